# SPDX-License-Identifier: Apache-2.0
"""A client of a unit that spills, each message made by hand, beside a model of what the unit holds."""

from __future__ import annotations

import itertools
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.storage.unit_kit import LoneUnit
from transfer_queue.calls import Turn
from transfer_queue.protocol import Failed, pack_indexes
from transfer_queue.storage.messages import Columns, Commit, Delete, Packer, Read, Rows, Write, Written, unpack_columns
from transfer_queue.storage.pack import encode_rows
from transfer_queue.storage.unit.arena import Arena
from transfer_queue.storage.unit.spill import SpillFile
from transfer_queue.storage.wire import WireColumn, dense_layout

MIB = 1 << 20


class Spiller:
    """A unit with a spill file, and a model of what it holds: the bytes of each row by its index."""

    def __init__(self, directory: Path, memory: int, disk: int, with_arena: bool = False) -> None:
        self.file = SpillFile(directory, disk)
        arena = Arena(64 * MIB) if with_arena else None
        self.unit = LoneUnit("u0", memory, arena, file=self.file)
        self.unit.calls.turn = Turn(itertools.count(step=1.0).__next__)
        self.memory, self.calls, self.now = memory, 0, 0.0
        self.values: dict[int, bytes] = {}
        self.pending: dict[int, dict[int, bytes]] = {}
        self.failed: dict[int, str] = {}
        self.rows: dict[int, tuple[Rows, list[Any]]] = {}

    def ask(self, request: Any, frames: list[Any] = ()) -> int:
        self.take(self.unit.handle("me", request, [memoryview(frame).cast("B") for frame in frames], self.now))
        return request.id

    def number(self) -> int:
        self.calls += 1
        return self.calls

    def take(self, replies: list[Any]) -> None:
        """What the unit answers. Each write is committed as soon as it has room."""
        left = deque(replies)
        while left:
            _, reply, frames = left.popleft()
            if isinstance(reply, Written):
                self.values.update(self.pending.pop(reply.id))
                left += self.unit.handle("me", Commit(0, [("me", reply.id)]), [], self.now)
            elif isinstance(reply, Failed):
                self.pending.pop(reply.id, None)
                self.failed[reply.id] = f"{reply.code}: {reply.text}"
            elif isinstance(reply, Rows):
                self.rows[reply.id] = reply, list(frames)
        stats = self.unit.stats()
        assert stats.held_nbytes - stats.spilled_nbytes <= self.memory
        assert stats.spilled_nbytes <= self.file.used_nbytes <= self.file.nbytes

    def put(self, indexes: list[int], row_nbytes: int, seed: int, wait_s: float = 1e6) -> int:
        data = np.random.default_rng(seed).integers(0, 255, (len(indexes), row_nbytes), np.uint8)
        column = WireColumn(dense_layout("uint8", 1, (row_nbytes,)), len(indexes), data.ravel())
        values = {index: own.tobytes() for index, own in zip(indexes, data, strict=True)}
        return self.put_column(indexes, column, values, wait_s)

    def put_objects(self, indexes: list[int], objects: list[Any]) -> int:
        """Returns how many bytes they take."""
        values = {index: encode_rows([own], "a").data.tobytes() for index, own in zip(indexes, objects, strict=True)}
        self.put_column(indexes, column := encode_rows(objects, "a"), values)
        return int(column.data.nbytes)

    def put_column(self, indexes: list[int], column: WireColumn, values: Any, wait_s: float = 1e6) -> int:
        packer, call = Packer(), self.number()
        packer.add("a", slice(0, len(indexes)), column)
        self.pending[call] = values
        columns = Columns(packer.headers, packer.tables)
        return self.ask(Write(call, pack_indexes(np.array(indexes)), columns, wait_s), packer.frames)

    def delete(self, indexes: list[int]) -> None:
        for index in indexes:
            self.values.pop(index, None)
        self.ask(Delete(self.number(), pack_indexes(np.array(indexes))))

    def begin_get(self, indexes: list[int]) -> int:
        return self.ask(Read(self.number(), pack_indexes(np.array(indexes)), ["a"]))

    def get(self, indexes: list[int]) -> list[bytes]:
        call = self.begin_get(indexes)
        self.settle()
        reply, frames = self.rows.pop(call)
        found = [b""] * len(indexes)
        for _, at, column in unpack_columns(reply.headers, reply.tables, frames, len(indexes)):
            where = range(len(indexes))[at] if isinstance(at, slice) else at
            for row, position in enumerate(where):
                found[position] = column.data[column.start_of(row) : column.start_of(row + 1)].tobytes()
        return found

    def step(self) -> bool:
        """One turn of the server's loop. Returns whether there was work."""
        if self.unit.next_deadline() != -math.inf:
            return False
        self.take(self.unit.expire(self.now))
        return True

    def settle(self) -> None:
        while self.step():
            pass

    def close(self) -> None:
        self.file.close()
