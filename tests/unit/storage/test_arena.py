# SPDX-License-Identifier: Apache-2.0
"""Arena: extents come back when their last view is gone, whole pages are recycled, idle ones go back to the kernel."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer_queue.storage.messages import PAGE_NBYTES, whole_pages
from transfer_queue.storage.unit.arena import IDLE_S, Arena

PAGE = PAGE_NBYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 * PAGE)
    yield made
    made.close()


def resident(arena: Arena) -> int:
    """Bytes that the kernel really keeps: holes of the file count nothing."""
    return os.fstat(arena.descriptor).st_blocks * 512


LAST_VIEWS = {
    "slice": lambda memory: memory[10:20],
    "reshaped words": lambda memory: memory.view(np.int64).reshape(-1, 2)[1:],
    "memoryview": lambda memory: memory.data[5:],
    "array over a memoryview": lambda memory: np.frombuffer(memory.data.toreadonly(), np.int32),
    "torch tensor": lambda memory: torch.from_numpy(memory).view(torch.float32)[3:],
    "array of a torch tensor": lambda memory: torch.from_numpy(memory)[1:].numpy(),
}


@pytest.mark.parametrize("last_view", LAST_VIEWS.values(), ids=LAST_VIEWS)
def test_an_extent_comes_back_when_the_last_view_of_it_is_gone_and_not_before(arena, last_view):
    memory = arena.allocate(2 * PAGE)
    view = last_view(memory)
    del memory
    gc.collect()
    assert arena.used_nbytes == 2 * PAGE
    del view
    assert (arena.used_nbytes, arena.recyclable_nbytes) == (0, 2 * PAGE)


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2), (64 * PAGE, 64)])
def test_an_allocation_takes_whole_pages_and_gives_what_was_asked_for(arena, nbytes, pages):
    memory = arena.allocate(nbytes)
    assert (memory.nbytes, arena.used_nbytes, arena.offset_of(memory) % PAGE) == (nbytes, pages * PAGE, 0)
    assert pages == 1 or whole_pages(nbytes) == pages * PAGE


def test_no_memory_is_given_where_no_range_is_large_enough(arena):
    kept = [arena.allocate(16 * PAGE) for _ in range(4)]
    assert arena.allocate(1) is None
    del kept[1]
    assert arena.allocate(17 * PAGE) is None
    assert arena.allocate(16 * PAGE) is not None


def test_pages_that_were_used_are_taken_before_fresh_ones(arena):
    first, second = arena.allocate(4 * PAGE), arena.allocate(PAGE)
    at = arena.offset_of(first)
    del first
    assert arena.offset_of(arena.allocate(3 * PAGE)) == at
    assert second is not None


def test_carving_frees_the_head_the_gaps_and_the_tail(arena):
    lease = arena.allocate(10 * PAGE)
    at = arena.offset_of(lease)
    parts = arena.carve(lease, [(at + PAGE, PAGE + 1), (at + 5 * PAGE, 8)])
    assert [(arena.offset_of(part) - at, part.nbytes) for part in parts] == [(PAGE, PAGE + 1), (5 * PAGE, 8)]
    assert (arena.used_nbytes, arena.recyclable_nbytes) == (3 * PAGE, 7 * PAGE)
    del lease
    assert arena.used_nbytes == 3 * PAGE, "the lease was no owner any more"
    del parts[0]
    assert arena.used_nbytes == PAGE
    parts.clear()
    assert (arena.used_nbytes, arena.recyclable_nbytes) == (0, 10 * PAGE)


def test_carving_nothing_out_of_an_extent_frees_all_of_it(arena):
    assert arena.carve(arena.allocate(3 * PAGE), []) == []
    assert arena.used_nbytes == 0


def test_memory_elsewhere_has_no_offset_in_the_arena(arena):
    assert arena.offset_of(arena.allocate(1)) >= 0
    assert arena.offset_of(np.zeros(PAGE, np.uint8)) == -1


def test_idle_pages_go_back_to_the_kernel_after_their_time_and_not_before(arena):
    arena.tick(100.0)
    kept = arena.allocate(2 * PAGE)
    kept[:] = 7
    arena.allocate(8 * PAGE)[:] = 1
    arena.tick(100.0)
    arena.trim(100.0 + IDLE_S - 0.1)
    assert (resident(arena), arena.recyclable_nbytes) == (10 * PAGE, 8 * PAGE)
    arena.trim(100.0 + IDLE_S)
    assert (resident(arena), arena.recyclable_nbytes, kept.min()) == (2 * PAGE, 0, 7)
    assert arena.allocate(62 * PAGE) is not None, "their addresses can be taken again"


def test_much_memory_goes_back_in_parts_with_the_next_one_due_at_once():
    arena, most = Arena(1 << 30), 32 << 20
    arena.tick(0.0)
    arena.allocate(80 << 20)  # pages that nobody touched cost the test nothing
    arena.tick(0.0)
    left, due = [], []
    for _ in range(3):
        due.append(arena.next_trim())
        arena.trim(IDLE_S)
        left.append(arena.recyclable_nbytes)
    assert left == [(80 << 20) - most, (80 << 20) - 2 * most, 0]
    assert (due, arena.next_trim()) == ([IDLE_S] * 3, None)
    arena.close()


def test_pages_that_were_recycled_in_time_stay(arena):
    arena.tick(0.0)
    arena.allocate(4 * PAGE)[:] = 1
    arena.tick(20.0)
    arena.allocate(4 * PAGE)[:] = 1
    arena.trim(20.0 + IDLE_S - 1.0)
    assert resident(arena) == 4 * PAGE


def test_what_steady_traffic_does_not_need_goes_back_though_it_touches_every_page_and_what_it_needs_stays():
    arena = Arena(64 * PAGE)
    arena.allocate(40 * PAGE)[:] = 1
    for second in range(0, 3 * int(IDLE_S), 5):
        arena.tick(float(second))
        traffic = [arena.allocate(3 * PAGE), arena.allocate(PAGE)]
        arena.tick(float(second))
        if (due := arena.next_trim()) is not None and due <= second:
            arena.trim(float(second))
        del traffic
    assert 4 * PAGE <= arena.used_nbytes + arena.recyclable_nbytes <= 5 * PAGE
    arena.close()


def test_there_is_nothing_to_trim_while_nothing_is_free_and_each_trim_moves_the_next(arena):
    arena.tick(1000.0)
    memory = arena.allocate(PAGE)
    assert arena.next_trim() is None
    del memory
    arena.tick(1000.0)
    now, trims = 1000.0, []
    while (due := arena.next_trim()) is not None:
        now = max(now, due)
        arena.trim(now)
        trims.append(now)
        assert (arena.next_trim() or now + 1) > now, "a deadline in the past would keep the server busy"
    assert len(trims) <= 3
    assert 1000.0 + IDLE_S <= trims[-1] <= 1000.0 + 2 * IDLE_S


def test_extents_that_end_in_other_threads_come_back_once_each(arena):
    rounds, errors = 200, []

    def end(extents: list) -> None:
        try:
            while extents:
                extents.pop()
        except BaseException as error:
            errors.append(error)

    for _ in range(rounds):
        shares = [[arena.allocate(PAGE * (1 + n % 3)) for n in range(8)] for _ in range(2)]
        assert all(memory is not None for share in shares for memory in share)
        threads = [threading.Thread(target=end, args=(share,)) for share in shares]
        for thread in threads:
            thread.start()
        for _ in range(20):
            assert arena.used_nbytes + arena.recyclable_nbytes <= arena.nbytes
        for thread in threads:
            thread.join()
    assert (errors, arena.used_nbytes) == ([], 0)


def test_a_view_outlives_the_arena():
    arena = Arena(4 * PAGE)
    memory = arena.allocate(PAGE)
    memory[:] = 3
    descriptor = arena.descriptor
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    del arena
    gc.collect()
    assert (memory.min(), memory.max()) == (3, 3)


class ArenaMachine(RuleBasedStateMachine):
    """Every extent is filled with a number of its own: whatever else changes it was given the same pages."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(48 * PAGE)
        self.kept: list[tuple[np.ndarray, int, int]] = []  # memory, what fills it, bytes that it takes
        self.numbers = 0
        self.now = 0.0

    def keep(self, memory: np.ndarray, nbytes: int) -> None:
        self.numbers = self.numbers % 250 + 1
        memory[:] = self.numbers
        self.kept.append((memory, self.numbers, nbytes))

    @rule(nbytes=st.integers(1, 12 * PAGE))
    def allocate(self, nbytes: int) -> None:
        memory = self.arena.allocate(nbytes)
        if memory is not None:
            self.keep(memory, whole_pages(nbytes))

    @rule(data=st.data())
    @precondition(lambda self: self.kept)
    def end(self, data: st.DataObject) -> None:
        self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1)))

    @rule(sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2 * PAGE)), max_size=3), tail=st.integers(0, 2))
    def lease_and_carve(self, sizes: list[tuple[int, int]], tail: int) -> None:
        pages = sum(gap + whole_pages(nbytes) // PAGE for gap, nbytes in sizes) + tail
        lease = self.arena.allocate(max(pages, 1) * PAGE)
        if lease is None:
            return
        at, ranges = self.arena.offset_of(lease), []
        for gap, nbytes in sizes:
            ranges.append((at + gap * PAGE, nbytes))
            at = ranges[-1][0] + whole_pages(nbytes)
        for part, (offset, nbytes) in zip(self.arena.carve(lease, ranges), ranges, strict=True):
            assert (self.arena.offset_of(part), part.nbytes) == (offset, nbytes)
            self.keep(part, whole_pages(nbytes))

    @rule(wait=st.sampled_from([1.0, 20.0, 40.0]))
    def trim(self, wait: float) -> None:
        self.now += wait
        self.arena.trim(self.now)

    @invariant()
    def nobody_wrote_into_the_memory_of_another(self) -> None:
        assert all((memory == number).all() for memory, number, _ in self.kept)

    @invariant()
    def used_is_what_is_kept(self) -> None:
        assert self.arena.used_nbytes == sum(nbytes for *_, nbytes in self.kept)
        assert resident(self.arena) <= self.arena.used_nbytes + self.arena.recyclable_nbytes

    def teardown(self) -> None:
        self.arena.close()


ArenaMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, print_blob=True)
TestNothingIsHandedOutTwice = ArenaMachine.TestCase
