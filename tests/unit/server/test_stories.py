# SPDX-License-Identifier: Apache-2.0
"""Whole stories of a server against one model: clients put, read, cancel, repeat, die and come back, save and load.

A story is a seed and a list of steps; each step has a seed of its own. So a story that fails is played again without
the steps that don't matter, and the rest is printed.
"""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.local_plane import tags_of
from tests.unit.server.front_kit import NOTHING, held, samples_of
from tests.unit.server.story_kit import Act, Call, Clients, Interrupted, Key, nothing
from tests.unit.server.story_model import TASKS, Part, Saved, Turn, Write
from transfer_queue import protocol as p
from transfer_queue.control import snapshot
from transfer_queue.storage import messages as m

WAITS = [0.0, 0.0, 5.0, 20.0]
VERBS = {
    "puts": 10, "puts_in_memory": 4, "puts_in_steps": 5, "fetches": 20, "reads": 3, "releases": 6, "tags": 1,
    "changes": 12, "interrupts": 6, "repeats": 6, "ends": 2, "saves": 3, "loads": 1, "loads_here": 1, "goes_on": 30,
    "passes": 2,
}  # fmt: skip
Steps = list[tuple[str, int]]


class Story(Clients):
    """``parts``: what the queue holds. ``seen``: all indexes there were; ``named``: by partition and key.

    ``blurred``: partitions where a put by key has waited for memory, and ended. It may have made a key that another put
    names, too, and that has ended with it.
    """

    saved: Saved | None = None

    def opens(self) -> None:
        super().opens()
        self.parts: dict[str, Part] = {}
        self.seen: set[int] = set()
        self.named: dict[tuple[str, str], int] = {}
        self.blurred: set[str] = set()
        self.freezes: dict[Key, Saved] = {}

    # ---- writes ----

    def writing(self, who: str) -> Write | None:
        """To new samples, to given ones, or by key."""
        draw, number, rows = self.draw, self.number(who), self.draw.randint(1, 3)
        name, wait_s, names = draw.choice("pq"), draw.choice(WAITS), draw.choice([["x"], ["x"], ["y"], ["x", "y"]])
        kind = draw.choice(["new", "new", "keys", "given"])
        specs = {name: p.FieldSpec("int64", (self.nbytes // 8,)) for name in names}
        begin: Any = p.Reserve(number, name, rows, specs, wait_s)
        if kind == "keys":
            begin = p.ResolveKeys(number, name, draw.sample("abcd", rows), True, True, specs, wait_s, names)
        elif kind == "given":
            live = self.parts[name].live() if name in self.parts else []
            samples = sorted(draw.sample(live, min(rows, len(live))))
            if not samples:
                return None
            begin, rows = p.CheckFields(number, name, p.pack_indexes(samples), specs, wait_s), len(samples)
        tags = {row: {"n": draw.randint(0, 9)} for row in range(rows) if draw.random() < 0.3}
        return Write(begin, {name: [next(self.values) for _ in range(rows)] for name in names}, tags)

    def began(self, who: str, write: Write, reply: Any) -> None:
        """The samples of a write are known. New ones are held until it is published."""
        begin, part = write.begin, self.parts.setdefault(write.begin.partition, Part())
        write.indexes = samples_of(begin if isinstance(begin, p.CheckFields) else reply)
        new = [index for index in write.indexes if index not in part.samples]
        part.hold(new, who)
        for key, index in zip(begin.keys, write.indexes, strict=True) if write.by_key else ():
            assert part.keys.setdefault(key, index) == index, "a key names one sample"
            if self.named.get((begin.partition, key)) == index:  # a put that waits for memory may have made it
                self.seen.discard(index)
            self.named[begin.partition, key] = index
        assert self.seen.isdisjoint(new), "an index is never used again"
        self.seen.update(write.indexes)
        if not isinstance(begin, p.Reserve):
            self.permits[who, begin.id] = lambda: self.replaced(part, write)
        self.undo[who, begin.id] = lambda how: part.release(new)

    def replaced(self, part: Part, write: Write) -> set[int]:
        """The samples of which this would replace values now."""
        there = part.samples if self.parts.get(write.begin.partition) is part else {}
        return {index for index in write.indexes if index in there and write.values.keys() & there[index].fields}

    def wrote(self, who: str, write: Write, call: int) -> None:
        """A write is visible now, by the answer to this call."""
        begin, part = write.begin, self.parts[write.begin.partition]
        del self.undo[who, begin.id]
        for frozen in self.freezes.values():
            saved = frozen.parts.get(begin.partition, Part()).values
            replaced = {index for index in write.indexes if write.values.keys() & saved.get(index, {}).keys()}
            assert replaced <= frozen.torn, "what is being saved is not replaced"
        part.wrote(write.indexes, write.values, write.tags)
        if isinstance(begin, p.Reserve):
            rewrites = part.num_rewrites
            self.undo[who, call] = lambda how: self.take_back(part, write, rewrites, how)
        elif call == begin.id:
            del self.permits[who, call]
            self.undo[who, call] = stays
        else:
            self.undo[who, call] = stays

    def take_back(self, part: Part, write: Write, rewrites: int, how: str) -> None:
        """A put of new samples is undone as a whole, unless somebody has got or written to one, or they are final."""
        own = set(write.indexes)
        is_there = self.parts.get(write.begin.partition) is part and part.samples.keys() >= own
        was_given = any(view.given.keys() & own for view in part.views.values())
        is_final = part.sealed or was_given or rewrites != part.num_rewrites or not is_there
        assert how == "died" or how == ("kept" if is_final else "undone")
        if how == "undone":
            part.clear(write.indexes)

    def puts(self, who: str) -> None:
        """In one message."""
        if (write := self.writing(who)) is not None:
            self.put(who, write, *self.packed(write.values))

    def put(self, who: str, write: Write, columns: m.Columns, frames: Any) -> None:
        def then(call: Call, reply: Any) -> None:
            self.began(who, write, reply)
            self.wrote(who, write, write.begin.id)

        self.send(who, p.Put(write.begin.id, write.begin, write.tags, m.encode_columns(columns)), frames, then)

    def stops_waiting(self, key: Key) -> bool:
        begin = getattr(self.waiting[key].request, "begin", None) if key in self.waiting else None
        if isinstance(begin, p.ResolveKeys):
            self.blurred.add(begin.partition)
        return super().stops_waiting(key)

    def puts_in_memory(self, who: str) -> Act:
        """What it copies into leased memory stays there until the put, whatever others do."""
        if not self.config["pages"] or (write := self.writing(who)) is None:
            return
        data = np.frombuffer(b"".join(self.packed(write.values)[1]), np.uint8)
        lease = m.LeaseMemory(self.number(who), len(data), wait_s=self.draw.choice(WAITS))
        try:
            leased = yield from self.reply(self.send(who, lease, (), self.leased, steps=True))
            if leased.offset >= 0:
                yield
                self.memory()[leased.offset : leased.offset + len(data)] = data
                yield
                del self.undo[who, lease.id]  # it ends with the put
                self.put(who, write, self.packed(write.values, lease.id, leased.offset)[0], ())
        except Interrupted:
            self.cancel(who, lease.id)

    def leased(self, call: Call, reply: m.LeasedMemory) -> None:
        if reply.offset >= 0:
            self.undo[call.client, reply.id] = str

    def puts_in_steps(self, who: str) -> Act:
        """Begin, write, publish, commit: the client may be interrupted or die between any two."""
        if (write := self.writing(who)) is None:
            return
        begin, publish = write.begin, None
        try:
            yield from self.reply(
                self.send(who, begin, (), lambda call, reply: self.began(who, write, reply), steps=True)
            )
            yield
            columns, frames = self.packed(write.values)
            fresh, indexes = isinstance(begin, p.Reserve), p.pack_indexes(write.indexes)
            stores = m.Write(begin.id, indexes, columns, self.draw.choice(WAITS), fresh)
            yield from self.reply(self.send(who, stores, frames, steps=True))
            yield
            tags, number = {write.indexes[row]: own for row, own in write.tags.items()}, self.number(who)
            publish = p.Publish(number, begin.partition, indexes, begin.fields, tags, write.by_key, begin.id, True)
            published: Any = lambda call, reply: self.wrote(who, write, number)  # noqa: E731
            yield from self.reply(self.send(who, publish, (), published, steps=True))
            yield
            if not fresh:
                self.ask(who, m.Commit(self.number(who), [(who, begin.id)]), p.Done)
                yield
            self.send(who, p.ListPartitions(self.number(who)), received=[begin.id, publish.id])
        except Interrupted:
            if publish is None:
                self.send(who, m.Abort(self.number(who), [begin.id]), tells=True)
            self.stops_waiting((who, begin.id))  # of a write that waits for room
            self.cancel(who, begin.id)
            if publish is not None:
                self.cancel(who, publish.id)

    # ---- reads ----

    def fetches(self, who: str) -> None:
        draw, task, name = self.draw, self.draw.choice(list(TASKS)), self.draw.choice("pq")
        plan, view = TASKS[task], self.parts.get(name, Part()).view(task)
        rank = None if plan.dp_size is None else draw.randrange(plan.dp_size)
        last = max([batch for _, batch in view.ledger], default=-1)
        index = draw.randint(max(0, last - 1), last + 1) if plan.names_batch else None
        size = self.sizes[task] if plan.dp_size else draw.randint(1, 3)
        fetch = p.Fetch(
            self.number(who), name, task, plan.fields, size, rank, index, plan.dp_size, draw.choice(WAITS),
            with_values=draw.random() < 0.5, mapped=draw.random() < 0.5 and bool(self.config["pages"]),
            small_values=draw.random() < 0.5,
        )  # fmt: skip
        self.send(who, fetch, then=self.fetched)

    def tokens(self, name: str, task: str) -> list[str]:
        known = [entry.token for entry in self.parts.get(name, Part()).view(task).ledger.values() if entry.token]
        return self.draw.sample(known, min(1, len(known)))

    def line(self, partition: str, task: str) -> list[Call]:
        """The fetches that wait, from front to back."""
        own = [call for call in self.waiting.values() if isinstance(call.request, p.Fetch)]
        own = [call for call in own if (call.request.partition, call.request.task) == (partition, task)]
        return sorted(own, key=lambda call: call.rank)

    def is_unsure(self, name: str) -> bool:
        """Whether the partition is sealed, and a put that waits for memory may hold samples that are still to come."""
        begins = [getattr(call.request, "begin", None) for call in self.waiting.values()]
        there = name in self.blurred or any(begin is not None and begin.partition == name for begin in begins)
        return there and name in self.parts and self.parts[name].sealed

    def turn(self, call: Call, is_first: bool) -> Turn:
        part = self.parts.get(call.request.partition)
        return Turn() if part is None else part.turn(call.request, is_first)

    def fetched(self, call: Call, reply: Any) -> None:
        name, line = call.request.partition, self.line(call.request.partition, call.request.task)
        turn = self.turn(call, not line or call.rank < line[0].rank)
        if isinstance(reply, p.Batch):
            self.got_batch(call, reply, self.parts[name], turn)
        elif isinstance(reply, p.NotReady):
            assert self.now >= call.since + call.wait_s
            assert not turn.kind or self.is_unsure(name), turn
        elif isinstance(reply, p.Ended):
            assert call.part_gone if reply.reason == "cleared" else turn.kind == "ended" or self.is_unsure(name), reply
        else:
            assert turn.kind == reply.code, turn

    def got_batch(self, call: Call, reply: p.Batch, part: Part, turn: Turn) -> None:
        fetch, key = call.request, (call.client, call.request.id)
        samples = part.give(fetch, turn)
        assert samples_of(reply) == samples, turn
        assert tags_of(reply) == {index: tags for index in samples if (tags := part.samples[index].tags)}
        if fetch.with_values:
            self.check_values(call, samples, {i: {n: part.values[i][n] for n in fetch.fields} for i in samples})
        elif call.answer is not None and call.answer.frames:
            header, *frames = call.answer.frames
            rows = m.decode_answer(header, m.Rows)
            assert (fetch.small_values, rows.pinned) == (True, False)
            found = self.rows(rows, frames, samples)
            assert found == {i: {n: part.values[i][n] for n in fetch.fields} for i in samples}
            self.came.append((rows.stamp, samples, found))
        if turn.key is None:
            view, num_resets = part.view(fetch.task), part.view(fetch.task).num_resets
            self.reading[key] = part, samples, False
            self.undo[key] = lambda how: view.release(samples, num_resets)
            return
        entry, token = part.view(fetch.task).ledger[turn.key], str(reply.token)
        assert (reply.batch_index, entry.token) in ((turn.key[1], ""), (turn.key[1], token))
        entry.token = token
        if fetch.batch_index is None:
            batch = turn.key
            self.undo[key] = lambda how: self.parts.get(fetch.partition, Part()).view(fetch.task).lost(batch, token)

    def check_values(self, call: Call, samples: list[int], expected: dict[int, dict[str, int]]) -> None:
        assert call.answer is not None
        header, *frames = call.answer.frames
        rows = m.decode_answer(header, m.Rows)
        assert self.rows(rows, frames, samples) == expected
        if rows.pinned:
            self.pinned[call.client, call.request.id] = rows, frames, samples, expected
            self.undo.setdefault((call.client, call.request.id), str)

    def releases(self, who: str) -> None:
        """What it has pinned is as it was, whatever was put since."""
        for key in [key for key in self.pinned if key[0] == who]:
            rows, frames, samples, expected = self.pinned.pop(key)
            assert self.rows(rows, frames, samples) == expected
            self.send(who, m.Release(self.number(who), [key[1]]), received=[key[1]], tells=True)

    def reads(self, who: str) -> None:
        """The values of the batches that came without them."""
        for key, (part, samples, _) in self.reading.items():
            if key[0] == who and key not in self.answered:
                self.reading[key] = part, samples, True

    # ---- partitions ----

    def tags(self, who: str) -> None:
        for name, part in list(self.parts.items()):
            tags = {index: {"n": self.draw.randint(0, 9)} for index in part.live()[:2]}

            def tagged(call: Call, reply: Any, part: Part = part, tags: dict[int, dict[str, int]] = tags) -> None:
                for index, own in tags.items():  # before those of puts that waited and are answered in the same turn
                    part.samples[index].tags.update(own)

            self.ask(who, p.SetTags(self.number(who), {name: tags}, True), p.Done, then=tagged)

    def changes(self, who: str) -> None:
        """One of the verbs that change a partition."""
        name, task = self.draw.choice("pq"), self.draw.choice(list(TASKS))
        kinds = {"acks": 8, "clears": 4, "clears_consumed": 4, "seals": 1, "resets": 1, "drops": 1}
        if name in self.parts:
            kind = self.draw.choices(list(kinds), list(kinds.values()))[0]
            getattr(self, kind)(who, name, task, self.parts[name])

    def acks(self, who: str, name: str, task: str, part: Part) -> None:
        tokens, earlier = self.tokens(name, task), self.draw.random() < 0.3
        count = part.view(task).ack(tokens, earlier)
        assert self.ask(who, p.Ack(self.number(who), name, task, tokens, earlier), p.Done).value == count

    def seals(self, who: str, name: str, task: str, part: Part) -> None:
        part.sealed = True
        self.ask(who, p.SealPartition(self.number(who), name), p.Done)

    def resets(self, who: str, name: str, task: str, part: Part) -> None:
        part.view(task).reset()
        self.ask(who, p.ResetConsumption(self.number(who), name, task), p.Done)

    def drops(self, who: str, name: str, task: str, part: Part) -> None:
        del self.parts[name]
        for call in self.waiting.values():
            call.part_gone |= isinstance(call.request, p.Fetch) and call.request.partition == name
        self.cleared(who, p.ClearPartition(self.number(who), name))

    def clears(self, who: str, name: str, task: str, part: Part) -> None:
        samples = self.draw.sample(part.live(), min(3, len(part.live())))
        part.clear(samples)
        self.cleared(who, p.ClearSamples(self.number(who), name, p.pack_indexes(samples)))

    def clears_consumed(self, who: str, name: str, task: str, part: Part) -> None:
        def then(call: Call, reply: Any) -> None:
            being_read = {index for own, samples, _ in self.reading.values() if own is part for index in samples}
            done = part.done_with(set(TASKS), being_read)
            assert set(samples_of(reply)) <= set(done), "only what all tasks have consumed"
            if not reply.not_begun:
                part.clear(done)

        self.cleared(who, p.ClearConsumed(self.number(who), name, list(TASKS)), then)

    def cleared(self, who: str, request: Any, then: Callable[[Call, Any], None] = nothing) -> None:
        reply = self.ask(who, request, p.Cleared, then=then)
        if reply.indexes or not isinstance(request, p.ClearPartition):
            self.undo[who, request.id] = stays

    # ---- checkpoints ----

    def saves(self, who: str) -> Act:
        freeze = p.Freeze(self.number(who), self.draw.choice(WAITS))

        def then(call: Call, reply: Any) -> None:
            is_late = self.now >= call.since + freeze.wait_s
            assert is_late or not any(replaced() for replaced in self.permits.values())
            torn = self.replacing() if is_late else set()
            self.freezes[who, freeze.id] = Saved(copy.deepcopy(self.parts), set(self.seen), torn)
            self.undo[who, freeze.id] = lambda how: self.freezes.pop((who, freeze.id))

        try:
            reply = yield from self.reply(self.send(who, freeze, (), then, steps=True))
            saved = self.freezes[who, freeze.id]
            saved.state.append(reply.state)
            while reply.num_parts > len(saved.state):
                yield
                reply = self.ask(who, p.ReadFrozen(self.number(who), freeze.id, len(saved.state)), p.Frozen)
                saved.state.append(reply.state)
            for name, part in [(name, part) for part in saved.parts.values() for name in "xy" if part.with_field(name)]:
                yield
                for index, found in self.read(who, part.with_field(name), [name]).items():
                    assert found[name] == part.values[index][name] or index in saved.torn
                    part.values[index].update(found)
            yield
            self.undo.pop((who, freeze.id))("thawed")
            self.cleared(who, p.Thaw(self.number(who), freeze.id))
            self.send(who, p.ListPartitions(self.number(who)), received=[freeze.id])
            self.saved = saved
        except Interrupted:
            self.cancel(who, freeze.id)

    def replacing(self) -> set[int]:
        """Samples of which a write under way may replace values: all, if a put waits for memory."""
        if any(isinstance(call.request, p.Put) for call in self.waiting.values()):
            return {index for part in self.parts.values() for index in part.samples}
        return {index for replaced in self.permits.values() for index in replaced()}

    def loads(self, who: str) -> None:
        """All clients end, and a new server starts. One client after the other tries to load, until one has done so."""
        if self.saved is None:
            return
        self.closes()
        self.opens()
        act = self.load(who := self.someone())
        while next(act, self) is not self:
            self.check()
            if self.draw.random() < 0.05:
                self.ends(who)
                self.rest()
                assert held(self.front) == NOTHING, "a load that does not come leaves nothing"
                act = self.load(who := self.someone())
        self.check()

    def loads_here(self, who: str) -> Act:
        """What this server holds is replaced, and others go on."""
        try:
            if not self.staged(who):
                yield from self.load(who)
        except Interrupted:
            for key in self.staged(who):
                self.cancel(*key)

    def staged(self, who: str) -> list[Key]:
        """The calls of a load under way."""
        return [key for key in self.undo if key[0] == who and self.undo[key] is unstaged]

    def load(self, who: str) -> Act:
        if self.saved is None:
            return
        saved, first = copy.deepcopy(self.saved), 0
        for part in saved.parts.values():
            part.release(part.held())
        stage = p.Stage(self.number(who), p.pack_indexes([i for part in saved.parts.values() for i in part.live()]))
        shift = (yield from self.reply(self.send(who, stage, steps=True))).value
        self.undo[who, stage.id] = unstaged
        yield
        for name, part in [(name, part) for part in saved.parts.values() for name in "xy" if part.with_field(name)]:
            columns, frames = self.packed({name: [part.values[index][name] for index in part.with_field(name)]})
            write = m.Write(self.number(who), p.pack_indexes([i + shift for i in part.with_field(name)]), columns, 5.0)
            self.undo[who, write.id] = unstaged
            yield from self.reply(self.send(who, write, frames, steps=True))
            yield
            self.ask(who, m.Commit(self.number(who), [(who, write.id)]), p.Done)
            del self.undo[who, write.id]
            yield
        for number, state in enumerate(saved.state[:-1]):
            call = self.number(who)
            first = first or call
            yield from self.reply(self.send(who, p.RestorePart(call, first, number, state, shift), steps=True))
            self.undo[who, first] = unstaged
            yield

        def then(call: Call, reply: Any) -> None:
            self.parts = {name: part.shifted(shift) for name, part in saved.parts.items()}
            self.seen |= {index + shift for index in saved.seen}

        self.cleared(who, p.Restore(self.number(who), saved.state[-1], shift, first), then)
        self.undo = {key: undo for key, undo in self.undo.items() if key not in ((who, stage.id), (who, first))}
        self.send(who, p.ListPartitions(self.number(who)), received=[stage.id, first])

    # ---- what always holds ----

    def check(self) -> None:
        plane, who = self.front.plane, "auditor"
        assert plane is not None
        plane.check_invariants()
        self.front.calls.check_invariants()
        if self.config["pages"]:
            self.check_came()
        assert self.clients.keys() >= set(self.front.calls.clients()), "nothing is held by the dead"
        for name, part in self.parts.items():
            live = part.live()
            described = self.ask(who, p.Describe(self.number(who), name, ["x", "y"]), p.Batch)
            assert samples_of(described) == live, "no sample is lost or doubled"
            assert tags_of(described) == {index: tags for index in live if (tags := part.samples[index].tags)}
            keys = {index: key for key, index in part.keys.items()}
            names = self.ask(who, p.KeysOf(self.number(who), name, p.pack_indexes(live)), p.Names).names
            assert names == [keys.get(index) for index in live]
            for each in "xy":
                if own := part.with_field(each):
                    found = self.read(who, own, [each])
                    assert found == {index: {each: part.values[index][each]} for index in own}

    def check_rest(self) -> None:
        """Nothing waits that could go on."""
        calls = list(self.waiting.values())
        assert not any(call.part_gone for call in calls), "its partition was cleared"
        fetches = {(call.request.partition, call.request.task) for call in calls if isinstance(call.request, p.Fetch)}
        for name, task in fetches:
            for at, call in enumerate(self.line(name, task)):
                assert not self.turn(call, at == 0).kind or self.is_unsure(name), self.turn(call, at == 0)
        freezes = [call for call in calls if isinstance(call.request, p.Freeze)]
        assert not freezes or self.permits or self.replacing(), "a freeze waits for nobody"
        if not (self.config["capacity"] or self.config["capacity_bytes"] or freezes or self.freezes):
            assert all(isinstance(call.request, p.Fetch) for call in calls), "a put waits for nothing"

    def closes(self) -> None:
        """All clients end, and nothing is held. What nobody has received can be got once more; then all is cleared."""
        for name in [name for name in self.clients if name != "auditor"]:
            self.ends(name)
        self.passes(100.0)
        self.check()
        who = self.someone()
        for name, part in list(self.parts.items()):
            for task in ("free", "pair"):
                for index in part.ready(task, TASKS[task].fields):
                    fetch = p.Fetch(self.number(who), name, task, TASKS[task].fields, 1, with_values=True)
                    assert samples_of(self.ask(who, fetch, p.Batch, then=self.fetched)) == [index]
        assert self.front.plane is not None
        for name in list(self.front.plane.state.partitions):
            self.cleared(who, p.ClearPartition(self.number(who), name))
        for name in sorted(self.clients, key="auditor".__eq__):
            self.ends(name)
        self.rest()
        assert held(self.front) == NOTHING
        assert self.front.unit is not None
        assert self.front.unit.stats().arena_nbytes == 0

    # ---- the story ----

    def step(self, verb: str, seed: int) -> None:
        self.draw = random.Random(seed)
        if verb == "passes":
            self.passes(self.draw.choice([0.5, 5.0, 30.0]))
        elif verb == "goes_on":
            if self.acts:
                who, act = self.acts.pop(self.draw.randrange(len(self.acts)))
                self.goes_on(who, act)
        else:
            who = self.someone()
            act = getattr(self, verb)(who)
            if isinstance(act, Iterator):
                self.goes_on(who, act)
        if self.draw.random() < 0.7:
            self.rest()
            self.check_rest()
            self.check()

    def goes_on(self, who: str, act: Any) -> None:
        if next(act, self) is not self:
            self.acts.append((who, act))


def stays(how: str) -> None:
    """What was done stays, whatever becomes of the call."""
    assert how in ("kept", "died")


def unstaged(how: str) -> None:
    """Of a load that doesn't come nothing stays."""


def played(seed: int, steps: Sequence[tuple[str, int]]) -> tuple[Story, str | None]:
    """The story, and how it failed."""
    story = Story(seed)
    try:
        for verb, own in steps:
            story.step(verb, own)
        story.closes()
    except Exception:
        return story, traceback.format_exc()
    return story, None


def shortest(seed: int, steps: Steps) -> Steps:
    """Without the steps that the failure does not need."""
    size = len(steps) // 2
    while size:
        at = 0
        while at < len(steps):
            fewer = steps[:at] + steps[at + size :]
            if played(seed, fewer)[1] is not None:
                steps = fewer
            else:
                at += size
        size //= 2
    return steps


def check_story(seed: int, count: int) -> None:
    draw = random.Random(seed)
    steps = [(verb, draw.randrange(2**32)) for verb in draw.choices(list(VERBS), list(VERBS.values()), k=count)]
    if played(seed, steps)[1] is not None:
        steps = shortest(seed, steps)
        story, failure = played(seed, steps)
        raise AssertionError("\n".join([f"played({seed}, {steps})", str(story.config), *story.trace, str(failure)]))


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a few rows, so that small queues have many."""
    monkeypatch.setattr(snapshot, "ROWS", 4)
    monkeypatch.setattr(snapshot, "BATCHES", 2)
    monkeypatch.setattr(snapshot, "_PARTITION", 1)


@pytest.mark.parametrize("seed", range(20))
def test_every_story_agrees_with_the_model(seed):
    check_story(seed, 150)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_every_long_story_agrees_with_the_model(seed):
    check_story(seed, 500)
