# SPDX-License-Identifier: Apache-2.0
"""A client's link to one unit: how much it leases ahead."""

from __future__ import annotations

from transfer_queue.storage.simple.holds import AHEAD_S
from transfer_queue.storage.simple.link import Place, UnitLink
from transfer_queue.storage.simple.messages import Hold

from transfer_queue.transport.base import Peer


def link() -> UnitLink:
    return UnitLink(Peer("u", "inproc://u"), shared=False)


def test_a_lone_write_leases_nothing_and_those_of_one_size_exactly_what_the_next_takes():
    unit = link()
    assert [unit.wish(4096) for _ in range(3)] == [0, 4096, 4096]


def test_writes_that_vary_lease_what_the_largest_of_them_would_need():
    unit = link()
    assert [unit.wish(nbytes) for nbytes in (8192, 16384, 12288)] == [0, 20480, 20480]


def test_nothing_more_is_leased_while_another_lease_waits_for_its_write():
    unit = link()
    unit.wish(4096)
    unit.keep_ahead(Place(Hold(1, 1), 0, 4096), asked=-AHEAD_S)
    assert unit.wish(4096) == 0
