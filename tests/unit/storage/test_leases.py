# SPDX-License-Identifier: Apache-2.0
"""Leases: memory to write into and to read from, named by client and call, that ends by its call or its session."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.storage.unit.session_memory import Leases


@pytest.fixture
def leases() -> Leases:
    return Leases()


def memory(nbytes: int = 8) -> np.ndarray:
    return np.zeros(nbytes, np.uint8)


def test_a_lease_is_taken_once_and_by_its_own_name_alone(leases):
    mine = memory()
    leases.lease("me", 7, mine)
    assert (leases.take("other", 7), leases.take("me", 8)) == (None, None)
    assert leases.leased("me", 7) is mine
    assert leases.take("me", 7) is mine
    assert (leases.take("me", 7), leases.leased("me", 7), leases.leased_nbytes) == (None, None, 0)


def test_a_pin_is_no_lease(leases):
    leases.pin("me", 7, [memory(), memory()])
    assert (leases.take("me", 7), leases.leased("me", 7)) == (None, None)
    assert (leases.num_pins, leases.leased_nbytes) == (1, 0)


def test_a_call_s_lease_or_pin_is_released_once(leases):
    leases.lease("me", 1, memory())
    leases.pin("me", 2, [memory()])
    for key in (("me", 1), ("me", 2), ("me", 1), ("other", 2)):
        leases.release(*key)
    assert (leases.leased_nbytes, leases.num_pins, leases.held_by()) == (0, 0, {})


def test_all_of_a_session_ends_with_it_and_nothing_of_another_s(leases):
    for client in ("me", "other"):
        leases.lease(client, 1, memory())
        leases.pin(client, 2, [memory()])
        leases.pin(client, 3, [memory()])
    assert leases.held_by() == {"me": (1, 2), "other": (1, 2)}
    leases.end("me")
    leases.end("me")
    assert (leases.held_by(), leases.leased_nbytes, leases.num_pins) == ({"other": (1, 2)}, 8, 2)


def test_the_memory_of_a_session_is_what_it_leased_and_pinned(leases):
    leased, pinned = memory(1), memory(2)
    leases.lease("me", 1, leased)
    leases.pin("me", 2, [pinned])
    leases.lease("other", 1, memory(4))
    assert [extent.nbytes for extent in leases.memory_of("me")] == [1, 2]
    assert leases.memory_of("nobody") == []


def test_what_is_released_is_referred_to_no_more(leases):
    extents = [memory(), memory()]
    refs = [weakref.ref(extent) for extent in extents]
    leases.lease("me", 1, extents[0])
    leases.pin("me", 2, extents)
    extents.clear()
    leases.release("me", 1)
    assert [ref() is None for ref in refs] == [False, False], "both are pinned"
    leases.end("me")
    assert [ref() is None for ref in refs] == [True, True]


STEPS = st.lists(
    st.tuples(st.sampled_from(["lease", "pin", "take", "release", "end"]), st.sampled_from("abc"), st.integers(1, 3))
)


@given(STEPS)
def test_the_numbers_are_those_of_what_was_not_ended(steps):
    leases, leased, pinned = Leases(), {}, {}
    for step, client, call in steps:
        key = (client, call)
        if step == "lease":
            leases.lease(client, call, memory(call))
            leased[key] = call
        elif step == "pin":
            leases.pin(client, call, [memory()])
            pinned[key] = True
        elif step == "take":
            assert (leases.take(client, call) is not None) == (leased.pop(key, None) is not None)
        elif step == "release":
            leases.release(client, call)
            for held in (leased, pinned):
                held.pop(key, None)
        else:
            leases.end(client)
            leased, pinned = ({own: held[own] for own in held if own[0] != client} for held in (leased, pinned))
        assert (leases.leased_nbytes, leases.num_pins) == (sum(leased.values()), len(pinned))
        assert set(leases.held_by()) == {own for own, _ in (*leased, *pinned)}
