# SPDX-License-Identifier: Apache-2.0
"""Clients of stories: what each has sent, what it has an answer to, what a call has taken, and the values they put."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.unit.server.front_kit import PAGE, Client, Got, front_of, got
from tests.unit.server.story_model import TASKS, Part
from transfer_queue import protocol as p
from transfer_queue.calls import Turn as TimeOfTurn
from transfer_queue.calls.turn import TURN_S
from transfer_queue.storage import messages as m
from transfer_queue.storage.wire import dense_layout

Key = tuple[str, int]
"""A client, and the number of its call."""
Act = Generator[None, None, Any]
"""Several messages of one client, with those of others in between."""
Found = dict[int, dict[str, int]]
"""Values by sample and field."""
MOST_TURNS = 3000
REFUSALS = {"InvalidRequestError", "SampleClearedError", "UnknownPartitionError"}
LATE = {"StorageFullError", "CheckpointError"}


class Interrupted(Exception):
    """A client's call ends: its deadline, Ctrl-C, a cancelled task."""


class Fatal(list[BaseException]):
    def append(self, fault: BaseException) -> None:
        raise AssertionError("a fault of the server") from fault


@dataclass
class Call:
    """``then``: what its answer means. ``steps``: more of them follow. ``part_gone``: cleared while it waited."""

    client: str
    request: Any
    frames: Sequence[Any]
    since: float
    then: Callable[[Call, Any], None]
    steps: bool
    serial: int
    answer: Got | None = None
    part_gone: bool = False

    @property
    def rank(self) -> tuple[float, int]:
        index = self.request.batch_index
        return 1e9 if index is None else index, self.serial

    @property
    def wait_s(self) -> float:
        wait_s: float = getattr(getattr(self.request, "begin", self.request), "wait_s", 0.0)
        return wait_s


def nothing(call: Call, reply: Any) -> None:
    """The answer changes nothing in the model."""


class Clients:
    """``undo``: what becomes of what an answered call has taken, by how it ends: died, failed, or what a cancel said.

    ``reading``: batches without ledger entry that may still be read, and whether they are read with the next message.
    ``pinned``: batches in the arena, and the values they had when they were fetched. ``came``: small values that came
    with a batch, and their stamp.
    """

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.config: dict[str, Any] = {
            "capacity": draw.choice([None, None, 8, 14]), "capacity_bytes": draw.choice([None, None, 16 * PAGE]),
            "pages": draw.choice([None, 96]), "producer_grace_s": 1e9,
        }  # fmt: skip
        self.looks = draw.choice([1, 3, 60])
        self.nbytes = PAGE if self.config["pages"] or self.config["capacity_bytes"] else 16
        self.sizes = {task: draw.choice([1, 2]) for task in TASKS}
        self.values, self.names, self.serials = itertools.count(1), itertools.count(1), itertools.count()
        self.trace: list[str] = []
        self.now = 0.0
        self.opens()

    def opens(self) -> None:
        """A new server, and clients that know nothing of an earlier one."""
        self.front = front_of(**self.config)
        self.front.calls.turn = TimeOfTurn(itertools.count(step=TURN_S / self.looks).__next__)
        self.front.calls.faults = Fatal()
        self.clients = {"auditor": Client(self.front, "auditor")}
        self.waiting: dict[Key, Call] = {}
        self.answered: dict[Key, Call] = {}
        self.undo: dict[Key, Callable[[str], Any]] = {}
        self.reading: dict[Key, tuple[Part, list[int], bool]] = {}
        self.pinned: dict[Key, tuple[m.Rows, Sequence[Any], list[int], Found]] = {}
        self.came: list[tuple[int, list[int], Found]] = []
        self.permits: dict[Key, Callable[[], set[int]]] = {}
        self.acts: list[tuple[str, Act]] = []
        for _ in range(3):
            self.joins()

    def joins(self) -> str:
        name = f"c{next(self.names)}"
        self.clients[name] = Client(self.front, name)
        return name

    def someone(self) -> str:
        return self.draw.choice([name for name in self.clients if name != "auditor"])

    def number(self, who: str) -> int:
        return self.clients[who].number()

    # ---- messages ----

    def send(
        self, who: str, request: Any, frames: Sequence[Any] = (), then: Callable[[Call, Any], Any] = nothing,
        steps: bool = False, received: Sequence[int] = (), tells: bool = False,
    ) -> Call:  # fmt: skip
        """``tells``: it expects no answer. A client also says which answers it has, and what it has read."""
        own = [number for (name, number), call in self.answered.items() if name == who and not call.steps]
        received = [*received, *(number for number in own if self.draw.random() < 0.3)]
        read = [number for (name, number), (_, _, is_read) in self.reading.items() if name == who and is_read]
        for number in received:
            known = self.answered.pop((who, number), None)
            for table in (self.undo, self.permits):
                table.pop((who, number), None)  # type: ignore[attr-defined]
            if known is not None and getattr(known.request, "with_values", False):
                self.reading.pop((who, number), None)
        for number in read:
            del self.reading[who, number]
        call = Call(who, request, frames, self.now, then, steps, next(self.serials))
        if not tells:
            self.waiting[who, request.id] = call
        self.notes(who, f"{request} {received=} {read=}")
        header = p.encode_request(request, received, read)
        self.deliver(who, request.id, self.clients[who].send_raw(header, frames, self.now, 0 if tells else request.id))
        return call

    def notes(self, who: str, message: object) -> None:
        if who != "auditor":
            self.trace.append(f"{self.now:g} {who}: {message}"[:300])

    def ask(self, who: str, request: Any, expected: type[Any], frames: Sequence[Any] = (), **more: Any) -> Any:
        """The answer, which comes at once."""
        answer = self.send(who, request, frames, **more).answer
        assert answer is not None, request
        assert isinstance(answer.reply, expected), answer.reply
        return answer.reply

    def reply(self, call: Call) -> Act:
        """A step of an act: the answer. One that is an error interrupts the act."""
        while call.answer is None:
            yield
        if isinstance(call.answer.reply, p.Failed):
            raise Interrupted
        return call.answer.reply

    def deliver(self, who: str, number: int, answers: Iterable[Got]) -> None:
        """In the order in which they took effect: that of the call itself, then those of others."""
        for answer in sorted(answers, key=lambda answer: (answer.client, answer.reply.id) != (who, number)):
            key, reply = (answer.client, answer.reply.id), answer.reply
            self.notes(answer.client, f"    {reply}")
            call = self.waiting[key]  # it is answered once
            self.stops_waiting(key)
            call.answer, self.answered[key] = answer, call
            if isinstance(reply, p.Failed):
                is_late = self.now >= call.since + call.wait_s
                assert reply.code in REFUSALS or (is_late and reply.code in LATE), reply
                if not isinstance(call.request, m.Write):  # else its beginning stays as it is
                    self.undo.pop(key, str)("failed")
                if not isinstance(call.request, p.Fetch):
                    continue
            call.then(call, reply)

    def stops_waiting(self, key: Key) -> bool:
        return self.waiting.pop(key, None) is not None

    def cancel(self, who: str, number: int) -> None:
        key, was_waiting = (who, number), self.stops_waiting((who, number))
        undo = self.undo.pop(key, None)
        for table in (self.answered, self.permits, self.pinned):
            table.pop(key, None)  # type: ignore[attr-defined]

        def then(call: Call, reply: Any) -> None:
            self.reading.pop(key, None)
            if undo is not None:
                undo(reply.value)
            assert reply.value == "kept" or undo is not None or was_waiting, reply

        self.send(who, p.Cancel(self.number(who), number), then=then)

    def interrupts(self, who: str) -> None:
        """One of its calls ends, or one of its acts."""
        keys = [key for calls in (self.waiting, self.answered) for key in calls if key[0] == who]
        keys = [key for key in keys if not (self.waiting.get(key) or self.answered[key]).steps]
        acts = [act for name, act in self.acts if name == who]
        if acts and (not keys or self.draw.random() < 0.5):
            act = self.draw.choice(acts)
            self.acts.remove((who, act))
            with contextlib.suppress(StopIteration):
                act.throw(Interrupted)
                raise AssertionError("an act that was interrupted goes on")
        elif keys:
            self.cancel(who, self.draw.choice(keys)[1])

    def repeats(self, who: str) -> None:
        """A message comes twice. It gets the same answer, or none while the first one waits."""
        keys = [key for calls in (self.waiting, self.answered) for key in calls if key[0] == who]
        if not keys:
            return
        key = self.draw.choice(keys)
        call = self.waiting.get(key) or self.answered[key]
        if isinstance(call.request, m.Write) or (call.answer is not None and key not in self.undo):
            return  # a step of a call, or one without effect, whose answer is not kept
        self.notes(who, f"again {call.request}")
        answers = self.clients[who].send_raw(p.encode_request(call.request), call.frames, self.now, key[1])
        if call.answer is not None:
            assert [each.reply for each in answers if (each.client, each.reply.id) == key] == [call.answer.reply]
            answers = [each for each in answers if (each.client, each.reply.id) != key]
        self.deliver(*key, answers)

    def ends(self, who: str) -> None:
        """It dies, says goodbye, or is evicted by another one. A new one comes."""
        how = self.draw.choice(["dies", "dies", "goodbye", "goodbye" if self.config["pages"] else "evicted"])
        how = "dies" if who == "auditor" else how
        self.acts = [(name, act) for name, act in self.acts if name != who]
        for key in [key for key in self.waiting if key[0] == who]:
            self.stops_waiting(key)
        for key in [key for key in reversed(self.undo) if key[0] == who]:
            self.undo.pop(key)("died")
        for table in (self.answered, self.permits, self.reading, self.pinned):
            for key in [key for key in table if key[0] == who]:  # type: ignore[attr-defined]
                del table[key]  # type: ignore[attr-defined]
        self.notes(who, how)
        client = self.clients.pop(who)
        if how == "evicted":
            auditor = self.clients["auditor"]
            evict = p.EvictClient(auditor.number(), who)
            self.deliver("", 0, [answer for answer in auditor.send(evict, now=self.now) if answer.client != "auditor"])
        elif how == "goodbye":
            answers = client.send(p.Goodbye(client.number()), now=self.now)
            self.deliver("", 0, [answer for answer in answers if answer.client != who])
        self.deliver("", 0, client.gone(self.now))
        self.joins()

    # ---- values ----

    def packed(self, values: Mapping[str, Sequence[int]], lease: int = 0, offset: int = 0) -> tuple[m.Columns, Any]:
        """The columns of a write, and its frames, or what is to be copied into its leased memory."""
        headers, frames = [], []
        for name, rows in values.items():
            layout, nbytes = dense_layout("int64", 8, (self.nbytes // 8,)), len(rows) * self.nbytes
            frames.append(np.repeat(np.array(rows, np.int64), self.nbytes // 8).tobytes())
            where = {"offset": offset, "nbytes": nbytes} if lease else {}
            headers.append(m.ColumnHeader(name, layout, len(rows), **where))
            offset += nbytes
        return m.Columns(headers, lease=lease), frames

    def memory(self) -> Any:
        """The arena, as clients have it mapped."""
        assert self.front.unit is not None
        assert self.front.unit._arena is not None
        return np.frombuffer(self.front.unit._arena._map, np.uint8)

    def rows(self, rows: m.Rows, frames: Sequence[Any], samples: Sequence[int]) -> Found:
        found: Found = {index: {} for index in samples}
        view = (lambda offset, nbytes: self.memory()[offset : offset + nbytes]) if self.config["pages"] else None
        for name, at, wire in m.unpack_columns(rows.headers, rows.tables, frames, len(samples), view):
            positions = range(len(samples))[at] if isinstance(at, slice) else at.tolist()
            table = np.frombuffer(wire.data, np.int64).reshape(-1, self.nbytes // 8)
            table = table if wire.selection is None else table[wire.selection]
            assert (table == table[:, :1]).all(), "no value is torn"
            for row, value in zip(positions, table[:, 0].tolist(), strict=True):
                found[samples[row]][name] = value
        return found

    def check_came(self) -> None:
        """What came with a batch, and has its stamp still, is what a read gives."""
        assert self.front.unit is not None
        changes = self.front.unit._changes
        assert changes is not None
        self.came = [each for each in self.came if changes.stamp(np.array(each[1])) == each[0]]
        for _, samples, found in self.came:
            assert self.read("auditor", samples, sorted(found[samples[0]])) == found

    def read(self, who: str, samples: Sequence[int], names: Sequence[str]) -> Found:
        call = self.send(who, m.Read(self.number(who), p.pack_indexes(samples), list(names)))
        assert call.answer is not None
        assert isinstance(call.answer.reply, m.Rows), call.answer.reply
        return self.rows(call.answer.reply, call.answer.frames, samples)

    # ---- time ----

    def rest(self) -> None:
        """The server comes to rest in a bounded number of turns."""
        for _ in range(MOST_TURNS):
            due = self.front.calls.next_deadline()
            if due is None or due > self.now:
                return
            self.deliver("", 0, got(self.front.expire(self.now)))
        raise AssertionError("the server does not come to rest")

    def passes(self, seconds: float) -> None:
        """Time passes; nothing is answered later than it must."""
        until = self.now + seconds
        self.rest()
        while (due := self.front.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.deliver("", 0, got(self.front.expire(self.now)))
            self.rest()
        self.now = until
        late = [call for call in self.waiting.values() if call.since + call.wait_s < self.now]
        assert not late, "it waits too long"
