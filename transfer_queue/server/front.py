# SPDX-License-Identifier: Apache-2.0
"""The front: one server's handler. It composes the control plane and the storage unit of its process.

A put is reserve, store, publish; a fetch with values is draw, read. Where both parts are here, that is one turn.
A client walks the same steps itself where they are in processes of their own.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import msgspec

from transfer_queue import protocol as p
from transfer_queue.control.plane import ControlPlane
from transfer_queue.control.sessions import Record
from transfer_queue.control.writing import CompletePut
from transfer_queue.errors import InvalidRequestError, ProtocolError, StorageFullError, TransferQueueError, to_wire
from transfer_queue.server.endings import PER_TURN, Answer, Endings, all_answers, answers_of, in_turns
from transfer_queue.server.janitor import Janitor
from transfer_queue.server.meter import Meter
from transfer_queue.storage.messages import (
    AskUnitStats,
    Commit,
    Delete,
    Read,
    Rows,
    UnitRequest,
    UnitStats,
    Write,
    decode_columns,
)
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.transport.base import Envelope, Outgoing
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)
_decode = p.message_decoder(*get_args(UnitRequest))
_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, MemoryError, msgspec.MsgspecError)


class Step(NamedTuple):
    """A request of a composed call to one of the parts."""

    request: p.Request
    frames: list[memoryview] = []  # noqa: RUF012 (never changed)


PAUSE = Step(p.ListPartitions(0))
"""Go on in the next turn: others are served first."""
Steps = Generator[Step, Answer, Answer]


@dataclass(slots=True)
class _Call:
    """A call that is not answered yet. ``steps``: how it goes on once a part has answered; None: that is the answer."""

    envelope: Envelope
    request: p.Request
    since: float
    steps: Steps | None = None


class Front:
    """A transport ``Handler`` for a controller, a storage unit, or both."""

    def __init__(
        self, conf: Mapping[str, Any], plane: ControlPlane | None = None, unit: StorageUnit | None = None,
        make_janitor: Callable[[], Janitor] | None = None,
    ) -> None:  # fmt: skip
        """``make_janitor``: called once there are storage units in other processes."""
        self.plane = plane
        self.unit = unit
        self.disconnect: Callable[[str], None] | None = None
        """Closes a client's connections; set by the server that this handler belongs to."""
        self.connections: Callable[[], dict[str, int]] = dict
        """How many connections each client has; set likewise."""
        self.alarms: Callable[[], list[dict[str, Any]]] = list
        self.meter = Meter()
        self._make_janitor = make_janitor
        self._conf = conf
        self._welcome = json.dumps(conf).encode()
        self._calls: dict[tuple[str, int], _Call] = {}
        self._said_goodbye: set[str] = set()  # clients that are still connected
        self._further: list[Answer] = []  # that undoing a call brought about
        self._paused: deque[tuple[str, int]] = deque()
        self._endings = Endings(plane, unit)
        self._now = 0.0
        composed: dict[type[p.Request], Callable[[str, Any, list[memoryview]], Steps]] = {p.Put: self._put}
        if plane is not None and unit is not None:
            composed |= dict.fromkeys(
                (p.ClearSamples, p.ClearConsumed, p.ClearPartition, p.Thaw, p.Restore), self._clear
            )
        self._composed = composed

    def listens_at(self, address: str) -> None:
        """Set the address for other hosts, which clients get with the configuration."""
        self._welcome = json.dumps({**self._conf, "listen": address}).encode()

    # ---- a transport handler ----

    def handle(self, envelope: Envelope, header: bytes, frames: list[memoryview], now: float) -> Iterable[Outgoing]:
        try:
            message = _decode(header)
        except TransferQueueError as error:
            self._told(envelope.client, *_told_by(header))
            return [Outgoing(envelope, p.encode(p.Failed(0, *to_wire(error))))]
        client, request, self._now = envelope.client, message.request, now
        self._told(client, message.received, message.read)
        call = self._calls.get((client, request.id))
        if call is not None:  # a retry of a call that is under way
            call.envelope = envelope
            return []
        call = _Call(envelope, request, now)
        if envelope.number:
            self._calls[client, request.id] = call
        outgoing = self._finish(
            self._guarded(client, request.id, lambda: self._start(client, call, request, frames, now)), now
        )
        outgoing.sort(key=lambda answer: answer.envelope is envelope)  # clients that waited are answered first
        return outgoing

    def expire(self, now: float) -> Iterable[Outgoing]:
        self._now = now
        answers = all_answers(partial(part.expire, now) for part in (self.plane, self.unit) if part is not None)
        if self._paused:
            client, call = self._paused.popleft()
            answers.append(Answer(client, p.Done(call)))
        if self._endings.unused:
            answers += self._endings.delete_some(now)
        return self._finish(answers, now)

    def next_deadline(self) -> float | None:
        if self._paused or self._endings.unused:
            return -math.inf  # a little each turn, between requests
        deadlines = [part.next_deadline() for part in (self.plane, self.unit) if part is not None]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def client_gone(self, client: str, now: float) -> Iterable[Outgoing]:
        """The client's last connection has closed: its session has ended."""
        self._now, died = now, client not in self._said_goodbye
        self._said_goodbye.discard(client)
        return self._finish(self._end_session(client, died, now), now)

    # ---- one call ----

    def _told(self, client: str, received: list[int], read: list[int]) -> None:
        """The client has the answers of these calls, which can't be undone any more, and has read these batches."""
        if self.plane is not None and received:
            self.plane.received(client, received)
            self._endings.writes.received(client, received)
        if self.plane is not None and read:
            self.plane.read(client, read)

    def _start(
        self, client: str, call: _Call, request: p.Request, frames: list[memoryview], now: float
    ) -> Iterable[Answer]:
        if isinstance(request, p.Hello):
            return [Answer(client, self._hello(request))]
        if isinstance(request, p.Cancel):
            self._drop(client, request.call)
            return self._endings.cancel(client, request, now)
        if isinstance(request, p.Goodbye):
            self._said_goodbye.add(client)
            return [Answer(client, p.Done(request.id)), *self._end_session(client, False, now, but=request.id)]
        if isinstance(request, p.EvictClient) and self.plane is not None:
            return self._evict(client, request, now)
        if isinstance(request, p.GetStats) and self.plane is not None:
            return self._stats(client, request, now)
        if isinstance(request, AskUnitStats):
            return self._unit_stats(client, request, now)
        compose = self._composed.get(type(request))
        if compose is not None and (answered := self._answered(client, request)) is not None:
            return [Answer(client, answered)]
        if compose is None and isinstance(request, p.Fetch) and request.with_values:
            compose = self._fetch
        if compose is None:
            return self._step(client, Step(request, frames), now)
        call.steps = compose(client, request, frames)
        return self._ask(client, next(call.steps), now)

    def _ask(self, client: str, step: Step, now: float) -> Iterable[Answer]:
        """Let the part that knows this request handle it."""
        request = step.request
        if self.unit is not None and self.unit.serves(request):
            return answers_of(self.unit.handle(client, request, step.frames, now))
        if self.plane is None or isinstance(request, UnitRequest):
            raise ProtocolError(f"this server does not serve {type(request).__name__}: it is of another kind.")
        return answers_of(self.plane.handle(client, request, now))

    def _step(self, client: str, step: Step, now: float) -> Iterable[Answer]:
        """Carry out a request. It may be one step of a write, and then its client asks for the other steps itself."""
        request, writes = step.request, self._endings.writes
        if isinstance(request, p.Reserve | p.CheckFields | p.ResolveKeys):
            writes.started(client, request.id)
        answers = self._ask(client, step, now)
        done = isinstance(request, p.Publish | p.JoinUnit) and not any(
            isinstance(reply, p.Failed) and reply.id == request.id and own == client for own, reply, _ in answers
        )
        if done and isinstance(request, p.Publish) and request.completes:
            writes.published(client, request.completes)
        elif done and isinstance(request, p.JoinUnit):
            self.start_janitor()
        return answers

    def start_janitor(self) -> None:
        """There are storage units in other processes, where a janitor ends writes and sessions."""
        if self._endings.janitor is None and self._make_janitor is not None:
            self._endings.janitor = self._make_janitor()

    def close(self) -> None:
        """Do what is left to do in other processes."""
        if self._endings.janitor is not None:
            self._endings.janitor.close()

    def _finish(self, answers: Iterable[Answer], now: float) -> list[Outgoing]:
        """Carry on the composed calls that were answered a step, until every answer is one for a client."""
        work, outgoing = deque(answers), list[Outgoing]()
        while True:
            work.extend(self._other_answers(now))
            if not work:
                return outgoing
            answer = work.popleft()
            key = (answer.client, answer.reply.id)
            call = self._calls.get(key)
            if call is None:  # it was cancelled, or expects no answer
                continue
            if isinstance(answer.reply, Rows):
                self.meter.reads(answer.reply, answer.frames)
            if call.steps is not None:
                final = self._next_step(answer, call.steps, work, now)
                if final is None:
                    continue
                answer = final
            del self._calls[key]
            outgoing.append(self._outgoing(call.envelope, answer))
            self.meter.answered(call.request, call.since, answer.reply)

    def _outgoing(self, envelope: Envelope, answer: Answer) -> Outgoing:
        """The encoded answer. If it can't be encoded, the call is undone and answered with an error."""
        try:
            return Outgoing(envelope, p.encode(self._explained(answer.reply)), answer.frames)
        except _UNENCODABLE as error:  # a value that can't travel harms its own call alone
            kind, call = type(answer.reply).__name__, answer.reply.id
            _log.error("an answer of type %s can't be encoded: %r", kind, error)
            self._undo(answer.client, call)
            unsendable = ProtocolError(f"the answer can't be sent: {error}")
            return Outgoing(envelope, p.encode(p.Failed(call, *to_wire(unsendable))))

    def _explained(self, reply: p.Reply) -> p.Reply:
        """A unit without room does not know the tasks; the control plane knows which of them keep it full."""
        if self.plane is None or not isinstance(reply, p.Failed) or reply.code != StorageFullError.__name__:
            return reply
        held_up_by = self.plane.held_up_by()
        return reply if held_up_by in reply.text else p.Failed(reply.id, reply.code, f"{reply.text} {held_up_by}")

    def _next_step(self, answer: Answer, steps: Steps, work: deque[Answer], now: float) -> Answer | None:
        """Continue a composed call. Returns its final answer, or None if it goes on."""
        client, call = answer.client, answer.reply.id

        def go_on() -> Iterable[Answer]:
            step = steps.send(answer)
            if step is PAUSE:
                self._paused.append((client, call))
                return []
            return self._ask(client, step, now)

        try:
            work.extend(self._guarded(client, call, go_on))
        except StopIteration as done:
            final: Answer = done.value
            return final
        return None

    def _guarded(self, client: str, call: int, act: Callable[[], Iterable[Answer]]) -> Iterable[Answer]:
        """The one guard of requests: whatever is wrong with one, its caller gets the error, and others are served."""
        try:
            return act()
        except StopIteration:
            raise
        except BaseException as error:  # foreign code may raise anything, and no Ctrl-C reaches a server
            pending = self._calls.get((client, call))
            if pending is not None and pending.steps is not None:
                pending.steps.close()
                pending.steps = None
                self._undo(client, call)
            if not isinstance(error, TransferQueueError):
                _log.exception("a request of client %s failed", client)
            return [Answer(client, p.Failed(call, *to_wire(error)))]

    # ---- composed calls ----

    def _answered(self, client: str, request: p.Request) -> p.Reply | None:
        """The answer to the same call before: it has one effect."""
        record = None if self.plane is None else self.plane.state.calls.get(client, request.id)
        return record.reply if record is not None and record.kind is type(request) else None

    def _remember(self, client: str, request: p.Request, reply: p.Reply) -> None:
        """The whole call is done, and can't be undone from here on."""
        assert self.plane is not None
        self.plane.state.calls.add(client, request.id, Record(type(request), reply))

    def _put(self, client: str, put: p.Put, frames: list[memoryview]) -> Steps:
        """Reserve (or check, or resolve keys), store, publish. Nothing is visible before the last of them."""
        if self.plane is None or self.unit is None:
            raise ProtocolError("this server's process has a controller and no storage: put in steps.")
        begin, columns = put.begin, decode_columns(put.write) if put.write else None
        if begin.id != put.id:
            raise ProtocolError(f"call {put.id} is a put that begins with call {begin.id}: a put is one call.")
        deadline = self._now + begin.wait_s
        lease = columns.lease if columns is not None else 0
        try:
            first = yield Step(begin)
            if isinstance(first.reply, p.Failed):
                return first
            indexes = begin.indexes if isinstance(begin, p.CheckFields) else first.reply.indexes  # type: ignore[attr-defined]
            if columns is not None:
                written = yield Step(Write(put.id, indexes, columns, max(0.0, deadline - self._now)), frames)
                lease = 0
                if isinstance(written.reply, p.Failed):
                    self._undo(client, put.id)
                    return written
            published = yield Step(_publication(put, indexes))
            if isinstance(published.reply, p.Failed):
                self._undo(client, put.id)
                return published
            if columns is not None:
                yield Step(Commit(put.id, [put.id]))
            answer = published if isinstance(begin, p.ResolveKeys) else first
            if isinstance(answer.reply, p.Reserved):
                state = self.plane.state
                partition, own = state.get(begin.partition), p.unpack_indexes(answer.reply.indexes)
                state.calls.add(client, put.id, CompletePut(state, put, answer.reply, partition, own))
            else:
                self._remember(client, put, answer.reply)
            return answer
        finally:
            if lease:
                self._further += all_answers([partial(self.unit.cancel, client, lease, self._now)])

    def _fetch(self, client: str, fetch: p.Fetch, frames: list[memoryview]) -> Steps:
        """Draw a batch, then read its values. A batch that can't be read is returned to its task."""
        batch = yield Step(fetch)
        if self.unit is None or not isinstance(batch.reply, p.Batch) or not batch.reply.indexes:
            return batch
        if not batch.reply.lies_in_front:
            return batch  # some values lie in other units, where the client reads them
        rows = yield Step(Read(fetch.id, batch.reply.indexes, sorted(set(fetch.fields)), fetch.mapped))
        if isinstance(rows.reply, p.Failed):
            self._undo(client, fetch.id)
            return rows
        return Answer(client, batch.reply, [p.encode(rows.reply), *rows.frames])

    def _clear(self, client: str, request: p.Request, frames: list[memoryview]) -> Steps:
        """Clear samples, then delete their values."""
        assert self.plane is not None
        cleared = yield Step(request)
        if isinstance(cleared.reply, p.Cleared):
            if self._endings.janitor is not None:
                self._endings.janitor.delete(p.unpack_indexes(cleared.reply.indexes))
            for some in in_turns(p.unpack_indexes(cleared.reply.indexes)):
                yield Step(Delete(request.id, p.pack_indexes(some)))
                if len(some) == PER_TURN:
                    yield PAUSE
            self._remember(client, request, cleared.reply)
        return cleared

    # ---- calls and sessions that end ----

    def _drop(self, client: str, number: int) -> None:
        call = self._calls.pop((client, number), None)
        if call is not None and call.steps is not None:
            call.steps.close()

    def _end_session(self, client: str, died: bool, now: float, but: int = 0) -> list[Answer]:
        """``but``: the call that asked for it."""
        for own, number in [key for key in self._calls if key[0] == client and key[1] != but]:
            self._drop(own, number)
        return self._endings.end_session(client, died, now)

    def _undo(self, client: str, call: int) -> None:
        """Both parts undo what they did for this call."""
        self._further += self._endings.undo(client, call, self._now)

    def _other_answers(self, now: float) -> list[Answer]:
        """Answers to other calls. Values that became unused are deleted, or at least the first of them."""
        answers, self._further = self._further, []
        if self.plane is not None and self.plane.state.unused:
            answers += self._endings.take_unused(now)
        return answers

    # ---- small verbs ----

    def _hello(self, hello: p.Hello) -> p.Reply:
        p.check_version(hello)
        return p.Welcome(hello.id, self._welcome)

    def _evict(self, client: str, request: p.EvictClient, now: float) -> Iterable[Answer]:
        assert self.plane is not None
        evicted = request.client
        if evicted == client:
            raise InvalidRequestError(f"client {client!r} can't evict itself: close it instead.")
        # It may live, and still copy into its leases or from its pins: that memory stays its own for a while.
        freed = [] if self.unit is None else answers_of(self.unit.client_gone(evicted, now, may_live=True))
        answers = [*freed, *answers_of(self.plane.handle(client, request, now))]
        if self.disconnect is not None:
            self.disconnect(evicted)
        return answers

    def _stats(self, client: str, request: p.GetStats, now: float) -> Iterable[Answer]:
        assert self.plane is not None
        answers = answers_of(self.plane.handle(client, request, now))
        for answer in answers:
            if answer.reply.id == request.id and isinstance(answer.reply, p.Done) and not request.after:
                answer.reply.value.update(alarms=self.alarms(), asked_by=client, metrics=self.meter.of_controller())
                answer.reply.value["waiting"] += [] if self.unit is None else self.unit.waiting(now)
                clients = answer.reply.value["clients"]
                for name, count in self.connections().items():
                    clients.setdefault(name, {})["connections"] = count
                for holder, (leases, pins) in ({} if self.unit is None else self.unit.holders()).items():
                    clients.setdefault(holder, {}).update(leases=leases, pins=pins)
        return answers

    def _unit_stats(self, client: str, request: AskUnitStats, now: float) -> Iterable[Answer]:
        answers = self._ask(client, Step(request), now)
        assert self.unit is not None, "it has answered"
        metrics = self.meter.of_unit(self.unit.put_nbytes)
        return [
            Answer(own, msgspec.structs.replace(reply, metrics=metrics), frames)
            if isinstance(reply, UnitStats) else Answer(own, reply, frames)
            for own, reply, frames in answers
        ]  # fmt: skip


def _publication(put: p.Put, indexes: bytes) -> p.Publish:
    """The last step of a put. Its tags are by row until then."""
    own = p.unpack_indexes(indexes)
    if put.tags and not 0 <= min(put.tags) <= max(put.tags) < len(own):
        raise InvalidRequestError(f"a put of {len(own)} rows has tags for rows {sorted(put.tags)}.")
    tags = {int(own[row]): tags for row, tags in put.tags.items()} if put.tags else {}
    by_key = isinstance(put.begin, p.ResolveKeys)
    return p.Publish(put.id, put.begin.partition, indexes, put.begin.fields, tags, by_key, put.id)


def _told_by(header: bytes) -> tuple[list[int], list[int]]:
    """What a message with a request that can't be decoded says of earlier calls: those received, and those read."""
    try:
        received, _, *rest = msgspec.msgpack.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, ValueError):
        return [], []
    return _calls_of(received), _calls_of(rest[0] if rest else None)


def _calls_of(value: object) -> list[int]:
    return [call for call in value if type(call) is int] if isinstance(value, list) else []
