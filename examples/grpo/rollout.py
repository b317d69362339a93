# SPDX-License-Identifier: Apache-2.0
"""The rollout process: leases tasks, answers them with the newest policy, and scores the answers."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

import transfer_queue as tq
from lightning_tq import WeightsReader

from .model import Policy
from .tasks import score
from .vocabulary import PAD, decode


def rollout(answers: int = 8, at_once: int = 32, worker: int = 0) -> None:
    """Answer each task several times, until the training ends. Any number of such processes share the work.

    Args:
        answers: Answers per task, which are one group.
        at_once: Most tasks that are answered together.
        worker: Number of this process. It decides the sampling.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(worker)
    client, weights, policy = tq.get_client(), WeightsReader(), Policy()
    with suppress(tq.EndOfPartitionError):  # the end of the weights is the end of training
        while True:
            leases = client.lease("train", at_once)
            newest = weights.latest(least=max(lease.version or 0 for lease in leases))
            policy.load_state_dict(newest.state_dict)
            prompts = torch.stack([lease.head["prompt"][0] for lease in leases])
            answered = policy.generate(prompts, num_answers=answers, generator=generator)
            for number, lease in enumerate(leases):
                own = slice(number * answers, (number + 1) * answers)
                tokens, lengths = answered.tokens[own], answered.lengths[own]
                rows = {"responses": tokens, "old_log_probs": answered.log_probs[own], "lengths": lengths}
                with lease:
                    lease.close(rows, tags_of(lease, tokens, lengths, newest.version))


def tags_of(lease: tq.Lease, tokens: Tensor, lengths: Tensor, version: int) -> list[dict[str, float]]:
    """Per answer: its reward, the version that gave it, and its tokens with those of the prompt."""
    entry, prompt_length = lease.head["entry"][0], int((lease.head["prompt"][0] != PAD).sum())
    return [
        {"reward": score(entry, decode(answer)), "version": version, "tokens": prompt_length + length}
        for answer, length in zip(tokens, lengths.tolist(), strict=True)
    ]
