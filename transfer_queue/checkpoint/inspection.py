# SPDX-License-Identifier: Apache-2.0
"""Describes a checkpoint without a queue, and checks that its files are still as they were written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer_queue.checkpoint.directory import is_url
from transfer_queue.checkpoint.opened import Opened, reading
from transfer_queue.checkpoint.remote import RemoteCheckpoint
from transfer_queue.checkpoint.saved_state import SavedState
from transfer_queue.checkpoint.spool import spooled_checkpoint
from transfer_queue.control.saved import SavedPartition, live_rows
from transfer_queue.protocol import unpack_indexes


def describe_checkpoint(path: str | os.PathLike[str], *, verify: bool = False) -> dict[str, Any]:
    """Read a checkpoint in a directory or at a URL, without a queue. One at a URL is copied here first.

    Args:
        verify: Read all values, too, and compare them with their checksums.
    Returns:
        {"version", "metadata", "nbytes", "partitions": {name: {...}}}, each with "samples", "keys", "sealed", "fields",
        "tasks" and "lost".
        "fields": {name: {"samples", "dtype", "shape", "nbytes"}}; a dtype of None means objects, and a None in a shape
        a size that differs between samples. "tasks": {name: {"given", "consumed"}} in samples. "nbytes": of values.
        "lost": by field, how many samples had lost it with a storage unit.
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
        blocks = {} if opened.values is None else opened.values.blocks
        nbytes = {name: sum(block.nbytes for block in own) for name, own in blocks.items()}
        if verify and opened.values is not None:
            opened.values.verify()
        return {
            "version": opened.metadata.version,
            "metadata": opened.metadata.user_metadata,
            "nbytes": sum(nbytes.values()),
            "partitions": _partitions(opened.state, nbytes),
        }


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Opened]:
    with ExitStack() as stack:
        if is_url(path):
            remote = RemoteCheckpoint(os.fspath(path))
            path = stack.enter_context(spooled_checkpoint(remote.url))
            remote.read(path)
        stack.enter_context(reading(path))
        yield Opened(path)


def _partitions(state: SavedState, nbytes: dict[tuple[str, str], int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for saved in state.slices():
        for section in saved.partitions:
            empty = {"samples": 0, "keys": 0, "sealed": section.sealed, "fields": {}, "tasks": {}, "lost": {}}
            _add(found.setdefault(section.name, empty), section)
    for partition, described in found.items():
        described["fields"] = {
            name: field | {"nbytes": nbytes.get((partition, name), 0)}
            for name, field in described["fields"].items()
            if field["samples"]
        }
    return found


def _add(described: dict[str, Any], section: SavedPartition) -> None:
    """Count what this section of the partition has."""
    live = live_rows(section)
    described["samples"] += int(np.count_nonzero(live))
    described["keys"] += len(section.keys)
    for field in section.fields:
        dtype = ", ".join(map(str, field.dtypes)) or field.dtype
        shape = [None] * field.ndim if field.shape is None and field.ndim is not None else field.shape
        own = described["fields"].setdefault(field.name, {"samples": 0, "dtype": dtype, "shape": shape})
        own["samples"] += _count(field.has, live)
    for name, indexes in section.lost.items():
        described["lost"][name] = described["lost"].get(name, 0) + len(unpack_indexes(indexes))
    for consumer in section.consumers:
        own = described["tasks"].setdefault(consumer.task, {"given": 0, "consumed": 0})
        own["given"] += _count(consumer.given, live, "<i4")
        own["consumed"] += _count(consumer.consumed, live)


def _count(column: bytes, live: NDArray[np.bool_], dtype: str = "?") -> int:
    return int(np.count_nonzero(np.frombuffer(column, dtype)[live]))
