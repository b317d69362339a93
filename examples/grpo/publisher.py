# SPDX-License-Identifier: Apache-2.0
"""The callback that sends each new version of the policy to the rollouts."""

from __future__ import annotations

from collections import deque
from typing import Any

import lightning as L

import transfer_queue as tq

from .weights import WEIGHTS, Plan, put_policy

_KEPT_VERSIONS = 2


class WeightPublisher(L.Callback):
    """Puts the policy onto the queue: before the first optimizer step, and after each. Says when training has ended.

    The module has ``policy`` and ``seed``; the TQDataModule's train stream has ``num_batches`` and a sampler of groups.
    """

    def __init__(self) -> None:
        self._version = -1
        self._published: deque[tq.BatchMeta] = deque()

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._publish(trainer, pl_module)  # the rollouts put the validation tasks, too, and wait for a policy

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._publish(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._publish(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            tq.get_client().seal_partition(WEIGHTS)

    def _publish(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero or trainer.global_step == self._version:
            return  # the version stays the same while gradients accumulate
        self._version = trainer.global_step
        client = tq.get_client()
        self._published.append(put_policy(client, pl_module.policy, plan_of(trainer, pl_module.seed)))
        while len(self._published) > _KEPT_VERSIONS:
            client.clear_samples(self._published.popleft())


def plan_of(trainer: L.Trainer, seed: int) -> Plan:
    """Where a Trainer stands, and what it wants. Raises ValueError when its train stream doesn't say how much."""
    stream, num_ranks = trainer.datamodule.train_feed().stream, trainer.datamodule.dp_size
    answers_per_prompt = getattr(stream.sampler, "n_samples_per_prompt", None)
    if stream.num_batches is None or answers_per_prompt is None:
        raise ValueError(
            f"the train stream has num_batches={stream.num_batches} and sampler {stream.sampler!r}. The rollouts must "
            f"know how many answers make an epoch, and how many a group: give num_batches, and a sampler of groups."
        )
    limit = trainer.limit_train_batches
    batches = min(stream.num_batches, limit) if isinstance(limit, int) else int(stream.num_batches * limit)
    return Plan(
        version=trainer.global_step,
        epoch=trainer.current_epoch,
        steps_per_epoch=max(1, batches // trainer.accumulate_grad_batches),
        answers_per_step=stream.micro_size * num_ranks * trainer.accumulate_grad_batches,
        answers_per_prompt=answers_per_prompt,
        seed=seed,
    )
