# SPDX-License-Identifier: Apache-2.0
"""Describes a checkpoint without a queue, and checks that its files are still as they were written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer_queue.checkpoint.opened import Opened, reading
from transfer_queue.checkpoint.remote import RemoteCheckpoint, is_url
from transfer_queue.checkpoint.spool import spooled_checkpoint
from transfer_queue.control.saved import SavedConsumer, SavedPartition, live_rows, rows_with


def describe_checkpoint(path: str | os.PathLike[str], *, verify: bool = False) -> dict[str, Any]:
    """Read a checkpoint in a directory or at a URL, without a queue. One at a URL is copied here first.

    Args:
        verify: Read all values, too, and compare them with their checksums.
    Returns:
        {"version", "metadata", "nbytes", "partitions": {name: {"samples", "keys", "sealed", "fields", "tasks"}}}.
        "fields": {name: {"samples", "dtype", "shape", "nbytes"}}; a dtype of None means objects, and a None in a shape
        a size that differs between samples. "tasks": {name: {"given", "consumed"}} in samples. "nbytes": of values.
    Raises:
        CheckpointNotFoundError: there is none, or a file of it is missing; the text names it.
        CheckpointError: it is foreign, damaged, or of a newer version.
        ConfigError: fsspec has no file system for this URL, or a package for it is missing.
    Examples:
        >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
        >>> client.save_checkpoint("runs/queue")
        >>> tq.describe_checkpoint("runs/queue", verify=True)["partitions"]["train"]["fields"]
        {'x': {'samples': 4, 'dtype': 'int64', 'shape': (1,), 'nbytes': 160}}
    """
    with _opened(path) as opened:
        nbytes = {} if opened.values is None else opened.values.nbytes()
        if verify and opened.values is not None:
            opened.values.verify()
        return {
            "version": opened.metadata.version,
            "metadata": opened.metadata.user_metadata,
            "nbytes": sum(nbytes.values()),
            "partitions": {each.name: _partition(each, nbytes) for each in opened.state.partitions},
        }


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Opened]:
    if is_url(path):
        remote = RemoteCheckpoint(os.fspath(path))
        with spooled_checkpoint(remote.url) as directory:
            remote.read(directory)
            with reading(directory):
                yield Opened(directory)
    else:
        with reading(path):
            yield Opened(path)


def _partition(saved: SavedPartition, nbytes: dict[tuple[str, str], int]) -> dict[str, Any]:
    live, (samples, rows) = live_rows(saved), rows_with(saved)
    return {
        "samples": len(samples),
        "keys": len(saved.keys),
        "sealed": saved.sealed,
        "fields": {
            each.name: {
                "samples": len(rows[each.name]),
                "dtype": ", ".join(str(dtype) for dtype in each.dtypes) or each.dtype,
                "shape": [None] * each.ndim if each.shape is None and each.ndim is not None else each.shape,
                "nbytes": nbytes.get((saved.name, each.name), 0),
            }
            for each in saved.fields
            if each.name in rows
        },
        "tasks": {each.task: _progress(each, live) for each in saved.consumers},
    }


def _progress(consumer: SavedConsumer, live: NDArray[np.bool_]) -> dict[str, int]:
    return {
        "given": int(np.count_nonzero(np.frombuffer(consumer.given, "<i4")[live])),
        "consumed": int(np.count_nonzero(np.frombuffer(consumer.consumed, np.bool_)[live])),
    }
