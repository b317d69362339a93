# SPDX-License-Identifier: Apache-2.0
"""Streams of batches for training loops: a torch IterableDataset and its DataLoader."""

from __future__ import annotations

from transfer_queue.dataloader.fetching import default_fetch_batch_fn
from transfer_queue.dataloader.splitting import chunk_batch_fn, token_budget_batch_fn
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset

__all__ = [
    "StreamingDataLoader",
    "StreamingDataset",
    "chunk_batch_fn",
    "default_fetch_batch_fn",
    "token_budget_batch_fn",
]
