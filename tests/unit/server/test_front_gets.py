# SPDX-License-Identifier: Apache-2.0
"""Front: a fetch brings its values along, or gives its batch back; a clear deletes the values in the same turn."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit.server.front_kit import (
    NOTHING,
    PAGE,
    Client,
    Held,
    batch_of,
    failed,
    front_of,
    got,
    held,
    in_short_turns,
    is_pinned,
    samples_of,
)
from transfer_queue import protocol as p

# ---- fetches ----


def test_a_fetch_brings_its_values_along(me, other):
    me.stored([7, 8, 9])
    (answer,) = other.send(other.fetch(2))
    assert (samples_of(answer.reply), batch_of(answer)) == ([0, 1], {0: 7, 1: 8})


def test_a_fetch_without_values_is_the_batch_alone(me, other):
    me.stored([7])
    fetch = p.Fetch(other.number(), "p", "t", ["x"], 1)
    ((_, batch, frames),) = other.send(fetch)
    assert (samples_of(batch), list(frames)) == ([0], [])


def test_a_fetch_that_finds_nothing_has_no_values(me, other):
    assert type(other.one(other.fetch(1))) is p.NotReady
    me.stored([7])
    me.one(p.SealPartition(me.number(), "p"))
    other.send(other.fetch(1))
    assert type(other.one(other.fetch(1))) is p.Ended


def test_the_same_fetch_again_gets_the_same_batch_and_values(me, other):
    me.stored([7, 8, 9])
    fetch = other.fetch(2)
    (first,), (again,) = other.send(fetch), other.send(fetch)
    assert (again.reply, batch_of(again)) == (first.reply, batch_of(first))
    assert batch_of(other.send(other.fetch(1))[0]) == {2: 9}


def test_a_fetch_that_waits_and_comes_again_is_answered_once(me, other):
    fetch = other.fetch(1, wait_s=5.0)
    assert (other.send(fetch), other.send(fetch)) == ([], [])
    own, batch = me.put([7])
    assert (own.client, batch_of(batch)) == ("me", {0: 7})


def test_a_batch_whose_values_can_not_be_read_is_given_back(me, other, front):
    samples = me.stored([7, 8])
    me.send(me.delete(samples[:1]))
    failed(other.send(other.fetch(2))[0], "StorageKeyNotFoundError", "field 'x' for sample 0")
    assert held(front).records == 1, "the put's alone"
    me.put([9], me.check(samples[:1]))
    assert batch_of(other.send(other.fetch(2))[0]) == {0: 9, 1: 8}


def test_a_fetch_that_is_cancelled_while_it_waits_takes_nothing(me, other, front):
    assert other.send(other.fetch(1, wait_s=5.0)) == []
    assert other.cancel(1) == []
    assert [answer.client for answer in me.put([7])] == ["me"]
    assert batch_of(other.send(other.fetch(1))[0]) == {0: 7}


def test_a_fetch_that_waits_on_a_connection_that_has_closed_takes_nothing(me, other, front):
    me.send(me.fetch(1, wait_s=9.0))
    assert got(front.connection_gone("me", "another", 0.0)) == []
    assert [call.is_under_way for call in front.calls.of("me")] == [True], "it waits on the other one"
    assert got(front.connection_gone("me", "route", 0.0)) == []
    assert other.put([7])[0].client == "other"
    assert batch_of(other.send(other.fetch(1))[0]) == {0: 7}


def test_a_fetch_that_is_cancelled_after_its_answer_gives_the_batch_back_to_the_one_that_waits(me, other):
    me.stored([7])
    other.send(other.fetch(1))
    third = Client(other.front, "third")
    assert third.send(third.fetch(1, wait_s=5.0)) == []
    (answer,) = other.cancel(1)
    assert (answer.client, batch_of(answer)) == ("third", {0: 7})


def test_a_batch_that_was_received_is_not_given_back(me, other):
    me.stored([7, 8])
    other.send(other.fetch(1))
    other.send(p.ListPartitions(other.number()), received=[1])
    assert other.one(p.Cancel(other.number(), 1)).value == "kept"
    other.gone()
    third = Client(other.front, "third")
    assert batch_of(third.send(third.fetch(1))[0]) == {1: 8}


def test_batches_that_a_session_has_not_received_are_given_back_when_it_ends(me, other):
    me.stored([7, 8, 9])
    other.send(other.fetch(1))
    other.send(other.fetch(1), received=[1])
    other.gone()
    third = Client(other.front, "third")
    assert batch_of(third.send(third.fetch(2))[0]) == {1: 8, 2: 9}


PER_TURN = 2000
"""Samples that one step of long work handles."""

# ---- pins ----


@pytest.fixture
def arena() -> Any:
    """With one sample of two pages."""
    front = front_of(pages=16)
    writer = Client(front, "writer")
    writer.one(writer.put_leased([0, 0]))
    writer.send(p.ListPartitions(writer.number()), received=[1, 2])
    return front


@pytest.mark.parametrize("leave", ["release", "cancel", "gone"])
def test_values_that_lie_in_the_arena_are_pinned_until_they_are_released_or_the_call_or_session_ends(arena, leave):
    reader = Client(arena, "reader")
    (answer,) = reader.send(reader.fetch(2, mapped=True))
    assert (is_pinned(answer), held(arena).pins) == (True, 1)
    {"release": lambda: reader.release(1), "cancel": lambda: reader.cancel(1), "gone": reader.gone}[leave]()
    assert held(arena).pins == 0


def test_pinned_values_stay_while_their_samples_are_cleared(arena):
    reader = Client(arena, "reader")
    reader.send(reader.fetch(2, mapped=True))
    reader.one(p.ClearPartition(reader.number(), "p"))
    assert (held(arena), arena.unit.stats().arena_nbytes) == (Held(records=2, pins=1), 2 * PAGE)
    reader.gone()
    assert (held(arena), arena.unit.stats().arena_nbytes) == (NOTHING, 0)


# ---- clears ----

CLEARS = {
    "samples": lambda client: p.ClearSamples(client.number(), "p", p.pack_indexes([0, 1])),
    "partition": lambda client: p.ClearPartition(client.number(), "p"),
    "consumed": lambda client: p.ClearConsumed(client.number(), "p", ["t"]),
}


@pytest.mark.parametrize("make", CLEARS.values(), ids=CLEARS)
def test_a_clear_deletes_the_values_in_the_same_turn(me, front, make):
    me.stored([7, 8])
    me.send(me.fetch(2))
    me.send(p.ListPartitions(me.number()), received=[1, 2])
    assert samples_of(me.one(make(me))) == [0, 1]
    me.send(p.ListPartitions(me.number()), received=[4])
    assert held(front) == NOTHING


def test_the_same_clear_again_gets_the_same_answer_and_clears_nothing_else(me):
    me.stored([7])
    clear = p.ClearPartition(me.number(), "p")
    first = me.one(clear)
    samples = me.stored([8])
    assert (me.one(clear), me.values(samples)) == (first, {1: 8})


def test_a_clear_of_nothing_again_clears_nothing_that_came_since(me):
    clear = p.ClearPartition(me.number(), "p")
    first = me.one(clear)
    samples = me.stored([8])
    assert (me.one(clear), me.values(samples)) == (first, {0: 8})


def test_a_large_clear_deletes_a_slice_each_turn_and_others_are_served_between(me, other, front):
    count = 2 * PER_TURN + 5
    in_short_turns(front)
    me.put([0] * count, nbytes=1)
    clear = p.ClearPartition(me.number(), "p")
    assert (me.send(clear), held(front).values) == ([], count - PER_TURN)
    assert front.next_deadline() == -math.inf
    assert other.stored([1]) == [count]
    assert (list(front.expire(0.0)), held(front).values) == ([], count - 2 * PER_TURN + 1)
    assert me.send(clear) == [], "the same call again"
    (answer,) = got(front.expire(0.0))
    assert (answer.client, len(samples_of(answer.reply)), held(front).values) == ("me", count, 1)
    assert front.next_deadline() is None


@pytest.mark.parametrize("leave", ["cancel", "gone"])
def test_a_large_clear_goes_on_when_it_is_cancelled_or_its_session_ends(me, front, leave):
    in_short_turns(front)
    me.put([0] * (2 * PER_TURN), nbytes=1)
    assert me.send(p.ClearPartition(me.number(), "p")) == []
    assert (me.cancel(2) if leave == "cancel" else me.gone()) == []
    turns = 0
    while front.next_deadline() == -math.inf:
        assert got(front.expire(0.0)) == []
        turns += 1
        assert turns < 10
    me.gone()
    assert held(front) == NOTHING


def test_values_of_a_frozen_queue_are_deleted_by_its_thaw(me, front):
    me.stored([7])
    me.one(p.Freeze(me.number()))
    assert samples_of(me.one(p.ClearPartition(me.number(), "p"))) == []
    assert held(front).values == 1
    thaw = p.Thaw(me.number(), 2)
    assert (samples_of(me.one(thaw)), held(front).values) == ([0], 0)


def test_values_of_a_frozen_queue_are_deleted_when_the_session_that_froze_it_ends(me, other, front):
    other.stored([7])
    me.one(p.Freeze(me.number()))
    other.one(p.ClearPartition(other.number(), "p"))
    assert held(front).values == 1
    assert (me.gone(), other.gone(), held(front)) == ([], [], NOTHING)


def test_a_save_reads_what_was_cleared_though_the_writer_that_had_reserved_its_key_has_died(front):
    dies, saves = Client(front, "dies"), Client(front, "saves")
    dies.one(p.ResolveKeys(dies.number(), "p", ["k"], True, True, {"y": p.FieldSpec("uint8", (1,))}, 0.0, ["y"]))
    ((_, put, _),) = dies.put([7], begin=dies.keys("k"))
    (sample,) = samples_of(put)
    dies.one(p.ListPartitions(dies.number()), received=[put.id])
    frozen = saves.one(p.Freeze(saves.number()))
    saves.one(p.ClearSamples(saves.number(), "p", p.pack_indexes([sample])))
    dies.gone()
    assert saves.values([sample]) == {sample: 7}
    saves.one(p.Thaw(saves.number(), frozen.id))
    assert front.unit.stats().samples == 0


def test_a_restore_deletes_what_was_there_before(me, front):
    me.stored([7])
    frozen = me.one(p.Freeze(me.number()))
    me.one(p.Thaw(me.number(), frozen.id))
    assert me.one(p.Stage(me.number(), p.pack_indexes([0]))) == p.Done(4, 1)
    restore = p.Restore(me.number(), frozen.state, 1)
    assert (me.one(restore), me.one(restore)) == 2 * (p.Cleared(5, p.pack_indexes([0])),)
    assert held(front).values == 0


def test_what_clears_free_is_not_counted_twice(me, front):
    me.stored([7, 8])
    me.one(CLEARS["samples"](me))
    assert me.one(CLEARS["samples"](me)) == p.Cleared(3, b"")
    me.gone()
    assert held(front) == NOTHING
