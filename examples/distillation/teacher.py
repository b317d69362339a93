# SPDX-License-Identifier: Apache-2.0
"""A teacher process: labels prompts as they arrive, and adds its logits to the same samples."""

from __future__ import annotations

import torch
from tensordict import TensorDict

import transfer_queue as tq

from .models import make_teacher


def label(epochs: int, worker: int, num_workers: int, batch_size: int = 32, seed: int = 0) -> None:
    """Add the field ``logits`` to every prompt of ``val`` and of the training partitions.

    Args:
        epochs: Number of training partitions.
        worker: Number of this teacher process. Each of ``num_workers`` gets a share of every partition.
        batch_size: Prompts labelled at once.
        seed: Seed of the teacher's weights.
    """
    torch.set_num_threads(1)  # the trainer needs the other core
    client, teacher = tq.get_client(), make_teacher(seed)
    # "pad" labels some prompts twice where they don't fill the last round, instead of dropping prompts.
    client.register_task("label", dp_size=num_workers, tail="pad")
    stream = tq.StreamingDataset(
        None, batch_size, batch_size, ["prompts"], "val", "label", dp_rank=worker, dp_size=num_workers, layout="dense"
    )
    for partition in ("val", *(f"train@{epoch}" for epoch in range(epochs))):
        stream.step(partition)
        for data, meta in stream:
            logits = teacher(data["prompts"])
            client.put(TensorDict({"logits": logits}, batch_size=[len(logits)]), metadata=meta)
