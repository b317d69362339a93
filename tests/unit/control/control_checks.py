# SPDX-License-Identifier: Apache-2.0
"""A plane whose every reply is compared with the plain model: what a random run may do to it, and what must hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from control_model import DP_SIZES, MAX_TOKENS, TASKS, Entry, PartitionModel, ProducersModel, Sample

from tests.local_plane import LocalPlane, To, tags_of
from transfer_queue import protocol as p

GRACE_S = 5.0
SPECS = {name: p.FieldSpec("int64", (2,)) for name in ("a", "b")}
CLIENTS = ("anna", "bert", "carl")
PARTITIONS = ("p", "q")
UNNAMED = "r"
"""A partition that one task reads, with unnamed fetches alone: soon all of it is consumed, and may be cleared."""


@dataclass
class Answer:
    """What a client was answered and has not said to have. ``reserved``: samples of a write that has begun."""

    request: Any
    reply: Any
    partition: PartitionModel | None
    undo: Callable[[PartitionModel], None] | None = None
    reserved: tuple[int, ...] = ()
    drawn: tuple[int, ...] = ()
    cleared: tuple[int, ...] = ()
    num_resets: int = 0


def size_of(request: Any) -> int:
    """Most samples that the request may add."""
    return len(request.keys) if isinstance(request, p.ResolveKeys) else int(request.count)


class CheckedPlane:
    """Sends requests, and checks each reply when it comes, at once or later."""

    def begin(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.plane = LocalPlane(capacity=capacity, producer_grace_s=GRACE_S)
        self.now = 0.0
        self.next_id = 0
        self.next_index = 0
        self.model: dict[str, PartitionModel] = {}
        self.open: dict[tuple[str, int], Any] = {}
        self.since: dict[tuple[str, int], float] = {}
        self.producers = ProducersModel()
        self.overtaken: dict[int, int] = {}
        self.chores: list[int] = []
        self.tokens: list[tuple[str, str, str]] = []
        self.answered: dict[tuple[str, int], Answer] = {}
        self.unread: dict[tuple[str, int], Answer] = {}
        """Batches of unnamed fetches whose answers were received, and which may still be read."""
        for name, plan in TASKS.items():
            self.ask("anna", p.RegisterTask, name, plan.sampler, plan.dp_size, plan.tail)

    # ---- requests and replies ----

    def ask(self, client: str, verb: Any, *args: Any) -> Any:
        """Send a request; returns its reply, None while it is parked. Every reply is checked against the model."""
        self.next_id += 1
        request = verb(self.next_id, *args)
        self.open[client, request.id] = request
        self.since[client, request.id] = self.now
        self.sound = False
        replies = self.plane.handle(client, request, self.now)
        self.absorb(replies)
        self.check_chores()
        self.sound = True
        return next((to.reply for to in replies if to == (client, to.reply) and to.reply.id == request.id), None)

    def absorb(self, replies: list[To]) -> None:
        self.skipped: set[tuple[str, str]] = set()
        for to in replies:
            request = self.open.pop((to.client, to.reply.id), None)
            assert request is not None, f"{to} answers nothing that is open"
            since = self.since.pop((to.client, to.reply.id))
            check = getattr(self, f"on_{type(request).__name__.lower()}", None)
            if isinstance(request, p.Fetch):
                self.take_skipped(request)
            if check is not None:
                check(to.client, request, to.reply, since)
        self.take_skipped(None)

    def take_skipped(self, answered: Any) -> None:
        """Batches that were drawn because a fetch asked for a later one, whether that was answered or not."""
        known_to_both = self.model.keys() & self.plane.state.partitions.keys()
        asking = [
            request for request in (answered, *self.open.values())
            if isinstance(request, p.Fetch) and request.first_index is not None and request.partition in known_to_both
        ]  # fmt: skip
        for request in asking:
            model = self.model[request.partition]
            ledger = self.plane.state.partitions[request.partition].consumer(request.task).ledger
            for i in range(request.first_index, request.batch_index or 0):
                drawn = ledger.get((request.dp_rank, i))
                if drawn is not None and (request.dp_rank, i) not in model.view(request.task).ledger:
                    drawer = self.likely_drawer(request, (answered, *self.open.values()), drawn.indexes.tolist())
                    self.take_round(model, msgspec.structs.replace(drawer, batch_index=i), i, guessed=True)
                    self.skipped.add((request.partition, request.task))

    def likely_drawer(self, request: Any, asking: tuple[Any, ...], indexes: list[int]) -> Any:
        """Of the fetches that may have drawn this batch, the one whose fields and size it fits."""
        model = self.model[request.partition]

        def fit(other: Any) -> tuple[bool, ...]:
            complete = all(model.has(index, other.fields) and model.matches(index, other.where) for index in indexes)
            return complete, len(indexes) == other.batch_size, len(indexes) < other.batch_size

        fetches = [other for other in asking if isinstance(other, p.Fetch)]
        same_task = (request.partition, request.task)
        return max((other for other in fetches if (other.partition, other.task) == same_task), key=fit)

    def parked(self, partition: str, task: str, where: str | None) -> list[tuple[float, int, Any]]:
        """Open fetches of a task and filter as (batch_index or infinity, arrival, request), first in line first."""
        found = [
            (math.inf if request.batch_index is None else request.batch_index, request.id, request)
            for request in self.open.values()
            if isinstance(request, p.Fetch)
            and (request.partition, request.task, request.where) == (partition, task, where)
        ]
        return sorted(found, key=lambda each: each[:2])

    def used(self) -> int:
        return sum(len(partition.samples) for partition in self.model.values())

    # ---- what each reply must be ----

    def on_reserve(self, client: str, request: Any, reply: Any, since: float) -> None:
        if isinstance(reply, p.Failed):
            return self.check_refused_writer(request, reply, since)
        self.check_first_writer(request, request.count)
        indexes = p.unpack_indexes(reply.indexes).tolist()
        assert len(indexes) == request.count
        self.add(request.partition, client, indexes)
        self.producers.announced(client, request.fields)
        self.remember(client, request, reply, reserved=tuple(indexes))
        return None

    def on_insert(self, client: str, request: Any, reply: Any, since: float) -> None:
        if isinstance(reply, p.Failed):
            return self.check_refused_writer(request, reply, since)
        self.check_first_writer(request, request.count)
        indexes = p.unpack_indexes(reply.indexes).tolist()
        self.add(request.partition, client, indexes)
        self.model[request.partition].make_live(indexes)
        self.remember(client, request, reply, lambda partition: partition.uninsert(indexes))
        return None

    def on_resolvekeys(self, client: str, request: Any, reply: Any, since: float) -> None:
        if isinstance(reply, p.Failed):
            return self.check_refused_writer(request, reply, since)
        found = dict(zip(reply.keys, p.unpack_indexes(reply.indexes).tolist(), strict=True))
        known = self.model[request.partition].keys if request.partition in self.model else {}
        assert {key: found[key] for key in request.keys if key in known} == {
            key: known[key] for key in request.keys if key in known
        }
        new = [key for key in request.keys if key not in known] if request.create else []
        assert set(found) == (set(request.keys) & set(known)) | set(new)
        if new:
            self.check_first_writer(request, len(new))
            made = [found[key] for key in new]
            self.add(request.partition, client, made)
            self.model[request.partition].keys.update({key: found[key] for key in new})
            if request.hold:
                self.producers.announced(client, request.fields)
                self.remember(client, request, reply, reserved=tuple(made))
            else:
                self.model[request.partition].make_live(made)
                self.remember(client, request, reply, lambda partition: partition.uninsert(made))
        return None

    def remember(
        self, client: str, request: Any, reply: Any, undo: Callable[[PartitionModel], None] | None = None,
        **parts: tuple[int, ...],
    ) -> None:  # fmt: skip
        """Until the client says that it has the answer, a cancel undoes this."""
        partition = self.model.get(request.partition)
        answer = self.answered[client, request.id] = Answer(request, reply, partition, undo, **parts)
        if isinstance(request, p.Fetch) and partition is not None:
            answer.num_resets = partition.view(request.task).num_resets

    def undo(self, key: tuple[str, int]) -> str:
        """What a cancel of this call does to the model."""
        answer = self.answered.pop(key, None)
        if answer is None:
            return "kept"
        partition = answer.partition
        there = partition is not None and self.model.get(answer.request.partition) is partition
        if there and answer.undo is not None:
            answer.undo(partition)  # type: ignore[arg-type]
        if there:
            partition.release_reserved(list(answer.reserved))  # type: ignore[union-attr]
        known = {index for each in self.model.values() for index in each.samples}
        self.chores += [index for index in (*answer.reserved, *answer.cleared) if index not in known]
        return (
            "kept"
            if isinstance(answer.request, (p.Publish, p.ClearSamples, p.ClearPartition, p.ClearConsumed))
            else "undone"
        )

    def check_chores(self) -> None:
        given = [index for unused in self.plane.take_unused() for index in unused.tolist()]
        assert sorted(given) == sorted(self.chores), "what belongs to nobody is deleted"
        self.chores.clear()

    def on_cancel(self, client: str, request: Any, reply: Any, since: float) -> None:
        assert reply.value in (self.undo((client, request.call)), "removed")

    def add(self, partition: str, client: str, indexes: list[int]) -> None:
        assert indexes == sorted(indexes), "ascending"
        assert indexes[0] >= self.next_index, "never reused"
        self.next_index = indexes[-1] + 1
        samples = self.model.setdefault(partition, PartitionModel()).samples
        samples.update({index: Sample(client) for index in indexes})
        assert self.capacity is None or self.used() <= self.capacity

    def check_first_writer(self, request: Any, count: int) -> None:
        """Those that came earlier and still wait may be overtaken by as much as they asked for themselves."""
        writers = [each for each in self.open.values() if isinstance(each, (p.Reserve, p.Insert, p.ResolveKeys))]
        for each in writers:
            if each.id < request.id:
                self.overtaken[each.id] = self.overtaken.get(each.id, 0) + count
                assert self.overtaken[each.id] <= size_of(each), "a writer was overtaken by too much"

    def check_refused_writer(self, request: Any, reply: p.Failed, since: float) -> None:
        if reply.code == "StorageFullError":
            assert self.now >= since + request.wait_s or request.count > (self.capacity or math.inf)
        else:
            assert reply.code == "InvalidRequestError", reply
            assert self.model[request.partition].sealed, reply

    def on_fetch(self, client: str, request: Any, reply: Any, since: float) -> None:
        assert isinstance(reply, (p.Batch, p.NotReady, p.Ended, p.Failed))
        partition = self.model.get(request.partition)
        if partition is None and isinstance(reply, p.Failed):
            assert reply.code == "ProducersGoneError"
            assert self.producers.lost(request.fields, self.now, GRACE_S)
        elif partition is None:
            if not isinstance(reply, p.Ended):
                held = reply.elsewhere
                assert reply == p.NotReady(request.id, self.needed(request), 0, 0, elsewhere=held)
                assert held.startswith("holds ") if self.model else held == "is empty"
                assert request.after is None
        elif request.after is not None and request.after not in partition.tokens:
            assert reply == p.Ended(request.id, "cleared"), "it read another partition of this name"
        elif isinstance(reply, p.Batch):
            self.check_batch(client, partition, request, reply)
        elif isinstance(reply, p.NotReady):
            assert self.now >= since + request.wait_s
            self.check_not_ready(partition, request, reply)
        elif isinstance(reply, p.Ended):
            self.check_ended(partition, request, reply)
        else:
            self.check_failed_fetch(partition, request, reply)

    def needed(self, request: Any) -> int:
        dp_size = DP_SIZES[request.task] or 1
        return dp_size if request.task == "tokens" else request.batch_size * dp_size

    def check_not_ready(self, partition: PartitionModel, request: Any, reply: p.NotReady) -> None:
        if (request.partition, request.task) in self.skipped:
            return  # drawn by another fetch at the same time, whether before this reply or after it
        last = partition.last_published
        wanted, samples = self.needed(request), partition.undrawn(request.task)
        if (batch := self.known_batch(partition, request)) is not None:
            wanted, samples = len(batch), batch
        ready = [index for index in samples if partition.has(index, request.fields)]
        unmatched = []
        if batch is None:
            ready = partition.ready(request.task, request.fields, request.where)
            unmatched = partition.unmatched(request.task, request.fields, request.where)
        assert (reply.wanted, reply.ready, reply.samples) == (wanted, len(ready), len(samples))
        assert reply.unmatched == len(unmatched)
        assert reply.lacking == partition.lacking(samples, request.fields)
        assert reply.last_published_s == (None if last is None else self.now - last)
        held = partition.held()
        assert reply.reserved == len(held)
        assert set(reply.owed_by) <= {partition.samples[index].holder for index in held}

    def known_batch(self, partition: PartitionModel, request: Any) -> list[int] | None:
        """The samples of a batch that was drawn before, and that this fetch can only get with more fields."""
        batch_index = request.batch_index
        if batch_index is None and request.dp_rank is not None:
            consumer = self.plane.state.partitions[request.partition].consumer(request.task)
            batch_index = consumer.ledger.next_index(request.dp_rank)
        entry = partition.view(request.task).ledger.get((request.dp_rank, batch_index))
        return None if entry is None else entry.indexes

    def check_batch(self, client: str, partition: PartitionModel, request: Any, reply: p.Batch) -> None:
        indexes = p.unpack_indexes(reply.indexes).tolist()
        assert indexes, "an empty batch would be a fourth answer"
        assert all(partition.has(index, request.fields) for index in indexes), "atomic"
        assert set(reply.fields) == set(request.fields)
        assert tags_of(reply) == {i: partition.samples[i].tags for i in set(indexes) if partition.samples[i].tags}
        self._check_batch(client, partition, request, reply, indexes)
        if partition.sealed and not self.num_left(partition, request):
            partition.view(request.task).last_drawn.add(request.where)

    def num_left(self, partition: PartitionModel, request: Any) -> int:
        """Samples that a fetch like this one would draw if they came, or had all fields."""
        unmatched = partition.unmatched(request.task, request.fields, request.where)
        return len(partition.undrawn(request.task)) - len(unmatched) + len(partition.held())

    def _check_batch(
        self, client: str, partition: PartitionModel, request: Any, reply: p.Batch, indexes: list[int]
    ) -> None:
        view = partition.view(request.task)
        num_resets = view.num_resets
        assert not view.is_past_end(request, reply.batch_index), "who reads the same pass is told the same end"
        if reply.batch_index is None:
            self.check_drawn(partition, request, indexes, None, indexes)
            self.check_order(request)
            view.given.update(dict.fromkeys(indexes))
            view.consumed.update(indexes)
            self.remember(
                client, request, reply, lambda _: view.release(indexes, num_resets), drawn=tuple(indexes)
            )  # fmt: skip
            return
        key = (request.dp_rank, reply.batch_index)
        if request.batch_index is None:
            self.remember(client, request, reply, drawn=tuple(indexes))
        assert request.batch_index in (None, reply.batch_index)
        if key not in view.ledger:
            self.take_round(partition, request, reply.batch_index)
        entry = view.ledger[key]
        assert (entry.indexes, entry.token) == (indexes, reply.token), "equal questions get equal answers"
        self.tokens.append((request.partition, request.task, entry.token))
        partition.tokens.add(entry.token)
        view.consumed |= {index for index in entry.consumes if index in partition.samples}

    def take_round(self, partition: PartitionModel, request: Any, batch_index: int, guessed: bool = False) -> None:
        """A batch that wasn't there before: so it must be there for every rank now. ``guessed``: who drew it is."""
        dp_size = DP_SIZES[request.task]
        view = partition.view(request.task)
        ledger = self.plane.state.partitions[request.partition].consumer(request.task).ledger
        for rank in (request.dp_rank,) if dp_size is None else range(dp_size):
            drawn = ledger.get((rank, batch_index))
            if drawn is None:
                assert TASKS[request.task].policy == "uneven_ok", "a batch exists for all ranks or for none"
                assert partition.sealed
                continue
            assert (rank, batch_index) not in view.ledger
            assert (rank, batch_index) not in view.settled
            indexes, consumes = drawn.indexes.tolist(), drawn.consumes.tolist()
            self.check_drawn(partition, request, indexes, drawn.padding, consumes)
            if not guessed:
                self.check_order(request)
            entry = Entry(indexes, set(consumes), drawn.token, dp_size)
            view.ledger[rank, batch_index] = entry
            view.given.update(dict.fromkeys(consumes, (rank, batch_index)))
            view.consumed |= entry.consumes

    def take_tail(self, partition: PartitionModel, request: Any) -> None:
        """The last samples may have gone to other ranks than the one that hears of the end."""
        ledger = self.plane.state.partitions[request.partition].consumer(request.task).ledger
        drawn = [i for i in range(40) if ledger.get((0, i)) and (0, i) not in partition.view(request.task).ledger]
        for batch_index in drawn:
            self.take_round(partition, request, batch_index)

    def check_drawn(
        self, partition: PartitionModel, request: Any, indexes: list[int], padding: Any, consumes: list[int]
    ) -> None:
        """One share that was drawn just now."""
        view, plan = partition.view(request.task), TASKS[request.task]
        own = indexes if padding is None else [i for i, padded in zip(indexes, padding, strict=True) if not padded]
        assert sorted(own) == sorted(consumes), "a batch consumes what it holds, short of padding"
        assert len(set(own)) == len(own)
        assert not view.given.keys() & set(own), "exactly once"
        assert all(partition.has(index, request.fields) for index in indexes), "atomic"
        assert all(partition.matches(index, request.where) for index in indexes), "the filter of the fetch that draws"
        assert padding is None or plan.policy == "pad"
        is_tail = partition.sealed or request.finite
        assert len(indexes) <= request.batch_size
        assert len(indexes) == request.batch_size or is_tail or request.task == "tokens"
        if request.task == "tokens":
            assert sum(partition.samples[index].tags["total_lengths"] for index in indexes) <= MAX_TOKENS
        if request.task == "groups":
            assert all(second == first + 1 for first, second in zip(indexes[::2], indexes[1::2], strict=True))

    def check_order(self, request: Any) -> None:
        first = self.parked(request.partition, request.task, request.where)
        own_order = (math.inf if request.batch_index is None else request.batch_index, request.id)
        assert all(each[:2] > own_order for each in first), "one who waits in front was overtaken"

    def check_ended(self, partition: PartitionModel, request: Any, reply: p.Ended) -> None:
        view, policy = partition.view(request.task), TASKS[request.task].policy
        if policy == "uneven_ok":
            self.take_tail(partition, request)
        undrawn = partition.undrawn(request.task)
        if reply.reason == "consumed":
            assert request.finite
            # As another rank was told, or another reader.
            assert undrawn or not partition.held() or request.dp_rank is not None or request.pass_start is not None
            plain = request.first_index is None and request.batch_index is not None and request.pass_start is not None
            if (
                plain
                and request.pass_start < request.batch_index
                and not view.is_past_end(request, request.batch_index)
            ):
                view.ends.add(request.batch_index)
            return
        assert reply.reason == "sealed"
        assert partition.sealed
        if request.where not in view.ended and (reply.dropped or request.where not in view.last_drawn):
            ready = partition.ready(request.task, request.fields, request.where)
            assert reply.dropped == self.num_left(partition, request)
            assert policy == "drop" or not ready, "only the policy drop leaves samples behind"
            assert not TASKS[request.task].exact or len(ready) < self.needed(request)
        view.ended.add(request.where)

    def check_failed_fetch(self, partition: PartitionModel, request: Any, reply: p.Failed) -> None:
        view = partition.view(request.task)
        if reply.code == "ProducersGoneError":
            assert self.producers.lost(request.fields, self.now, GRACE_S)
        elif reply.code == "SampleClearedError":
            keys = [(request.dp_rank, i) for i in range(99)]
            torn = [key for key in keys if key in view.ledger and self.is_torn(partition, view.ledger[key])]
            assert torn if request.batch_index is None else (request.dp_rank, request.batch_index) in torn
        else:
            assert reply.code == "InvalidRequestError", reply
            assert (request.dp_rank, request.batch_index) in view.settled

    def is_torn(self, partition: PartitionModel, entry: Entry) -> bool:
        return not set(entry.indexes) <= partition.samples.keys()

    def on_publish(self, client: str, request: Any, reply: Any, since: float) -> None:
        partition = self.model[request.partition]
        indexes = p.unpack_indexes(request.indexes).tolist()
        assert isinstance(reply, p.Published), reply
        for index in indexes:
            partition.samples[index].tags.update(request.tags[index])
        partition.publish(indexes, list(request.fields), self.now)
        self.producers.published(client, request.fields)
        begun = self.answered.pop((client, request.completes), None)
        if begun is not None:
            left = [i for i in begun.reserved if i not in indexes]
            if self.model.get(begun.request.partition) is begun.partition is not None:
                begun.partition.release_reserved(left)
            known = {index for each in self.model.values() for index in each.samples}
            self.chores += [index for index in left if index not in known]
        self.remember(client, request, reply)

    def on_resetconsumption(self, client: str, request: Any, reply: Any, since: float) -> None:
        assert reply.value == (request.partition in self.model)
        if not reply.value:
            return
        consumers = self.plane.state.partitions[request.partition].consumers
        for name, view in self.model[request.partition].views.items():
            if request.task in (None, name):
                view.reset()
                for key, entry in view.ledger.items():
                    renewed = consumers[name].ledger.get(key)
                    assert renewed is not None
                    assert renewed.token != entry.token, "an ack from before the reset is late"
                    entry.token = renewed.token

    def on_createpartition(self, client: str, request: Any, reply: Any, since: float) -> None:
        known = self.model.get(request.partition)
        if isinstance(reply, p.Failed):
            assert known is not None
            assert known.num_samples not in (None, request.num_samples)
            return
        assert reply.value == (known is None)
        partition = self.model.setdefault(request.partition, PartitionModel())
        partition.num_samples = request.num_samples or partition.num_samples
        partition.seal_if_complete()

    def on_clearsamples(self, client: str, request: Any, reply: Any, since: float) -> None:
        partition = self.model.get(request.partition, PartitionModel())
        indexes = p.unpack_indexes(request.indexes).tolist()
        self.check_cleared(client, request, reply, partition.clear(indexes))

    def on_clearconsumed(self, client: str, request: Any, reply: Any, since: float) -> None:
        partition = self.model.get(request.partition, PartitionModel())
        there = self.plane.state.partitions.get(request.partition)
        readers = set() if there is None else set(there.consumers)
        being_read = {i for a in self.being_read(partition) for i in a.drawn}
        done = partition.done_with(readers, being_read) if readers and readers.issuperset(request.tasks) else []
        by_client: dict[str, set[int]] = {}
        for (reader, _), a in [*self.answered.items(), *self.unread.items()]:
            if a in self.being_read(partition) and a.reply.batch_index is None:
                by_client.setdefault(reader, set()).update(partition.samples.keys() & set(a.drawn))
        assert reply.readers == {reader: len(left) for reader, left in by_client.items() if left}
        assert reply.not_begun == (sorted(set(request.tasks) - readers) if request.partition in self.model else [])
        self.check_cleared(client, request, reply, [] if request.dry_run else partition.clear(done))

    def being_read(self, partition: PartitionModel) -> list[Answer]:
        """Answers with batches of this partition that their clients may not have read yet."""
        together = [*self.answered.values(), *self.unread.values()]
        return [answer for answer in together if answer.partition is partition and answer.drawn]

    def on_clearpartition(self, client: str, request: Any, reply: Any, since: float) -> None:
        partition = self.model.pop(request.partition, None)
        self.was_there = partition is not None
        known = list(partition.samples) if partition else []
        self.check_cleared(client, request, reply, known)

    def check_cleared(self, client: str, request: Any, reply: Any, expected: list[int]) -> None:
        assert p.unpack_indexes(reply.indexes).tolist() == expected
        if expected:
            self.remember(client, request, reply, cleared=tuple(expected))
