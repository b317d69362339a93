# SPDX-License-Identifier: Apache-2.0
"""The state of a queue on disk: a file of slices, written as they are cut, and read one at a time.

Each slice is a msgpack "bin 32": a byte, its length in four bytes, and the saved queue as msgpack. In format 1 the file
was one saved queue, which is cut here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from transfer_queue.checkpoint.files import DataFile, GrowingFile, SavedFile
from transfer_queue.control.restoring import recut
from transfer_queue.control.saved import SavedBatch, SavedPartition, SavedQueue, decode, live_rows
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError
from transfer_queue.protocol import unpack_indexes
from transfer_queue.storage.wire import IntArray

_HEAD = struct.Struct(">BI")
_BIN = 0xC6


def write_slice(file: GrowingFile, data: bytes) -> None:
    """Append a slice."""
    file.write(_HEAD.pack(_BIN, len(data)))
    file.write(data)


@dataclass(frozen=True, slots=True)
class SavedSamples:
    """The samples of one partition, ascending, and by field the positions of those that have it.

    ``places``: by field, the storage unit of each sample, where some lay in another unit than 0. ``ragged``: fields
    whose shapes differ.
    """

    partition: str
    samples: IntArray
    rows: dict[str, IntArray]
    places: dict[str, NDArray[np.int32]]
    ragged: set[str]

    @classmethod
    def of(cls, partition: str, sections: Iterable[SavedPartition]) -> SavedSamples:
        samples: list[IntArray] = []
        has: dict[str, list[NDArray[np.bool_]]] = {}
        units: dict[str, list[NDArray[np.int32]]] = {}
        ragged = set()
        for section in sections:
            live = live_rows(section)
            samples.append(unpack_indexes(section.index)[live])
            for field in section.fields:
                has.setdefault(field.name, []).append(np.frombuffer(field.has, np.bool_)[live])
                own = field.units or bytes(4 * len(live))
                units.setdefault(field.name, []).append(np.frombuffer(own, "<i4")[live])
                if field.shape is None:
                    ragged.add(field.name)
        rows = {name: np.concatenate(own).nonzero()[0] for name, own in has.items()}
        places = {name: np.concatenate(own) for name, own in units.items()}
        return cls(
            partition, np.concatenate(samples), {name: own for name, own in rows.items() if len(own)},
            {name: own for name, own in places.items() if own.any()}, ragged,
        )  # fmt: skip


def _written(file: Path | int) -> tuple[int, int, int]:
    """Which file it is, and since when it has been as it is."""
    found = os.stat(file)
    return found.st_ino, found.st_mtime_ns, found.st_size


class SavedState:
    """A saved state. Raises CheckpointError for what can't be read, wherever it is met."""

    def __init__(self, path: Path, expected: DataFile | None = None) -> None:
        """``expected``: what was written, if that is known; it is compared.

        Raises:
            CheckpointNotFoundError: there is no such file.
        """
        self._path = path
        self._written = _written(path) if path.exists() else None
        if expected is not None:
            SavedFile(path.parent, expected).check()
        elif self._written is None:
            raise CheckpointNotFoundError(f"no saved state of a queue at {path}.")

    def slices(self) -> Iterator[SavedQueue]:
        """The slices in order; there is at least one."""
        with open(self._path, "rb") as file:
            if _written(file.fileno()) != self._written:
                raise CheckpointError(f"another checkpoint was saved to {self._path.parent} meanwhile. Load that one.")
            first = file.read(1)
            if first != bytes([_BIN]):
                yield from recut(decode(first + file.read()))
                return
            file.seek(0)
            while head := file.read(_HEAD.size):
                kind, nbytes = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
                data = file.read(nbytes)
                if kind != _BIN or len(data) != nbytes:
                    raise CheckpointError(
                        f"the saved state of the queue can't be read: {self._path} ends within a slice."
                    )
                yield decode(data)

    def batches(self) -> Iterator[tuple[str, SavedBatch]]:
        """The open batches of all tasks, each with its partition."""
        for partition in (partition for saved in self.slices() for partition in saved.partitions):
            yield from ((partition.name, batch) for task in partition.consumers for batch in task.ledger.entries)

    def samples(self) -> Iterator[SavedSamples]:
        """Those of each partition, in order."""
        sections = (section for saved in self.slices() for section in saved.partitions)
        for name, own in groupby(sections, lambda section: section.name):
            yield SavedSamples.of(name, own)
