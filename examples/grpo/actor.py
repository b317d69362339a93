# SPDX-License-Identifier: Apache-2.0
"""The LightningModule: a policy that learns from answers and their rewards."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from transfer_queue import BatchMeta

from .losses import LossConfig, group_advantages, policy_loss
from .model import Policy, PolicyConfig
from .publisher import plan_of
from .tasks import make_tasks, score
from .vocabulary import decode
from .warmup import WarmupConfig, accuracy, warm_up


class Actor(L.LightningModule):
    """Warms a policy up, then improves it with GRPO; one optimizer step per batch of the queue.

    Args:
        learning_rate: Peak of the schedule, which rises over ``ramp_steps`` steps and then falls linearly to
            ``final_share`` of the peak. Without the fall, the last steps undo part of what was learned.
        seed: Seed of all tasks, also in the rollouts.
        policy: Size of the policy.
        loss: Clipping and entropy.
        warmup: Length of the warm-up.
        validation_tasks: Number of held-out tasks to measure the warm-up's accuracy. The rollouts use the same tasks.
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
        held_out = make_tasks("validation", self.validation_tasks, self.seed)
        self.warmup_accuracy.fill_(accuracy(self.policy, held_out))

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

    def training_step(self, batch: tuple[Any, BatchMeta], batch_idx: int) -> Tensor:
        data, meta = batch
        plan = plan_of(self.trainer, self.seed)
        positions = torch.arange(data["responses"].shape[1], device=self.device)
        log_probs, entropy = self.policy.token_log_probs(data["prompts"], data["responses"])
        result = policy_loss(
            log_probs,
            data["old_log_probs"],
            group_advantages(data["rewards"], plan.answers_per_prompt),
            positions < data["lengths"][:, None],
            entropy,
            self.loss_config,
        )
        staleness = [self.global_step - tags["version"] for tags in meta.custom_meta]
        self.log_dict(
            {
                "train/loss": result.loss.detach(),
                "train/reward": data["rewards"].mean(),
                "train/staleness": sum(staleness) / len(staleness),
                "train/staleness_max": float(max(staleness)),
                "train/answers": float(meta.size),
                **{f"train/{name}": value for name, value in result.metrics.items()},
            },
            batch_size=meta.size,
        )
        return result.loss

    # ---- validation ----

    def validation_step(self, batch: tuple[Any, BatchMeta], batch_idx: int) -> None:
        """Answer greedily with the current weights, so the validation is never stale."""
        data, meta = batch
        answers = self.policy.generate(data["prompts"], temperature=0.0).tokens
        right = [score(entry, decode(answer)) == 1.0 for entry, answer in zip(data["entry"], answers, strict=True)]
        self.log("val/accuracy", sum(right) / len(right), batch_size=meta.size, prog_bar=True, sync_dist=True)
