# SPDX-License-Identifier: Apache-2.0
"""When groups give their slots back and streams of groups end: tails, other partitions, resets, filters, restores."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest

from tests.local_plane import tags_of
from tests.unit.control.control_kit import load, refused, save
from tests.unit.control.groups_kit import FEEDER, PART, TRAINER, Queue
from transfer_queue import GroupSampler
from transfer_queue import protocol as p


def sealed(queue: Queue, partition: str = PART) -> None:
    queue.done(queue.ask(TRAINER, p.SealPartition, partition))


def a_queue(sampler: GroupSampler, count: int, *tasks: str, **more: object) -> Queue:
    """Groups that are closed, and no more will come."""
    queue = Queue()
    for task in tasks or ("actor",):
        queue.register(task, sampler, **more)
    queue.add(count, tasks or ("actor",))
    queue.work(count)
    sealed(queue)
    return queue


def test_groups_that_a_tail_drops_leave_and_their_slots_are_free():
    queue = a_queue(GroupSampler(groups=4, ahead=0, oversample=2.0), 6, dp_size=2)
    first = [queue.draw("actor", rank=rank, batch=0) for rank in (0, 1)]
    ends = [queue.fetch("actor", rank=rank, batch=1) for rank in (0, 1)]
    assert [end.reason for end in ends] == ["sealed", "sealed"]
    left = queue.states().keys() - {head for heads in first for head in heads}
    assert {queue.states()[head] for head in left} == {"expired"}
    assert len(left) == 2
    assert queue.charged("actor") == 0, "what was drawn is trained, and what was left over has left"
    assert queue.tags(min(left))["group.reason"] == ["left over: too few groups for a last step of task 'actor'"]


def test_what_one_task_can_draw_no_more_is_there_for_the_other():
    queue = a_queue(GroupSampler(groups=2, ahead=1), 3, "actor", "critic", tail="drop")
    queue.draw("actor")
    assert isinstance(queue.fetch("actor"), p.Ended)
    queue.register("critic", GroupSampler(groups=1, ahead=3))
    assert len([heads for _ in range(4) if (heads := queue.draw("critic"))]) == 3
    assert queue.charged("actor") == queue.charged("critic") == 0


def test_a_reader_that_asks_in_another_partition_has_trained_what_it_had():
    queue = Queue()
    queue.register("actor", GroupSampler(groups=1, ahead=0))
    for name in ("one", "two"):
        queue.add(1, ["actor"], partition=name)
    queue.work(partition=["one", "two"])
    assert queue.draw("actor", partition="one")
    assert queue.lease(wait_s=9.0, partition=["one", "two"]) is None, "the only slot is taken"
    assert queue.fetch("actor", partition="two", wait_s=9.0) is None
    assert any(isinstance(to.reply, p.LeasedGroups) for to in queue.inbox)


def test_a_refused_put_does_not_bring_its_partition_back():
    queue = Queue()
    queue.add(1)
    (lease,) = queue.lease()
    sealed(queue)
    queue.done(queue.ask(TRAINER, p.ClearPartition, PART))
    refused(queue.put(lease), "LeaseLostError", "nothing was written")
    refused(queue.end(lease, "release", "late"), "LeaseLostError", "nothing was written")
    assert PART not in queue.plane.state.partitions


def test_a_full_queue_says_how_many_heads_of_groups_that_have_left_take_room():
    queue = Queue(capacity=3)
    queue.register("actor", GroupSampler(groups=1, ahead=1))
    queue.add(3, ["actor"])
    for lease in queue.lease(count=2):
        queue.end(lease, "reject", "too easy")
    refused(queue.ask(FEEDER, p.Insert, "other", 1, wait_s=0.0), "StorageFullError")
    said = queue.plane.held_up_by()
    assert said.startswith(" 2 heads of groups that have left (rejected, failed, expired or stale) take room")
    assert f"in partition {PART!r}: kv_clear the keys" in said


def test_what_a_named_task_has_yet_to_train_is_not_cleared_as_consumed():
    queue = a_queue(GroupSampler(groups=1), 1)
    queue.ask("reward", p.Fetch, PART, "reward", ["resp"], 1)
    cleared = queue.ask(TRAINER, p.ClearConsumed, PART, ["reward"])
    assert len(p.unpack_indexes(cleared.indexes)) == 0
    assert len(queue.draw("actor")) == 1


def test_open_batches_keep_their_groups_when_consumption_is_reset():
    queue = a_queue(GroupSampler(groups=1, ahead=1), 2, dp_size=1)
    before = [queue.draw("actor", rank=0, batch=number) for number in (0, 1)]
    queue.done(queue.ask(TRAINER, p.ResetConsumption, PART, "actor"))
    assert [queue.draw("actor", rank=0, batch=number) for number in (0, 1)] == before
    assert queue.fetch("actor", rank=0, batch=2).reason == "sealed"


def test_groups_that_do_not_match_a_filter_do_not_keep_its_stream_open():
    queue = Queue()
    queue.register("actor", GroupSampler(groups=1, ahead=1))
    queue.add(2, ["actor"])
    for lease, env in zip(queue.lease(count=2), ("math", "code"), strict=True):
        queue.put(lease, 1, [{"env": env}])
    sealed(queue)
    batch = queue.fetch("actor", where="env == 'code'")
    assert next(iter(tags_of(batch).values()))["env"] == "code"
    assert isinstance(queue.fetch("actor", where="env == 'code'"), p.Ended)
    assert queue.draw("actor", where="env == 'math'"), "another filter still draws the other one"


def test_a_group_that_lacks_its_gates_tags_keeps_a_filtered_stream_open():
    queue = Queue()
    queue.register("actor", GroupSampler(groups=1, gate="max(q) > 0"))
    queue.add(1, ["actor"])
    (lease,) = queue.lease()
    (row,) = queue.put(lease, 1, [{"env": "math"}])
    sealed(queue)
    assert isinstance(queue.fetch("actor", where="env == 'math'"), p.NotReady)
    queue.done(queue.ask(TRAINER, p.SetTags, {PART: {row: {"q": 1}}}, True))
    assert queue.draw("actor", where="env == 'math'")


def test_a_finite_read_ends_when_all_groups_were_given():
    queue = Queue()
    queue.register("actor", GroupSampler(groups=1, ahead=1), dp_size=1)
    queue.add(1, ["actor"])
    read = {"rank": 0, "finite": True, "pass_start": 0}
    assert isinstance(queue.fetch("actor", batch=0, **read), p.NotReady), "more may come: it is still worked on"
    queue.work()
    assert queue.draw("actor", batch=0, **read)
    assert isinstance(queue.fetch("actor", batch=1, **read), p.Ended)


# ---- restores ----


def test_a_closed_group_that_lacks_its_gates_tags_expires_after_a_restore_too():
    queue = Queue()
    queue.register("actor", GroupSampler(groups=1, gate="std(r) > 0"))
    (head,) = queue.add(1, ["actor"], deadline_s=5.0)
    queue.work()
    load(queue.plane, save(queue.plane))
    queue.pass_time(6.0)
    (state,) = queue.states().values()
    assert state == "expired", head


def test_after_a_restore_a_version_that_went_back_hides_nothing_that_is_too_old():
    queue = Queue()
    queue.register("actor", GroupSampler(groups=1, ahead=5, max_staleness=4, stale="drop"))
    queue.add(2, ["actor"])
    queue.advance(5)
    (newer,) = queue.lease()
    queue.advance(2, resumed=True)
    (older,) = queue.lease()
    queue.put(newer), queue.put(older)
    state = save(queue.plane)
    other = Queue()
    other.register("actor", GroupSampler(groups=1, ahead=5, max_staleness=4, stale="drop"))
    load(other.plane, state)
    other.advance(8)
    assert sorted(other.states().values()) == ["closed", "stale"]


@pytest.mark.parametrize("server", [1, 2**24 - 1])
def test_two_servers_that_restore_the_same_state_give_out_different_tokens(server):
    queue = Queue()
    queue.register("actor", GroupSampler(groups=1, ahead=9))
    queue.add(4, ["actor"])
    state = save(queue.plane)
    tokens, acks = set(), set()
    for number in (0, server):
        other = Queue(server=number)
        other.register("actor", GroupSampler(groups=1, ahead=9), dp_size=1)
        load(other.plane, state)
        tokens |= {lease.token for lease in other.lease(count=2)}
        other.work()
        acks.add(other.fetch("actor", rank=0, batch=0).token)
    assert len(tokens) == 4
    assert len(acks) == 2


def test_groups_that_have_left_are_counted_by_state_and_reason_also_after_a_restore():
    queue = Queue()
    queue.register("actor", GroupSampler(groups=1, ahead=20))
    queue.add(14, ["actor"], attempts=1, deadline_s=5.0)
    for number in range(11):
        (lease,) = queue.lease()
        queue.end(lease, "release", f"cause {number // 2}" if number < 4 else f"other cause {number}", blame="sample")
    (lease,) = queue.lease()
    queue.end(lease, "reject", "no use")
    queue.lease(count=2)
    queue.pass_time(6.0)
    expected = {
        "failed": {"cause 0": 2, "cause 1": 2, **{f"other cause {n}": 1 for n in range(4, 10)}, "others": 1},
        "rejected": {"no use": 1}, "expired": {"0 of 1 parts were closed in 5 s": 2},
    }  # fmt: skip
    for _ in range(2):
        groups = queue.ask(TRAINER, p.GetStats).value["partitions"][PART]["groups"]
        assert (groups["left"], groups["rejected"]) == (expected, {"no use": 1})
        load(queue.plane, save(queue.plane))


def test_what_has_left_takes_no_memory_until_its_deadline():
    queue = Queue()
    queue.register("actor", GroupSampler(groups=1, ahead=9))
    queue.add(2, ["actor"], deadline_s=(patience_s := 3600.125))
    queue.lease(count=2)
    partition = weakref.ref(queue.plane.state.partitions[PART])

    def num_kept() -> int:
        own = [each for each in gc.get_objects() if type(each).__name__ == "Group" and hasattr(each, "terms")]
        return sum(each.terms.deadline_s == patience_s for each in own)

    assert num_kept() == 2
    queue.done(queue.ask(TRAINER, p.ClearPartition, PART))
    gc.collect()
    assert (partition(), num_kept()) == (None, 0)
    queue.pass_time(4000.0)


def test_groups_that_are_trained_before_their_deadlines_leave_no_timers():
    queue = Queue()
    queue.register("actor", GroupSampler(groups=4))
    for step in range(30):
        queue.add(4, ["actor"], deadline_s=3600.0)
        queue.work(4)
        assert len(queue.draw("actor", batch=step)) == 4
        queue.pass_time(1.0)
    assert len(queue.plane.calls._timers) <= 2  # one of this partition, one of its worker


def test_many_deadlines_at_once_and_many_retries_leave_others_their_turns():
    many, queue = 400, Queue(check=False)
    calls, looks = queue.plane.calls, itertools.count(step=1e-3)
    calls.turn = type(calls.turn)(looks.__next__)  # four looks at the clock are a turn
    queue.add(many, deadline_s=10.0)
    queue.lease(count=many)
    queue.now = 10.0
    queue.plane.expire(queue.now)
    assert 0 < list(queue.states().values()).count("expired") < many
    queue.pass_time(0.0)
    assert set(queue.states().values()) == {"expired"}
    number = queue.number()
    assert queue.plane.handle(TRAINER, p.RetryGroups(number, PART, None), queue.now) == []
    assert 0 < list(queue.states().values()).count("waiting") < many
    queue.pass_time(0.0)
    assert set(queue.states().values()) == {"waiting"}
    queue.plane.check_invariants()


# ---- partitions that a task has left ----


def go_on(queue: Queue, to: str, *left: str, task: str = "actor") -> None:
    queue.done(queue.ask(TRAINER, p.MoveOn, to, task, list(left)))


def two_epochs(*tasks: str, ahead: int = 1) -> Queue:
    queue = Queue()
    for task in tasks:
        queue.register(task, GroupSampler(groups=1, ahead=ahead))
    for name in ("one", "two"):
        queue.add(4, tasks, partition=name)
    return queue


def test_groups_of_a_partition_that_its_task_has_left_hold_no_slots_whatever_they_wait_for():
    queue = two_epochs("actor")
    queue.work(partition="one")
    (running,) = queue.lease(partition="one")
    assert queue.lease(wait_s=9.0, partition="two") is None, "two slots, both taken"
    go_on(queue, "two", "one")
    assert queue.states("one") == dict.fromkeys(queue.states("one"), "expired")
    refused(queue.put(running), "LeaseLostError")
    assert any(isinstance(to.reply, p.LeasedGroups) for to in queue.inbox)
    assert queue.charged("actor") == 1
    (late,) = queue.add(1, ["actor"], partition="one")
    assert queue.states("one")[late] == "expired", "of what is fed later, too"
    sealed(queue, "one")
    assert isinstance(queue.lease(partition="one"), p.Ended)


def test_a_task_that_has_left_is_told_the_end_but_gets_what_was_drawn_and_may_come_back():
    queue = two_epochs("actor")
    queue.work(partition="one")
    drawn = queue.draw("actor", rank=0, batch=0, partition="one")
    go_on(queue, "two", "one")
    assert queue.draw("actor", rank=0, batch=0, partition="one") == drawn
    assert isinstance(queue.fetch("actor", rank=0, batch=1, partition="one"), p.Ended)
    go_on(queue, "one")
    queue.add(1, ["actor"], partition="one")
    queue.work(partition="one")
    assert queue.draw("actor", rank=0, batch=1, partition="one")


def test_what_another_task_still_draws_stays_and_begins():
    queue = two_epochs("actor", "critic", ahead=3)
    queue.work(2, partition="one")
    go_on(queue, "two", "one")
    assert len(queue.states("one")) == 4
    queue.work(2, partition="one")
    assert len([heads for _ in range(4) if (heads := queue.draw("critic", partition="one"))]) == 4
    queue.fetch("critic", partition="two")
    assert queue.charged("actor") == queue.charged("critic") == 0
    go_on(queue, "two", "one", task="critic")


def test_what_a_reader_was_given_of_a_partition_that_it_has_left_counts_as_trained():
    queue = two_epochs("actor")
    queue.work(2, partition="one")
    assert queue.draw("actor", rank=0, batch=0, partition="one", trained=0)
    assert queue.draw("actor", rank=0, batch=1, partition="one", trained=0)
    assert queue.charged("actor") == 2
    go_on(queue, "two", "one")
    assert queue.charged("actor") == 0


def test_that_a_task_has_left_is_saved():
    queue = two_epochs("actor")
    go_on(queue, "two", "one")
    restored = Queue()
    load(restored.plane, save(queue.plane))
    (late,) = restored.add(1, ["actor"], partition="one")
    assert restored.states("one")[late] == "expired"


def test_a_closed_group_that_names_no_task_waits_for_its_first_reader_whatever_its_deadline():
    queue = Queue()
    queue.add(1, deadline_s=5.0)
    heads = queue.work()
    queue.pass_time(9.0)
    queue.register("actor", GroupSampler(groups=1))
    assert queue.draw("actor") == heads
