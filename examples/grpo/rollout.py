# SPDX-License-Identifier: Apache-2.0
"""The rollout process: answers tasks with the newest policy, a limited number of versions ahead of the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq

from .model import Policy
from .tasks import Task, make_tasks
from .vocabulary import PAD, encode_prompts
from .weights import Plan, PolicyFollower


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Settings of all rollout processes. The trainer's plan decides what they make."""

    prompts_per_put: int = 32
    """Prompts answered at once, with the same policy."""
    max_staleness: int = 1
    """Most optimizer steps between the policy that answers and the one that learns. Over 3 it learns worse."""
    validation_tasks: int = 256
    """Held-out tasks, which are the same in every validation partition."""


def rollout(worker: int = 0, num_workers: int = 1, **settings: Any) -> None:
    """Fill partitions until training ends. It runs in its own process and finds the queue by TQ_ADDRESS.

    Args:
        settings: Fields of RolloutConfig.
    """
    torch.set_num_threads(1)  # a small policy gains nothing from more, and the trainer needs the cores
    Rollout(worker, num_workers, RolloutConfig(**settings)).run()


class Rollout:
    """One rollout process: ``val@0``, ``train@0``, ``val@1``, … as far ahead as staleness allows."""

    def __init__(self, worker: int, num_workers: int, config: RolloutConfig) -> None:
        self._worker = worker
        self._num_workers = num_workers
        self._config = config
        self._client = tq.get_client()
        self._follower = PolicyFollower(self._client, f"rollout-{worker}")
        self._generator = torch.Generator()

    def run(self) -> None:
        """Fill one epoch after the other, starting with the trainer's."""
        try:
            policy = self._follower.follow()
            self._generator.manual_seed(self._follower.plan.seed * self._num_workers + self._worker)
            for epoch in count(self._follower.plan.epoch):
                if self._worker == 0:
                    self._put_validation(f"val@{epoch}", policy.config.prompt_width)
                self._fill(epoch)
        except tq.EndOfPartitionError:
            return  # the end of the weights is the end of training

    def _put_validation(self, partition: str, width: int) -> None:
        tasks = make_tasks("validation", self._config.validation_tasks, self._follower.plan.seed)
        self._client.create_partition(partition, num_samples=len(tasks))
        prompts = encode_prompts([task.prompt for task in tasks], width)
        entries = NonTensorStack(*(task.entry for task in tasks))
        self._client.put(TensorDict({"prompts": prompts, "entry": entries}, [len(tasks)]), partition_id=partition)

    def _fill(self, epoch: int) -> None:
        partition, plan = f"train@{epoch}", self._follower.plan
        # The last answer seals it, whichever process puts it.
        self._client.create_partition(partition, num_samples=plan.steps_per_epoch * plan.answers_per_step)
        for step, tasks in self._puts(epoch, plan):
            policy = self._follower.follow(least=step - self._config.max_staleness)
            self._put_answers(partition, tasks, policy)

    def _puts(self, epoch: int, plan: Plan) -> list[tuple[int, list[Task]]]:
        """This process's share of an epoch: the tasks of each put, and the optimizer step that will use the answers."""
        num_steps, per_step = plan.steps_per_epoch, plan.answers_per_step // plan.answers_per_prompt
        tasks = make_tasks("train", num_steps * per_step, plan.seed + 1 + epoch)  # the warm-up uses the seed itself
        size = self._config.prompts_per_put
        puts: list[tuple[int, list[Task]]] = []
        for step in range(num_steps):
            # No put spans two steps, because its answers would be too stale for the second one.
            of_step = tasks[step * per_step : (step + 1) * per_step]
            puts += [(epoch * num_steps + step, of_step[first : first + size]) for first in range(0, per_step, size)]
        return puts[self._worker :: self._num_workers]

    def _put_answers(self, partition: str, tasks: list[Task], policy: Policy) -> None:
        num_answers = self._follower.plan.answers_per_prompt
        prompts = encode_prompts([task.prompt for task in tasks], policy.config.prompt_width)
        answers = policy.generate(prompts, num_answers=num_answers, generator=self._generator)
        prompts = prompts.repeat_interleave(num_answers, dim=0)
        data = TensorDict(
            {
                "prompts": prompts,
                "responses": answers.tokens,
                "old_log_probs": answers.log_probs,
                "lengths": answers.lengths,
                "entry": NonTensorStack(*(task.entry for task in tasks for _ in range(num_answers))),
            },
            batch_size=[len(prompts)],
        )
        total_lengths = (prompts != PAD).sum(dim=1) + answers.lengths
        tags = [{"version": self._follower.version, "total_lengths": length} for length in total_lengths.tolist()]
        # A put holds whole groups, so that the sampler keeps them together.
        self._client.put(data, partition_id=partition, tags=tags)
