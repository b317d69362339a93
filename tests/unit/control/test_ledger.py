# SPDX-License-Identifier: Apache-2.0
"""The ledger: what each batch was given, until an ack, a clear or a reset settles it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.control.ledger import Ledger, Runs
from transfer_queue.control.rows import PendingCopies


def write(ledger, key, *indexes, dp_size=None):
    samples = np.array(indexes, dtype=np.int64)
    entry = ledger.write(key, samples, samples, dp_size=dp_size)
    ledger.own(entry, len(indexes))
    return entry


def numbers(*values):
    return np.array(values, dtype=np.int32)


def test_a_batch_is_there_until_its_token_is_acknowledged_and_settled_after():
    ledger = Ledger("p/t/1", PendingCopies())
    entry = write(ledger, (0, 0), 5, 6)
    assert ledger.get((0, 0)) is entry
    assert (ledger.holds((0, 0)), ledger.is_closed((0, 0)), len(ledger)) == (True, False, 1)
    assert ledger.ack([entry.token, entry.token, "p/t/1/0#9", ""]) == 1
    assert ledger.get((0, 0)) is None
    assert (ledger.holds((0, 0)), ledger.is_closed((0, 0)), len(ledger)) == (True, True, 0)


def test_tokens_of_another_ledger_settle_nothing():
    ledger = Ledger("p/t/1", PendingCopies())
    write(ledger, (0, 0), 5)
    assert ledger.ack([write(Ledger("p/t/2", PendingCopies()), (0, 0), 5).token]) == 0


def test_an_ack_settles_the_earlier_batches_of_its_rank_when_told_to():
    ledger = Ledger("p/t/1", PendingCopies())
    entries = {key: write(ledger, key, 10 * key[0] + key[1]) for key in [(0, 0), (0, 1), (1, 0), (0, 2)]}
    assert ledger.ack([entries[0, 1].token], earlier=True) == 2
    assert ledger.ack([entries[0, 0].token], earlier=True) == 0  # late
    assert [key for key in entries if ledger.get(key)] == [(1, 0), (0, 2)]
    assert sorted(ledger.open_indexes().tolist()) == [2, 10]


def test_a_reader_without_a_place_begins_behind_what_any_rank_has_settled():
    ledger = Ledger("p/t/1", PendingCopies())
    assert ledger.first_open() == 0
    entries = {(rank, at): write(ledger, (rank, at), 2 * at + rank) for at in range(3) for rank in range(2)}
    assert ledger.first_open() == 0
    ledger.ack([entries[0, 0].token, entries[0, 1].token, entries[1, 0].token])
    assert ledger.first_open() == 2
    ledger.ack([entry.token for entry in entries.values()])
    assert ledger.first_open() == 3


def test_settled_batches_of_a_long_run_leave_a_mark_only():
    ledger = Ledger("p/t/1", PendingCopies())
    window = [write(ledger, (0, i), i) for i in range(3)]
    for i in range(3, 500):
        ledger.ack([window.pop(1).token])  # out of order, as several workers do
        window.append(write(ledger, (0, i), i))
        window.sort(key=lambda entry: entry.number)
        if i % 7 == 0:
            ledger.ack([window.pop(0).token])
            window.append(write(ledger, (0, 1000 + i), i))
    for entry in window:
        ledger.ack([entry.token])
    assert [i for i in range(1600) if ledger.is_closed((0, i))] == [*range(500), *range(1007, 1500, 7)]
    (saved,) = ledger.save().ranks
    assert (len(saved.starts), len(ledger)) == (1 + len(range(7, 500, 7)), 0)


def test_a_stream_that_begins_late_leaves_a_mark_only_too():
    ledger = Ledger("p/t/1", PendingCopies())
    for i in range(1000, 3000):
        ledger.ack([write(ledger, (0, i), i).token])
    (saved,) = ledger.save().ranks
    assert (saved.starts, ledger.is_closed((0, 2999)), ledger.holds((0, 999))) == ([1000], True, False)


@pytest.mark.parametrize(
    ("batch_index", "first", "undrawn"), [(9, 0, 7), (9, 8, 8), (5, 0, 3), (3, 0, 3), (3, 4, 4), (9 * 10**18, 0, 7)]
)
def test_batches_before_one_that_nobody_drew_begin_after_the_last_one_drawn(batch_index, first, undrawn):
    ledger = Ledger("p/t/1", PendingCopies())
    assert ledger.first_undrawn((0, 4), 2) == 2
    for i in (0, 1, 2, 6):
        write(ledger, (0, i), i)
    assert ledger.first_undrawn((0, batch_index), first) == undrawn


@pytest.mark.parametrize("token", ["p/t/1/0#" + "9" * 5000, "p/t/1/0#-1", "p/t/1/0#x", "p/t/1/0#", "#1", "1"])
def test_what_is_no_token_settles_nothing(token):
    ledger = Ledger("p/t/1", PendingCopies())
    write(ledger, (0, 0), 5)
    assert ledger.ack([token]) == 0


def test_an_unnamed_batch_comes_after_the_last_one_given_and_skips_settled_ones():
    ledger = Ledger("p/t/1", PendingCopies())
    assert ledger.next_index(0) == 0
    write(ledger, (0, 3), 1)
    ledger.took((0, 3))
    ledger.took((0, 1))
    assert (ledger.next_index(0), ledger.next_index(1)) == (4, 0)
    ledger.ack([write(ledger, (0, 4), 2).token])
    assert ledger.next_index(0) == 5


def test_a_batch_with_no_sample_left_is_settled():
    ledger = Ledger("p/t/1", PendingCopies())
    first, second = write(ledger, (0, 0), 1, 2), write(ledger, (0, 1), 3)
    ledger.samples_cleared(numbers(first.number, 0, -1, 77))
    assert (first.owned, len(ledger)) == (1, 2)
    ledger.samples_cleared(numbers(first.number, second.number))
    assert (ledger.is_closed((0, 0)), ledger.is_closed((0, 1)), len(ledger)) == (True, True, 0)


def test_a_reset_keeps_batches_under_new_tokens_and_reopens_settled_ones():
    ledger = Ledger("p/t/1", PendingCopies())
    kept, gone = write(ledger, (0, 0), 1), write(ledger, (0, 1), 2)
    old = kept.token
    ledger.ack([gone.token])
    ledger.took((0, 1))
    assert ledger.reset() == [kept.number]
    assert (ledger.get((0, 0)), ledger.holds((0, 1)), ledger.next_index(0)) == (kept, False, 0)
    assert (ledger.ack([old]), ledger.ack([kept.token])) == (0, 1)


def test_a_reset_drops_rounds_whole_and_leaves_ranks_that_drew_alone_apart():
    ledger = Ledger("p/t/1", PendingCopies())
    torn = [write(ledger, (rank, 0), rank, dp_size=2) for rank in range(2)]
    whole = [write(ledger, (rank, 1), 10 + rank, dp_size=2) for rank in range(2)]
    alone = [write(ledger, (rank, 2), 20 + rank) for rank in range(2)]
    ledger.ack([torn[0].token, alone[0].token])
    assert ledger.reset() == [whole[0].number, whole[1].number, alone[1].number]
    assert not ledger.holds((1, 0))


def test_the_books_are_checked_against_what_samples_say():
    ledger = Ledger("p/t/1", PendingCopies())
    entry = write(ledger, (0, 0), 1, 2)
    ledger.check_invariants(numbers(entry.number, entry.number, 0))
    ledger.check_invariants(numbers(entry.number, entry.number, 99))
    with pytest.raises(AssertionError, match="owns its live samples"):
        ledger.check_invariants(numbers(entry.number))


# ---- runs of numbers ----


def runs_of(numbers):
    runs = Runs()
    for number in numbers:
        runs.add(number)
    return runs


@given(st.lists(st.integers(0, 40), max_size=40))
def test_runs_are_a_set_of_numbers(numbers):
    runs, members = runs_of(numbers), set(numbers)
    assert [number for number in range(-1, 43) if number in runs] == sorted(members)
    for number in range(43):
        assert runs.below(number) == max((member + 1 for member in members if member < number), default=0)
    assert runs.end() == max(members, default=-1) + 1
    assert len(runs) == sum(number - 1 not in members for number in members)


def test_a_long_row_of_numbers_takes_the_room_of_one_in_whatever_order_it_came():
    assert len(runs_of([*range(0, 1000, 2), *range(999, 0, -2)])) == 1
