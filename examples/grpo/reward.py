# SPDX-License-Identifier: Apache-2.0
"""The reward process: scores answers as they arrive, and adds the rewards to the same samples."""

from __future__ import annotations

from itertools import count
from math import gcd

import torch
from tensordict import TensorDict

import transfer_queue as tq

from .tasks import score
from .vocabulary import decode
from .weights import PolicyFollower


def reward(batch_size: int = 64) -> None:
    """Add the field ``rewards`` to every answer, partition by partition, until the run ends this process.

    Args:
        batch_size: Most answers scored at once.
    """
    torch.set_num_threads(1)
    client = tq.get_client()
    trainer = PolicyFollower(client, "reward")
    trainer.follow()
    # It must divide a training step. A larger batch would wait for the rollout, which waits for the trainer.
    size = gcd(batch_size, trainer.plan.answers_per_step)
    answers = tq.StreamingDataset(
        None, size, size, ["responses", "entry"], "train@0", "reward", dp_rank=0, layout="dense"
    )
    for epoch in count(trainer.plan.epoch):
        answers.step(f"train@{epoch}")
        for data, meta in answers:
            texts = map(decode, data["responses"])
            rewards = [score(entry, text) for entry, text in zip(data["entry"], texts, strict=True)]
            client.put(TensorDict({"rewards": torch.tensor(rewards)}, batch_size=[len(rewards)]), metadata=meta)
