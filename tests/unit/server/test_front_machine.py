# SPDX-License-Identifier: Apache-2.0
"""Front against a model: clients put, get, clear, cancel, repeat themselves and end in any order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.server.front_kit import (
    NBYTES,
    NOTHING,
    PAGE,
    Client,
    Got,
    batch_of,
    front_of,
    got,
    held,
    is_lease,
    is_written,
    samples_of,
    specs,
)
from transfer_queue import protocol as p

REFUSALS = {
    "ProducersGoneError",
    "StorageFullError",
    "SampleClearedError",
    "InvalidRequestError",
    "UnknownPartitionError",
}
WAIT_S = st.sampled_from([0.0, 0.0, 5.0, 20.0])
VALUES = st.lists(st.integers(1, 250), min_size=1, max_size=3)


@dataclass
class Call:
    """One call of a client. ``answer`` None: it waits. ``values``: what it puts, by sample or in the order of rows."""

    request: p.Request
    frames: list[bytes] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    answer: Got | None = None
    num_rewrites: int = 0


class FrontMachine(RuleBasedStateMachine):
    """``visible``: value by sample. ``taken``: samples of batches whose answers the client has not said it has;
    ``consumed``: of those it has."""

    @initialize(
        capacity=st.sampled_from([None, 4, 7]), capacity_bytes=st.sampled_from([None, 4 * PAGE]), arena=st.booleans()
    )
    def begin(self, capacity: int | None, capacity_bytes: int | None, arena: bool) -> None:
        self.arena = arena
        self.nbytes = PAGE if arena or capacity_bytes else NBYTES
        self.front = front_of(capacity, capacity_bytes, 64 if arena else None)
        self.now = 0.0
        self.clients: dict[str, Client] = {}
        self.calls: dict[tuple[str, int], Call] = {}
        self.visible: dict[int, int] = {}
        self.cleared: set[int] = set()
        self.taken: dict[tuple[str, int], list[int]] = {}
        self.consumed: list[int] = []
        self.leases: list[tuple[str, int, int]] = []
        self.started: dict[tuple[str, int], list[int]] = {}  # reserved samples of writes in steps
        self.num_rewrites = 0
        self.made = 0
        for _ in range(3):
            self.join()
        self.auditor = Client(self.front, "auditor")

    def join(self) -> None:
        self.made += 1
        name = f"c{self.made}"
        self.clients[name] = Client(self.front, name)

    def client(self, number: int) -> Client:
        return list(self.clients.values())[number]

    # ---- what is sent, and what comes back ----

    def send(self, client: Client, request: p.Request, frames: Any = (), values: Any = (), **more: Any) -> Got | None:
        """The call's own answer, None while it waits."""
        call = self.calls[client.name, request.id] = Call(request, list(frames), list(values))
        self.note(client.send(request, frames, now=self.now, **more))
        return call.answer

    def note(self, answers: list[Got]) -> None:
        for answer in answers:
            key = (answer.client, answer.reply.id)
            call = self.calls[key]
            assert call.answer is None, "a call is answered once"
            call.answer = answer
            self.take_note(key, call, answer)

    def take_note(self, key: tuple[str, int], call: Call, answer: Got) -> None:
        reply = answer.reply
        if isinstance(reply, p.Failed):
            assert reply.code in REFUSALS, reply
        elif isinstance(call.request, p.Put):
            begin = call.request.begin
            samples = samples_of(begin if isinstance(begin, p.CheckFields) else reply)
            self.num_rewrites += not self.visible.keys().isdisjoint(samples)
            call.num_rewrites = self.num_rewrites
            self.visible.update(zip(samples, call.values, strict=True))
            assert not self.cleared.intersection(samples)
        elif isinstance(reply, p.Batch):
            batch = batch_of(answer)
            assert batch == {sample: self.visible[sample] for sample in samples_of(reply)}
            assert not set(batch).intersection(self.consumed, *self.taken.values()), "given twice"
            self.taken[key] = list(batch)
        elif isinstance(reply, p.Cleared):
            for sample in samples_of(reply):
                del self.visible[sample]
                self.cleared.add(sample)

    # ---- rules ----

    numbers = st.integers(0, 2)

    @rule(number=numbers, values=VALUES, wait_s=WAIT_S)
    def put_new(self, number: int, values: list[int], wait_s: float) -> None:
        client = self.client(number)
        put, frames = client.a_put(values, None, {0: {"n": 1}}, self.nbytes, wait_s)
        self.send(client, put, frames, values)

    @rule(number=numbers, values=VALUES, wait_s=WAIT_S, data=st.data())
    @precondition(lambda self: self.visible)
    def put_existing(self, number: int, values: list[int], wait_s: float, data: st.DataObject) -> None:
        client, known = self.client(number), sorted(self.visible)
        samples = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=len(values), unique=True))
        values = values[: len(samples)]
        begin = p.CheckFields(client.number(), "p", p.pack_indexes(samples), specs(self.nbytes), wait_s)
        put, frames = client.a_put(values, begin, nbytes=self.nbytes)
        self.send(client, put, frames, values)

    @rule(number=numbers, keys=st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True), wait_s=WAIT_S)
    def put_keys(self, number: int, keys: list[str], wait_s: float) -> None:
        client, values = self.client(number), [ord(key) for key in keys]
        begin = p.ResolveKeys(client.number(), "p", keys, True, True, specs(self.nbytes), wait_s, ["x"])
        put, frames = client.a_put(values, begin, nbytes=self.nbytes)
        self.send(client, put, frames, values)

    @rule(number=numbers, values=VALUES)
    def put_badly(self, number: int, values: list[int]) -> None:
        """One row too many."""
        client = self.client(number)
        put, frames = client.a_put([*values, 0], client.reserve(len(values)), nbytes=self.nbytes)
        (answer,) = client.send(put, frames, now=self.now)
        assert isinstance(answer.reply, p.Failed)

    @rule(number=numbers, pages=st.integers(1, 3), wait_s=WAIT_S)
    @precondition(lambda self: self.arena)
    def lease(self, number: int, pages: int, wait_s: float) -> None:
        client = self.client(number)
        answer = self.send(client, client.lease(pages, wait_s))
        if answer is not None and is_lease(answer.reply):  # else it is full
            self.leases.append((client.name, answer.reply.id, pages))

    @rule(data=st.data(), wait_s=WAIT_S)
    @precondition(lambda self: self.leases)
    def put_leased(self, data: st.DataObject, wait_s: float) -> None:
        """The leased memory was never written: its bytes are 0, or those of a value that was there before."""
        name, lease, pages = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        client = self.clients[name]
        offset = self.calls[name, lease].answer.reply.offset
        self.front.unit._arena._map[offset : offset + pages * PAGE] = bytes([77]) * pages * PAGE
        begin = p.Reserve(client.number(), "p", pages, specs(PAGE), wait_s)
        put = client.put_leased([77] * pages, begin, lease, offset)
        self.send(client, put, (), [77] * pages)

    @rule(data=st.data())
    @precondition(lambda self: self.leases)
    def release(self, data: st.DataObject) -> None:
        name, lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.note(self.clients[name].release(lease, now=self.now))

    @rule(number=numbers, count=st.integers(1, 2), write=st.booleans())
    def start_steps(self, number: int, count: int, write: bool) -> None:
        client = self.client(number)
        reserve = client.reserve(count)
        answer = self.send(client, reserve)
        if answer is None or isinstance(answer.reply, p.Failed):
            return
        self.started[client.name, reserve.id] = samples_of(answer.reply)

    @rule(data=st.data(), value=st.integers(1, 250))
    @precondition(lambda self: self.started)
    def finish_steps(self, data: st.DataObject, value: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.started)))
        samples, client = self.started.pop(key), self.clients[key[0]]
        put, frames = client.a_put([value] * len(samples), client.reserve(1), nbytes=self.nbytes)
        write = client.write(put, samples, key[1])  # a step of the call that reserved
        answer = self.send(client, write, frames)
        del self.calls[key]  # a call that a later one has completed is not repeated
        if answer is None or not is_written(answer.reply):
            self.note(client.cancel(key[1], self.now))
            return
        publish = p.Publish(client.number(), "p", write.indexes, specs(self.nbytes), completes=key[1])
        self.visible.update(dict.fromkeys(samples, value))
        self.send(client, publish)

    @rule(number=numbers, count=st.integers(1, 3), wait_s=WAIT_S)
    def fetch(self, number: int, count: int, wait_s: float) -> None:
        client = self.client(number)
        self.send(client, client.fetch(count, wait_s))

    @rule(number=numbers, data=st.data(), consumed=st.booleans())
    @precondition(lambda self: self.visible)
    def clear(self, number: int, data: st.DataObject, consumed: bool) -> None:
        client = self.client(number)
        samples = data.draw(st.lists(st.sampled_from(sorted(self.visible)), max_size=3))
        named = p.ClearSamples(client.number(), "p", p.pack_indexes(samples))
        self.send(client, p.ClearConsumed(named.id, "p", ["t"]) if consumed else named)

    def open_calls(self, number: int) -> list[tuple[str, int]]:
        name = self.client(number).name
        return [key for key in self.calls if key[0] == name]

    @rule(number=numbers, data=st.data())
    def cancel(self, number: int, data: st.DataObject) -> None:
        keys = self.open_calls(number)
        if keys:
            self.undo(data.draw(st.sampled_from(keys)))

    def undo(self, key: tuple[str, int]) -> None:
        call = self.calls.pop(key)
        if isinstance(call.request, p.Put) and call.answer is not None and isinstance(call.answer.reply, p.Reserved):
            self.take_back(call, samples_of(call.answer.reply))
        self.taken.pop(key, None)
        self.started.pop(key, None)
        self.leases = [lease for lease in self.leases if lease[:2] != key]
        self.note(self.clients[key[0]].cancel(key[1], self.now))

    def take_back(self, call: Call, samples: list[int]) -> None:
        """A complete put of new samples is undone as a whole, unless somebody has got one or has written."""
        given = {*self.consumed, *itertools.chain(*self.taken.values())}
        if call.num_rewrites == self.num_rewrites and self.visible.keys() >= {*samples} and given.isdisjoint(samples):
            self.cleared.update(samples)
            for sample in samples:
                del self.visible[sample]

    @rule(number=numbers, data=st.data())
    def repeat(self, number: int, data: st.DataObject) -> None:
        """A message comes twice. It gets the same answer, or none while the first one waits."""
        keys = [key for key in self.open_calls(number) if self.is_repeatable(key)]
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        call = self.calls[key]
        answers = self.clients[key[0]].send(call.request, call.frames, now=self.now)
        if call.answer is None:
            assert answers == []
        else:
            ((name, reply, _),) = answers
            assert (name, reply) == (key[0], call.answer.reply)

    def is_repeatable(self, key: tuple[str, int]) -> bool:
        """Of what has no effect, or failed, the answer is another one later."""
        call = self.calls[key]
        if call.answer is None:
            return True
        if isinstance(call.answer.reply, p.Batch) and key in self.taken:
            return not self.cleared.intersection(self.taken[key])
        return isinstance(call.answer.reply, (p.Reserved, p.Cleared)) and key not in self.started

    @rule(number=numbers, data=st.data())
    def receive(self, number: int, data: st.DataObject) -> None:
        client = self.client(number)
        answered = [key for key in self.open_calls(number) if self.calls[key].answer is not None]
        answered = [
            key for key in answered if key not in self.started and key not in {lease[:2] for lease in self.leases}
        ]
        if not answered:
            return
        keys = data.draw(st.lists(st.sampled_from(answered), unique=True))
        for key in keys:
            self.consumed += self.taken.pop(key, [])
            del self.calls[key]
        self.send(client, p.ListPartitions(client.number()), received=[call for _, call in keys])

    @rule(number=numbers, polite=st.booleans())
    def end(self, number: int, polite: bool) -> None:
        client = self.client(number)
        for key in self.open_calls(number):
            del self.calls[key]
            self.taken.pop(key, None)
            self.started.pop(key, None)
        self.leases = [lease for lease in self.leases if lease[0] != client.name]
        if polite:
            self.send(client, p.Goodbye(client.number()))
        self.note(client.gone(self.now))
        self.calls = {key: call for key, call in self.calls.items() if key[0] != client.name}
        del self.clients[client.name]
        self.join()

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (deadline := self.front.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.note(got(self.front.expire(self.now)))
        self.now = until

    # ---- what always holds ----

    @invariant()
    def every_visible_sample_has_the_value_that_was_put(self) -> None:
        if hasattr(self, "front") and self.visible:
            assert self.auditor.values(sorted(self.visible)) == dict(sorted(self.visible.items()))

    @invariant()
    def nothing_else_is_stored(self) -> None:
        if hasattr(self, "front"):
            found = held(self.front)
            assert (found.values, found.uncommitted_nbytes, found.pins) == (len(self.visible), 0, 0)
            assert found.leased_nbytes >= PAGE * sum(lease[2] for lease in self.leases)

    def teardown(self) -> None:
        if not hasattr(self, "front"):
            return
        for number in range(3):
            self.end(number=0, polite=bool(number))
        self.wait(60.0)
        self.no_sample_is_lost()
        last = Client(self.front, "last")
        last.send(p.ClearPartition(last.number(), "p"))
        for client in (last, self.auditor, *self.clients.values()):
            assert client.gone(self.now) == []
        assert held(self.front) == NOTHING
        assert self.front.plane.state.allocator.num_used == 0
        assert not self.arena or self.front.unit.stats().arena_nbytes == 0

    def no_sample_is_lost(self) -> None:
        """What no client said it has can be got once more."""
        reader = Client(self.front, "reader")
        rest = []
        while isinstance((answer := reader.send(reader.fetch(1), now=self.now)[0]).reply, p.Batch):
            rest += samples_of(answer.reply)
        assert sorted(rest) == sorted(set(self.visible).difference(self.consumed))
        reader.gone(self.now)


FrontMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, print_blob=True)
TestFrontAgainstAModel = FrontMachine.TestCase
