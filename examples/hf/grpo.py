# SPDX-License-Identifier: Apache-2.0
"""GRPO of a Hugging Face model: python -m examples.hf.grpo [--model Qwen/…] [--lora true]"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from jsonargparse import auto_cli
from torch import Tensor

import transfer_queue as tq
from lightning_tq import Producer, PublishWeights, Stream, TQDataModule

from .models import TINY, load_model, load_tokenizer, token_log_probs
from .reward import reward


class Actor(L.LightningModule):
    """The policy. Compares answers to the same question with each other."""

    def __init__(self, model: str, lora: bool, group: int, learning_rate: float) -> None:
        super().__init__()
        self.policy = load_model(model, load_tokenizer(model), lora)
        self.group = group
        self.learning_rate = learning_rate
        self.rewards: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        data, _ = batch
        rewards = data["rewards"].view(-1, self.group)  # the sampler keeps groups together
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        responses = data["responses"].unbind()
        of_token = advantages.flatten().repeat_interleave(torch.tensor([len(row) for row in responses]).to(self.device))
        log_probs = token_log_probs(self.policy, data["prompts"].unbind(), responses)
        ratio = (log_probs - torch.cat(data["old_log_probs"].unbind())).exp()
        loss = -torch.min(ratio * of_token, ratio.clamp(0.8, 1.2) * of_token).mean()
        self.log_dict({"reward": rewards.mean(), "tokens": len(of_token) / len(responses)}, prog_bar=True)
        self.rewards.append(rewards.mean().item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=0.0)


def main(
    model: str = TINY,
    lora: bool = False,
    steps: int = 100,
    prompts: int = 8,
    group: int = 8,
    max_tokens: int = 8,
    learning_rate: float = 3e-3,
    rollout: str = "examples.hf.rollout:rollout",
    rollouts: int = 1,
) -> None:
    """Train a model to answer in digits only.

    Args:
        model: Name of a model of the hub, a folder, or "tiny".
        lora: Train low-rank adapters. Only they travel to the rollout.
        steps: Optimizer steps.
        prompts: Questions per step.
        group: Answers per question.
        max_tokens: Most tokens of an answer.
        learning_rate: For a downloaded model take about 1e-6, or 2e-5 with adapters.
        rollout: "examples.hf.vllm_rollout:rollout" answers with vLLM.
        rollouts: Number of rollout processes.
    """
    generation = {"model": model, "lora": lora, "prompts": prompts, "group": group, "max_tokens": max_tokens}
    dm = TQDataModule(
        train=Stream(
            partition="train",
            task="update_actor",
            fields=["prompts", "responses", "old_log_probs", "rewards"],
            num_batches=steps,
            sampler=tq.GroupSampler(groups=prompts, max_staleness=1, stale="wait"),
        ),
        producers=[
            Producer(target="examples.hf.rollout:feed", args={"model": model, "count": (steps + 1) * prompts}),
            Producer(target=rollout, args=generation, count=rollouts),
            Producer(target=reward, args={"group": group}),
        ],
    )
    actor = Actor(model, lora, group, learning_rate)
    publish = PublishWeights(module="policy", include=["*lora_*"] if lora else None)
    trainer = L.Trainer(
        max_epochs=1,
        callbacks=[publish],
        logger=False,
        enable_checkpointing=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(actor, dm)
    first, last = actor.rewards[:10], actor.rewards[-10:]
    print(f"reward {sum(first) / len(first):.3f} -> {sum(last) / len(last):.3f} in {trainer.global_step} steps")


if __name__ == "__main__":
    auto_cli(main)
