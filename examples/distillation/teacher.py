# SPDX-License-Identifier: Apache-2.0
"""A teacher process: labels prompts as they arrive, and adds its logits to the same samples."""

from __future__ import annotations

import torch

import transfer_queue as tq

from .models import make_teacher


def label(epochs: int, batch_size: int = 32, seed: int = 0) -> None:
    """Add the field ``logits`` to every prompt of ``val`` and of the training partitions.

    Args:
        epochs: Number of training partitions.
        batch_size: Prompts labelled at once.
        seed: Seed of the teacher's weights.
    """
    torch.set_num_threads(1)  # the trainer needs the other core
    client, teacher = tq.get_client(), make_teacher(seed)
    for partition in ("val", *(f"train@{epoch}" for epoch in range(epochs))):
        while True:
            try:  # "adds": what this process leaves unlabelled if it dies goes to the other teachers
                meta = client.get_meta(
                    ["prompts"], batch_size, partition, task_name="label", adds=["logits"], timeout_s=600
                )
            except tq.EndOfPartitionError:
                break
            logits = teacher(client.get_data(meta, layout="dense")["prompts"])
            client.put({"logits": logits}, metadata=meta)
