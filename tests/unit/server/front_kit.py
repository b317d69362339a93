# SPDX-License-Identifier: Apache-2.0
"""Clients of a front, each message made by hand: no sockets, and time is passed in."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np

from tests.local_plane import LocalPlane
from transfer_queue import protocol as p
from transfer_queue.calls import Turn
from transfer_queue.server.front import Front
from transfer_queue.storage.changes import Changes
from transfer_queue.storage.messages import (
    PAGE_NBYTES,
    ColumnHeader,
    Columns,
    Commit,
    Delete,
    LeasedMemory,
    LeaseMemory,
    Read,
    Release,
    Rows,
    UnitAnswer,
    Write,
    Written,
    decode_answer,
    decode_columns,
    encode_columns,
    unpack_columns,
)
from transfer_queue.storage.unit.arena import Arena
from transfer_queue.storage.unit.session_memory import Memory
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.storage.wire import dense_layout
from transfer_queue.transport.base import NOBODY_WAITS, Envelope, Outgoing

PAGE = PAGE_NBYTES
NBYTES = 100
"""Bytes of a value that travels in the message."""
_kinds = reduce(or_, {*get_args(p.AnyReply), *get_args(UnitAnswer)})
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_kinds)


class Got(NamedTuple):
    """An answer as it came to its client."""

    client: str
    reply: Any
    frames: Sequence[Any] = ()


def front_of(
    capacity: int | None = None, capacity_bytes: int | None = None, pages: int | None = None, **config: Any
) -> Front:
    """A controller and a unit. ``capacity``: most samples; ``pages``: size of the arena, None: there is none."""
    arena = None if pages is None else Arena(pages * PAGE)
    if arena is not None:
        arena.changes = Changes()
        arena.changes.close()  # its page stays mapped here
    unit = StorageUnit("u0", capacity_bytes, arena, inline_nbytes=64 * 1024 if arena is None else 0)
    return Front({"the": "configuration"}, LocalPlane(capacity=capacity, **config), unit)


def apart(front: Front) -> tuple[Front, Front]:
    """Two servers instead: of its controller alone, and of its unit alone."""
    return Front({}, front.plane), Front({}, None, front.unit)


def in_short_turns(front: Front) -> Front:
    """Each of its turns has time for one step of long work."""
    front.calls.turn = Turn(itertools.count(step=1.0).__next__)
    return front


def got(answers: Iterable[Outgoing]) -> list[Got]:
    return [Got(out.envelope.client, _decoder.decode(out.header), out.frames) for out in answers]


class Client:
    """One session. Its calls are numbered from 1."""

    def __init__(self, front: Front, name: str) -> None:
        self.front, self.name = front, name
        self._numbers = itertools.count(1)

    def number(self) -> int:
        return next(self._numbers)

    def send(
        self, request: p.Request, frames: Sequence[Any] = (), received: Sequence[int] = (), now: float = 0.0
    ) -> list[Got]:
        """All answers that this brings about, its own first."""
        answers = self.send_raw(p.encode_request(request, received), frames, now, request.id)
        return sorted(answers, key=lambda answer: (answer.client, answer.reply.id) != (self.name, request.id))

    def send_raw(self, header: bytes, frames: Sequence[Any] = (), now: float = 0.0, number: int = 1) -> list[Got]:
        envelope = Envelope(self.name, number, "route")
        views = [memoryview(frame).cast("B") for frame in frames]
        return got(self.front.handle(envelope, header, views, now))

    def one(self, request: p.Request, frames: Sequence[Any] = (), **more: Any) -> Any:
        """The only answer."""
        ((client, reply, _),) = self.send(request, frames, **more)
        assert (client, reply.id) == (self.name, request.id)
        return reply

    def tell(self, request: p.Request, now: float = 0.0) -> list[Got]:
        """A message that expects no answer: those of others that it brings about."""
        header = p.encode_request(request)
        return got(self.front.handle(Envelope(self.name, NOBODY_WAITS, "route"), header, [], now))

    def cancel(self, call: int, now: float = 0.0) -> list[Got]:
        return self.tell(p.Cancel(self.number(), call), now)

    def gone(self, now: float = 0.0) -> list[Got]:
        """Its last connection has closed."""
        return got(self.front.client_gone(self.name, now))

    # ---- memory and steps ----

    def lease(self, pages: int, wait_s: float = 0.0) -> LeaseMemory:
        return LeaseMemory(self.number(), pages * PAGE, wait_s=wait_s)

    def release(self, *calls: int, now: float = 0.0) -> list[Got]:
        return self.tell(Release(self.number(), list(calls)), now)

    def write(self, put: p.Put, samples: Sequence[int], call: int | None = None) -> Write:
        """The values of a put as a step of its own."""
        return Write(call or self.number(), p.pack_indexes(samples), decode_columns(put.write))

    def commit(self, write: int) -> Commit:
        return Commit(self.number(), [(self.name, write)])

    def delete(self, samples: Sequence[int]) -> Delete:
        """Of values alone, whose samples the controller still has."""
        return Delete(self.number(), p.pack_indexes(samples))

    # ---- puts ----

    def reserve(self, count: int, partition: str = "p", wait_s: float = 0.0) -> p.Reserve:
        return p.Reserve(self.number(), partition, count, specs(), wait_s)

    def check(self, samples: Sequence[int], partition: str = "p", nbytes: int = NBYTES) -> p.CheckFields:
        return p.CheckFields(self.number(), partition, p.pack_indexes(samples), specs(nbytes))

    def keys(self, *keys: str, partition: str = "p") -> p.ResolveKeys:
        return p.ResolveKeys(self.number(), partition, list(keys), True, True, specs(), 0.0, ["x"])

    def put(
        self, values: Sequence[int], begin: Any = None, tags: dict[int, dict[str, Any]] | None = None,
        nbytes: int = NBYTES, wait_s: float = 0.0, **more: Any,
    ) -> list[Got]:  # fmt: skip
        """Rows of ``nbytes`` bytes, each full of its value; new samples of partition "p" where ``begin`` is None."""
        return self.send(*self.a_put(values, begin, tags, nbytes, wait_s), **more)

    def a_put(
        self, values: Sequence[int], begin: Any = None, tags: dict[int, dict[str, Any]] | None = None,
        nbytes: int = NBYTES, wait_s: float = 0.0,
    ) -> tuple[p.Put, list[bytes]]:  # fmt: skip
        if begin is None:
            begin = p.Reserve(self.number(), "p", len(values), specs(nbytes), wait_s)
        columns = Columns([ColumnHeader("x", dense_layout("uint8", 1, (nbytes,)), len(values))])
        return p.Put(begin.id, begin, tags or {}, encode_columns(columns)), [bytes_of(values, nbytes)]

    def put_leased(self, values: Sequence[int], begin: Any = None, lease: int | None = None, offset: int = 0) -> p.Put:
        """A put of rows of a page each that lie in leased memory; there must be room for the lease."""
        if lease is None:
            leased = self.one(LeaseMemory(self.number(), len(values) * PAGE))
            assert isinstance(leased, LeasedMemory), leased
            lease, offset = leased.id, leased.offset
        begin = begin or p.Reserve(self.number(), "p", len(values), specs(PAGE))
        layout = dense_layout("uint8", 1, (PAGE,))
        columns = Columns(
            [ColumnHeader("x", layout, len(values), offset=offset, nbytes=len(values) * PAGE)], lease=lease
        )
        return p.Put(begin.id, begin, {}, encode_columns(columns))

    def stored(self, values: Sequence[int], **more: Any) -> list[int]:
        """The samples of a put that must succeed."""
        ((_, reply, _),) = self.put(values, **more)
        assert isinstance(reply, p.Reserved), reply
        return samples_of(reply)

    # ---- gets ----

    def fetch(self, count: int, wait_s: float = 0.0, task: str = "t", **more: Any) -> p.Fetch:
        return p.Fetch(self.number(), "p", task, ["x"], count, wait_s=wait_s, with_values=True, **more)

    def values(self, samples: Sequence[int]) -> dict[int, int]:
        """What the unit has for these samples, one byte of each row."""
        ((_, rows, frames),) = self.send(Read(self.number(), p.pack_indexes(samples), ["x"]))
        assert isinstance(rows, Rows), rows
        return rows_of(rows, frames, list(samples))


def is_lease(reply: Any) -> bool:
    """Is this memory?"""
    return isinstance(reply, LeasedMemory) and reply.offset >= 0


def is_written(reply: Any) -> bool:
    return isinstance(reply, Written)


def is_pinned(answer: Got) -> bool:
    """Does this batch's answer say where in the arena its values lie?"""
    return decode_answer(answer.frames[0], Rows).pinned


def specs(nbytes: int = NBYTES) -> dict[str, p.FieldSpec]:
    return {"x": p.FieldSpec("uint8", (nbytes,))}


def bytes_of(values: Sequence[int], nbytes: int = NBYTES) -> bytes:
    return np.repeat(np.array(values, np.uint8), nbytes).tobytes()


def samples_of(reply: Any) -> list[int]:
    assert not isinstance(reply, p.Failed), reply
    return p.unpack_indexes(reply.indexes).tolist()


def batch_of(answer: Got) -> dict[int, int]:
    """Samples of a batch and the values that came with it."""
    assert isinstance(answer.reply, p.Batch), answer.reply
    header, *frames = answer.frames
    return rows_of(decode_answer(header, Rows), frames, samples_of(answer.reply))


def rows_of(rows: Rows, frames: Sequence[Any], samples: list[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for _, at, wire in unpack_columns(rows.headers, rows.tables, frames, len(samples)):
        positions = range(len(samples))[at] if isinstance(at, slice) else at
        for n, row in zip(positions, np.asarray(wire.data).reshape(wire.rows, -1), strict=True):
            (found[samples[n]],) = set(row.tolist())
    return found


def failed(answer: Got | Any, code: str, fragment: str = "") -> None:
    reply = answer.reply if isinstance(answer, Got) else answer
    assert isinstance(reply, p.Failed), reply
    assert (reply.code, fragment in reply.text) == (code, True), reply


class Held(NamedTuple):
    """What a front holds. ``samples``: visible or reserved; ``records``: of answered calls that can be undone."""

    samples: int = 0
    records: int = 0
    waiting: int = 0
    values: int = 0
    held_nbytes: int = 0
    uncommitted_nbytes: int = 0
    leased_nbytes: int = 0
    pins: int = 0
    parked: int = 0


NOTHING = Held()


def held(front: Front) -> Held:
    assert front.plane is not None
    assert front.unit is not None
    front.plane.check_invariants()
    state, unit = front.plane.state, front.unit.stats()
    calls = [call for client in front.calls.clients() for call in front.calls.of(client)]
    records = sum(any(not isinstance(each, Memory) for each in call.holdings) for call in calls)
    return Held(
        state.allocator.num_used, records, state.waits.count - unit.parked, unit.values, unit.held_nbytes,
        unit.uncommitted_nbytes, unit.leased_nbytes, unit.pins, unit.parked,
    )  # fmt: skip
