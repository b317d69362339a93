# SPDX-License-Identifier: Apache-2.0
"""Lists that come in pages, and what the queue tells of tasks and clients that hold something up."""

from __future__ import annotations

import pytest
from control_kit import (
    ACTOR,
    CRITIC,
    INT,
    REWARDER,
    ROLLOUT,
    ack,
    ask,
    batch,
    clear,
    clear_consumed,
    fetch,
    indexes,
    park,
    put,
    refused,
    register,
    reserve,
    seal,
    send,
)

from transfer_queue import protocol as p

MOST_OF_A_PAGE, MOST_STATUS = 5_000, 200_000

# ---- pages ----


def pages(plane):
    """Every page of keys."""
    after, found = -1, []
    while True:
        reply = ask(plane, ACTOR, p.ListKeys, "p", after)
        found.append(list(reply.keys["p"]))
        if reply.last is None:
            return found
        after = reply.last


def test_keys_are_listed_in_pages_in_order_of_insertion(plane, page_of):
    ask(plane, ROLLOUT, p.ResolveKeys, "p", ["e", "d", "c"], True)
    put(plane, 1)
    ask(plane, ROLLOUT, p.ResolveKeys, "p", ["b", "a"], True)
    assert pages(plane) == [["e", "d", "c", "b", "a"]]
    page_of(2)
    assert pages(plane) == [["e", "d"], ["c", "b"], ["a"]]
    page_of(5)
    assert pages(plane) == [["e", "d", "c", "b", "a"]]


@pytest.mark.parametrize("put_again", [False, True], ids=["cleared", "cleared and put again"])
def test_a_list_whose_last_key_is_cleared_between_two_pages_leaves_none_out(plane, page_of, put_again):
    page_of(2)
    ask(plane, ROLLOUT, p.ResolveKeys, "p", ["a", "b", "c", "d", "e"], True)
    first = ask(plane, ACTOR, p.ListKeys, "p")
    assert list(first.keys["p"]) == ["a", "b"]
    clear(plane, [1])
    if put_again:
        ask(plane, ROLLOUT, p.ResolveKeys, "p", ["b"], True)
    second = ask(plane, ACTOR, p.ListKeys, "p", first.last)
    assert list(second.keys["p"]) == ["c", "d"]
    assert list(ask(plane, ACTOR, p.ListKeys, "p", second.last).keys["p"]) == ["e", *["b"] * put_again]


def test_a_page_holds_no_more_than_so_many_keys(plane):
    names = [f"k{i}" for i in range(MOST_OF_A_PAGE + 1)]
    ask(plane, ROLLOUT, p.ResolveKeys, "p", names, True)
    assert [len(page) for page in pages(plane)] == [MOST_OF_A_PAGE, 1]


def test_many_cleared_keys_leave_nothing_behind(plane, page_of):
    page_of(3)
    ask(plane, ROLLOUT, p.ResolveKeys, "p", [f"k{i}" for i in range(300)], True)
    clear(plane, list(range(295)))
    assert pages(plane) == [["k295", "k296", "k297"], ["k298", "k299"]]
    assert plane.state.partitions["p"].keys.is_ascending(), "both ways know no more than those five"


def test_all_samples_are_described_in_pages(make_plane, page_of):
    page_of(4)
    plane = make_plane(preallocate=12)
    put(plane, 5, "x", "y")
    put(plane, 3, "x")
    clear(plane, [2])
    found, after, more = [], None, True
    while more:
        page = ask(plane, ACTOR, p.Describe, "p", None, None, after)
        assert list(page.fields) == [], "the pre-allocated ones have none"
        found.append(indexes(page))
        after, more = found[-1][-1], page.more
    assert found == [[0, 1, 3, 4], [5, 6, 7, 8], [9, 10, 11]]
    seal(plane)
    page_of(1)
    assert list(ask(plane, ACTOR, p.Describe, "p").fields) == ["x"], "what all have, not the page"
    assert indexes(ask(plane, ACTOR, p.Describe, "p", None, None, 10**9)) == []


def test_status_is_told_in_pages(plane, page_of):
    page_of(2)
    put(plane, 5)
    batch(plane, 3)
    pages = [ask(plane, ACTOR, p.ConsumptionStatus, "p", "train", False, after) for after in (None, 1, 3, 4)]
    assert [(indexes(page), list(page.status), page.more) for page in pages] == [
        ([0, 1], [1, 1], True), ([2, 3], [1, 0], True), ([4], [0], False), ([], [], False),
    ]  # fmt: skip
    page = ask(plane, ACTOR, p.FieldStatus, "p", ["x"], False, 1)
    assert (indexes(page), list(page.status), page.columns, page.more) == ([2, 3], [1, 1], 1, True)


def test_a_page_of_status_holds_no_more_than_so_many_samples(plane):
    reserved = ask(plane, ROLLOUT, p.Insert, "p", MOST_STATUS + 1)
    assert len(indexes(reserved)) == MOST_STATUS + 1
    page = ask(plane, ACTOR, p.ConsumptionStatus, "p", "train")
    assert (len(indexes(page)), page.more) == (MOST_STATUS, True)
    page = ask(plane, ACTOR, p.ConsumptionStatus, "p", "train", False, MOST_STATUS - 1)
    assert (len(indexes(page)), page.more) == (1, False)


# ---- tasks and clients that hold something up ----


def test_a_forgotten_task_holds_no_samples(make_plane):
    plane = make_plane(capacity=2)
    put(plane, 2)
    batch(plane, 2)
    fetch(plane, 1, 0, 0, task="mispelt")
    park(plane, 1, 0, 1, task="mispelt", names=("y",), client=CRITIC)
    register(plane, "mispelt", tail="pad")
    own, told = send(plane, ACTOR, p.ForgetTask, "mispelt")
    assert (own.reply.value, told) == (1, (CRITIC, p.Ended(told.reply.id, "cleared")))
    assert ask(plane, ACTOR, p.ForgetTask, "mispelt").value == 0
    assert plane.state.tasks.by_name == {}
    assert not [name for name in plane.state.partitions["p"].table._columns if "mispelt" in name]
    assert clear_consumed(plane, "train") == [0, 1]


def test_a_task_that_was_forgotten_may_come_again_and_nothing_of_before_concerns_it(plane):
    put(plane, 4)
    lost, acked = fetch(plane, 1), fetch(plane, 1, 0, 0)
    ask(plane, ACTOR, p.ForgetTask, "train")
    assert batch(plane, 2) == [0, 1]
    given = fetch(plane, 1, 0, 0)
    assert ack(plane, acked.token) == 0, "an ack from before settles nothing"
    assert ask(plane, ACTOR, p.Cancel, lost.id).value == "undone"
    assert (indexes(given), indexes(fetch(plane, 1))) == ([2], [3])
    assert ack(plane, given.token) == 1


def test_a_clear_says_which_tasks_hold_what_stays(plane):
    put(plane, 6)
    first = fetch(plane, 2, 0, 0)
    batch(plane, 4, task="eval")
    reply = ask(plane, ACTOR, p.ClearConsumed, "p", ["train", "later"])
    assert (indexes(reply), reply.held_by, reply.not_begun) == ([], {"train": 6, "eval": 2}, ["later"])
    ack(plane, first.token)
    reply = ask(plane, ACTOR, p.ClearConsumed, "p", ["train"])
    assert (indexes(reply), reply.held_by, reply.not_begun) == ([0, 1], {"train": 4, "eval": 2}, [])
    unread = fetch(plane, 2)
    reply = ask(plane, ACTOR, p.ClearConsumed, "p", ["train"])
    assert (indexes(reply), reply.held_by) == ([], {"train": 4, "eval": 2})
    plane.received(ACTOR, [unread.id])
    assert plane.calls.find(ACTOR, reply.id) is None, "nothing was cleared, so nothing is kept"


def test_a_dry_run_says_what_would_stay_and_clears_nothing(plane):
    put(plane, 3)
    asked = ask(plane, ACTOR, p.ClearConsumed, "p", [], True)
    assert (asked.indexes, asked.held_by, asked.not_begun, asked.unread) == (b"", {}, [], 3)
    first = fetch(plane, 2, 0, 0)
    for tasks, not_begun in (([], []), (["later", "train", "also"], ["also", "later"])):
        asked = ask(plane, ACTOR, p.ClearConsumed, "p", tasks, True)
        assert (asked.indexes, asked.held_by, asked.not_begun, asked.unread) == (b"", {"train": 3}, not_begun, 0)
    ack(plane, first.token)
    asked = ask(plane, ACTOR, p.ClearConsumed, "p", [], True)
    assert (asked.indexes, asked.held_by, asked.more) == (b"", {"train": 1}, False)
    assert plane.calls.find(ACTOR, asked.id) is None, "there is nothing to undo"
    assert clear_consumed(plane) == [0, 1]
    unknown = ask(plane, ACTOR, p.ClearConsumed, "nowhere", ["train"], True)
    assert unknown == p.Cleared(unknown.id, b"")


def test_statistics_tell_what_each_client_holds(plane):
    put(plane, 2)
    reserve(plane, 3, client=REWARDER)
    ask(plane, REWARDER, p.CheckFields, "p", p.pack_indexes([0]), {"x": INT})
    fetch(plane, 1)
    park(plane, 9, client=CRITIC)
    clients = ask(plane, ACTOR, p.GetStats).value["clients"]
    nothing = dict.fromkeys(("reservations", "reserved", "leaves", "freezes", "parked", "unreceived"), 0)
    assert clients == {
        ROLLOUT: nothing | {"unreceived": 1},
        REWARDER: nothing | {"reservations": 1, "reserved": 3, "leaves": 1, "unreceived": 2},
        ACTOR: nothing | {"unreceived": 1},
        CRITIC: nothing | {"parked": 1},
    }
    plane.client_gone(REWARDER, 0.0)
    ask(plane, ACTOR, p.Freeze)
    assert ask(plane, ACTOR, p.GetStats).value["clients"][ACTOR]["freezes"] == 1


def test_a_client_that_is_gone_holds_nothing_any_more_and_is_gone_once(make_plane):
    plane = make_plane(producer_grace_s=5.0)
    ask(plane, ROLLOUT, p.Reserve, "p", 2, {"x": INT})
    park(plane, 1, wait_s=600.0)
    plane.client_gone(ROLLOUT, 1.0)
    assert [unused.tolist() for unused in plane.take_unused()] == [[0, 1]]
    refused(plane.expire(6.0)[0].reply, "ProducersGoneError")
