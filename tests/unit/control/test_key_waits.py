# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for keys: answered by the change that decides them, in the controller alone."""

from __future__ import annotations

from typing import Any

import pytest
from control_kit import (
    ACTOR,
    CRITIC,
    ROLLOUT,
    ask,
    cancel,
    clear,
    indexes,
    put,
    refused,
    save,
    send,
    short_turns,
    turns,
)

from transfer_queue import protocol as p

Keys = dict[str, dict[str, Any]]


def put_keys(plane: Any, *keys: str, now: float = 0.0, **tags: Any) -> list[Any]:
    """Publishes samples with these keys, all with these tags. Returns the replies to others."""
    begun = ask(plane, ROLLOUT, p.ResolveKeys, "p", list(keys), True, True)
    packed = p.pack_indexes(indexes(begun))
    own, *others = send(
        plane, ROLLOUT, p.Publish, "p", packed, {}, dict.fromkeys(indexes(begun), tags), completes=begun.id, now=now
    )
    assert isinstance(own.reply, p.Published), own
    return others


def sample(plane: Any, key: str) -> int:
    return indexes(ask(plane, ROLLOUT, p.ResolveKeys, "p", [key]))[0]


def retag(plane: Any, key: str, **tags: Any) -> list[Any]:
    return send(plane, ROLLOUT, p.SetTags, {"p": {sample(plane, key): tags}})[1:]


def watch(plane: Any, after: Any = None, **kwargs: Any) -> Any:
    """The reply of a watch that goes on ``after`` an earlier reply; None while it is parked."""
    return ask(plane, ACTOR, p.WatchKeys, "p", None if after is None else after.position, wait_s=100.0, **kwargs)


def wait(plane: Any, where: str | None = None, count: int = 1, wait_s: float = 100.0) -> Any:
    return ask(plane, ACTOR, p.WaitKeys, "p", where, count, wait_s)


def told(reply: Any) -> tuple[Keys, list[str], bool]:
    assert isinstance(reply, p.ChangedKeys), reply
    return reply.keys, reply.removed, reply.fresh


def only(replies: list[Any]) -> Any:
    (to,) = replies
    assert to.client == ACTOR
    return to.reply


# ---- watches ----


def test_the_first_answer_lists_all_keys_then_each_change_is_told(plane):
    put(plane, 2)
    put_keys(plane, "a", "b", v=1)
    listed = watch(plane)
    assert told(listed) == ({"a": {"v": 1}, "b": {"v": 1}}, [], True)
    assert watch(plane, listed) is None
    second = only(put_keys(plane, "c"))
    assert told(second) == ({"c": {}}, [], False)
    assert watch(plane, second) is None
    third = only(retag(plane, "a", v=2))
    assert told(third) == ({"a": {"v": 2}}, [], False)
    assert watch(plane, third) is None
    gone = [to.reply for to in send(plane, ROLLOUT, p.ClearSamples, "p", p.pack_indexes([sample(plane, "b")]))]
    assert told(gone[1]) == ({}, ["b"], False)


def test_changes_between_two_answers_are_told_as_one(plane):
    put_keys(plane, "a", "b", "c", v=1)
    listed = watch(plane)
    retag(plane, "a", v=2)
    retag(plane, "a", v=3)
    clear(plane, [sample(plane, "b"), sample(plane, "c")])
    put_keys(plane, "d")
    put_keys(plane, "b", v=9)
    reply = watch(plane, listed)
    assert told(reply) == ({"a": {"v": 3}, "d": {}, "b": {"v": 9}}, ["c"], False)
    assert told(watch(plane, listed)) == told(reply), "asking again changes nothing"


def test_a_key_under_way_is_not_told_before_it_is_published(plane):
    put_keys(plane, "a")
    listed = watch(plane)
    begun = ask(plane, ROLLOUT, p.ResolveKeys, "p", ["b"], True, True)
    assert watch(plane, listed) is None
    assert cancel(plane, ROLLOUT, begun) == ("undone", [])


def test_a_watch_with_a_filter_is_told_what_matches_and_what_may_match_no_more(plane):
    put_keys(plane, "a", v=1)
    put_keys(plane, "b", v=2)
    listed = watch(plane, where="v > 1")
    assert told(listed) == ({"b": {"v": 2}}, [], True)
    retag(plane, "a", v=3)
    retag(plane, "b", v=0)
    assert told(watch(plane, listed, where="v > 1")) == ({"a": {"v": 3}}, ["b"], False)


def test_other_partitions_fields_and_fetches_do_not_wake_a_watch(plane):
    put_keys(plane, "a")
    assert watch(plane, watch(plane)) is None
    put(plane, 2, partition="other")
    put(plane, 2)
    others = send(plane, ROLLOUT, p.Publish, "p", p.pack_indexes([0]), {"y": p.FieldSpec("int64", ())}, {})[1:]
    assert others == []


def test_a_watcher_too_far_behind_gets_a_fresh_list(plane):
    put_keys(plane, "a", "b")
    listed = watch(plane)
    for v in range(1000):
        retag(plane, "a", v=v)
    assert told(watch(plane, listed)) == ({"a": {"v": 999}}, [], False)
    for v in range(1000):
        retag(plane, "a", v=v)
    assert told(watch(plane, listed)) == ({"a": {"v": 999}, "b": {}}, [], True)


def test_of_many_keys_more_changes_are_remembered(plane):
    put_keys(plane, *map(str, range(5000)))
    listed = watch(plane)
    for v in range(3000):
        retag(plane, "1", v=v)
    assert told(watch(plane, listed)) == ({"1": {"v": 2999}}, [], False)


def test_many_changes_come_a_page_at_a_time(plane):
    put_keys(plane, "a")
    listed = watch(plane)
    put_keys(plane, *(f"k{i}" for i in range(12_000)))
    pages, reply = [], listed
    while (reply := watch(plane, reply)) is not None:
        pages.append(len(reply.keys))
    assert pages == [5000, 5000, 2000]


def test_a_watch_waits_for_its_partition(plane):
    assert watch(plane) is None
    assert told(only(put_keys(plane, "a"))) == ({"a": {}}, [], True)


def test_clearing_the_partition_ends_watches_and_waits(plane):
    put_keys(plane, "a")
    listed = watch(plane)
    assert watch(plane, listed) is None
    assert wait(plane, count=2) is None
    replies = send(plane, ROLLOUT, p.ClearPartition, "p")
    assert [to.reply.reason for to in replies if isinstance(to.reply, p.Ended)] == ["cleared"] * 2
    put_keys(plane, "b")
    assert watch(plane, listed).reason == "cleared", "the partition is another one now"


def test_a_watch_goes_on_in_a_restored_partition_with_a_fresh_list(plane):
    put_keys(plane, "a", "b")
    saved = save(plane)
    clear(plane, [sample(plane, "a")])
    listed = watch(plane)
    assert watch(plane, listed) is None
    replies = send(plane, ROLLOUT, p.Stage, p.pack_indexes([0, 1]))
    shift = replies[0].reply.value
    replies = send(plane, ROLLOUT, p.Restore, saved, shift)
    again = next(to.reply for to in replies if to.client == ACTOR)
    assert told(again) == ({"a": {}, "b": {}}, [], True)
    assert wait(plane, count=2).keys == {"p": {"a": {}, "b": {}}}


def test_a_watch_that_waited_long_enough_is_told_that_nothing_changed(plane):
    put_keys(plane, "a")
    listed = watch(plane)
    assert watch(plane, listed) is None
    assert plane.next_deadline() == 100.0
    (to,) = plane.expire(100.0)
    assert (told(to.reply), to.reply.position) == (({}, [], False), listed.position)
    reply = ask(plane, ACTOR, p.WatchKeys, "p", listed.position)
    assert reply.position == listed.position, "a watch that doesn't wait"


def test_what_waits_for_keys_ends_with_its_session(plane):
    put_keys(plane, "a")
    assert watch(plane, watch(plane)) is None
    assert wait(plane, count=5) is None
    stats = ask(plane, CRITIC, p.GetStats).value
    assert stats["clients"][ACTOR]["parked"] == 2
    assert [(each["wanted"], each["keys"]) for each in stats["waiting"]] == [(None, "keys"), (5, "keys")]
    plane.client_gone(ACTOR, 0.0)
    assert put_keys(plane, "b") == []
    assert plane.next_deadline() is None


def test_a_cancelled_watch_is_gone(plane):
    put_keys(plane, "a")
    request = p.WatchKeys(10**6, "p", watch(plane).position, None, 5.0)
    assert plane.handle(ACTOR, request, 0.0) == []
    assert ask(plane, ACTOR, p.Cancel, request.id).value == "removed"
    assert put_keys(plane, "b") == []


def test_many_long_answers_take_several_turns(plane):
    put_keys(plane, "a")
    listed = watch(plane)
    short_turns(plane, 8)
    for _ in range(100):
        assert watch(plane, listed) is None
    found = [put_keys(plane, "b"), *turns(plane)]
    assert len(found) > 2
    assert sum(map(len, found)) == 100


# ---- waits for enough keys ----


def test_a_wait_is_answered_by_the_put_that_decides_it(plane):
    assert wait(plane, count=3) is None
    assert put_keys(plane, "a", "b", v=1) == []
    reply = only(put_keys(plane, "c"))
    assert reply.keys == {"p": {"a": {"v": 1}, "b": {"v": 1}, "c": {}}}


def test_a_wait_is_answered_by_the_tags_that_decide_it(plane):
    put_keys(plane, "a", "b", v=1)
    put(plane, 3)
    assert wait(plane, "v > 1", 2) is None
    assert retag(plane, "a", v=2) == []
    assert retag(plane, "a", v=0) == []
    assert retag(plane, "b", v=3) == []
    assert only(retag(plane, "a", v=4)).keys == {"p": {"a": {"v": 4}, "b": {"v": 3}}}


def test_cleared_keys_do_not_count(plane):
    put_keys(plane, "a", "b")
    assert wait(plane, count=3) is None
    clear(plane, [sample(plane, "a")])
    assert put_keys(plane, "c") == []
    assert list(only(put_keys(plane, "d")).keys["p"]) == ["b", "c", "d"]


def test_a_compacted_table_is_followed(plane):
    put_keys(plane, *map(str, range(200)), v=1)
    assert wait(plane, "v == 1", 201) is None
    clear(plane, list(range(150)))
    assert len(wait(plane, "v == 1", 50).keys["p"]) == 50


def test_a_wait_that_took_too_long_says_how_many_match_of_how_many(plane):
    put_keys(plane, "a", "b", v=1)
    put_keys(plane, "c", v=2)
    assert wait(plane, "v == 1", 3, wait_s=5.0) is None
    (to,) = plane.expire(5.0)
    refused(to.reply, "KeysTimeoutError", "waited 5.0 s for 3 keys of 'p' where v == 1: 2 of its 3")
    refused(wait(plane, None, 4, 0.0), "KeysTimeoutError", "waited 0.0 s for 4 keys", "of 'p': 3 of its 3 keys match")
    nowhere = ask(plane, ACTOR, p.WaitKeys, "nowhere")
    refused(nowhere, "KeysTimeoutError", "there is no such partition")


def test_wrong_requests_are_refused(plane):
    refused(wait(plane, count=0), "InvalidRequestError", "count of at least 1, got 0")
    refused(wait(plane, "v ="), "InvalidRequestError", "at character 3")
    refused(watch(plane, where="v ="), "InvalidRequestError", "at character 3")
    refused(ask(plane, ACTOR, p.ListKeys, "p", where="v ="), "InvalidRequestError", "at character 3")


@pytest.mark.parametrize("wait_s", [0.0, 5.0])
def test_many_keys_are_compared_some_in_each_turn(plane, wait_s):
    short_turns(plane, 8)
    put_keys(plane, *map(str, range(15_000)))
    put_keys(plane, "last", v=1)
    assert wait(plane, "v == 1", 2, wait_s) is None
    assert wait(plane, "v == 1", 1, wait_s) is None
    found = turns(plane)
    replies = [reply for turn in found for reply in turn]
    assert len(found) >= 2
    assert [list(to.reply.keys["p"]) for to in replies if isinstance(to.reply, p.KeyList)] == [["last"]]
    assert len(replies) == (2 if wait_s == 0.0 else 1)


def test_list_keys_gives_those_that_match_page_by_page(plane, page_of):
    page_of(4)
    for i in range(6):
        put_keys(plane, f"k{i}", v=i)
    first = ask(plane, ACTOR, p.ListKeys, "p", -1, "v >= 2")
    assert (list(first.keys["p"]), first.last) == (["k2", "k3"], 3)
    second = ask(plane, ACTOR, p.ListKeys, "p", first.last, "v >= 2")
    assert (list(second.keys["p"]), second.last) == (["k4", "k5"], None)
