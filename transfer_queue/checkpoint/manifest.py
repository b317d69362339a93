# SPDX-License-Identifier: Apache-2.0
"""The contents of a checkpoint's JSON files: which files exist, their sizes, and what their rows mean."""

from __future__ import annotations

from typing import Any

import msgspec

from transfer_queue.storage.pieces import Layout

FORMAT = 1
METADATA = "metadata.json"
CONTROLLER = "controller_state.msgpack"
STORAGE = "simple_storage"
VALUES = "values.json"


class DataFile(msgspec.Struct, frozen=True):
    """One file. ``crc32`` covers what follows the header; only .npy files have a header."""

    name: str
    nbytes: int
    crc32: int


class Block(msgspec.Struct, frozen=True):
    """Rows of one field with the same layout. ``samples``: the index of each row; None: the partition's, in order.

    dense: ``values`` [rows, *shape]. ragged: ``values`` flat, row i is values[offsets[i] : offsets[i + 1]], of shape
    ``shapes[i]`` if it has more than one dim. objects: ``values`` is msgpack, cut at ``offsets`` in bytes.
    Elements of a dtype that NumPy lacks (bfloat16, float8) are unsigned integers of the same size.
    """

    layout: Layout
    rows: int
    values: DataFile
    offsets: DataFile | None = None
    shapes: DataFile | None = None
    samples: DataFile | None = None


class Field(msgspec.Struct, frozen=True):
    name: str
    blocks: list[Block]


class Partition(msgspec.Struct, frozen=True):
    """One partition. ``directory`` has its files. ``samples``: the indexes of all its samples."""

    name: str
    directory: str
    samples: DataFile
    fields: list[Field]


class Values(msgspec.Struct, frozen=True):
    """``values.json``."""

    format: int
    partitions: list[Partition]


class Metadata(msgspec.Struct, frozen=True):
    """``metadata.json``, written last: a directory that has it is complete."""

    format: int
    storage_saved: bool
    user_metadata: dict[str, Any]
    version: str
    controller: DataFile
    values: DataFile | None = None
