# SPDX-License-Identifier: Apache-2.0
"""The control plane under random producers, consumers and accidents, compared step by step with a plain model.

A failure prints the steps and a ``@reproduce_failure`` line; put that line over ``PlaneMachine`` to replay it.
``pytest -m slow`` runs the same machine with far more and longer runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from control_model import Entry, PartitionModel, Sample, View
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transfer_queue import protocol as p
from transfer_queue.control.plane import ControlPlane, To
from transfer_queue.control.state import PlaneConfig

GRACE_S = 5.0
MAX_TOKENS = 8
SPECS = {name: p.FieldSpec("int64", (2,)) for name in ("a", "b")}


@dataclass(frozen=True)
class TaskPlan:
    """How a task of the machine is registered and read. ``sizes``: the batch sizes it asks for."""

    sampler: str | dict[str, Any] | None = None
    dp_size: int | None = None
    tail: str | None = None
    sizes: tuple[int, ...] = (1, 2, 3)
    finite: bool = False
    exact: bool = True
    """Any batch_size * dp_size ready samples make a round."""

    @property
    def policy(self) -> str:
        return self.tail or ("uneven_ok" if (self.dp_size or 1) == 1 else "drop")


def spec(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"class": name, "args": [], "kwargs": kwargs}


TASKS = {
    "plain": TaskPlan(),
    "padded": TaskPlan(dp_size=2, tail="pad", sizes=(2,)),
    "uneven": TaskPlan("SequentialSampler", dp_size=3, tail="uneven_ok", sizes=(1, 2)),
    "ranks": TaskPlan("RankAwareSampler", dp_size=2),
    "groups": TaskPlan(spec("GRPOGroupNSampler", n_samples_per_prompt=2), dp_size=2, sizes=(2,), exact=False),
    "balanced": TaskPlan(spec("SeqlenBalancedSampler", dp_size=2), tail="pad", sizes=(1, 2)),
    "tokens": TaskPlan(spec("TokenBudgetSampler", max_tokens=MAX_TOKENS), dp_size=2, sizes=(3,), exact=False),
    "finite": TaskPlan(finite=True, sizes=(2,)),
    "finite_ranks": TaskPlan(dp_size=2, finite=True, sizes=(2,)),
}
DP_SIZES = {name: 2 if name == "balanced" else plan.dp_size for name, plan in TASKS.items()}
CLIENTS = ("anna", "bert", "carl")
PARTITIONS = ("p", "q")

clients = st.sampled_from(CLIENTS)
partitions = st.sampled_from(PARTITIONS)
tasks = st.sampled_from(sorted(TASKS))
field_sets = st.sampled_from([["a"], ["b"], ["a", "b"]])
waits = st.sampled_from([0.0, 1.0, 3.0, 50.0])


class PlaneMachine(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([None, None, 10]))
    def start(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.plane = ControlPlane(PlaneConfig(capacity=capacity, producer_grace_s=GRACE_S))
        self.now = 0.0
        self.next_id = 0
        self.next_index = 0
        self.model: dict[str, PartitionModel] = {}
        self.open: dict[tuple[str, int], Any] = {}
        self.since: dict[tuple[str, int], float] = {}
        self.orphans: set[int] = set()
        self.stranded: dict[str, set[int]] = {}
        self.tokens: list[tuple[str, str, str]] = []
        for name, plan in TASKS.items():
            self.ask("anna", p.RegisterTask, name, plan.sampler, plan.dp_size, plan.tail)

    # ---- requests and replies ----

    def ask(self, client: str, verb: Any, *args: Any) -> Any:
        """Send a request; returns its reply, None while it is parked. Every reply is checked against the model."""
        self.next_id += 1
        request = verb(self.next_id, *args)
        self.open[client, request.id] = request
        self.since[client, request.id] = self.now
        if isinstance(request, p.Fetch) and request.partition in self.model:
            self.model[request.partition].view(request.task).ack(request.acks)
        self.sound = False
        replies = self.plane.handle(client, request, self.now)
        self.absorb(replies)
        self.sound = True
        return next((to.reply for to in replies if to == (client, to.reply) and to.reply.id == request.id), None)

    def absorb(self, replies: list[To]) -> None:
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
        for request in (answered, *self.open.values()):
            if isinstance(request, p.Fetch) and request.first_index is not None and request.partition in known_to_both:
                ledger = self.plane.state.partitions[request.partition].consumer(request.task).ledger
                known = self.model[request.partition].view(request.task).ledger
                for i in range(request.first_index, request.batch_index or 0):
                    key = (request.dp_rank, i)
                    if key not in known and ledger.get(key) is not None:
                        earlier = msgspec.structs.replace(request, batch_index=i)
                        self.take_round(self.model[request.partition], earlier, i)

    def parked(self, partition: str, task: str) -> list[tuple[float, int, Any]]:
        """Open fetches of a task as (batch_index or infinity, arrival, request), first in line first."""
        found = [
            (math.inf if request.batch_index is None else request.batch_index, request.id, request)
            for request in self.open.values()
            if isinstance(request, p.Fetch) and (request.partition, request.task) == (partition, task)
        ]
        return sorted(found, key=lambda each: each[:2])

    def used(self) -> int:
        return sum(len(partition.samples) for partition in self.model.values())

    # ---- what each reply must be ----

    def on_reserve(self, client: str, request: Any, reply: Any, since: float) -> None:
        if isinstance(reply, p.Failed):
            return self.check_refused_writer(request, reply, since)
        self.check_first_writer(request)
        indexes = p.unpack_indexes(reply.indexes).tolist()
        assert len(indexes) == request.count
        return self.add(request.partition, client, indexes, "held")

    def on_insert(self, client: str, request: Any, reply: Any, since: float) -> None:
        if isinstance(reply, p.Failed):
            return self.check_refused_writer(request, reply, since)
        self.check_first_writer(request)
        indexes = p.unpack_indexes(reply.indexes).tolist()
        self.add(request.partition, client, indexes, "held")
        return self.model[request.partition].make_live(indexes)

    def on_resolvekeys(self, client: str, request: Any, reply: Any, since: float) -> None:
        if isinstance(reply, p.Failed):
            return self.check_refused_writer(request, reply, since)
        self.check_first_writer(request)
        found = dict(zip(reply.keys, p.unpack_indexes(reply.indexes).tolist(), strict=True))
        known = self.model[request.partition].keys if request.partition in self.model else {}
        assert {key: found[key] for key in request.keys if key in known} == {
            key: known[key] for key in request.keys if key in known
        }
        new = [key for key in request.keys if key not in known] if request.create else []
        assert set(found) == (set(request.keys) & set(known)) | set(new)
        if new:
            self.add(request.partition, client, [found[key] for key in new], "held")
            self.model[request.partition].keys.update({key: found[key] for key in new})
            if not request.hold:
                self.model[request.partition].make_live([found[key] for key in new])
        return None

    def add(self, partition: str, client: str, indexes: list[int], state: str) -> None:
        assert indexes == sorted(indexes), "ascending"
        assert indexes[0] >= self.next_index, "never reused"
        self.next_index = indexes[-1] + 1
        samples = self.model.setdefault(partition, PartitionModel()).samples
        samples.update({index: Sample(client, state) for index in indexes})
        assert self.capacity is None or self.used() <= self.capacity

    def check_first_writer(self, request: Any) -> None:
        others = [each for each in self.open.values() if isinstance(each, (p.Reserve, p.Insert, p.ResolveKeys))]
        assert all(each.id > request.id for each in others), "a writer was overtaken"

    def check_refused_writer(self, request: Any, reply: p.Failed, since: float) -> None:
        if reply.code == "StorageFullError":
            assert self.now >= since + request.wait_s or self.capacity is not None and request.count > self.capacity
        else:
            assert reply.code == "InvalidRequestError", reply
            assert self.model[request.partition].sealed, reply

    def on_fetch(self, client: str, request: Any, reply: Any, since: float) -> None:
        assert isinstance(reply, (p.Batch, p.NotReady, p.Ended, p.Failed))
        partition = self.model.get(request.partition)
        if partition is None:
            assert isinstance(reply, p.Ended) or reply == p.NotReady(request.id, self.needed(request), 0, 0)
        elif isinstance(reply, p.Batch):
            self.check_batch(partition, request, reply)
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
        last = partition.last_published
        wanted, samples = self.needed(request), partition.undrawn(request.task)
        if (batch := self.known_batch(partition, request)) is not None:
            wanted, samples = len(batch), batch
        ready = [index for index in samples if partition.has(index, request.fields)]
        assert (reply.wanted, reply.ready, reply.samples) == (wanted, len(ready), len(samples))
        assert reply.lacking == partition.lacking(samples, request.fields)
        assert reply.last_published_s == (None if last is None else self.now - last)

    def known_batch(self, partition: PartitionModel, request: Any) -> list[int] | None:
        """The samples of a batch that was drawn before, and that this fetch can only get with more fields."""
        batch_index = request.batch_index
        if batch_index is None and request.dp_rank is not None:
            consumer = self.plane.state.partitions[request.partition].consumer(request.task)
            batch_index = consumer.ledger.next_index(request.dp_rank)
        entry = partition.view(request.task).ledger.get((request.dp_rank, batch_index))
        return None if entry is None else entry.indexes

    def check_batch(self, partition: PartitionModel, request: Any, reply: p.Batch) -> None:
        indexes = p.unpack_indexes(reply.indexes).tolist()
        assert indexes, "an empty batch would be a fourth answer"
        assert all(partition.has(index, request.fields) for index in indexes), "atomic"
        assert set(reply.fields) == set(request.fields)
        assert reply.tags == {i: partition.samples[i].tags for i in set(indexes) if partition.samples[i].tags}
        view = partition.view(request.task)
        if reply.batch_index is None:
            self.check_drawn(partition, request, indexes, None, indexes)
            view.given.update(dict.fromkeys(indexes))
            view.consumed.update(indexes)
            return
        key = (request.dp_rank, reply.batch_index)
        assert request.batch_index in (None, reply.batch_index)
        if key not in view.ledger:
            self.take_round(partition, request, reply.batch_index)
        entry = view.ledger[key]
        assert (entry.indexes, entry.token) == (indexes, reply.token), "equal questions get equal answers"
        self.tokens.append((request.partition, request.task, entry.token))
        view.consumed |= {index for index in entry.consumes if index in partition.samples}

    def take_round(self, partition: PartitionModel, request: Any, batch_index: int) -> None:
        """A batch that wasn't there before: so it must be there for every rank now."""
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
        assert padding is None or plan.policy == "pad"
        is_tail = partition.sealed or request.finite
        assert len(indexes) <= request.batch_size
        assert len(indexes) == request.batch_size or is_tail or request.task == "tokens"
        if request.task == "tokens":
            assert sum(partition.samples[index].tags["total_lengths"] for index in indexes) <= MAX_TOKENS
        if request.task == "groups":
            assert all(second == first + 1 for first, second in zip(indexes[::2], indexes[1::2], strict=True))
        first = self.parked(request.partition, request.task)
        own_order = (math.inf if request.batch_index is None else request.batch_index, request.id)
        assert all(each[:2] > own_order for each in first), "one who waits in front was overtaken"

    def check_ended(self, partition: PartitionModel, request: Any, reply: p.Ended) -> None:
        view, policy = partition.view(request.task), TASKS[request.task].policy
        if policy == "uneven_ok":
            self.take_tail(partition, request)
        undrawn = partition.undrawn(request.task)
        if reply.reason == "consumed":
            assert request.finite
            assert undrawn or not partition.held()
            return
        assert reply.reason == "sealed"
        assert partition.sealed
        if not view.ended:
            ready = partition.ready(request.task, request.fields)
            assert reply.dropped == len(undrawn) + len(partition.held())
            assert policy == "drop" or not ready, "only the policy drop leaves samples behind"
            assert not TASKS[request.task].exact or len(ready) < self.needed(request)
        view.ended = True

    def check_failed_fetch(self, partition: PartitionModel, request: Any, reply: p.Failed) -> None:
        view = partition.view(request.task)
        if reply.code == "ProducersGoneError":
            assert partition.abandoned(request.fields, self.now, GRACE_S)
        elif reply.code == "SampleClearedError":
            keys = [(request.dp_rank, i) for i in range(99)]
            torn = [key for key in keys if key in view.ledger and self.is_torn(partition, view.ledger[key])]
            assert torn if request.batch_index is None else (request.dp_rank, request.batch_index) in torn
        else:
            assert reply.code == "InvalidRequestError", reply
            assert (request.dp_rank, request.batch_index) in view.settled

    def is_torn(self, partition: PartitionModel, entry: Entry) -> bool:
        return not set(entry.indexes) <= partition.samples.keys()

    # ---- producers ----

    @rule(client=clients, partition=partitions, count=st.integers(1, 5), wait_s=waits)
    def reserve(self, client: str, partition: str, count: int, wait_s: float) -> None:
        self.ask(client, p.Reserve, partition, count, SPECS, wait_s)

    @rule(client=clients, partition=partitions, count=st.integers(1, 4), wait_s=waits, fields=field_sets)
    def put(self, client: str, partition: str, count: int, wait_s: float, fields: list[str]) -> None:
        reply = self.ask(client, p.Reserve, partition, count, SPECS, wait_s)
        if isinstance(reply, p.Reserved):
            self.publish(client, partition, p.unpack_indexes(reply.indexes).tolist(), fields, 0, count % 3 + 1)

    @rule(client=clients, partition=partitions, count=st.integers(1, 3), wait_s=waits)
    def insert(self, client: str, partition: str, count: int, wait_s: float) -> None:
        self.ask(client, p.Insert, partition, count, ["a"], wait_s)

    def pick(self, data: st.DataObject, indexes: list[int], label: str) -> list[int]:
        if not indexes:
            return []
        return data.draw(st.lists(st.sampled_from(indexes), min_size=1, max_size=5, unique=True), label)

    @rule(data=st.data(), client=clients, partition=partitions, fields=field_sets, ahead=st.sampled_from([0, 0, 2]))
    def publish_some(self, data: st.DataObject, client: str, partition: str, fields: list[str], ahead: int) -> None:
        samples = self.model[partition].samples if partition in self.model else {}
        own = [i for i, s in samples.items() if s.state == "live" or s.holder == client]
        picked = self.pick(data, own, "samples")
        if picked:
            self.publish(client, partition, picked, fields, ahead, data.draw(st.integers(1, 4), "length"))

    def publish(
        self, client: str, partition: str, indexes: list[int], fields: list[str], ahead: int, length: int
    ) -> None:
        tags = {index: {"total_lengths": length} for index in indexes}
        specs = {name: SPECS[name] for name in fields}
        self.ask(client, p.Publish, partition, p.pack_indexes(indexes), specs, tags, ahead)

    def on_publish(self, client: str, request: Any, reply: Any, since: float) -> None:
        partition = self.model[request.partition]
        indexes = p.unpack_indexes(request.indexes).tolist()
        if isinstance(reply, p.Failed):
            assert reply.code == "SampleClearedError", reply
            assert partition.sealed
            assert any(partition.samples[index].state == "ahead" for index in indexes)
            return
        for index in indexes:
            partition.samples[index].tags.update(request.tags[index])
        partition.publish(client, indexes, list(request.fields), self.now)
        ahead = p.unpack_indexes(reply.indexes).tolist()
        assert len(ahead) in (0, request.reserve_next)
        assert not ahead or (self.capacity is None and not partition.sealed)
        if ahead:
            self.add(request.partition, client, ahead, "ahead")

    @rule(data=st.data(), client=clients, partition=partitions)
    def cancel(self, data: st.DataObject, client: str, partition: str) -> None:
        picked = self.pick(data, list(range(max(0, self.next_index - 12), self.next_index)), "indexes")
        reply = self.ask(client, p.Cancel, partition, p.pack_indexes(picked))
        known = {index for each in self.model.values() for index in each.samples}
        # The reply may have admitted writers already, whose indexes are new ones.
        assert {i for i in picked if i not in known} == set(p.unpack_indexes(reply.indexes).tolist())

    def on_cancel(self, client: str, request: Any, reply: Any, since: float) -> None:
        partition = self.model.get(request.partition, PartitionModel())
        own = [i for i in p.unpack_indexes(request.indexes).tolist() if i in partition.samples]
        partition.clear([i for i in own if (s := partition.samples[i]).state != "live" and s.holder == client])

    @rule(client=clients, died=st.booleans())
    def client_gone(self, client: str, died: bool) -> None:
        for key in [key for key in self.open if key[0] == client]:
            del self.open[key], self.since[key]
        lost = self.stranded.pop(client, set())
        for partition in self.model.values():
            held = [i for i, s in partition.samples.items() if s.holder == client and s.state != "live"]
            lost.update(partition.clear(held))
            partition.writer_gone(client, died, self.now)
        self.absorb(self.plane.client_gone(client, self.now, died))
        assert {i for orphans in self.plane.take_orphans() for i in orphans.tolist()} == lost

    # ---- keys and tags ----

    @rule(
        client=clients, partition=partitions, keys=st.lists(st.sampled_from("uvwxyz"), min_size=1, max_size=3, unique=True),
        create=st.booleans(), hold=st.booleans(), wait_s=waits,
    )  # fmt: skip
    def resolve_keys(
        self, client: str, partition: str, keys: list[str], create: bool, hold: bool, wait_s: float
    ) -> None:
        self.ask(client, p.ResolveKeys, partition, keys, create, hold, {}, wait_s)

    @rule(data=st.data(), partition=partitions, value=st.integers(0, 3), merge=st.booleans())
    def set_tags(self, data: st.DataObject, partition: str, value: int, merge: bool) -> None:
        samples = self.model[partition].samples if partition in self.model else {}
        picked = self.pick(data, list(samples), "samples")
        # The samplers that weigh need their tag.
        tags = {i: {"v": value} | ({} if merge else {"total_lengths": 2}) for i in picked}
        for index in picked:
            samples[index].tags = samples[index].tags | tags[index] if merge else dict(tags[index])
        self.ask("anna", p.SetTags, {partition: tags, "nowhere": {0: {"v": 1}}}, merge)

    # ---- consumers ----

    @rule(
        data=st.data(), client=clients, partition=partitions, task=tasks, fields=field_sets, wait_s=waits,
        batch_index=st.one_of(st.none(), st.integers(0, 4)), from_first=st.booleans(),
    )  # fmt: skip
    def fetch(
        self, data: st.DataObject, client: str, partition: str, task: str, fields: list[str], wait_s: float,
        batch_index: int | None, from_first: bool,
    ) -> None:  # fmt: skip
        plan, dp_size = TASKS[task], DP_SIZES[task]
        batch_size = data.draw(st.sampled_from(plan.sizes), "batch_size")
        rank = data.draw(st.none() if dp_size is None else st.integers(0, dp_size - 1), "dp_rank")
        if dp_size is None and batch_index is not None:
            rank = data.draw(st.sampled_from([0, 1]), "dp_rank")
        acks = data.draw(st.lists(st.sampled_from(self.tokens), max_size=2, unique=True)) if self.tokens else []
        self.ask(
            client, p.Fetch, partition, task, fields, batch_size, rank, batch_index, None, wait_s, plan.finite, {},
            [token for where, who, token in acks if (where, who) == (partition, task)], 0 if from_first else None,
        )  # fmt: skip

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def withdraw(self, data: st.DataObject) -> None:
        client, request_id = data.draw(st.sampled_from(sorted(self.open)), "request")
        del self.open[client, request_id], self.since[client, request_id]
        assert self.ask(client, p.Withdraw, request_id).value == 1
        assert self.ask(client, p.Withdraw, request_id).value == 0

    @rule(data=st.data(), task=tasks, partition=partitions)
    @precondition(lambda self: self.tokens)
    def ack(self, data: st.DataObject, task: str, partition: str) -> None:
        tokens = [token for _, _, token in data.draw(st.lists(st.sampled_from(self.tokens), max_size=3, unique=True))]
        view = self.model[partition].view(task) if partition in self.model else View()
        settled = view.ack(tokens)
        assert self.ask("anna", p.Ack, partition, task, tokens).value == settled

    @rule(partition=partitions, task=st.one_of(st.none(), tasks))
    def reset(self, partition: str, task: str | None) -> None:
        self.ask("anna", p.ResetConsumption, partition, task)

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

    # ---- partitions ----

    @rule(partition=partitions, num_samples=st.one_of(st.none(), st.integers(1, 12)))
    def create(self, partition: str, num_samples: int | None) -> None:
        self.ask("anna", p.CreatePartition, partition, num_samples)

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

    @rule(partition=partitions)
    def seal(self, partition: str) -> None:
        self.model.setdefault(partition, PartitionModel()).sealed = True
        assert isinstance(self.ask("anna", p.SealPartition, partition), p.Done)

    @rule(data=st.data(), partition=partitions)
    def clear_samples(self, data: st.DataObject, partition: str) -> None:
        picked = self.pick(data, list(range(self.next_index + 2)), "indexes")
        self.ask("anna", p.ClearSamples, partition, p.pack_indexes(picked + picked))

    def on_clearsamples(self, client: str, request: Any, reply: Any, since: float) -> None:
        partition = self.model.get(request.partition, PartitionModel())
        indexes = p.unpack_indexes(request.indexes).tolist()
        self.strand(partition, indexes)
        assert p.unpack_indexes(reply.indexes).tolist() == partition.clear(indexes)

    @rule(partition=partitions)
    def clear_partition(self, partition: str) -> None:
        self.ask("anna", p.ClearPartition, partition)
        assert not [each for each in self.open.values() if isinstance(each, p.Fetch) and each.partition == partition] or (
            not self.was_there
        )

    def on_clearpartition(self, client: str, request: Any, reply: Any, since: float) -> None:
        partition = self.model.pop(request.partition, None)
        self.was_there = partition is not None
        known = list(partition.samples) if partition else []
        if partition is not None:
            self.strand(partition, known)
        assert p.unpack_indexes(reply.indexes).tolist() == known

    def strand(self, partition: PartitionModel, indexes: list[int]) -> None:
        """What a writer may be storing values for while it is cleared."""
        for index in indexes:
            sample = partition.samples.get(index)
            if sample is not None and sample.state != "live":
                self.stranded.setdefault(sample.holder, set()).add(index)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.absorb(self.plane.expire(self.now))

    # ---- what always holds ----

    @invariant()
    def books_agree(self) -> None:
        self.plane.check_invariants()

    @invariant()
    def nothing_that_could_be_answered_waits(self) -> None:
        for partition in PARTITIONS:
            self.plane.state.touch(partition)
        self.sound = False
        assert self.plane.expire(self.now) == []
        deadline = self.plane.next_deadline()
        assert deadline is None or deadline > self.now
        self.sound = True

    @invariant()
    def fetches_wait_only_for_lack_of_samples(self) -> None:
        for name, partition in self.model.items():
            for task, plan in TASKS.items():
                waiting = self.parked(name, task)
                assert not waiting or not self.could_draw(partition, plan, waiting[0][2])
                fetches = [request for _, _, request in waiting]
                assert not any(partition.abandoned(request.fields, self.now, GRACE_S) for request in fetches)

    def could_draw(self, partition: PartitionModel, plan: TaskPlan, request: Any) -> bool:
        ready = partition.ready(request.task, request.fields)
        return plan.exact and len(ready) >= self.needed(request)

    @invariant()
    def writers_wait_only_for_room(self) -> None:
        waiting = [each for each in self.open.values() if isinstance(each, (p.Reserve, p.Insert, p.ResolveKeys))]
        if waiting:
            assert self.capacity is not None
            first = min(waiting, key=lambda request: request.id)
            known = self.model[first.partition].keys if first.partition in self.model else {}
            count = sum(key not in known for key in first.keys) if isinstance(first, p.ResolveKeys) else first.count
            assert self.used() + count > self.capacity

    @invariant()
    def status_calls_tell_what_the_model_knows(self) -> None:
        assert sorted(self.ask("anna", p.ListPartitions).names) == sorted(self.model)
        for name, partition in self.model.items():
            live = partition.live()
            produced = self.ask("anna", p.ProductionStatus, name, ["a"])
            if produced.known:
                assert list(produced.status) == [partition.has(index, ["a"]) for index in live]
            for task in ("plain", "ranks"):
                status = self.ask("anna", p.ConsumptionStatus, name, task)
                assert p.unpack_indexes(status.indexes).tolist() == live
                assert list(status.status) == [index in partition.view(task).consumed for index in live]
            keys = self.ask("anna", p.ListKeys, name).keys[name]
            expected = {key: index for key, index in partition.keys.items() if index in live}
            assert keys == {key: partition.samples[index].tags for key, index in expected.items()}

    def teardown(self) -> None:
        """Whatever happened: in the end every request is answered and nothing is left in memory."""
        if not getattr(self, "sound", False):  # a failure before is the one to show
            return
        self.now += 1e6
        self.absorb(self.plane.expire(self.now))
        assert not self.open, "each request is answered exactly once"
        for name in PARTITIONS:
            self.ask("anna", p.ClearPartition, name)
        state = self.plane.state
        assert (state.allocator.num_used, state.partitions, state.waiters.all()) == (0, {}, [])
        assert self.plane.next_deadline() is None
        assert not any(sampler._states for sampler in state.tasks.samplers())


HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
TestPlaneMachine = PlaneMachine.TestCase
TestPlaneMachine.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None, print_blob=True, suppress_health_check=HEALTH
)


@pytest.mark.slow
@pytest.mark.timeout(3000)
class TestPlaneMachineForLong(PlaneMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=1500, stateful_step_count=120, deadline=None, print_blob=True, suppress_health_check=HEALTH
    )
