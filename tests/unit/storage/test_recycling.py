# SPDX-License-Identifier: Apache-2.0
"""Recycler: memory of dropped batches is used again, never while anything still points at it, and not hoarded."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
import torch

from transfer_queue.storage.recycling import POOLED_NBYTES, Recycler

MIB = 1024 * 1024


def address(memory: np.ndarray) -> int:
    return int(memory.__array_interface__["data"][0])


@pytest.fixture
def recycler() -> Recycler:
    return Recycler(kept_nbytes=8 * MIB)


LAST_POINTERS = {
    "array": lambda memory: memory[10:],
    "tensor": lambda memory: torch.from_numpy(memory).view(torch.float32).view(-1, 4)[1:, 2],
    "nested tensor": lambda memory: torch.nested.nested_tensor_from_jagged(
        torch.from_numpy(memory), torch.tensor([0, 5, memory.nbytes])
    ),
    "row of a nested tensor": lambda memory: torch.nested.nested_tensor_from_jagged(
        torch.from_numpy(memory), torch.tensor([0, 5, memory.nbytes])
    ).unbind()[1],
    "storage of a tensor": lambda memory: torch.from_numpy(memory).untyped_storage(),
    "memoryview": lambda memory: memory.data,
}


@pytest.mark.parametrize("last_pointer", LAST_POINTERS.values(), ids=LAST_POINTERS)
def test_a_buffer_is_used_again_only_after_everything_made_of_it_is_gone(recycler, last_pointer):
    memory = recycler.empty(2 * MIB)
    first = address(memory)
    pointer = last_pointer(memory)
    del memory
    gc.collect()
    others = [recycler.empty(2 * MIB) for _ in range(3)]
    assert first not in [address(other) for other in others]
    assert recycler.kept_nbytes == 0
    del pointer
    gc.collect()
    assert (recycler.kept_nbytes, address(recycler.empty(2 * MIB))) == (2 * MIB, first)


def test_memory_is_as_long_as_asked_for_and_writable(recycler):
    for nbytes in (0, 1, POOLED_NBYTES - 1, POOLED_NBYTES, POOLED_NBYTES + 1):
        memory = recycler.empty(nbytes)
        memory[:] = 1
        assert (memory.nbytes, memory.dtype) == (nbytes, np.uint8)


def test_small_buffers_are_left_to_the_allocator(recycler):
    recycler.empty(POOLED_NBYTES - 1)
    assert recycler.kept_nbytes == 0


def test_a_buffer_serves_requests_that_are_a_little_smaller_and_no_others(recycler):
    first = address(recycler.empty(4 * MIB))
    assert address(recycler.empty(4 * MIB - 5000)) == first
    assert address(recycler.empty(2 * MIB)) != first
    assert recycler.empty(4 * MIB + 8192).nbytes == 4 * MIB + 8192


def test_of_several_buffers_that_fit_the_one_dropped_last_is_used(recycler):
    """Its bytes may still be in the caches."""
    kept = [recycler.empty(2 * MIB) for _ in range(3)]
    wanted = address(kept[1])
    for position in (0, 2, 1):
        kept[position] = None
    assert address(recycler.empty(2 * MIB)) == wanted


def test_no_more_is_kept_than_the_bound_and_the_oldest_goes_first(recycler):
    buffers = [recycler.empty(3 * MIB) for _ in range(4)]
    last = address(buffers[-1])
    while buffers:
        buffers.pop(0)
    assert recycler.kept_nbytes == 6 * MIB
    assert last in [address(recycler.empty(3 * MIB)), address(recycler.empty(3 * MIB))]


def test_buffers_larger_than_the_bound_are_not_kept(recycler):
    recycler.empty(9 * MIB)
    assert recycler.kept_nbytes == 0


def test_memory_that_the_system_does_not_map_is_the_allocators_to_refuse(recycler):
    with pytest.raises(MemoryError):
        recycler.empty(1 << 60)


def test_a_thousand_buffers_dropped_in_any_order_are_found_by_size_or_given_up(recycler):
    sizes = np.random.default_rng(0).integers(POOLED_NBYTES, 2 * MIB, 1000).tolist()
    buffers = [recycler.empty(size) for size in sizes]
    while buffers:
        buffers.pop(len(buffers) * 7 // 11)
        assert recycler.kept_nbytes <= 8 * MIB
    for size in sizes:
        assert recycler.empty(size).nbytes == size


def test_a_forked_child_and_its_parent_each_go_on_with_memory_of_their_own(recycler):
    recycler.empty(2 * MIB)[:] = 1
    kept = recycler.empty(MIB)
    kept[:] = 5
    recycler._lock.acquire()  # as another thread of the parent may have, when it forks
    child = os.fork()
    if child == 0:
        recycler.after_fork()
        mine = recycler.empty(2 * MIB)
        mine[:] = 2
        ok = bool((kept == 5).all())
        kept[:] = 6
        os._exit(0 if ok else 1)
    recycler._lock.release()
    _, status = os.waitpid(child, 0)
    assert (os.waitstatus_to_exitcode(status), kept.min(), kept.max()) == (0, 5, 5)


def test_threads_never_get_memory_that_another_one_uses(recycler):
    wrong: list[int] = []

    def work(number: int) -> None:
        for n in range(60):
            memory = recycler.empty(MIB + 64 * (n % 5))
            memory[::4096] = number
            recycler.empty(MIB)[::4096] = number
            if not (memory[::4096] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert recycler.kept_nbytes <= 8 * MIB
