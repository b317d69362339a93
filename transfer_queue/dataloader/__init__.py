# SPDX-License-Identifier: Apache-2.0
"""Streams of batches for training loops: a torch IterableDataset and its DataLoader."""

from __future__ import annotations

from transfer_queue.dataloader.fetching import default_fetch_batch_fn as default_fetch_batch_fn
from transfer_queue.dataloader.splitting import chunk_batch_fn as chunk_batch_fn
from transfer_queue.dataloader.splitting import token_budget_batch_fn as token_budget_batch_fn
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader as StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset as StreamingDataset
