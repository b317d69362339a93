# SPDX-License-Identifier: Apache-2.0
"""The policy's publisher. Each version also carries its model config and the trainer's plan."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import lightning as L

from lightning_tq import PublishWeights

from .weights import Plan


class PolicyPublisher(PublishWeights):
    """Publishes the module's ``policy``. The rollouts need no configuration and follow the Trainer's settings.

    The module needs ``policy`` and ``seed``. The train stream needs ``num_batches`` and a sampler of groups.
    """

    def __init__(self) -> None:
        super().__init__(module="policy")

    def info(self, trainer: L.Trainer, pl_module: L.LightningModule, version: int) -> dict[str, Any]:
        return {"plan": asdict(plan_of(trainer, pl_module.seed)), "policy": asdict(pl_module.policy.config)}


def plan_of(trainer: L.Trainer, seed: int) -> Plan:
    """The Trainer's current epoch and its sizes. Raises ValueError if its train stream lacks them."""
    stream, num_ranks = trainer.datamodule.train_reader().stream, trainer.datamodule.dp_size
    answers_per_prompt = getattr(stream.sampler, "n_samples_per_prompt", None)
    if stream.num_batches is None or answers_per_prompt is None:
        raise ValueError(
            f"the train stream has num_batches={stream.num_batches} and sampler {stream.sampler!r}. The rollouts need "
            f"the answers per epoch and per group: set num_batches, and a sampler of groups."
        )
    limit = trainer.limit_train_batches
    batches = min(stream.num_batches, limit) if isinstance(limit, int) else int(stream.num_batches * limit)
    return Plan(
        epoch=trainer.current_epoch,
        steps_per_epoch=max(1, batches // trainer.accumulate_grad_batches),
        answers_per_step=stream.micro_size * num_ranks * trainer.accumulate_grad_batches,
        answers_per_prompt=answers_per_prompt,
        seed=seed,
    )
