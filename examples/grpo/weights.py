# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from trainer to rollouts: one sample per version of the policy, in a partition of its own."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tensordict import NonTensorStack, TensorDict
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import transfer_queue as tq

from .model import Policy, PolicyConfig

if TYPE_CHECKING:
    from transfer_queue import BatchMeta, TransferQueueClient

WEIGHTS = "weights"
"""The partition. Sealed when training ends: that is how the rollouts learn of it."""

_FIELDS = ["parameters", "config"]
_REPORT_EVERY_S = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a version is part of. Travels as the tags of its sample, so that producers follow any Trainer's settings."""

    version: int
    """Optimizer steps that made it."""
    epoch: int
    steps_per_epoch: int
    answers_per_step: int
    """Over all ranks."""
    answers_per_prompt: int
    seed: int
    """Decides the prompts and the sampling. When each policy arrives it doesn't decide."""


def put_policy(client: TransferQueueClient, policy: Policy, plan: Plan) -> BatchMeta:
    """Publish a version; its sample says how to build the policy, too, so that followers need no configuration."""
    data = TensorDict(
        {
            "parameters": parameters_to_vector(policy.parameters()).detach()[None],
            "config": NonTensorStack(asdict(policy.config)),
        },
        batch_size=[1],
    )
    return client.put(data, partition_id=WEIGHTS, tags=[asdict(plan)])


class PolicyFollower:
    """The newest published policy, in a process that doesn't train it.

    Args:
        task: Name of this follower; each sees every version.
    """

    def __init__(self, client: TransferQueueClient, task: str) -> None:
        self._client = client
        self._task = task
        self._policy: Policy | None = None
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan that the policy of the last ``follow`` came with; RuntimeError before that."""
        if self._plan is None:
            raise RuntimeError("no policy yet: call follow() first.")
        return self._plan

    @property
    def version(self) -> int:
        """Of the policy that ``follow`` returned last; -1 before that."""
        return -1 if self._plan is None else self._plan.version

    def follow(self, least: int = 0) -> Policy:
        """The newest policy, as soon as its version is at least ``least``; parked in the controller until then.

        Raises:
            EndOfPartitionError: training has ended.
        """
        while (newest := self._newest()) is not None or self.version < least:
            self._load(newest or self._wait())
        assert self._policy is not None
        return self._policy

    def _newest(self) -> BatchMeta | None:
        """The last of the versions that are there and weren't seen yet."""
        newest = None
        while (meta := self._fetch(0.0)) is not None:
            newest = meta
        return newest

    def _wait(self) -> BatchMeta:
        while (meta := self._fetch(_REPORT_EVERY_S)) is None:
            logger.warning("%s waits for a policy newer than version %d.", self._task, self.version)
        return meta

    def _fetch(self, wait_s: float) -> BatchMeta | None:
        try:
            return self._client.get_meta(_FIELDS, 1, WEIGHTS, task_name=self._task, timeout_s=wait_s)
        except tq.BatchTimeoutError:
            return None

    def _load(self, meta: BatchMeta) -> None:
        try:
            data = self._client.get_data(meta)
        except tq.StorageKeyNotFoundError:
            return  # cleared since, so there is a newer one
        if self._policy is None:
            self._policy = Policy(PolicyConfig(**data["config"][0])).requires_grad_(False)
        vector_to_parameters(data["parameters"][0], self._policy.parameters())
        self._plan = Plan(**meta.custom_meta[0])
