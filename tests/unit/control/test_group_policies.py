# SPDX-License-Identifier: Apache-2.0
"""One GroupSampler per framework: the cases that their own tests have, and the bounds that they promise."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.control.control_kit import load, refused, save
from tests.unit.control.groups_kit import PART, TRAINER, WORKER, Queue
from transfer_queue import GroupSampler
from transfer_queue import protocol as p
from transfer_queue.errors import SamplerError

SLOW_SCHEDULES, FAST_SCHEDULES = 10_000, 100


def a_queue(sampler: GroupSampler, count: int = 40, **terms: Any) -> Queue:
    queue = Queue()
    queue.register("actor", sampler)
    queue.advance(0)
    queue.add(count, ["actor"], **terms)
    return queue


def close(queue: Queue, *leases: Any, reward: float = 1.0) -> None:
    for lease in leases:
        assert isinstance(queue.put(lease, 1, [{"reward": reward}]), list)


def trained(queue: Queue, version: int) -> None:
    assert isinstance(queue.advance(version), p.Done)


class OfAUser(GroupSampler):
    """A subclass that takes the newest groups first."""

    def pick(self, queue: Any) -> list[Any]:
        return list(queue)[: -self.groups - 1 : -1]


def test_a_subclass_draws_groups_as_its_base_does_by_its_own_choice():
    queue = Queue(sampler_modules=(__name__,))
    queue.register("actor", OfAUser(groups=1, ahead=3))
    queue.add(2, ["actor"])
    first, second = queue.lease(count=2)
    close(queue, first, second)
    assert [queue.draw("actor", batch=index) for index in range(2)] == [[second.head], [first.head]]


@pytest.mark.parametrize(("stale", "limits"), [("drop", ["ahead"]), ("wait", ["max_staleness"])])
def test_full_slots_are_put_down_to_the_options_that_bound_them(stale, limits):
    queue = a_queue(GroupSampler(groups=1, ahead=4, max_staleness=1, stale=stale))
    stats = queue.ask(TRAINER, p.GetStats).value
    assert stats["partitions"][PART]["groups"]["slots"]["actor"]["limits"] == limits


def test_a_close_that_is_repeated_says_that_its_rows_are_stored():
    queue = a_queue(GroupSampler(groups=1, ahead=3))
    (lease,) = queue.lease()
    close(queue, lease)
    refused(queue.put(lease), "LeaseLostError", "closed its group already, so those rows are stored")


def test_a_close_that_comes_after_its_group_was_closed_without_it_says_that_nothing_is_stored():
    queue = a_queue(GroupSampler(groups=1, ahead=3), 1, parts=3, min_parts=1, deadline_s=5.0)
    (lease,) = queue.lease()
    queue.put(lease, parts=[0])
    queue.pass_time(6.0)
    refused(queue.put(lease, parts=[1, 2]), "LeaseLostError", "nothing was written: its group is closed")


# ---- verl: groups too old are dropped, or the draw waits; DAPO refills what its filter rejects ----


def test_drop_throws_away_what_is_older_than_the_threshold_and_aborts_its_leases():
    queue = a_queue(GroupSampler(groups=2, ahead=9, max_staleness=8, stale="drop"))
    old, running = queue.lease(count=2)
    close(queue, old)
    trained(queue, 8)
    assert queue.states()[old.head] == "closed"
    trained(queue, 9)
    assert [queue.states()[lease.head] for lease in (old, running)] == ["stale", "stale"]
    assert queue.ask(WORKER, p.RenewLeases, [running.token]).value == [running.token]
    refused(queue.put(running), "LeaseLostError", "stale")


def test_what_is_dropped_frees_its_slot_at_once():
    queue = a_queue(GroupSampler(groups=1, ahead=0, max_staleness=0, stale="drop"))
    (lease,) = queue.lease()
    assert queue.lease("other", wait_s=9.0) is None
    trained(queue, 1)
    (granted,) = queue.inbox
    assert granted.reply.leases[0].head != lease.head


def test_wait_draws_nothing_while_a_running_group_would_get_too_old():
    queue = a_queue(GroupSampler(groups=1, ahead=3, max_staleness=1, stale="wait"))
    slow, quick = queue.lease(count=2)
    close(queue, quick)
    # Trained at step 0, quick is fine, and slow can follow at step 1, which is its last one.
    assert queue.draw("actor", batch=0) == [quick.head]
    trained(queue, 1)
    (third,) = queue.lease()
    close(queue, third)
    assert queue.draw("actor", batch=1) == []
    close(queue, slow)
    assert queue.draw("actor", batch=1) == [slow.head]
    assert "stale" not in queue.states().values()


def test_dynamic_sampling_refills_exactly_what_its_filter_rejects_and_discards_the_surplus():
    gate = "std(reward) > 0"
    queue = a_queue(GroupSampler(groups=2, ahead=0, oversample=2, max_staleness=0, stale="drop", gate=gate), parts=2)
    leases = queue.lease(count=40)
    assert len(leases) == 4
    queue.put(leases[0], 1, [{"reward": 1.0}, {"reward": 1.0}])
    assert queue.states()[leases[0].head] == "rejected"
    (refill,) = queue.lease(count=40)
    for lease in (leases[1], leases[2], refill):
        queue.put(lease, 1, [{"reward": 1.0}, {"reward": 0.0}])
    assert queue.draw("actor", batch=0) == [leases[1].head, leases[2].head]
    trained(queue, 1)
    assert [queue.states()[lease.head] for lease in (leases[3], refill)] == ["stale", "stale"]
    assert len(queue.lease(count=40)) == 4


def test_a_filter_that_rejects_everything_says_so_with_what_it_saw():
    queue = a_queue(GroupSampler(groups=1, ahead=0, gate="std(reward) > 0"), parts=2)
    for _ in range(10):
        queue.work(1, reward=0.0)
    refused(queue.fetch("actor", batch=0), "GateStarvedError", "std(reward) was 0 (10x)", "Loosen the gate")
    queue.register("actor", GroupSampler(groups=1, ahead=0))
    queue.work(1, reward=0.0)
    assert len(queue.draw("actor", batch=0)) == 1


def test_a_filter_that_rejects_everything_withholds_neither_a_step_that_is_ready_nor_the_end():
    queue = a_queue(GroupSampler(groups=1, ahead=1, gate="std(reward) > 0"), count=12, parts=2)
    (good,) = queue.lease()
    queue.put(good, 1, [{"reward": 1.0}, {"reward": 0.0}])
    for _ in range(10):
        queue.work(1, reward=0.0)
    assert queue.draw("actor", batch=0) == [good.head]
    refused(queue.fetch("actor", batch=1), "GateStarvedError", "std(reward) was 0 (10x)")
    queue.work(1, reward=0.0)
    queue.ask(TRAINER, p.SealPartition, PART)
    assert isinstance(queue.fetch("actor", batch=1), p.Ended)


# ---- NeMo-RL: a window of ages, look-ahead, or in order of weights ----


def test_windowed_takes_the_freshest_within_the_age_window():
    queue = a_queue(GroupSampler(groups=1, ahead=5, max_staleness=2, stale="drop", order="newest"))
    leases = {}
    for version in range(4):
        trained(queue, version)
        (leases[version],) = queue.lease()
        close(queue, leases[version])
    assert queue.draw("actor", batch=0) == [leases[3].head]
    assert queue.states()[leases[0].head] == "stale"
    assert queue.draw("actor", batch=1) == [leases[2].head]  # for step 4, so version 1 is too old by now
    assert queue.draw("actor", batch=2) == []


def test_too_few_groups_are_no_batch():
    queue = a_queue(GroupSampler(groups=2, ahead=2, max_staleness=1, stale="drop"))
    queue.work(1)
    assert isinstance(queue.fetch("actor", batch=0), p.NotReady)
    queue.work(1)
    assert len(queue.draw("actor", batch=0)) == 2


def test_ready_first_takes_groups_as_they_became_ready_also_after_others_were_deleted():
    queue = a_queue(GroupSampler(groups=1, ahead=9, order="arrival"))
    leases = queue.lease(count=6)
    assert queue.draw("actor", batch=0) == []
    close(queue, *reversed(leases))
    assert queue.draw("actor", batch=0) == [leases[5].head]
    # Rows move when many are deleted.
    others = queue.add(3000)
    queue.ask(TRAINER, p.ClearSamples, PART, p.pack_indexes(others))
    assert queue.draw("actor", batch=1) == [leases[4].head]
    assert queue.draw("actor", batch=2) == [leases[3].head]


def test_in_order_of_weights_takes_older_versions_first_whatever_was_ready_first():
    queue = a_queue(GroupSampler(groups=1, ahead=5, order="oldest"))
    leases = []
    for version in range(3):
        trained(queue, version)
        leases += queue.lease()
    close(queue, *reversed(leases))
    assert [queue.draw("actor", batch=batch) for batch in range(3)] == [[lease.head] for lease in leases]


# ---- torchtitan: a window over the order of leases ----


def test_a_window_lets_few_overtake_a_slow_group_and_then_waits_for_it():
    queue = a_queue(GroupSampler(groups=1, ahead=9, window=3))
    slow, *quick = queue.lease(count=6)
    close(queue, *quick)
    assert [queue.draw("actor", batch=batch) for batch in range(2)] == [[quick[0].head], [quick[1].head]]
    assert queue.draw("actor", batch=2) == []
    close(queue, slow)
    assert [queue.draw("actor", batch=batch) for batch in (2, 3)] == [[slow.head], [quick[2].head]]


def test_a_window_of_one_step_is_strictly_in_order():
    queue = a_queue(GroupSampler(groups=2, ahead=9, window=2))
    leases = queue.lease(count=4)
    close(queue, *leases[1:])
    assert queue.draw("actor", batch=0) == []
    close(queue, leases[0])
    assert queue.draw("actor", batch=0) == [lease.head for lease in leases[:2]]


def test_a_window_smaller_than_a_step_is_refused():
    with pytest.raises(SamplerError, match="window must be at least groups"):
        GroupSampler(groups=4, window=3)


@pytest.mark.parametrize(("name", "wrong"), [("gate", 5), ("balance", 5), ("oversample", "2")])
def test_settings_of_another_type_are_refused_by_name(name, wrong):
    with pytest.raises(SamplerError, match=f"{name} must be .* got {wrong!r}"):
        GroupSampler(groups=4, **{name: wrong})


# ---- SkyRL and AReaL: capacity by steps ----


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_capacity_is_one_step_and_those_ahead_and_grows_by_one_step_per_step(ahead):
    queue = a_queue(GroupSampler(groups=2, ahead=ahead, order="arrival"))
    assert len(queue.work(40)) == (ahead + 1) * 2
    assert queue.work(40) == []
    queue.draw("actor", batch=0)
    assert queue.work(40) == []
    trained(queue, 1)
    assert len(queue.work(40)) == 2


def test_a_filtered_group_gives_its_capacity_back():
    queue = a_queue(GroupSampler(groups=2, ahead=1, order="arrival"))
    first, *_ = queue.work(40)
    assert queue.work(40) == []
    queue.reject([first])
    assert len(queue.work(40)) == 1


def test_a_failed_rollout_keeps_its_capacity_for_its_next_attempt():
    queue = a_queue(GroupSampler(groups=1, ahead=0, order="arrival"))
    (lease,) = queue.lease()
    queue.end(lease, "release", "the engine died")
    (again,) = queue.lease()
    assert (again.head, again.attempt) == (lease.head, 2)
    assert not isinstance(queue.lease(), list)


# ---- tinker: never more than some steps begun, and nothing is thrown away ----


def test_groups_begun_and_untrained_never_exceed_the_steps_off_policy():
    queue = a_queue(GroupSampler(groups=3, ahead=2))
    assert len(queue.lease(count=40)) == 9
    assert queue.charged("actor") == 9


def test_old_groups_are_trained_all_the_same():
    queue = a_queue(GroupSampler(groups=1, ahead=1, max_staleness=0))
    (lease,) = queue.lease()
    trained(queue, 5)
    close(queue, lease)
    assert queue.draw("actor", batch=0) == [lease.head]


# ---- TRL and prime-rl: dropped by age, and work on it is cancelled early ----


def test_leases_that_can_not_be_used_any_more_are_aborted_when_the_version_advances():
    queue = a_queue(GroupSampler(groups=1, ahead=3, max_staleness=1, stale="drop"))
    (old,) = queue.lease()
    renewal = queue.ask(WORKER, p.RenewLeases, [old.token], wait_s=30.0)
    assert renewal is None
    trained(queue, 1)
    assert queue.inbox == []
    trained(queue, 2)
    (told,) = queue.inbox
    assert (told.client, told.reply.value) == (WORKER, [old.token])


# ---- a filter of leases ----


def test_a_lease_that_waits_is_answered_by_the_tag_that_makes_a_group_match():
    queue = Queue()
    (head,) = queue.add(1)
    assert queue.lease(where="env == 'math'", wait_s=30.0) is None
    queue.ask(TRAINER, p.SetTags, {PART: {head: {"env": "math"}}}, True)
    (granted,) = queue.inbox
    assert [lease.head for lease in granted.reply.leases] == [head]


# ---- after a restore ----


def test_ranks_of_a_round_that_was_restored_train_in_one_step():
    queue = Queue()
    queue.register("actor", GroupSampler(groups=2, ahead=2, max_staleness=1, stale="drop"), dp_size=2)
    queue.advance(0)
    queue.add(4, ["actor"])
    queue.work(4)
    assert all(queue.draw("actor", batch=0, rank=rank) for rank in range(2))
    load(queue.plane, save(queue.plane))
    # One step is drawn and not trained, so what is drawn next is for step 1, and one version old.
    assert all(queue.draw("actor", batch=1, rank=rank, trained=0) for rank in range(2))


def test_what_is_too_old_is_dropped_at_the_first_draw_after_a_restore_too():
    queue = a_queue(GroupSampler(groups=1, ahead=3, max_staleness=1, stale="drop"), 3)
    queue.work(3)
    assert queue.draw("actor", batch=0)
    trained(queue, 1)
    assert queue.draw("actor", batch=1)
    load(queue.plane, save(queue.plane))
    assert queue.draw("actor", batch=2, trained=1) == []
    assert sorted(queue.states().values()) == ["drawn", "stale", "trained"]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_draw_for_which_the_newest_version_is_too_old_waits_for_the_next_one_and_drops_nothing(sealed):
    queue = a_queue(GroupSampler(groups=1, ahead=2, max_staleness=1, stale="drop"), 4 - sealed)
    if sealed:
        queue.ask(TRAINER, p.SealPartition, PART)
    queue.work(3)
    assert [len(queue.draw("actor", batch=index, trained=0)) for index in range(2)] == [1, 1]
    assert queue.fetch("actor", batch=2, trained=0, wait_s=30.0) is None
    assert sorted(queue.states().values()) == ["drawn", "drawn", "ready"] + ["waiting"] * (not sealed)
    trained(queue, 1)  # which the third one was leased too early for
    assert sorted(queue.states().values()) == ["drawn", "stale", "trained"] + ["waiting"] * (not sealed)
    last = queue.work(1)
    (answer,) = queue.inbox
    assert isinstance(answer.reply, p.Ended) if sealed else queue.heads(answer.reply) == last


def test_what_was_drawn_in_a_partition_and_left_there_is_no_step():
    queue = a_queue(GroupSampler(groups=1, ahead=2, max_staleness=1, stale="drop"), 3)
    queue.work(3)
    assert [len(queue.draw("actor", batch=index, rank=0)) for index in range(2)] == [1, 1]  # the first one is trained
    queue.ask(TRAINER, p.Trained, PART, "actor", 1)
    trained(queue, 1)
    queue.add(3, ["actor"], partition="next")
    assert queue.fetch("actor", batch=0, rank=0, partition="next", wait_s=30.0) is None
    queue.advance(1, partition="next")
    queue.ask(TRAINER, p.MoveOn, "next", "actor", [PART])
    assert len(queue.work(1, partition="next")) == 1
    (answer,) = queue.inbox
    assert isinstance(answer.reply, p.Batch)
    assert "stale" not in queue.states("next").values()


# ---- bounds ----


class Schedule:
    """Workers of any speed and one trainer, in a random order. ``ages``: of the groups that were trained."""

    def __init__(self, sampler: GroupSampler, seed: int, check: Callable[[Schedule], None]) -> None:
        self.queue = Queue(check=False)
        self.sampler, self.random, self._check = sampler, random.Random(seed), check
        self.queue.register("actor", sampler)
        self.queue.advance(0)
        self.heads = self.queue.add(60, ["actor"])
        self.version, self.num_drawn = 0, 0
        self.versions: dict[int, int] = {}
        self.running: list[Any] = []
        self.begun: list[int] = []
        self.drawn: list[int] = []
        self.ages: list[int] = []
        self.speed = self.random.choice([0.1, 0.5, 0.9])

    def run(self, steps: int = 40) -> None:
        for _ in range(steps):
            self.random.choice([self.lease, self.lease, self.close, self.close, self.train])()
            self._check(self)

    def lease(self) -> None:
        got = self.queue.lease(count=self.random.randint(1, 4))
        for lease in got if isinstance(got, list) else ():
            self.versions[lease.head] = lease.version
            self.running.append(lease)
            self.begun.append(lease.head)

    def close(self) -> None:
        """The oldest may be slow."""
        for lease in list(self.running):
            if self.random.random() < self.speed * (0.2 if lease is self.running[0] else 1.0):
                self.running.remove(lease)
                reward = self.random.choice([0.0, 1.0, 1.0])
                got = self.queue.put(lease, 1, [{"reward": reward}])
                assert isinstance(got, list) or got.code == "LeaseLostError"

    def train(self) -> None:
        """The step that trains now; its batch may be asked for some time before it comes."""
        heads = self.queue.draw("actor", batch=self.num_drawn)
        if not heads:
            return
        assert len(heads) == self.sampler.groups
        self.ages += [self.version - self.versions[head] for head in heads]
        self.drawn += heads
        self.num_drawn += 1
        self.version += 1
        self.queue.advance(self.version)

    def finish(self) -> None:
        """No more slow workers: whatever is left is trained, but less than one step."""
        idle, self.speed = 0, 1e9
        while idle < 3:
            before = (len(self.begun), self.num_drawn)
            self.lease()
            self.close()
            self.train()
            self._check(self)
            idle = idle + 1 if (len(self.begun), self.num_drawn) == before else 0
        left = [head for head, state in self.queue.states().items() if state in ("waiting", "closed", "ready")]
        assert len(left) < self.sampler.groups, left

    def num(self, state: str) -> int:
        return sum(own == state for own in self.queue.states().values())


def no_older_than(bound: int) -> Callable[[Schedule], None]:
    def check(run: Schedule) -> None:
        assert max(run.ages, default=0) <= bound

    return check


def no_older_and_nothing_dropped(bound: int) -> Callable[[Schedule], None]:
    def check(run: Schedule) -> None:
        assert max(run.ages, default=0) <= bound
        assert run.num("stale") == 0

    return check


def at_most_ahead(groups: int, ahead: int) -> Callable[[Schedule], None]:
    def check(run: Schedule) -> None:
        left = run.num("rejected")
        assert len(run.begun) - left <= (ahead + run.version + 1) * groups
        assert run.queue.charged("actor") <= (ahead + 1) * groups
        assert run.num("stale") == 0

    return check


def overtaken_by_few(window: int, bound: int) -> Callable[[Schedule], None]:
    def check(run: Schedule) -> None:
        assert max(run.ages, default=0) <= bound
        at = {head: place for place, head in enumerate(run.drawn)}
        for place, head in enumerate(run.begun):
            later = [other for other in run.begun[place + 1 :] if at.get(other, 10**9) < at.get(head, 10**8)]
            assert len(later) < window

    return check


BOUNDS = {
    "verl drop": (GroupSampler(groups=2, ahead=9, max_staleness=8, stale="drop"), no_older_than(8)),
    "verl drop 1": (GroupSampler(groups=2, ahead=3, max_staleness=1, stale="drop"), no_older_than(1)),
    "verl wait": (
        GroupSampler(groups=2, ahead=9, max_staleness=3, stale="wait"), no_older_and_nothing_dropped(3),
    ),
    "verl wait 0": (
        GroupSampler(groups=2, ahead=2, max_staleness=0, stale="wait"), no_older_and_nothing_dropped(0),
    ),
    "verl wait, gate": (
        GroupSampler(groups=2, ahead=9, max_staleness=1, stale="wait", gate="max(reward) > 0"),
        no_older_and_nothing_dropped(1),
    ),
    "DAPO": (
        GroupSampler(groups=2, ahead=0, oversample=2, max_staleness=0, stale="drop", gate="max(reward) > 0"),
        no_older_than(0),
    ),
    "NeMo-RL windowed": (
        GroupSampler(groups=2, ahead=4, max_staleness=2, stale="drop", order="newest"), no_older_than(2),
    ),
    "NeMo-RL ready first": (GroupSampler(groups=2, ahead=2, order="arrival"), at_most_ahead(2, 2)),
    "NeMo-RL weight fifo": (GroupSampler(groups=2, ahead=2, order="oldest"), at_most_ahead(2, 2)),
    "torchtitan": (GroupSampler(groups=2, ahead=1, window=4), overtaken_by_few(4, 1 + math.ceil(3 / 2))),
    "torchtitan 3": (GroupSampler(groups=3, ahead=2, window=7), overtaken_by_few(7, 2 + math.ceil(6 / 3))),
    "SkyRL, AReaL": (GroupSampler(groups=3, ahead=1, order="arrival"), at_most_ahead(3, 1)),
    "tinker": (GroupSampler(groups=3, ahead=2), at_most_ahead(3, 2)),
    "TRL": (GroupSampler(groups=2, ahead=4, max_staleness=4, stale="drop"), no_older_than(4)),
    "prime-rl": (GroupSampler(groups=2, ahead=5, max_staleness=2, stale="drop"), no_older_than(2)),
}  # fmt: skip


def hold(name: str, first: int, count: int) -> None:
    sampler, check = BOUNDS[name]
    num_drawn = 0
    for seed in range(first, first + count):
        run = Schedule(sampler, seed, check)
        try:
            run.run()
            run.finish()
        except AssertionError as error:
            raise AssertionError(f"{name}, seed {seed}: {error}") from error
        num_drawn += run.num_drawn
    assert num_drawn >= count, "the schedules train"


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bound_holds(name):
    hold(name, 0, FAST_SCHEDULES // len(BOUNDS))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", BOUNDS)
def test_the_bound_holds_over_ten_thousand_schedules(name):
    hold(name, 1000, SLOW_SCHEDULES // len(BOUNDS))


def test_a_reward_costs_as_much_however_many_groups_wait_for_theirs() -> None:
    def calls_of_a_reward(groups: int) -> int:
        queue = Queue(check=False)
        queue.register("actor", GroupSampler(groups=2, ahead=groups, gate="all(reward)"))
        queue.add(groups, tasks=("actor",))
        heads = queue.work(groups)
        assert queue.fetch("actor", wait_s=60.0) is None, "a trainer waits for the first step"
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        reward = p.SetTags(queue.number(), {PART: {queue.members(heads[0])[0]: {"reward": 1.0}}}, True)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            queue.send(WORKER, reward)
        finally:
            sys.setprofile(before)
        assert queue.tags(heads[0])["group.state"] == "ready"
        return calls

    assert calls_of_a_reward(200) < 1.2 * calls_of_a_reward(20)


# ---- which rank gets which group ----


def test_ranks_get_groups_of_about_the_same_length_in_all():
    queue = Queue()
    queue.register("actor", GroupSampler(groups=4, balance="length"), dp_size=2)
    queue.add(4, ["actor"])
    leases = queue.lease(count=4)
    for lease, length in zip(leases, (8, 1, 2, 7), strict=True):
        assert isinstance(queue.put(lease, 2, [{"length": length}] * 2), list)
    shares = [queue.draw("actor", batch=0, rank=rank) for rank in range(2)]
    heads = [lease.head for lease in leases]
    assert sorted(map(sorted, shares)) == [[heads[0], heads[1]], [heads[2], heads[3]]]


def test_a_row_without_a_length_is_named_where_ranks_are_balanced_by_it():
    queue = Queue()
    queue.register("actor", GroupSampler(groups=2, balance="length"), dp_size=2)
    queue.add(2, ["actor"])
    for lease in queue.lease(count=2):
        queue.put(lease, 1, [{"reward": 1.0}])
    refused(queue.fetch("actor", batch=0, rank=0), "SamplerError", "has no tag 'length'")


def test_a_retry_whose_partition_is_cleared_meanwhile_says_so():
    queue, count = Queue(check=False), 6_000
    queue.add(count)
    for lease in queue.lease(count=count):
        queue.end(lease, "reject", "no use")
    queue.plane.make_turns_short()
    number = queue.number()
    assert queue.plane.handle(TRAINER, p.RetryGroups(number, PART, "group.state == 'rejected'"), 0.0) == []
    queue.ask(TRAINER, p.ClearPartition, PART)
    (answer,) = [to.reply for to in queue.inbox if to.reply.id == number]
    refused(answer, "UnknownPartitionError", "was cleared meanwhile")
