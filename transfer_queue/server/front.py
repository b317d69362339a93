# SPDX-License-Identifier: Apache-2.0
"""The front: one server's handler. It composes the control plane and the storage unit of its process.

A put is reserve, store, publish; a fetch with values is draw, read. Where both parts are here, that is one turn.
A client walks the same steps itself where they are in processes of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, get_args

import msgspec

from transfer_queue import protocol as p
from transfer_queue.calls import PIECE, Answer, Call, Calls, Effect, Steps, Turn, Verb, Wait, replied
from transfer_queue.control import fetches, lifecycle, memberships, queries, writing
from transfer_queue.control.plane import ControlPlane, PlaneVerb
from transfer_queue.control.state import WRITERS
from transfer_queue.errors import InvalidRequestError, ProtocolError, StorageFullError, TransferQueueError, to_wire
from transfer_queue.server.janitor import Janitor
from transfer_queue.server.meter import Meter
from transfer_queue.storage.messages import (
    AskUnitStats,
    Columns,
    EndSession,
    Read,
    Rows,
    UnitRequest,
    Write,
    decode_columns,
)
from transfer_queue.storage.unit.session_memory import MemoryLease, StoredRows
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.transport.base import Envelope, Outgoing, Route
from transfer_queue.transport.loop import guarded
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)
_decode = p.message_decoder(*get_args(UnitRequest))
_CLEARS: tuple[type[p.Request], ...] = (p.ClearSamples, p.ClearConsumed, p.ClearPartition, p.Thaw, p.Restore)
_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, MemoryError, msgspec.MsgspecError)


class Front:
    """A transport ``Handler`` for a controller, a storage unit, or both."""

    def __init__(
        self, conf: Mapping[str, Any], plane: ControlPlane | None = None, unit: StorageUnit | None = None,
        make_janitor: Callable[[], Janitor] | None = None, turn: Turn | None = None,
    ) -> None:  # fmt: skip
        """``make_janitor``: called once there are storage units in other processes. ``turn``: else the plane's."""
        self.plane = plane
        self.unit = unit
        self.disconnect: Callable[[str], object] = _nothing
        """Closes a client's connections; set by the server that this handler belongs to."""
        self.connections: Callable[[], dict[str, int]] = dict
        """How many connections each client has; set likewise."""
        self.watch: Callable[[int, int | None, Callable[[], None]], object] = _nothing
        """Calls back when a process of this host has ended; set likewise."""
        self.alarms: Callable[[], list[dict[str, Any]]] = list
        self.meter = Meter() if plane is None else Meter(version_of=plane.state.leases.version_of)
        self._make_janitor = make_janitor
        self._janitor: Janitor | None = None
        self.conf = conf
        self._welcome = json.dumps(conf).encode()
        self._said_goodbye: set[str] = set()  # clients that are still connected
        self._pids: dict[str, tuple[int, int | None]] = {}
        self.calls = plane.calls if plane is not None else Calls()
        if turn is not None:
            self.calls.turn = turn
        if unit is not None:
            unit.share(self.calls)
        self.calls.verbs = self._verbs()

    def _verbs(self) -> dict[type[p.Request], Verb]:
        """Those of the parts, and what is made of both."""
        plane, unit = self.plane, self.unit
        verbs = {**({} if plane is None else plane.verbs), **({} if unit is None else unit.verbs)}
        verbs |= {p.Hello: self._hello, p.Goodbye: self._goodbye, p.Cancel: self._cancel}
        if plane is not None and unit is not None:
            verbs |= {kind: self._clearing(plane.verbs[kind]) for kind in _CLEARS}
            verbs |= _ComposedCalls(plane, unit).verbs
        if plane is not None:
            verbs |= {p.EvictClient: self._evict, p.GetStats: self._stats, p.JoinUnit: self._join_unit}
        if unit is not None:
            verbs |= {AskUnitStats: partial(self._unit_stats, unit), EndSession: partial(self._end_in_unit, unit)}
        return verbs

    def listens_at(self, address: str) -> None:
        """Set the address for other hosts, which clients get with the configuration."""
        self._welcome = json.dumps({**self.conf, "listen": address}).encode()

    def start_janitor(self) -> None:
        """There are storage units in other processes, where a janitor ends writes and sessions."""
        if self._janitor is None and self._make_janitor is not None:
            self._janitor = self._make_janitor()
            if self.unit is not None:
                self.unit.others_join()

    def close(self) -> None:
        """Do what is left to do in other processes."""
        if self._janitor is not None:
            self._janitor.close()

    # ---- a transport handler ----

    def handle(self, envelope: Envelope, header: bytes, frames: list[memoryview], now: float) -> Iterable[Outgoing]:
        try:
            message = _decode(header)
        except TransferQueueError as error:
            self._note_received(envelope.client, *_received_by(header))
            return [Outgoing(envelope, p.encode(p.Failed(0, *to_wire(error))))]
        if message.received or message.read:
            self._note_received(envelope.client, message.received, message.read)
        if self.unit is not None:
            self.unit.tick(now)
        call = Call(envelope.client, message.request, now, frames, envelope if envelope.number else None)
        outgoing = self._outgoing(self.calls.handle(call, now))
        if len(outgoing) > 1:
            outgoing.sort(key=lambda answer: answer.envelope is envelope)  # clients that waited are answered first
        return outgoing

    def expire(self, now: float) -> Iterable[Outgoing]:
        if self.unit is not None:
            guarded(self.unit.trim, now)
        return self._outgoing(self.calls.expire(now))

    def next_deadline(self) -> float | None:
        deadline = self.calls.next_deadline()
        trim = None if self.unit is None else self.unit.next_trim()
        return deadline if trim is None else trim if deadline is None else min(deadline, trim)

    def connection_gone(self, client: str, route: Route, now: float) -> Iterable[Outgoing]:
        """The calls that wait for an answer there are cancelled: nobody would get it."""
        self.calls.now = now
        self.calls.turn.begin()
        for call in self.calls.of(client):
            if call.is_under_way and call.envelope is not None and call.envelope.route is route:
                self.calls.cancel(client, call.number)
        return self._outgoing(self.calls.work())

    def client_gone(self, client: str, now: float) -> Iterable[Outgoing]:
        """The client's last connection has closed: its session has ended."""
        self.calls.now, died = now, client not in self._said_goodbye
        self._said_goodbye.discard(client)
        self._pids.pop(client, None)
        self.calls.turn.begin()
        self._end_session(client, died)
        return self._outgoing(self.calls.work())

    def _note_received(self, client: str, received: list[int], read: list[int]) -> None:
        """The client has the answers of these calls, which can't be undone any more, and has read these batches."""
        self.calls.received(client, received)
        if self.plane is not None and read:
            self.plane.read(client, read)

    def _outgoing(self, answers: list[Answer]) -> list[Outgoing]:
        """The answers as they travel. What became unused or ended meanwhile is dealt with."""
        if self.plane is not None and (self.plane.state.unused or self.plane.state.ended_writes):
            answers += self._clean_up(self.plane)
        if self._janitor is not None and self._janitor.committed:
            self._note_committed(self._janitor)
        for fault in self.calls.faults:
            _log.error("a request could not be served, or a call could not be undone", exc_info=fault)
        self.calls.faults.clear()
        outgoing = []
        for answer in answers:
            if answer.envelope is not None:
                outgoing.append(self._encoded(answer))
        return outgoing

    def _encoded(self, answer: Answer) -> Outgoing:
        """The encoded answer. If it can't be encoded, the call is undone and answered with an error."""
        call, reply = answer.call, answer.reply
        self.meter.answered(answer.request, call.since, reply)
        try:
            if type(reply) is p.Failed:
                reply = self._explained(reply)
            elif type(reply) is p.NotReady:
                reply = msgspec.structs.replace(reply, parked_puts=self._num_parked_puts())
            return Outgoing(answer.envelope, p.encode(reply), answer.values)
        except _UNENCODABLE as error:  # a value that can't travel harms its own call alone
            _log.error("an answer of type %s can't be encoded: %r", type(reply).__name__, error)
            self.calls.cancel(call.client, call.number)
            unsendable = ProtocolError(f"the answer can't be sent: {error}")
            return Outgoing(answer.envelope, p.encode(p.Failed(call.number, *to_wire(unsendable))))

    def _explained(self, reply: p.Failed) -> p.Failed:
        """With the tasks that keep the queue full. A unit does not know them."""
        if self.plane is None or reply.code != StorageFullError.__name__:
            return reply
        return p.Failed(reply.id, reply.code, reply.text + writing.held_up_by(self.plane.state))

    def _num_parked_puts(self) -> int:
        """How many puts wait for room, as far as this process knows."""
        in_unit = 0 if self.unit is None else self.unit.num_waiting
        return len(self.calls.waits.of(WRITERS)) + in_unit

    # ---- clears ----

    def _clearing(self, clear: PlaneVerb) -> Verb:
        """The verb that also deletes the values of what it clears."""

        def verb(call: Call, request: p.Request) -> Steps:
            cleared = yield from replied(clear(call, request))
            if isinstance(cleared, p.Cleared):
                yield from self._deleting(p.unpack_indexes(cleared.indexes))
                self.calls.take(call.client, call.number, lifecycle.Clearing)
                self.calls.hold(call, Effect())
            return cleared

        return verb

    def _deleting(self, indexes: p.Indexes) -> Iterator[None]:
        """Delete the values of these samples: in this process a piece at a time."""
        if self._janitor is not None and len(indexes):
            self._janitor.delete(indexes)
        if self.unit is None:
            return
        for start in range(0, len(indexes), PIECE):
            if start:
                yield
            self.unit.delete(indexes[start : start + PIECE])

    # ---- calls and sessions that end ----

    def _cancel(self, call: Call, request: p.Cancel) -> p.Reply:
        return p.Done(request.id, self.calls.cancel(call.client, request.call))

    def _end_session(self, client: str, died: bool) -> None:
        if self.plane is None:  # only the controller knows that a session has ended for good
            self.calls.end(client, died)
            if self.unit is not None:
                self.unit.process_gone(client)
            return
        self.calls.refuse(client)
        self.calls.end(client, died)
        state = self.plane.state
        own = [published for (owner, _), published in state.ended_writes if owner == client]
        published = list(dict.fromkeys(chain.from_iterable(own)))
        state.ended_writes = [each for each in state.ended_writes if each[0][0] != client]
        if self.unit is not None:
            guarded(self.unit.end_session, client, published)
        if self._janitor is not None:
            self._janitor.end_session(client, published)

    def _end_in_unit(self, unit: StorageUnit, call: Call, request: EndSession) -> p.Reply:
        """The controller has ended a session. Its client may live: while it is connected here, it may still copy."""
        if self.plane is None:  # otherwise it ended at once, and another may have its name by now
            if request.client in self.connections():
                unit.evict(request.client)
            unit.end_session(request.client, request.published)
        return p.Done(request.id)

    def _note_committed(self, janitor: Janitor) -> None:
        while self.plane is not None and janitor.committed:
            self.plane.state.committed(janitor.committed.popleft())

    def _clean_up(self, plane: ControlPlane) -> list[Answer]:
        """Delete what has become unused, and end writes that were left halfway. Returns answers that this decides."""
        ended, plane.state.ended_writes = plane.state.ended_writes, []
        for write, published in ended:
            if self.unit is not None:
                guarded(self.unit.end_write, write, published)
            if self._janitor is not None:
                self._janitor.end_write(write, published)
        for unused in plane.take_unused():
            deleting = self._deleting(unused)
            guarded(next, deleting, None)
            self.calls.later(deleting)
        return self.calls.work()

    # ---- small verbs ----

    def _hello(self, call: Call, hello: p.Hello) -> p.Reply:
        p.check_version(hello)
        self._pids[call.client] = hello.pid, hello.namespace
        return p.Welcome(hello.id, self._welcome)

    def _goodbye(self, call: Call, request: p.Goodbye) -> p.Reply:
        self._said_goodbye.add(call.client)
        self._end_session(call.client, False)
        return p.Done(request.id)

    def _evict(self, call: Call, request: p.EvictClient) -> p.Reply:
        assert self.plane is not None
        memberships.check_evict(self.plane.state, call, request)
        evicted, unit = request.client, self.unit
        held = bool(self.calls.of(evicted))
        if unit is not None:
            # It may live, and still copy into its leases or from its pins: that memory stays its own while it does.
            unit.evict(evicted)
            if evicted in self._pids:
                self.watch(*self._pids[evicted], lambda: unit.process_gone(evicted))
        self._end_session(evicted, True)
        self.disconnect(evicted)
        return p.Done(request.id, held)

    def _stats(self, call: Call, request: p.GetStats) -> p.Reply:
        assert self.plane is not None
        reply = queries.stats(self.plane.state, call, request)
        if isinstance(reply, p.Done) and not request.after:
            reply.value.update(alarms=self.alarms(), asked_by=call.client, metrics=self.meter.of_controller())
            reply.value["waiting"] += [] if self.unit is None else self.unit.waiting(self.calls.now)
            clients = reply.value["clients"]
            for name, count in self.connections().items():
                clients.setdefault(name, {})["connections"] = count
            for holder, (leases, pins) in ({} if self.unit is None else self.unit.holders()).items():
                clients.setdefault(holder, {}).update(leases=leases, pins=pins)
        return reply

    def _join_unit(self, call: Call, request: p.JoinUnit) -> p.Reply:
        assert self.plane is not None
        reply = memberships.join_unit(self.plane.state, call, request)
        self.start_janitor()
        return reply

    def _unit_stats(self, unit: StorageUnit, call: Call, request: AskUnitStats) -> p.Reply:
        metrics = self.meter.of_unit(unit.put_nbytes, unit.got_nbytes)
        return msgspec.structs.replace(unit.stats(), id=request.id, metrics=metrics)


class _ComposedCalls:
    """Calls that take both the control plane and the storage unit of this process."""

    def __init__(self, plane: ControlPlane, unit: StorageUnit) -> None:
        self._plane, self._unit = plane, unit
        self.verbs: dict[type[p.Request], Verb] = {
            p.Put: self._put, p.Fetch: self._fetch, p.Publish: self._publish,
        }  # fmt: skip

    def _put(self, call: Call, put: p.Put) -> p.Reply | Steps:
        """Reserve (or check, or resolve keys), store, publish. Nothing is visible before the last of them.

        Plain new samples take nothing beforehand where there is room for them and their values: it is one step then.
        """
        begin = put.begin
        if begin.id != put.id:
            raise ProtocolError(f"call {put.id} is a put that begins with call {begin.id}: a put is one call.")
        columns = self._columns(call, put.write) if put.write else None
        if (
            columns is not None and isinstance(begin, p.Reserve)
            and writing.takes_now(self._plane.state, call, begin) and self._unit.takes_now(call, columns)
        ):  # fmt: skip
            return self._put_now(call, put, begin, columns)
        return self._put_in_steps(call, put, columns)

    def _put_now(self, call: Call, put: p.Put, begin: p.Reserve, columns: Columns) -> p.Reply:
        """All of it in one step, of which an error leaves nothing."""
        indexes = self._plane.state.allocator.allocate(begin.count)
        tags = _by_index(put.tags, indexes) if put.tags else {}
        try:
            self._unit.store_new(call, indexes, columns)
            return writing.add(self._plane.state, call, begin, indexes, tags)
        except BaseException:
            self._unit.delete(indexes)
            raise

    def _put_in_steps(self, call: Call, put: p.Put, columns: Columns | None) -> Steps:
        begin = put.begin
        if columns is not None and not columns.lease and not self._is_free(call, begin, columns):
            # Memory before samples, as a put has them that leases memory: otherwise each may wait for the other.
            kept = yield from replied(self._unit.keep_room(call, begin.wait_s))
            if isinstance(kept, p.Failed):
                return kept
            columns = msgspec.structs.replace(columns, lease=call.number)
        first = yield from replied(self._plane.verbs[type(begin)](call, begin))
        if isinstance(first, p.Failed):
            return first
        indexes: bytes = begin.indexes if isinstance(begin, p.CheckFields) else first.indexes  # type: ignore[attr-defined]
        if columns is not None:
            fresh = isinstance(begin, p.Reserve)
            wait_s = max(0.0, call.since + begin.wait_s - self._plane.calls.now)
            written = yield from replied(self._unit.write(call, Write(put.id, indexes, columns, wait_s, fresh)))
            if isinstance(written, p.Failed):
                return written
        published = writing.publish(self._plane.state, call, _publication(put, indexes))
        self._plane.calls.take(call.client, call.number, StoredRows)
        if not isinstance(begin, p.Reserve):
            for over in self._plane.calls.take(call.client, call.number, writing.Committing):
                self._unit.commit([over.write])
                over.keep()
                self._plane.calls.hold(call, Effect())
        return published if isinstance(begin, p.ResolveKeys) else first

    def _is_free(self, call: Call, begin: writing.Writer | p.CheckFields, columns: Columns) -> bool:
        """Whether a put takes nothing that others wait for: it replaces values, or there is room for all of it."""
        if isinstance(begin, p.CheckFields):
            return True
        count = len(begin.keys) if isinstance(begin, p.ResolveKeys) else begin.count
        has_room = self._unit.takes_now(call, columns) and writing.has_room(self._plane.state, count)
        return has_room or writing.check(self._plane.state, begin) < count

    def _columns(self, call: Call, data: bytes) -> Columns:
        """What a put stores. The memory that it leased ends with the put, whatever becomes of that."""
        columns = decode_columns(data)
        if not columns.lease:
            return columns
        for lease in self._plane.calls.take(call.client, columns.lease, MemoryLease):
            self._plane.calls.hold(call, lease)
        return msgspec.structs.replace(columns, lease=call.number)

    def _publish(self, call: Call, publish: p.Publish) -> p.Reply:
        """A write in steps is visible: what it stored in this process stays."""
        reply = writing.publish(self._plane.state, call, publish)
        self._plane.calls.take(call.client, publish.completes, StoredRows)
        self._unit.commit([(call.client, publish.completes)])
        return reply

    def _fetch(self, call: Call, fetch: p.Fetch) -> Any:
        """Draw a batch; with values, read them, too."""
        drawn = fetches.fetch(self._plane.state, call, fetch)
        if fetch.with_values:
            return self._with_values(call, fetch, drawn)
        if fetch.small_values:
            return self._small_once_drawn(call, drawn) if isinstance(drawn, Wait) else self._small(call, drawn)
        return drawn

    def _small_once_drawn(self, call: Call, drawn: Wait) -> Steps:
        return self._small(call, (yield drawn))

    def _small(self, call: Call, batch: p.Reply) -> p.Reply:
        """This batch, with its values if they are few bytes."""
        if isinstance(batch, p.Batch) and batch.indexes and batch.lies_in_front:
            rows = self._unit.read_small(call, batch.indexes, sorted(batch.fields))
            if rows is not None:
                call.values = [p.encode(rows), *call.values]
        return batch

    def _with_values(self, call: Call, fetch: p.Fetch, drawn: Any) -> Steps:
        """A batch that can't be read is returned to its task."""
        batch = yield from replied(drawn)
        if not isinstance(batch, p.Batch) or not batch.indexes or not batch.lies_in_front:
            return batch  # some values lie in other units, where the client reads them
        read = Read(fetch.id, batch.indexes, sorted(set(fetch.fields)), fetch.mapped)
        rows = yield from replied(self._unit.read(call, read))
        if isinstance(rows, Rows):
            call.values = [p.encode(rows), *call.values]
            return batch
        return rows


def _nothing(*_: object) -> None:
    """Of a front without a server."""


def _publication(put: p.Put, indexes: bytes) -> p.Publish:
    """The last step of a put. Its tags are by row until then."""
    tags = _by_index(put.tags, p.unpack_indexes(indexes)) if put.tags else {}
    by_key = isinstance(put.begin, p.ResolveKeys)
    return p.Publish(
        put.id, put.begin.partition, indexes, put.begin.fields, tags, by_key, put.id, uncommitted=True,
        role=None if isinstance(put.begin, p.CheckFields) else put.begin.role,
    )  # fmt: skip


def _by_index(tags: dict[int, p.Tags], indexes: p.Indexes) -> dict[int, p.Tags]:
    """The tags of these samples, which came by row."""
    if not 0 <= min(tags) <= max(tags) < len(indexes):
        raise InvalidRequestError(f"a put of {len(indexes)} rows has tags for rows {sorted(tags)}.")
    return {int(indexes[row]): own for row, own in tags.items()}


def _received_by(header: bytes) -> tuple[list[int], list[int]]:
    """What a message with a request that can't be decoded says of earlier calls: those received, and those read."""
    try:
        received, _, *rest = msgspec.msgpack.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, ValueError):
        return [], []
    return _calls_of(received), _calls_of(rest[0] if rest else None)


def _calls_of(value: object) -> list[int]:
    return [call for call in value if type(call) is int] if isinstance(value, list) else []
