# SPDX-License-Identifier: Apache-2.0
"""Holds: leases and pins per attached client, which fall with it, by its word, or unused after their time."""

from __future__ import annotations

import numpy as np
import pytest
from transfer_queue.storage.simple.holds import Holds

ME, OTHER = 1, 2


@pytest.fixture
def holds() -> Holds:
    made = Holds()
    made.enter(ME)
    made.enter(OTHER)
    return made


def memory(nbytes: int = 8) -> np.ndarray:
    return np.zeros(nbytes, np.uint8)


def expire_all(holds: Holds) -> list[float]:
    """The deadlines at which something was to be done, until there was none."""
    deadlines = []
    while (deadline := holds.next_deadline()) is not None:
        assert len(deadlines) < 10, "a deadline in the past would keep the server busy"
        deadlines.append(deadline)
        holds.expire(deadline)
    return deadlines


def test_an_unused_lease_is_warned_of_and_then_expires_at_the_second_look(holds):
    holds.lease(ME, 7, memory(), expires=10.0)
    first = holds.next_deadline()
    assert first > 10.0
    assert (holds.expire(10.0), holds.expire(first), holds.leased_nbytes) == (False, False, 8)
    second = holds.next_deadline()
    assert second > first
    assert (holds.expire(second), holds.leased_nbytes, holds.take_lease(ME, 7)) == (True, 0, None)


def test_a_client_that_is_heard_between_the_two_looks_keeps_its_lease(holds):
    holds.lease(ME, 7, memory(), expires=10.0)
    holds.expire(holds.next_deadline())
    holds.begin(ME, 7)
    assert holds.next_deadline() is None
    assert not holds.expire(1e9)
    assert holds.take_lease(ME, 7) is not None


def test_a_lease_that_was_begun_or_asked_for_never_expires(holds):
    holds.lease(ME, 1, memory(), expires=10.0)
    holds.begin(ME, 1)
    holds.lease(ME, 2, memory())
    assert (holds.next_deadline(), holds.expire(1e9), holds.leased_nbytes) == (None, False, 16)


def test_a_begin_for_a_lease_that_expired_brings_nothing_back(holds):
    holds.lease(ME, 7, memory(), expires=10.0)
    assert len(expire_all(holds)) == 2
    holds.begin(ME, 7)
    assert holds.take_lease(ME, 7) is None


def test_leases_expire_each_at_its_time(holds):
    holds.lease(ME, 1, memory(), expires=10.0)
    holds.lease(OTHER, 1, memory(), expires=20.0)
    holds.lease(OTHER, 2, memory())
    assert len(expire_all(holds)) == 4
    assert holds.leased_nbytes == 8


def test_a_lease_is_taken_once_and_by_its_own_name_only(holds):
    mine = memory()
    holds.lease(ME, 7, mine)
    assert (holds.take_lease(OTHER, 7), holds.take_lease(ME, 8)) == (None, None)
    assert holds.take_lease(ME, 7) is mine
    assert holds.take_lease(ME, 7) is None


def test_what_was_let_go_is_no_hold_any_more(holds):
    holds.lease(ME, 1, memory())
    holds.pin(ME, 2, [memory(), memory()])
    assert (holds.leased_nbytes, holds.num_pins) == (8, 1)
    holds.let_go(ME, 1)
    holds.let_go(ME, 2)
    assert (holds.leased_nbytes, holds.num_pins) == (0, 0)


def test_a_hold_that_was_let_go_before_it_was_granted_may_not_be_granted(holds):
    holds.let_go(ME, 7)
    assert (holds.may(OTHER, 7), holds.may(ME, 8), holds.may(ME, 7)) == (True, True, False)


def test_what_was_let_go_after_its_grant_is_not_taken_for_an_early_word(holds):
    holds.lease(ME, 7, memory())
    holds.let_go(ME, 7)
    assert holds.may(ME, 7)


def test_all_holds_of_a_client_fall_with_it_and_nobody_elses(holds):
    for client in (ME, OTHER):
        holds.lease(client, 1, memory(), expires=5.0)
        holds.pin(client, 2, [memory()])
        holds.let_go(client, 3)
    holds.leave(ME)
    assert (holds.num_clients, holds.leased_nbytes, holds.num_pins) == (1, 8, 1)
    assert (holds.may(ME, 4), holds.may(OTHER, 3), holds.may(OTHER, 4)) == (False, False, True)
    holds.let_go(ME, 9)
    holds.enter(ME)
    assert holds.may(ME, 9), "words of a client that has left are not remembered"


def test_early_words_are_remembered_up_to_a_bound_and_the_latest_of_them(holds):
    for number in range(5000):
        holds.let_go(ME, number)
    remembered = [number for number in range(5000) if not holds.may(ME, number)]
    assert remembered == list(range(5000 - len(remembered), 5000))
    assert 100 <= len(remembered) <= 2000
