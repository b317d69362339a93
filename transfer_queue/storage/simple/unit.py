# SPDX-License-Identifier: Apache-2.0
"""One storage unit: answers writes, reads and drops on a block store; parks a write that does not fit yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transfer_queue.errors import StorageFullError, to_wire
from transfer_queue.storage.pieces import IntArray
from transfer_queue.storage.simple.blocks import BlockStore
from transfer_queue.storage.simple.messages import (
    Answer,
    Drop,
    Dropped,
    Failed,
    FieldParts,
    Read,
    Rows,
    UnitStats,
    Write,
    Written,
    decode_request,
    encode,
    pack_parts,
    unpack_indexes,
    unpack_parts,
)
from transfer_queue.transport.base import Envelope, Outgoing


@dataclass(frozen=True, slots=True)
class _Parked:
    envelope: Envelope
    indexes: IntArray
    parts: FieldParts
    nbytes: int
    since: float
    deadline: float


class StorageUnit:
    """A transport ``Handler``. Values stay opaque bytes here: no torch, nothing decoded, nothing unpickled."""

    def __init__(self, name: str = "unit", capacity_bytes: int | None = None) -> None:
        """``capacity_bytes``: what all values together may take; None is unlimited."""
        self.name = name
        self._capacity = capacity_bytes
        self._store = BlockStore()
        # In arrival order: a write that would fit never overtakes an earlier one, or large writes would starve.
        self._parked: deque[_Parked] = deque()

    def handle(self, envelope: Envelope, header: bytes, frames: list[memoryview], now: float) -> Iterable[Outgoing]:
        return self._answered(envelope, partial(self._serve, envelope, header, frames, now))

    def expire(self, now: float) -> Iterable[Outgoing]:
        late = [parked for parked in self._parked if parked.deadline <= now]
        if not late:
            return []
        self._parked = deque(parked for parked in self._parked if parked.deadline > now)
        return [_failed(parked.envelope, self._full(parked, now)) for parked in late] + self._let_in()

    def next_deadline(self) -> float | None:
        return min((parked.deadline for parked in self._parked), default=None)

    def client_gone(self, client: str, now: float) -> Iterable[Outgoing]:
        """Its parked writes go with it: nobody would publish them."""
        self._parked = deque(parked for parked in self._parked if parked.envelope.client != client)
        return self._let_in()

    def stats(self) -> UnitStats:
        store = self._store
        return UnitStats(
            unit=self.name,
            samples=store.num_samples,
            values=store.num_values,
            live_nbytes=store.live_nbytes,
            held_nbytes=store.held_nbytes,
            blocks=store.num_blocks,
            capacity_bytes=self._capacity,
            parked=len(self._parked),
            parked_nbytes=sum(parked.nbytes for parked in self._parked),
        )

    def _answered(self, envelope: Envelope, serve: Callable[[], list[Outgoing]]) -> list[Outgoing]:
        try:
            return serve()
        # The one place that must outlive any message, whatever is wrong with it.
        except Exception as error:
            return [_failed(envelope, error)]

    def _serve(self, envelope: Envelope, header: bytes, frames: list[memoryview], now: float) -> list[Outgoing]:
        request = decode_request(header)
        if isinstance(request, Write):
            return self._write(envelope, request, frames, now)
        if isinstance(request, Read):
            indexes = unpack_indexes(request.indexes)
            headers, values = pack_parts(self._store.read(indexes, request.fields))
            return [_answer(envelope, Rows(headers), values)]
        if isinstance(request, Drop):
            dropped = self._store.drop(unpack_indexes(request.indexes), request.fields)
            return [_answer(envelope, Dropped(dropped)), *self._let_in()]
        return [_answer(envelope, self.stats())]

    def _write(self, envelope: Envelope, request: Write, frames: list[memoryview], now: float) -> list[Outgoing]:
        indexes = unpack_indexes(request.indexes)
        parts = unpack_parts(request.parts, frames, len(indexes))
        nbytes = sum(piece.nbytes for _, _, piece in parts)
        if self._capacity is not None and nbytes > self._capacity:
            raise StorageFullError(
                f"a put of {nbytes} bytes can never fit storage unit {self.name!r} of {self._capacity} bytes. "
                f"Put fewer samples at once, or give the units more memory."
            )
        parked = _Parked(envelope, indexes, parts, nbytes, now, now + request.wait_s)
        if self._parked or not self._fits(parked):
            if request.wait_s <= 0:
                raise self._full(parked, now)
            self._parked.append(parked)
            return []
        return self._keep(parked)

    def _fits(self, parked: _Parked) -> bool:
        if self._capacity is None or self._store.held_nbytes + parked.nbytes <= self._capacity:
            return True
        freed = self._store.replaced_nbytes(parked.indexes, parked.parts)
        return self._store.live_nbytes - freed + parked.nbytes <= self._capacity

    def _keep(self, parked: _Parked) -> list[Outgoing]:
        self._store.write(parked.indexes, parked.parts)
        if self._capacity is not None and self._store.held_nbytes > self._capacity:
            self._store.squeeze()
        return [_answer(parked.envelope, Written())]

    def _let_in(self) -> list[Outgoing]:
        answers: list[Outgoing] = []
        while self._parked and self._fits(self._parked[0]):
            first = self._parked.popleft()
            answers += self._answered(first.envelope, partial(self._keep, first))
        return answers

    def _full(self, parked: _Parked, now: float) -> StorageFullError:
        return StorageFullError(
            f"Storage capacity exceeded: a put of {parked.nbytes} bytes waited {now - parked.since:.1f} s at storage "
            f"unit {self.name!r}, whose values take {self._store.live_nbytes} of {self._capacity} bytes. "
            f"Clear consumed samples sooner, raise the capacity, or raise put_timeout_s."
        )


def _answer(envelope: Envelope, answer: Answer, frames: Sequence[Any] = ()) -> Outgoing:
    return Outgoing(envelope, encode(answer), frames)


def _failed(envelope: Envelope, error: BaseException) -> Outgoing:
    return _answer(envelope, Failed(*to_wire(error)))
