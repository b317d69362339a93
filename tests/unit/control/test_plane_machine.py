# SPDX-License-Identifier: Apache-2.0
"""The control plane under random producers, consumers and accidents, compared step by step with a plain model.

A failure prints the steps and a ``@reproduce_failure`` line: put that line over ``TestPlaneMachine`` to replay it.
``pytest -m slow`` runs the same machine with far more and longer runs.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from control_checks import CLIENTS, GRACE_S, PARTITIONS, SPECS, UNNAMED, CheckedPlane
from control_model import DP_SIZES, FILTERS, TASKS, PartitionModel, TaskPlan, View
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transfer_queue import protocol as p
from transfer_queue.control.state import FETCHES, KEYS, SAVING, WRITERS

clients = st.sampled_from(CLIENTS)
partitions = st.sampled_from(PARTITIONS)
any_partitions = st.sampled_from((*PARTITIONS, UNNAMED))
tasks = st.sampled_from(sorted(TASKS))
some_keys = st.lists(st.sampled_from("uvwxyz"), min_size=1, max_size=3, unique=True)
field_sets = st.sampled_from([["a"], ["b"], ["a", "b"]])
filters = st.one_of(st.none(), st.sampled_from(list(FILTERS)))
waits = st.sampled_from([0.0, 1.0, 3.0, 50.0])


class PlaneMachine(CheckedPlane, RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([None, None, 10]))
    def start(self, capacity: int | None) -> None:
        self.begin(capacity)

    # ---- producers ----

    @rule(client=clients, partition=partitions, count=st.integers(1, 5), wait_s=waits)
    def reserve(self, client: str, partition: str, count: int, wait_s: float) -> None:
        self.ask(client, p.Reserve, partition, count, SPECS, wait_s)

    @rule(client=clients, partition=partitions, count=st.integers(1, 4), wait_s=waits, fields=field_sets)
    def put(self, client: str, partition: str, count: int, wait_s: float, fields: list[str]) -> None:
        reply = self.ask(client, p.Reserve, partition, count, SPECS, wait_s)
        if isinstance(reply, p.Reserved):
            indexes = p.unpack_indexes(reply.indexes).tolist()
            self.publish(client, partition, indexes, fields, count % 3 + 1, reply.id)

    @rule(client=clients, partition=partitions, count=st.integers(1, 3), wait_s=waits)
    def insert(self, client: str, partition: str, count: int, wait_s: float) -> None:
        self.ask(client, p.Insert, partition, count, ["a"], wait_s)

    def pick(self, data: st.DataObject, indexes: list[int], label: str) -> list[int]:
        if not indexes:
            return []
        return data.draw(st.lists(st.sampled_from(indexes), min_size=1, max_size=5, unique=True), label)

    @rule(data=st.data(), client=clients, partition=partitions, fields=field_sets)
    def publish_some(self, data: st.DataObject, client: str, partition: str, fields: list[str]) -> None:
        samples = self.model[partition].samples if partition in self.model else {}
        own = [i for i, s in samples.items() if s.state == "live" or s.holder == client]
        picked = self.pick(data, own, "samples")
        if picked:
            begun = data.draw(st.sampled_from([0, *self.writes(client)]), "completes")
            self.publish(client, partition, picked, fields, data.draw(st.integers(1, 4), "length"), begun)

    @rule(data=st.data(), client=clients, fields=field_sets)
    def publish_what_was_reserved(self, data: st.DataObject, client: str, fields: list[str]) -> None:
        begun = data.draw(st.sampled_from([0, *self.writes(client)]), "completes")
        if not begun:
            return
        answer = self.answered[client, begun]
        samples = {} if answer.partition is None else answer.partition.samples
        left = [i for i in answer.reserved if i in samples]
        if left and self.model.get(answer.request.partition) is answer.partition:
            self.publish(client, answer.request.partition, left, fields, 1, begun)

    def writes(self, client: str) -> list[int]:
        """Calls of the client that reserved samples, and are neither published nor cancelled."""
        return [call for (name, call), answer in self.answered.items() if name == client and answer.reserved]

    def publish(
        self, client: str, partition: str, indexes: list[int], fields: list[str], length: int, begun: int = 0
    ) -> None:
        tags = {index: {"total_lengths": length} for index in indexes}
        specs = {name: SPECS[name] for name in fields}
        self.ask(client, p.Publish, partition, p.pack_indexes(indexes), specs, tags, False, begun)

    @rule(client=clients, died=st.booleans())
    def client_gone(self, client: str, died: bool) -> None:
        for key in [key for key in self.open if key[0] == client]:
            del self.open[key], self.since[key]
        for key in [key for key in self.answered if key[0] == client][::-1]:
            self.undo(key)
        for key in [key for key in self.unread if key[0] == client]:
            del self.unread[key]
        self.producers.gone(client, died, self.now)
        self.absorb(self.plane.client_gone(client, self.now, died))
        self.check_chores()
        assert client not in self.plane.calls.clients()

    # ---- calls ----

    @rule(data=st.data())
    @precondition(lambda self: self.answered)
    def receive(self, data: st.DataObject) -> None:
        """The client has some answers; what a call reserved stays its own all the same."""
        keys = data.draw(st.lists(st.sampled_from(sorted(self.answered)), max_size=4, unique=True), "calls")
        for client, call in keys:
            self.plane.received(client, [call])
            answer = self.answered[client, call]
            if self.is_unnamed(answer):
                self.check_read_once(answer)
                if not answer.request.with_values:
                    self.unread[client, call] = answer
            if not answer.reserved:
                del self.answered[client, call]

    def is_unnamed(self, answer: Any) -> bool:
        """Whether this is a batch that is in no ledger."""
        return isinstance(answer.request, p.Fetch) and answer.reply.batch_index is None

    @rule(data=st.data())
    @precondition(lambda self: self.answered or self.unread)
    def read(self, data: st.DataObject) -> None:
        """The client has read some batches, whether it has said to have their answers or not. Other calls stay."""
        keys = data.draw(st.lists(st.sampled_from(sorted({**self.answered, **self.unread})), max_size=4, unique=True))
        for client, call in keys:
            self.plane.read(client, [call, self.next_id + 1])
            answer = self.answered.get((client, call))
            if answer is not None and self.is_unnamed(answer) and not answer.request.with_values:
                self.check_read_once(answer)
                del self.answered[client, call]
            self.unread.pop((client, call), None)

    @rule(data=st.data())
    @precondition(lambda self: self.unread)
    def cancel_received(self, data: st.DataObject) -> None:
        """What was received is never given again, and nobody will read it any more."""
        client, call = data.draw(st.sampled_from(sorted(self.unread)), "call")
        del self.unread[client, call]
        assert self.ask(client, p.Cancel, call).value == "kept"

    def check_read_once(self, answer: Any) -> None:
        view = self.model.get(answer.request.partition, PartitionModel()).view(answer.request.task)
        if answer.partition is self.model.get(answer.request.partition):
            read = {i for i in view.received[1] if i in answer.partition.samples}
            if view.received[0] == view.num_resets == answer.num_resets:
                assert read.isdisjoint(answer.drawn), "no sample is given twice to answers that were received"
                view.received[1].update(answer.drawn)
            elif answer.num_resets == view.num_resets:
                view.received = view.num_resets, set(answer.drawn)

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def cancel_parked(self, data: st.DataObject) -> None:
        client, call = data.draw(st.sampled_from(sorted(self.open)), "call")
        del self.open[client, call], self.since[client, call]
        assert self.ask(client, p.Cancel, call).value == "removed"
        assert self.ask(client, p.Cancel, call).value == "kept"

    @rule(data=st.data())
    @precondition(lambda self: self.answered)
    def cancel_answered(self, data: st.DataObject) -> None:
        client, call = data.draw(st.sampled_from(sorted(self.answered)), "call")
        answer = self.answered[client, call]
        final = isinstance(answer.request, (p.Publish, p.ClearSamples, p.ClearConsumed, p.ClearPartition))
        assert self.ask(client, p.Cancel, call).value == ("kept" if final else "undone")
        assert self.ask(client, p.Cancel, call).value == "kept"

    @rule(data=st.data())
    @precondition(lambda self: self.answered)
    def retry(self, data: st.DataObject) -> None:
        """The same call again: the same answer, once."""
        client, call = data.draw(st.sampled_from(sorted(self.answered)), "call")
        known = self.plane.calls.find(client, call)
        if known is not None and known.reply is not None:
            answer = self.answered[client, call]
            (to,) = self.plane.handle(client, answer.request, self.now)
            assert to == (client, answer.reply)

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def retry_parked(self, data: st.DataObject) -> None:
        client, call = data.draw(st.sampled_from(sorted(self.open)), "call")
        assert self.plane.handle(client, self.open[client, call], self.now) == []

    # ---- keys and tags ----

    @rule(client=clients, partition=partitions, keys=some_keys, create=st.booleans(), hold=st.booleans(), wait_s=waits)
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
        pass_start=st.one_of(st.none(), st.integers(0, 4)), where=filters,
    )  # fmt: skip
    def fetch(
        self, data: st.DataObject, client: str, partition: str, task: str, fields: list[str], wait_s: float,
        batch_index: int | None, from_first: bool, pass_start: int | None, where: str | None,
    ) -> None:  # fmt: skip
        plan, dp_size = TASKS[task], DP_SIZES[task]
        batch_size = data.draw(st.sampled_from(plan.sizes), "batch_size")
        rank = data.draw(st.none() if dp_size is None else st.integers(0, dp_size - 1), "dp_rank")
        if dp_size is None and batch_index is not None:
            rank = data.draw(st.sampled_from([0, 1]), "dp_rank")
        seen = [token for where, who, token in self.tokens if (where, who) == (partition, task)]
        after = data.draw(st.sampled_from([None, *seen]), "after")
        self.ask(
            client, p.Fetch, partition, task, fields, batch_size, rank, batch_index, None, wait_s, plan.finite, {},
            0 if from_first else None, 0, pass_start if plan.finite else None, after,
            data.draw(st.booleans(), "with_values"), False, where,
        )  # fmt: skip

    @rule(data=st.data(), task=tasks, partition=partitions)
    @precondition(lambda self: self.tokens)
    def ack(self, data: st.DataObject, task: str, partition: str) -> None:
        tokens = [token for _, _, token in data.draw(st.lists(st.sampled_from(self.tokens), max_size=3, unique=True))]
        view = self.model[partition].view(task) if partition in self.model else View()
        earlier = data.draw(st.booleans(), "earlier")
        settled = view.ack(tokens, earlier)
        assert self.ask("anna", p.Ack, partition, task, tokens, earlier).value == settled

    @rule(partition=any_partitions, task=st.one_of(st.none(), tasks))
    def reset(self, partition: str, task: str | None) -> None:
        self.ask("anna", p.ResetConsumption, partition, task)

    # ---- partitions ----

    @rule(partition=partitions, num_samples=st.one_of(st.none(), st.integers(1, 12)))
    def create(self, partition: str, num_samples: int | None) -> None:
        self.ask("anna", p.CreatePartition, partition, num_samples)

    @rule(partition=partitions)
    def seal(self, partition: str) -> None:
        self.model.setdefault(partition, PartitionModel()).sealed = True
        assert isinstance(self.ask("anna", p.SealPartition, partition), p.Done)

    @rule(data=st.data(), partition=any_partitions)
    def clear_samples(self, data: st.DataObject, partition: str) -> None:
        every = range(self.next_index + 2)  # a restore leaves 2**32 of them out
        picked = self.pick(data, sorted({*every[:40], *every[-40:]}), "indexes")
        self.ask("anna", p.ClearSamples, partition, p.pack_indexes(picked + picked))

    @rule(partition=any_partitions, named=st.sets(tasks), dry_run=st.booleans())
    def clear_consumed(self, partition: str, named: set[str], dry_run: bool) -> None:
        self.ask("anna", p.ClearConsumed, partition, sorted(named), dry_run)

    @rule(client=clients, reader=clients, count=st.integers(1, 3), with_values=st.booleans())
    def fetch_unnamed(self, client: str, reader: str, count: int, with_values: bool) -> None:
        self.put(client, UNNAMED, count, 0.0, ["a"])
        self.ask(
            reader, p.Fetch, UNNAMED, "plain", ["a"], count, None, None, None, 0.0, False, {}, None, 0, None, None,
            with_values,
        )  # fmt: skip

    @rule()
    def clear_what_was_read(self) -> None:
        self.ask("anna", p.ClearConsumed, UNNAMED, [])

    @rule(partition=any_partitions)
    def clear_partition(self, partition: str) -> None:
        self.ask("anna", p.ClearPartition, partition)
        assert not [
            each for each in self.open.values() if isinstance(each, p.Fetch) and each.partition == partition
        ] or (not self.was_there)

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
        for group in ((FETCHES,), (KEYS,), WRITERS, SAVING):
            self.plane.calls.waits.wake(group)
            self.plane.calls.waits.wake_first(group)
        self.sound = False
        assert self.plane.expire(self.now) == []
        deadline = self.plane.next_deadline()
        assert deadline is None or deadline > self.now
        self.sound = True

    @invariant()
    def fetches_wait_only_for_lack_of_samples(self) -> None:
        for name, partition in self.model.items():
            for task, where in product(TASKS, FILTERS):
                waiting = self.parked(name, task, where)
                assert not waiting or not self.could_draw(partition, TASKS[task], waiting[0][2])
                fetches = [request for _, _, request in waiting]
                assert not any(self.producers.lost(request.fields, self.now, GRACE_S) for request in fetches)

    def could_draw(self, partition: PartitionModel, plan: TaskPlan, request: Any) -> bool:
        known = self.known_batch(partition, request)
        if known is not None:
            return all(partition.has(index, request.fields) for index in known)
        ready = partition.ready(request.task, request.fields, request.where)
        return plan.exact and len(ready) >= self.needed(request)

    @invariant()
    def writers_wait_only_for_room(self) -> None:
        waiting = [each for each in self.open.values() if isinstance(each, (p.Reserve, p.Insert, p.ResolveKeys))]
        assert all(self.room_for(each) for each in waiting), "who needs no room waits for nobody"
        if waiting:
            assert self.capacity is not None
            first = min(waiting, key=lambda request: request.id)
            assert self.used() + self.room_for(first) > self.capacity

    def room_for(self, request: Any) -> int:
        if not isinstance(request, p.ResolveKeys):
            return int(request.count)
        known = self.model[request.partition].keys if request.partition in self.model else {}
        return sum(key not in known for key in request.keys) if request.create else 0

    @invariant()
    def status_calls_tell_what_the_model_knows(self) -> None:
        assert sorted(self.ask("anna", p.ListPartitions).names) == sorted(self.model)
        for name, partition in self.model.items():
            live = partition.live()
            produced = self.ask("anna", p.FieldStatus, name, ["a"])
            if produced.known:
                assert list(produced.status) == [partition.has(index, ["a"]) for index in live]
                assert self.ask("anna", p.FieldStatus, name, ["a"], True).value == all(produced.status)
            for task in ("plain", "ranks"):
                status = self.ask("anna", p.ConsumptionStatus, name, task)
                assert p.unpack_indexes(status.indexes).tolist() == live
                assert list(status.status) == [index in partition.view(task).consumed for index in live]
                whole = bool(live) and all(status.status)
                assert self.ask("anna", p.ConsumptionStatus, name, task, True).value == whole
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
        for client in CLIENTS:
            self.client_gone(client, died=False)
        assert not any(partition.held() for partition in self.model.values()), "all reservations are given back"
        self.plane.check_invariants()
        self.check_nothing_is_lost()
        for name in (*PARTITIONS, UNNAMED):
            self.ask("anna", p.ClearPartition, name)
        self.now += 1e6
        assert self.plane.expire(self.now) == []
        state = self.plane.state
        assert (state.allocator.num_used, state.partitions, state.waits.count) == (0, {}, 0)
        assert self.plane.next_deadline() is None
        assert not any(sampler._states for sampler in state.tasks.samplers())

    def check_nothing_is_lost(self) -> None:
        """Every sample was received by a reader, is named by the ledger, is still to draw, or was dropped by a tail."""
        for name, partition in self.model.items():
            for task, view in partition.views.items():
                unread = set(partition.live()) - set(view.given)
                consumer = self.plane.state.partitions[name].consumers.get(task)
                assert consumer is None or consumer.num_undrawn == len(unread)
                unnamed = {index for index, key in view.given.items() if key is None}
                known = view.received[1] if view.received[0] == view.num_resets else set()
                assert unnamed <= known, "what nobody received is to be drawn again"


HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.timeout(600)  # a run takes seconds; making a failure's steps few takes minutes
class TestPlaneMachine(PlaneMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=100, stateful_step_count=50, deadline=None, print_blob=True, suppress_health_check=HEALTH
    )


@pytest.mark.slow
@pytest.mark.timeout(3000)
class TestPlaneMachineForLong(PlaneMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=2000, stateful_step_count=120, deadline=None, print_blob=True, suppress_health_check=HEALTH
    )
