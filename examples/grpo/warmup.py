# SPDX-License-Identifier: Apache-2.0
"""The supervised warm-up: trains on right answers until sampling finds some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from .model import Policy, response_mask
from .tasks import Difficulty, Task, make_tasks, score
from .vocabulary import decode, encode_prompts, encode_responses


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupConfig:
    """Length and speed of the warm-up. More steps leave less to gain for the policy loss."""

    steps: int = 110
    batch_size: int = 128
    learning_rate: float = 1e-3
    ramp_steps: int = 20
    """Steps over which the learning rate rises to its full value."""


def warm_up(
    policy: Policy, seed: int, difficulty: Difficulty | None = None, config: WarmupConfig | None = None
) -> float:
    """Train the policy on right answers; returns the last loss.

    Equal arguments and an equal number of torch threads give equal weights on one machine.
    """
    config, difficulty = config or WarmupConfig(), difficulty or Difficulty()
    tasks = make_tasks("train", config.steps * config.batch_size, seed, difficulty)
    prompts = encode_prompts([task.prompt for task in tasks], policy.config.prompt_width)
    answers = encode_responses([task.answer for task in tasks], policy.config.response_width)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=config.ramp_steps)
    loss = torch.zeros(())
    for step in range(config.steps):
        rows = slice(step * config.batch_size, (step + 1) * config.batch_size)
        mask = response_mask(answers[rows])
        loss = functional.cross_entropy(policy(prompts[rows], answers[rows])[mask], answers[rows][mask])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


def accuracy(policy: Policy, tasks: Sequence[Task]) -> float:
    """Share of tasks with a completely right greedy answer."""
    prompts = encode_prompts([task.prompt for task in tasks], policy.config.prompt_width)
    answers = policy.generate(prompts, temperature=0.0).tokens
    right = [score(task.entry, decode(answer)) == 1.0 for task, answer in zip(tasks, answers, strict=True)]
    return sum(right) / len(right)
