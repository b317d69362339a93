# SPDX-License-Identifier: Apache-2.0
"""The rollout process: leases tasks, answers them with the newest policy, and scores the answers."""

from __future__ import annotations

from contextlib import suppress

import torch

import transfer_queue as tq
from lightning_tq import WeightsReader

from .model import Policy
from .tasks import score
from .vocabulary import PAD, decode


def rollout(answers: int = 8, worker: int = 0) -> None:
    """Answer each task several times, until the training ends. Any number of such processes share the work.

    Args:
        answers: Answers per task, which are one group.
        worker: Number of this process. It decides the sampling.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(worker)
    client, weights, policy = tq.get_client(), WeightsReader(), Policy()
    version = -1
    with suppress(tq.EndOfPartitionError):  # the end of the weights is the end of training
        for lease in client.leases("train"):
            newest = weights.latest(least=lease.version or 0)
            if newest.version != version:
                policy.load_state_dict(newest.state_dict)
                version = newest.version
            prompt, entry = lease.head["prompt"][0], lease.head["entry"][0]
            answered = policy.generate(prompt[None], num_answers=answers, generator=generator)
            rows = {"responses": answered.tokens, "old_log_probs": answered.log_probs, "lengths": answered.lengths}
            prompt_length = int((prompt != PAD).sum())
            tags = [
                {"reward": score(entry, decode(tokens)), "version": version, "tokens": prompt_length + length}
                for tokens, length in zip(answered.tokens, answered.lengths.tolist(), strict=True)
            ]
            lease.close(rows, tags)
