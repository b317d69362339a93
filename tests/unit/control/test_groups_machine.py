# SPDX-License-Identifier: Apache-2.0
"""Whatever workers and trainers do and whoever dies, each group is where a second account of it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.control.groups_kit import PART, SPEC, Queue
from tests.unit.control.groups_model import LEFT, Group, Model
from transfer_queue import GroupSampler
from transfer_queue import protocol as p

WORKERS = ("w0", "w1", "w2")
CRITICS = ("c0", "c1")
TASKS = st.sampled_from([("actor",), ("actor", "critic"), ()])
TERMS = st.fixed_dictionaries({
    "parts": st.integers(1, 3), "min_parts": st.sampled_from([None, 1]), "deadline_s": st.sampled_from([None, 17.25]),
    "attempts": st.integers(1, 2), "worker_attempts": st.integers(1, 3),
})  # fmt: skip
KEEP = st.sampled_from(["all", "closed", "none"])
LEASE_S = st.sampled_from([3.5, 10.5])
TURNS = st.integers(0, 99)
SELDOM = st.integers(0, 5)
"""What ends work happens only where this is 0."""
REWARDS = st.sampled_from([None, 0, 1, 1])


class GroupsMachine(RuleBasedStateMachine):
    """One partition, a trainer of one or two ranks, a second task that reads as it likes, three workers."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(producer_grace_s=1e9)
        self.parked: dict[tuple[str, int], dict[str, Any]] = {}
        self.tokens: dict[int, Any] = {}
        """Every lease that was granted."""
        self.read: set[int] = set()
        self.unit = 0
        """The number of the other storage unit, while there is one."""
        self.in_unit: set[int] = set()
        self.sealed = self.has_ended = self.reader_is_over = False
        self.no_more_work = False
        """Whether a worker was told so."""
        self.num_heads = 0

    @initialize(dp_size=st.sampled_from([1, 2]), ahead=st.integers(0, 1), gate=st.booleans(), critic=st.integers(1, 2),
                terms=TERMS, tasks=TASKS)  # fmt: skip
    def register(
        self, dp_size: int, ahead: int, gate: bool, critic: int, terms: dict[str, Any], tasks: tuple[str, ...]
    ) -> None:
        self.dp_size = dp_size
        self.batch = [0] * dp_size
        self.given: dict[tuple[int, int], list[Group]] = {}
        """By rank and batch."""
        self.drawn_rounds: dict[int, list[int]] = {}
        self.tokens_of: dict[tuple[int, int], str] = {}
        self.critic_has: dict[str, list[Group]] = {name: [] for name in CRITICS}
        actor = GroupSampler(groups=2, ahead=ahead, gate="max(reward) > 0" if gate else None)
        other = GroupSampler(groups=critic, ahead=2)
        self.queue.register("actor", actor, dp_size=dp_size, tail="uneven_ok")
        self.queue.register("critic", other, tail="uneven_ok")
        self.sizes = {"actor": 2, "critic": critic}
        self.model = Model(
            {"actor": actor.budget, "critic": other.budget},
            {"actor": (lambda rewards: max(rewards) > 0) if gate else None, "critic": None},
        )
        # Which gates judge groups of no task depends on who has read by then. And where some groups are of one task
        # and some of two, those of two may wait for each other's slots at the end.
        self.tasks = tasks or (("actor",) if gate else ())
        self.add(8, terms)

    # ---- helpers ----

    @property
    def groups(self) -> dict[int, Group]:
        return self.model.groups

    def pick(self, turn: int, among: Any) -> Any:
        listed = list(among)
        return listed[turn % len(listed)] if listed else None

    def hear(self) -> None:
        """Leases that were granted to those that waited."""
        inbox, self.queue.inbox = self.queue.inbox, []
        for to in inbox:
            asked = self.parked.pop((to.client, to.reply.id))
            if isinstance(to.reply, p.LeasedGroups):
                for lease in to.reply.leases:
                    self.grant(to.client, lease, asked)
            elif isinstance(to.reply, p.Ended):
                assert self.is_over()
                self.no_more_work = True
            else:
                assert to.reply.code == "BatchTimeoutError", to.reply

    def grant(self, worker: str, lease: Any, asked: dict[str, Any]) -> None:
        group = self.groups[lease.head]
        if asked["keep"] == "none" and group.closed and not self.model.holders(group):
            self.model.begins_anew(group)
        self.model.granted(worker, lease, asked["lease_s"], asked["keep"], self.queue.now)
        self.tokens[lease.token] = lease

    def is_over(self) -> bool:
        return self.sealed and not any(group.is_under_work for group in self.groups.values())

    def forget_parked(self, client: str) -> None:
        self.parked = {call: asked for call, asked in self.parked.items() if call[0] != client}

    # ---- heads ----

    @precondition(lambda self: not self.sealed and self.num_heads < 40)
    @rule(count=st.integers(1, 4), terms=TERMS)
    def add(self, count: int, terms: dict[str, Any]) -> None:
        tasks = self.tasks
        if terms["deadline_s"] is None:
            terms = terms | {"min_parts": None}
        self.num_heads += count
        for head in self.queue.add(count, tasks, **terms):
            self.groups[head] = Group(head, p.Terms(tasks=tasks, **terms))
        self.hear()

    @precondition(lambda self: self.groups and not self.sealed)
    @rule(seldom=SELDOM)
    def seal(self, seldom: int) -> None:
        if seldom:
            return
        self.queue.ask("feeder", p.SealPartition, PART)
        self.sealed = True
        self.hear()

    @rule(turn=TURNS, is_head=st.booleans(), seldom=SELDOM)
    def clear(self, turn: int, is_head: bool, seldom: int) -> None:
        """A head, or all rows of a group that is not worked on."""
        if seldom:
            return
        group = self.pick(turn, [each for each in self.groups.values() if each.state not in ("done", "cleared")])
        if group is None or (not is_head and (group.is_under_work or not group.rows())):
            return
        gone = [group.head] if is_head else group.rows()
        if group.state in ("closed", "drawn", "trained") and not is_head:
            self.model.goes(group, "rejected" if group.state == "closed" else "done")
        else:
            self.model.goes(group, "cleared")
        self.queue.ask("feeder", p.ClearSamples, PART, p.pack_indexes(gone))
        self.hear()

    @rule()
    def retry(self) -> None:
        left = [group for group in self.groups.values() if group.state in LEFT]
        reply = self.queue.ask("feeder", p.RetryGroups, PART, None)
        if isinstance(reply, p.Failed):
            assert reply.code == ("GroupStateError" if self.has_ended else "UnknownPartitionError")
            return
        assert reply.value == len(left)
        self.no_more_work &= not left
        for group in left:
            self.model.retried(group)
        self.hear()

    # ---- workers ----

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 4), by_part=st.booleans(), keep=KEEP, lease_s=LEASE_S,
          wait_s=st.sampled_from([0.0, 30.0]))  # fmt: skip
    def lease(self, worker: str, count: int, by_part: bool, keep: str, lease_s: float, wait_s: float) -> None:
        could = self.model.leasable()
        asked = {"keep": keep, "lease_s": lease_s, "by_part": by_part}
        number = self.queue.number()
        request = p.LeaseGroups(number, [PART], count, by_part, None, lease_s, keep, wait_s)
        reply = self.queue.send(worker, request)
        if isinstance(reply, p.LeasedGroups):
            for lease in reply.leases:
                self.grant(worker, lease, asked)
            left = self.model.leasable()
            assert len(reply.leases) == count or not left, "a lease gets as many as there are"
        elif reply is None:
            self.parked[worker, number] = asked
            assert not could, "nobody waits while there is work"
        elif isinstance(reply, p.Ended):
            assert self.is_over()
            self.no_more_work = True
        else:
            assert reply.code == "BatchTimeoutError"
            assert not could
        self.hear()

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 4), reward=REWARDS)
    def work(self, worker: str, count: int, reward: int | None) -> None:
        """As most workers do."""
        before = set(self.tokens)
        self.lease(worker, count, False, "closed", 10.5, 0.0)
        for token in [token for token in self.tokens if token not in before]:
            if token in self.model.leases:
                self.put_of(self.tokens[token], worker, 1, True, reward)

    @rule()
    def step(self) -> None:
        """All ranks."""
        for rank in range(self.dp_size):
            self.fetch(rank)

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 3))
    def lease_and_cancel(self, worker: str, count: int) -> None:
        """Nobody's fault: the group waits again, with its slot."""
        reply = self.queue.ask(worker, p.LeaseGroups, [PART], count, confirm=False)
        if isinstance(reply, p.Ended):
            assert self.is_over()
            self.no_more_work = True
        if not isinstance(reply, p.LeasedGroups):
            return
        asked = {"keep": "closed", "lease_s": 60.0}
        for lease in reply.leases:
            self.grant(worker, lease, asked)
        for lease in reversed(reply.leases):
            self.model.ends(lease.token, "nobody", is_lost=False)
        self.queue.ask(worker, p.Cancel, reply.id)
        self.hear()

    @rule(turn=TURNS, rows=st.integers(1, 2), closes=st.booleans(), reward=REWARDS, part=st.sampled_from([None, 0]),
          other=st.booleans())  # fmt: skip
    def put(self, turn: int, rows: int, closes: bool, reward: int | None, part: int | None, other: bool) -> None:
        """Of a lease that is held, or was."""
        lease = self.some_lease(turn)
        if lease is None:
            return
        worker = self.owner(lease, "w1" if other and turn % 5 == 0 else None)
        self.put_of(lease, worker, rows, closes, reward, part)

    def put_of(
        self, lease: Any, worker: str, rows: int, closes: bool, reward: int | None, part: int | None = None
    ) -> None:
        own = self.model.leases.get(lease.token)
        parts = list(lease.parts if own is None else own.parts) if part is None else [lease.parts[0]]
        expected = self.model.refuses(worker, lease.token, lease.head, parts)
        tags = [] if reward is None else [{"reward": reward}] * (rows * len(parts))
        got = self.queue.put(lease, rows, tags, closes, worker, parts, unit=self.unit if lease.token % 4 else 0)
        if expected is not None:
            assert isinstance(got, p.Failed), (expected, got)
            assert got.code == expected
            return
        assert isinstance(got, list), got
        if reward is not None:
            self.model.rewards.update(dict.fromkeys(got, reward))
        self.in_unit |= set(got) if self.unit and lease.token % 4 else set()
        self.model.put(worker, lease.token, lease.head, parts, got, closes, self.queue.now)
        self.hear()

    @precondition(lambda self: not self.unit)
    @rule()
    def unit_joins(self) -> None:
        self.unit = self.queue.done(self.queue.ask("unit", p.JoinUnit, "unit", "host", ["tcp://unit:1"])).value

    @precondition(lambda self: self.unit)
    @rule(seldom=st.integers(0, 2))
    def unit_gone(self, seldom: int) -> None:
        """With the values in it. Those of groups that were drawn are put again."""
        if seldom:
            return
        self.queue.gone("unit")
        self.have_lost_rows()

    def have_lost_rows(self) -> None:
        is_over = self.has_ended or self.no_more_work
        stay = self.model.loses_rows(self.in_unit, self.read, is_over, self.queue.now)
        if stay:
            packed = p.pack_indexes(np.array(stay, dtype=np.int64))
            self.queue.done(self.queue.ask("mender", p.Publish, PART, packed, {"resp": SPEC}))
        self.unit, self.in_unit = 0, set()
        self.hear()

    def some_lease(self, turn: int) -> Any:
        held = list(self.model.leases)
        token = self.pick(turn, held) if held and turn % 8 < 6 else self.pick(turn, self.tokens)
        return self.tokens.get(token)

    def owner(self, lease: Any, other: str | None) -> str:
        own = self.model.leases.get(lease.token)
        return other or (own.worker if own is not None else "w0")

    @rule(turn=TURNS, how=st.sampled_from(["close", "release", "release", "reject"]),
          blame=st.sampled_from(["worker", "sample"]))  # fmt: skip
    def end(self, turn: int, how: str, blame: str) -> None:
        lease = self.some_lease(turn)
        if lease is None:
            return
        own, group = self.model.leases.get(lease.token), self.groups[lease.head]
        worker = self.owner(lease, None)
        parts = list(lease.parts if own is None else own.parts)
        expected = self.model.refuses(worker, lease.token, lease.head, parts)
        if expected is None and how == "close" and not all(group.members.get(part) for part in parts):
            expected = "GroupStateError"
        if expected is None and how == "release" and own is None:
            expected = "LeaseLostError"
        members = p.Members(lease.token, lease.head, parts)
        reply = self.queue.ask(worker, p.EndLease, PART, members, how, "why", blame)
        if expected is not None:
            assert isinstance(reply, p.Failed), (expected, reply)
            assert reply.code == expected
            return
        assert isinstance(reply, p.Done), reply
        if how == "close":
            self.model.put(worker, lease.token, lease.head, parts, [], True, self.queue.now)
        elif how == "reject":
            self.model.leaves(group, "rejected")
        else:
            self.model.ends(lease.token, blame, is_lost=False)
        self.hear()

    @rule(worker=st.sampled_from(WORKERS), died=st.booleans(), seldom=SELDOM)
    def worker_gone(self, worker: str, died: bool, seldom: int) -> None:
        if seldom:
            return
        self.forget_parked(worker)
        self.model.worker_gone(worker)
        self.queue.gone(worker, died)
        self.hear()

    @rule(worker=st.sampled_from(WORKERS))
    def renew(self, worker: str) -> None:
        own = [lease for lease in self.model.leases.values() if lease.worker == worker]
        reply = self.queue.ask(worker, p.RenewLeases, [lease.token for lease in own] + list(self.tokens)[:3])
        for lease in own:
            lease.renewed = self.queue.now
        mine = {lease.token for lease in own}
        assert reply is None or {*reply.value} == {token for token in list(self.tokens)[:3] if token not in mine}

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        # In small steps, because what one step frees is leased in it.
        end = self.queue.now + seconds
        while self.queue.now < end:
            due = self.queue.plane.next_deadline()
            at = end if due is None else min(end, max(due, self.queue.now))
            self.model.pass_time(at)
            self.queue.pass_time(at - self.queue.now)
            self.queue.now = at
            self.hear()
            if due is None or due > end:
                break
            if at == self.queue.now and self.queue.plane.next_deadline() == due:
                self.queue.now += 1e-9
        self.queue.now = max(self.queue.now, end)

    # ---- rewards, and those that read rows as they come ----

    @rule(turn=TURNS, reward=st.integers(0, 1))
    def reward(self, turn: int, reward: int) -> None:
        group = self.pick(turn, [each for each in self.groups.values() if each.rows()])
        if group is None:
            return
        for index in group.rows():
            if group.rows() and index not in self.model.rewards:
                self.queue.ask("rm", p.SetTags, {PART: {index: {"reward": reward}}}, merge=True)
                self.model.rewarded(index, reward)
        self.hear()

    @rule()
    def read_rows(self) -> None:
        reply = self.queue.ask("rm", p.Fetch, PART, "rm", ["resp"], 1)
        if isinstance(reply, p.Batch):
            (index,) = p.unpack_indexes(reply.indexes).tolist()
            assert index not in self.read, "a row is read once"
            assert any(index in group.rows() for group in self.groups.values()), "rows that are gone are not read"
            self.read.add(index)
        elif not self.reader_is_over:  # which stays at its end, also when groups wait again
            here = {index for group in self.groups.values() for index in group.rows()}
            assert here <= self.read, "no row is skipped"
            if isinstance(reply, p.Ended):
                assert self.is_over()
                self.has_ended = self.reader_is_over = True

    # ---- trainers ----

    @rule(rank=st.integers(0, 1))
    def fetch(self, rank: int) -> None:
        """The next batch of a rank: it has trained those before."""
        rank %= self.dp_size
        number = self.batch[rank]
        for before in [key for key in self.given if key[0] == rank and key[1] < number]:
            for group in self.given[before]:
                self.model.trains("actor", group)
        known = number in self.drawn_rounds
        ready = self.model.drawable("actor")
        self.model.have_drawers = True
        reply = self.queue.fetch("actor", number, rank if self.dp_size > 1 else None, f"trainer{rank}")
        if isinstance(reply, p.Batch):
            heads = self.queue.heads(reply)
            if known:
                assert set(heads) <= set(self.drawn_rounds[number])
            else:
                wanted = [group.head for group in ready][: self.sizes["actor"]]
                self.draws("actor", wanted)
                self.drawn_rounds[number] = wanted
            assert set(heads) <= set(self.drawn_rounds[number]), "the oldest ones come first"
            if self.dp_size == 1 and all(self.groups[head].is_live for head in self.drawn_rounds[number]):
                assert heads == self.drawn_rounds[number]
            assert p.unpack_indexes(reply.indexes).tolist() == [i for h in heads for i in self.groups[h].rows()]
            others = [self.given.get((other, number), []) for other in range(self.dp_size) if other != rank]
            assert not any(self.groups[head] in own for own in others for head in heads), "ranks share no group"
            self.given[rank, number] = [self.groups[head] for head in heads]
            self.tokens_of[rank, number] = reply.token
            self.batch[rank] += 1
        elif isinstance(reply, p.Failed):
            assert reply.code in ("GateStarvedError", "ProducersGoneError") or known, reply
            self.batch[rank] += reply.code == "InvalidRequestError"
        elif not known:
            if isinstance(reply, p.NotReady):
                assert len(ready) < self.sizes["actor"], "a step is drawn as soon as it can be"
            else:
                assert self.is_over()
                self.has_ended = True
        self.hear()

    def draws(self, task: str, heads: list[int]) -> None:
        for head in heads:
            self.model.draws(task, self.groups[head])

    @rule(turn=TURNS)
    def ack(self, turn: int) -> None:
        key = self.pick(turn, self.tokens_of)
        if key is None:
            return
        self.queue.ask(f"trainer{key[0]}", p.Ack, PART, "actor", [self.tokens_of.pop(key)])
        for group in self.given.pop(key):
            if group.is_live:
                self.model.acks("actor", group)
        self.hear()

    @rule(critic=st.sampled_from(CRITICS))
    def fetch_critic(self, critic: str) -> None:
        """Without batch numbers: what it was given is trained at its next fetch."""
        for group in self.critic_has[critic]:
            self.model.trains("critic", group)
        self.critic_has[critic] = []
        ready = self.model.drawable("critic")
        self.model.have_drawers = True
        reply = self.queue.fetch("critic", client=critic)
        if isinstance(reply, p.Batch):
            heads = self.queue.heads(reply)
            assert heads == [group.head for group in ready][: self.sizes["critic"]]
            self.draws("critic", heads)
            self.critic_has[critic] = [self.groups[head] for head in heads]
        elif isinstance(reply, p.NotReady):
            assert len(ready) < self.sizes["critic"]
        else:
            assert self.is_over()
            self.has_ended = True
        self.hear()

    @rule(critic=st.sampled_from(CRITICS))
    def critic_gone(self, critic: str) -> None:
        for group in self.critic_has[critic]:
            self.model.trains("critic", group)
        self.critic_has[critic] = []
        self.queue.gone(critic)
        self.hear()

    @rule(critic=st.sampled_from(CRITICS), seldom=SELDOM)
    def critic_never_gets_its_batch(self, critic: str, seldom: int) -> None:
        """The other storage unit may end while it is on its way."""
        if self.critic_has[critic]:
            return
        self.model.have_drawers = True
        reply = self.queue.ask(critic, p.Fetch, PART, "critic", ["resp"], 1, confirm=False)
        if isinstance(reply, p.Batch):
            if self.unit and not seldom:
                self.queue.gone("unit")
            self.queue.ask(critic, p.Cancel, reply.id)
            if self.unit and not seldom:
                self.have_lost_rows()
            for head in self.queue.heads(reply):  # it was in state "drawn" for a moment
                assert "critic" not in self.groups[head].drawn
        self.hear()

    @rule(turn=TURNS)
    def reject(self, turn: int) -> None:
        """Not while a rank has still to get its share of the round: no rank would, and this account knows no shares."""
        rounds = [number for number in self.drawn_rounds if len(self.ranks_with(number)) < self.dp_size]
        under_way = {head for number in rounds for head in self.drawn_rounds[number]}
        drawn = [group for group in self.groups.values() if group.drawn and group.is_live]
        group = self.pick(turn, [group for group in drawn if group.head not in under_way])
        if group is not None:
            self.queue.reject([group.head])
            self.model.leaves(group, "rejected")
            self.hear()

    def ranks_with(self, number: int) -> list[int]:
        """Those that are past this batch."""
        return [rank for rank in range(self.dp_size) if self.batch[rank] > number]

    @rule(more=st.integers(0, 1))
    def advance(self, more: int) -> None:
        version = (self.model.version or 0) + more
        self.model.version = version
        self.trained_before(version)
        self.queue.done(self.queue.advance(version))
        self.hear()

    def trained_before(self, version: int) -> None:
        """What was drawn for earlier steps."""
        for task, trainer in self.queue.plane.state.leases.trainers.items():
            for batch in trainer.open_batches():
                for head in batch.groups if batch.step < version else ():
                    self.model.trains(task, self.groups[head])

    # ---- after each step ----

    @invariant()
    def each_group_is_where_it_should_be(self) -> None:
        seen = self.queue.states()
        for head, group in self.groups.items():
            state = seen.get(head, "gone")
            expected = "gone" if group.state in ("done", "cleared") else group.state
            assert state.replace("ready", "closed") == expected, (head, state, group)
            assert self.queue.members(head) == (group.rows() if group.is_live else []), group
        for task, budget in self.model.budgets.items() if self.groups else ():
            assert self.queue.charged(task) == self.model.charged(task) <= budget
        if PART in self.queue.plane.state.partitions:
            assert self.queue.plane.state.partitions[PART].num_live == self.model.num_rows()
        tokens = {lease.token for lease in self.queue.plane.state.leases.all_held()}
        assert tokens == set(self.model.leases), "leases"
        assert not (self.parked and self.model.leasable()), "those that wait get what there is"

    def teardown(self) -> None:
        """Once all have gone, nothing is held; new ones finish every group that can be."""
        if self.unit:
            self.unit_gone(0)
        for client in [*WORKERS, *CRITICS, "trainer0", "trainer1", "trainer", "feeder", "rm", "mender"]:
            self.forget_parked(client)
            if client in WORKERS:
                self.model.worker_gone(client)
            if client in CRITICS:
                for group in self.critic_has.get(client, ()):
                    self.model.trains("critic", group)
                self.critic_has[client] = []
            self.queue.gone(client)
        self.queue.pass_time(100.0)
        self.queue.check_nothing_held()
        self.model.pass_time(self.queue.now)
        if self.groups:
            self.finish()

    def finish(self) -> None:
        self.queue.ask("feeder", p.SealPartition, PART)
        for _ in range(80):
            self.queue.work(5, reward=1.0, worker="w9")
            rows = [index for group in self.groups for index in self.queue.members(group)]
            self.queue.ask("rm", p.SetTags, {PART: {index: {"reward": 1} for index in rows}}, merge=True)
            ended = []
            for rank in range(self.dp_size):
                at = rank if self.dp_size > 1 else None
                ended.append(self.queue.fetch("actor", self.batch[rank], at, f"t{rank}"))
                settled = isinstance(ended[-1], p.Failed) and ended[-1].code != "ProducersGoneError"
                self.batch[rank] += settled or isinstance(ended[-1], p.Batch)
            ended.append(self.queue.fetch("critic", client="c9"))
            if all(isinstance(reply, p.Ended) for reply in ended):
                break
        else:
            groups = self.queue.plane.state.partitions[PART].groups
            assert groups is not None
            known = [(each.index, each.state, list(each.drawn), each.trained) for each in groups.live.values()]
            raise AssertionError(f"it never ends: {known}, {ended}")
        for head, state in self.queue.states().items():
            assert state in ("drawn", "trained", *LEFT), (head, state, self.groups[head])


def check(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        GroupsMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_groups_are_where_a_second_account_of_them_says() -> None:
    check(40, 40)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_groups_are_where_a_second_account_of_them_says_in_long_runs() -> None:
    check(1500, 100)
