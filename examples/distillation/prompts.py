# SPDX-License-Identifier: Apache-2.0
"""The prompts process: one validation partition, then one training partition per epoch, while there is space."""

from __future__ import annotations

import torch
from tensordict import TensorDict

import transfer_queue as tq

from .models import PROMPT_TOKENS, VOCABULARY

_PER_PUT = 64


def prompts(epochs: int, train: int, val: int, seed: int = 1) -> None:
    """Put random prompts. It runs in its own process and finds the queue by TQ_ADDRESS.

    Args:
        epochs: Number of training partitions ``train@0``, ``train@1``, ...
        train: Prompts in each of them.
        val: Prompts in ``val``.
    """
    generator = torch.Generator().manual_seed(seed)
    _fill("val", val, generator)
    for epoch in range(epochs):
        _fill(f"train@{epoch}", train, generator)


def _fill(partition: str, count: int, generator: torch.Generator) -> None:
    client = tq.get_client()
    client.create_partition(partition, num_samples=count)  # the last sample seals it
    tokens = torch.randint(VOCABULARY, (count, PROMPT_TOKENS), generator=generator)
    for part in tokens.split(_PER_PUT):
        client.put(TensorDict({"prompts": part}, batch_size=[len(part)]), partition_id=partition)
