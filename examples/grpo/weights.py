# SPDX-License-Identifier: Apache-2.0
"""The newest published policy and its plan, for processes that don't train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_tq import Weights, WeightsReader

from .model import Policy, PolicyConfig

if TYPE_CHECKING:
    from transfer_queue import TransferQueueClient


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The trainer's settings, sent with each version so that producers follow them."""

    epoch: int
    steps_per_epoch: int
    answers_per_step: int
    """Over all ranks."""
    answers_per_prompt: int
    seed: int
    """Seed of the prompts and the sampling. It doesn't decide when each policy arrives."""


class PolicyFollower:
    """Builds the newest published policy from its weights and info.

    Args:
        task: Name of this follower; each sees every version.
    """

    def __init__(self, client: TransferQueueClient, task: str) -> None:
        self._reader = WeightsReader(client, task=task)
        self._weights: Weights | None = None
        self._policy: Policy | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the last ``follow``. Raises RuntimeError before that."""
        if self._weights is None:
            raise RuntimeError("no policy yet: call follow() first.")
        return Plan(**self._weights.info["plan"])

    @property
    def version(self) -> int:
        """Version that ``follow`` returned last; -1 before that."""
        return self._reader.version

    def follow(self, least: int = 0) -> Policy:
        """Wait for the newest policy of version ``least`` or later.

        Raises:
            EndOfPartitionError: training has ended.
        """
        weights = self._reader.latest(least)
        if self._policy is None:
            self._policy = Policy(PolicyConfig(**weights.info["policy"])).requires_grad_(False)
        if weights is not self._weights:
            self._policy.load_state_dict(weights.state_dict)
            self._weights = weights
        return self._policy
