# SPDX-License-Identifier: Apache-2.0
"""The producer of the samples that examples/tiny.py learns from. Without an import of lightning it starts sooner."""

from __future__ import annotations

import torch
from tensordict import TensorDict

import transfer_queue as tq

_PUTS = 4


def produce(epochs: int, train: int, val: int) -> None:
    """Fill and seal val@0, train@0, val@1, ... with four numbers ``x``, and then their sum ``y``.

    The sanity check reads val@0 before training starts.
    """
    client = tq.get_client()
    for epoch in range(epochs):
        for partition, count in ((f"val@{epoch}", val), (f"train@{epoch}", train)):
            client.create_partition(partition, num_samples=count)  # the last sample seals it
            for x in torch.randn(count, 4).chunk(_PUTS):
                meta = client.put(TensorDict({"x": x}, batch_size=[len(x)]), partition_id=partition)
                client.put(TensorDict({"y": x.sum(dim=1, keepdim=True)}, batch_size=[len(x)]), metadata=meta)
