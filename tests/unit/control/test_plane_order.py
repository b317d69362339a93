# SPDX-License-Identifier: Apache-2.0
"""Several readers of one stream: a batch asked for early never takes the samples of those before it."""

from __future__ import annotations

from control_kit import (
    ACTOR,
    ROLLOUT,
    batch,
    batches,
    fetch,
    indexes,
    new_plane,
    park,
    publish,
    put,
    refused,
    register,
    seal,
    send,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue import protocol as p


def test_a_batch_asked_for_first_leaves_the_samples_of_the_earlier_ones(plane):
    put(plane, 6)
    assert batch(plane, 2, 0, 2, first_index=0) == [4, 5]
    assert [batch(plane, 2, 0, index, first_index=0) for index in (1, 0)] == [[2, 3], [0, 1]]


def test_it_waits_while_the_earlier_ones_take_all_there_is(plane):
    put(plane, 3)
    park(plane, 2, 0, 1, first_index=0, client="worker1")
    assert batch(plane, 2, 0, 0, first_index=0, client="worker0") == [0, 1]
    assert batches(put_replies(plane, 1)) == [("worker1", [2, 3])]


def put_replies(plane, count):
    samples = indexes(send(plane, ROLLOUT, p.Reserve, "p", count)[0].reply)
    return publish(plane, samples)


def test_nothing_before_the_first_index_is_drawn(plane):
    put(plane, 8)
    assert batch(plane, 2, 0, 6, first_index=5) == [2, 3]
    assert batch(plane, 2, 0, 5, first_index=5) == [0, 1]
    assert batch(plane, 2, 0, 7, first_index=5) == [4, 5]


def test_without_a_first_index_batches_are_drawn_as_they_are_asked_for(plane):
    put(plane, 4)
    assert (batch(plane, 2, 0, 1), batch(plane, 2, 0, 0)) == ([0, 1], [2, 3])


def test_settled_batches_are_not_drawn_again(plane):
    put(plane, 4)
    first = fetch(plane, 2, 0, 0, first_index=0)
    send(plane, ACTOR, p.Ack, "p", "train", [first.token])
    assert batch(plane, 2, 0, 1, first_index=0) == [2, 3]
    refused(fetch(plane, 2, 0, 0, first_index=0), "InvalidRequestError", "settled")


def test_a_short_tail_goes_to_the_earlier_batch_and_the_later_one_ends(plane):
    put(plane, 3)
    seal(plane)
    assert isinstance(fetch(plane, 2, 0, 3, first_index=0), p.Ended)
    assert [batch(plane, 2, 0, index, first_index=0) for index in (1, 0)] == [[2], [0, 1]]
    assert isinstance(fetch(plane, 2, 0, 2, first_index=0), p.Ended)


def test_in_lockstep_the_earlier_rounds_are_drawn_for_all_ranks(plane):
    register(plane, dp_size=2)
    put(plane, 8)
    assert batch(plane, 2, 1, 1, first_index=0) == [6, 7]
    assert [batch(plane, 2, rank, index) for index in (0, 1) for rank in (0, 1)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@given(
    asks=st.permutations(range(8)).flatmap(lambda order: st.tuples(st.just(order), st.integers(0, 8))),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None, print_blob=True)
def test_however_readers_and_puts_interleave_batch_b_is_the_b_th_of_the_samples(asks, sizes):
    order, early = asks
    plane = new_plane()
    answers = []

    def ask(index):
        answers.extend(
            send(plane, f"worker{index}", p.Fetch, "p", "train", ["x"], 2, 0, index, None, 99.0, first_index=0)
        )

    for index in order[:early]:
        ask(index)
    for size in sizes:
        answers.extend(put_replies(plane, size))
    for index in order[early:]:
        ask(index)
    plane.check_invariants()
    got = dict(batches(answers))
    whole = sum(sizes) // 2
    assert got == {f"worker{b}": [2 * b, 2 * b + 1] for b in range(min(8, whole))}
