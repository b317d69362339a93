# SPDX-License-Identifier: Apache-2.0
"""The LightningModule: a policy that learns from answers and their rewards."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from lightning_tq import TQBatch

from .losses import LossConfig, group_advantages, policy_loss
from .model import Policy, PolicyConfig
from .tasks import Task, make_tasks
from .warmup import WarmupConfig, accuracy, warm_up


class Actor(L.LightningModule):
    """Warms a policy up, then improves it with GRPO; one optimizer step per batch of the queue.

    Args:
        learning_rate: Peak of the schedule, which rises over ``ramp_steps`` steps and then falls linearly to
            ``final_share`` of the peak. Without the fall, the last steps undo part of what was learned.
        seed: Seed of the tasks of warm-up and validation.
        policy: Size of the policy.
        loss: Clipping and entropy.
        warmup: Length of the warm-up.
        validation_tasks: Number of held-out tasks, which are answered after the warm-up and each epoch.
    """

    def __init__(
        self,
        learning_rate: float = 3e-4,
        ramp_steps: int = 10,
        final_share: float = 0.1,
        seed: int = 0,
        policy: PolicyConfig | None = None,
        loss: LossConfig | None = None,
        warmup: WarmupConfig | None = None,
        validation_tasks: int = 256,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.ramp_steps = ramp_steps
        self.final_share = final_share
        self.seed = seed
        self.validation_tasks = validation_tasks
        self.policy = Policy(policy)
        self.loss_config = loss or LossConfig()
        self.warmup_config = warmup or WarmupConfig()
        self.register_buffer("warmup_accuracy", torch.tensor(float("nan")))

    # ---- before the first step ----

    def setup(self, stage: str) -> None:
        """Warm up on rank zero. DDP then copies its weights to all ranks."""
        torch.set_num_threads(1)  # a small policy gains nothing from more, and the rollouts need the cores
        if stage != "fit" or not self.trainer.is_global_zero or self.trainer.ckpt_path is not None:
            return
        warm_up(self.policy, self.seed, config=self.warmup_config)
        self.warmup_accuracy.fill_(accuracy(self.policy, self._held_out()))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._share_of_rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _share_of_rate(self, step: int) -> float:
        ramp = (step + 1) / self.ramp_steps
        if ramp <= 1.0:
            return ramp  # the number of steps may be unknown before the first one
        total = self.trainer.estimated_stepping_batches
        done = (step - self.ramp_steps) / max(1.0, total - 1 - self.ramp_steps)
        return 1.0 - (1.0 - self.final_share) * min(1.0, done)

    # ---- training ----

    def training_step(self, batch: TQBatch, batch_idx: int) -> Tensor:
        data, meta = batch
        prompts = batch.heads["prompt"][meta.group_index]  # one per group
        rewards = torch.tensor([tags["reward"] for tags in meta.custom_meta], device=self.device)
        positions = torch.arange(data["responses"].shape[1], device=self.device)
        log_probs, entropy = self.policy.token_log_probs(prompts, data["responses"])
        result = policy_loss(
            log_probs,
            data["old_log_probs"],
            group_advantages(rewards, meta.size // len(batch.heads)),
            positions < data["lengths"][:, None],
            entropy,
            self.loss_config,
        )
        staleness = [self.global_step - tags["version"] for tags in meta.custom_meta]
        self.log_dict(
            {
                "train/loss": result.loss.detach(),
                "train/reward": rewards.mean(),
                "train/staleness": sum(staleness) / len(staleness),
                "train/staleness_max": float(max(staleness)),
                "train/answers": float(meta.size),
                **{f"train/{name}": value for name, value in result.metrics.items()},
            },
            batch_size=meta.size,
        )
        return result.loss

    def on_train_batch_end(self, *_: Any) -> None:
        """After an epoch, answer the held-out tasks with the current weights, greedily."""
        if self.trainer.is_last_batch:
            share = accuracy(self.policy, self._held_out())
            self.log("val/accuracy", share, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)

    def _held_out(self) -> list[Task]:
        return make_tasks("validation", self.validation_tasks, self.seed)
