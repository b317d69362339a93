# SPDX-License-Identifier: Apache-2.0
"""Waiters: wait queues in order, deadlines in order, and nothing left of requests that were answered."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from transfer_queue.control.state import Waiters


class Named(NamedTuple):
    """A request of which only the number matters."""

    id: str


@pytest.fixture
def waiters():
    return Waiters()


def park(waiters, name, deadline=10.0, queue="p", order=0.0):
    return waiters.park("client", Named(name), 0.0, deadline, queue, order)


def requests(parked):
    return [each.request.id for each in parked]


def test_a_lane_is_in_order_of_rank_then_of_arrival(waiters):
    for name, order in (("late", 2.0), ("unnamed", float("inf")), ("first", 0.0), ("also first", 0.0)):
        park(waiters, name, order=order)
    assert requests(waiters.waiting_in("p")) == ["first", "also first", "late", "unnamed"]
    assert waiters.waiting_in("q") == []


def test_a_lane_may_be_walked_while_its_requests_leave(waiters):
    for name in "abc":
        park(waiters, name)
    for parked in waiters.waiting_in("p"):
        waiters.remove(parked)
    assert (waiters.waiting_in("p"), waiters.all(), waiters.next_deadline()) == ([], [], None)


def test_requests_expire_at_their_deadline_and_leave_in_the_order_of_their_lane(waiters):
    park(waiters, "second", deadline=4.0, order=1.0)
    park(waiters, "first", deadline=5.0, order=0.0)
    park(waiters, "later", deadline=6.0)
    assert (waiters.next_deadline(), waiters.expired(3.9, 99)) == (4.0, [])
    assert requests(waiters.expired(5.0, 99)) == ["first", "second"]
    assert (waiters.next_deadline(), requests(waiters.all())) == (6.0, ["later"])


def test_an_answered_request_does_not_expire_and_may_be_removed_twice(waiters):
    parked = park(waiters, "a", deadline=1.0)
    waiters.remove(parked)
    waiters.remove(parked)
    assert (waiters.expired(2.0, 99), waiters.next_deadline()) == ([], None)


def test_the_requests_of_a_lane_are_removed_together(waiters):
    for name, queue in (("a", "p"), ("b", "q"), ("c", "p")):
        park(waiters, name, queue=queue)
    assert requests(waiters.remove_queue("p")) == ["a", "c"]
    assert requests(waiters.all()) == ["b"]
    assert waiters.remove_queue("p") == []


def test_a_request_is_found_by_its_client_and_its_number(waiters):
    parked = park(waiters, "a")
    assert (waiters.find("client", "a"), waiters.find("other", "a"), waiters.of("client")) == (parked, None, [parked])
    waiters.remove(parked)
    assert (waiters.find("client", "a"), waiters.of("client")) == (None, [])


def test_deadlines_of_answered_requests_do_not_pile_up(waiters):
    last = park(waiters, "stays", deadline=1e9)
    for i in range(1000):
        waiters.remove(park(waiters, i, deadline=1e6))
    assert len(waiters._deadlines) < 100
    assert (requests(waiters.all()), waiters.next_deadline()) == (["stays"], 1e9)
    waiters.remove(last)


def test_an_endless_wait_never_expires(waiters):
    park(waiters, "a", deadline=float("inf"))
    assert (waiters.expired(1e300, 99), waiters.next_deadline()) == ([], float("inf"))
