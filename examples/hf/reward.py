# SPDX-License-Identifier: Apache-2.0
"""The reward process of grpo.py: adds rewards to answers as they come."""

from __future__ import annotations

import torch

import transfer_queue as tq

from .questions import reward_of


def reward(group: int) -> None:
    """Runs in a process of its own, which loads no model and no tokenizer. Adds the field ``rewards``.

    Args:
        group: Answers scored at once. It must divide what a training step reads, or the trainer would wait for it.
    """
    client = tq.get_client()
    while True:
        try:
            meta = client.get_meta(["answers"], group, "train", task_name="reward", adds=["rewards"], timeout_s=600)
        except tq.EndOfPartitionError:
            return
        answers = client.get_data(meta)["answers"]
        client.put({"rewards": torch.tensor([reward_of(text) for text in answers])}, metadata=meta)
