# SPDX-License-Identifier: Apache-2.0
"""A save of a queue with groups, while they are worked on."""

from __future__ import annotations

from typing import Any

import pytest
from control_kit import SAVER, ask
from groups_kit import FEEDER, PART, TRAINER, Queue
from hypothesis import given
from hypothesis import strategies as st
from slices_kit import parts_of, small_slices

from transfer_queue import GroupSampler
from transfer_queue import protocol as p


@pytest.fixture(autouse=True, scope="module")
def in_small_slices():
    with small_slices():
        yield


class Groups:
    """A queue with groups in two partitions, and what feeders, workers and readers do with them."""

    def __init__(self) -> None:
        self.queue, self.leases, self.sealed = Queue(check=False), list[Any](), set[str]()  # a check writes late tags
        self.queue.register("actor", GroupSampler(groups=1))
        for what, some in ((0, 2), (0, 3), (1, 2), (1, 3)):
            self.act(what, some)

    def act(self, what: int, some: int) -> None:
        queue, name = self.queue, f"{PART}{some % 2}"
        if what == 0 and name not in self.sealed:
            queue.add(1 + some % 4, ["actor"], name)
        elif what == 1:
            found = queue.lease(f"worker{some % 2}", 1 + some % 3, name, wait_s=0.0)
            self.leases += [(f"worker{some % 2}", each) for each in found] if isinstance(found, list) else []
        elif what == 2 and self.leases:
            worker, lease = self.leases.pop(some % len(self.leases))
            if some % 4:
                queue.put(lease, worker=worker, closes=bool(some % 3))
            else:
                queue.end(lease, ("release", "reject", "fail")[some % 3], "why", worker=worker)
        elif what == 3:
            queue.gone(f"worker{some % 2}")
        elif what == 4:
            queue.ask(TRAINER, p.Fetch, name, "actor", ["resp"], 1)
        elif what == 5:
            self.sealed.add(name)
            queue.ask(FEEDER, p.SealPartition, name)


DEEDS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 11)), max_size=12)


@given(before=DEEDS, after=st.lists(DEEDS, min_size=1, max_size=6))
def test_a_save_has_all_groups_as_they_were_at_the_freeze_whatever_is_done_with_them_meanwhile(before, after):
    one, other = Groups(), Groups()
    for groups in (one, other):
        for deed in before:
            groups.act(*deed)
    for partition in one.queue.plane.state.partitions.values():
        partition.tags.catch_up()
    expected = parts_of(one.queue.plane)
    frozen = ask(other.queue.plane, SAVER, p.Freeze)
    parts, meanwhile = [frozen.state], iter(after)
    while True:
        for deed in next(meanwhile, ()):
            other.act(*deed)
        if len(parts) == len(expected):
            break
        parts.append(ask(other.queue.plane, SAVER, p.ReadFrozen, frozen.id, len(parts)).state)
    assert parts == expected
