# SPDX-License-Identifier: Apache-2.0
"""The control plane under random producers, consumers and accidents, compared step by step with a plain model.

A failure prints the steps and a ``@reproduce_failure`` line: put that line over ``TestPlaneMachine`` to replay it.
``pytest -m slow`` runs the same machine with far more and longer runs.
"""

from __future__ import annotations

from typing import Any

import pytest
from control_checks import CLIENTS, DP_SIZES, GRACE_S, PARTITIONS, SPECS, TASKS, CheckedPlane, TaskPlan
from control_model import PartitionModel, View
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transfer_queue import protocol as p

clients = st.sampled_from(CLIENTS)
partitions = st.sampled_from(PARTITIONS)
tasks = st.sampled_from(sorted(TASKS))
some_keys = st.lists(st.sampled_from("uvwxyz"), min_size=1, max_size=3, unique=True)
field_sets = st.sampled_from([["a"], ["b"], ["a", "b"]])
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
            unused = self.pick(data, list(samples), "unused") if data.draw(st.booleans(), "gives back") else []
            self.publish(client, partition, picked, fields, ahead, data.draw(st.integers(1, 4), "length"), unused)

    def publish(
        self, client: str, partition: str, indexes: list[int], fields: list[str], ahead: int, length: int,
        unused: list[int] | None = None,
    ) -> None:  # fmt: skip
        tags = {index: {"total_lengths": length} for index in indexes}
        specs = {name: SPECS[name] for name in fields}
        given_back = p.pack_indexes(unused or [])
        self.ask(client, p.Publish, partition, p.pack_indexes(indexes), specs, tags, ahead, False, given_back)

    @rule(data=st.data(), client=clients, partition=partitions)
    def cancel(self, data: st.DataObject, client: str, partition: str) -> None:
        picked = self.pick(data, list(range(max(0, self.next_index - 12), self.next_index)), "indexes")
        reply = self.ask(client, p.Cancel, partition, p.pack_indexes(picked))
        known = {index for each in self.model.values() for index in each.samples}
        # The reply may have admitted writers already, whose indexes are new ones.
        assert {i for i in picked if i not in known} == set(p.unpack_indexes(reply.indexes).tolist())

    @rule(client=clients, died=st.booleans())
    def client_gone(self, client: str, died: bool) -> None:
        for key in [key for key in self.open if key[0] == client]:
            del self.open[key], self.since[key]
        self.answered = {key: undo for key, undo in self.answered.items() if key[0] != client}
        lost = self.stranded.pop(client, set())
        for partition in self.model.values():
            held = [i for i, s in partition.samples.items() if s.holder == client and s.state != "live"]
            lost.update(partition.clear(held))
            partition.writer_gone(client, died, self.now)
        self.absorb(self.plane.client_gone(client, self.now, died))
        assert {i for orphans in self.plane.take_orphans() for i in orphans.tolist()} == lost

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
        pass_start=st.one_of(st.none(), st.integers(0, 4)),
    )  # fmt: skip
    def fetch(
        self, data: st.DataObject, client: str, partition: str, task: str, fields: list[str], wait_s: float,
        batch_index: int | None, from_first: bool, pass_start: int | None,
    ) -> None:  # fmt: skip
        plan, dp_size = TASKS[task], DP_SIZES[task]
        batch_size = data.draw(st.sampled_from(plan.sizes), "batch_size")
        rank = data.draw(st.none() if dp_size is None else st.integers(0, dp_size - 1), "dp_rank")
        if dp_size is None and batch_index is not None:
            rank = data.draw(st.sampled_from([0, 1]), "dp_rank")
        acks = data.draw(st.lists(st.sampled_from(self.tokens), max_size=2, unique=True)) if self.tokens else []
        seen = [token for where, who, token in self.tokens if (where, who) == (partition, task)]
        after = data.draw(st.sampled_from([None, *seen]), "after")
        self.ask(
            client, p.Fetch, partition, task, fields, batch_size, rank, batch_index, None, wait_s, plan.finite, {},
            [token for where, who, token in acks if (where, who) == (partition, task)], 0 if from_first else None,
            0, pass_start if plan.finite else None, after,
        )  # fmt: skip

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def withdraw(self, data: st.DataObject) -> None:
        client, request_id = data.draw(st.sampled_from(sorted(self.open)), "request")
        del self.open[client, request_id], self.since[client, request_id]
        assert self.ask(client, p.Withdraw, request_id).value == 1
        assert self.ask(client, p.Withdraw, request_id).value == 0

    @rule(data=st.data())
    @precondition(lambda self: self.answered)
    def withdraw_too_late(self, data: st.DataObject) -> None:
        client, request_id = data.draw(st.sampled_from(sorted(self.answered)), "request")
        assert self.ask(client, p.Withdraw, request_id).value == 1
        assert self.ask(client, p.Withdraw, request_id).value == 0

    @rule(data=st.data(), task=tasks, partition=partitions)
    @precondition(lambda self: self.tokens)
    def ack(self, data: st.DataObject, task: str, partition: str) -> None:
        tokens = [token for _, _, token in data.draw(st.lists(st.sampled_from(self.tokens), max_size=3, unique=True))]
        view = self.model[partition].view(task) if partition in self.model else View()
        earlier = data.draw(st.booleans(), "earlier")
        settled = view.ack(tokens, earlier)
        assert self.ask("anna", p.Ack, partition, task, tokens, earlier).value == settled

    @rule(partition=partitions, task=st.one_of(st.none(), tasks))
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

    @rule(data=st.data(), partition=partitions)
    def clear_samples(self, data: st.DataObject, partition: str) -> None:
        picked = self.pick(data, list(range(self.next_index + 2)), "indexes")
        self.ask("anna", p.ClearSamples, partition, p.pack_indexes(picked + picked))

    @rule(partition=partitions, named=st.sets(tasks))
    def clear_consumed(self, partition: str, named: set[str]) -> None:
        self.ask("anna", p.ClearConsumed, partition, sorted(named))

    @rule(partition=partitions)
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
        known = self.known_batch(partition, request)
        if known is not None:
            return all(partition.has(index, request.fields) for index in known)
        ready = partition.ready(request.task, request.fields)
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
            produced = self.ask("anna", p.ProductionStatus, name, ["a"])
            if produced.known:
                assert list(produced.status) == [partition.has(index, ["a"]) for index in live]
                assert self.ask("anna", p.ProductionStatus, name, ["a"], True).value == all(produced.status)
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
        for name in PARTITIONS:
            self.ask("anna", p.ClearPartition, name)
        state = self.plane.state
        assert (state.allocator.num_used, state.partitions, state.waiters.all()) == (0, {}, [])
        assert self.plane.next_deadline() is None
        assert not any(sampler._states for sampler in state.tasks.samplers())


HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.timeout(600)  # a run takes seconds; making a failure's steps few takes minutes
class TestPlaneMachine(PlaneMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=200, stateful_step_count=50, deadline=None, print_blob=True, suppress_health_check=HEALTH
    )


@pytest.mark.slow
@pytest.mark.timeout(3000)
class TestPlaneMachineForLong(PlaneMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=2000, stateful_step_count=120, deadline=None, print_blob=True, suppress_health_check=HEALTH
    )
