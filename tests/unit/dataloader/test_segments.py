# SPDX-License-Identifier: Apache-2.0
"""Segments: what a worker lends is read where it lies, and used again only when the reader has dropped all of it."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import DupFd, ForkingPickler

import numpy as np
import psutil
import pytest
import torch

from transfer_queue.dataloader import segments as module
from transfer_queue.dataloader.segments import LEAST_NBYTES, Lent, Segments, receive, unmap, unmap_owners
from transfer_queue.storage.pack import from_bytes

MIB = 1024 * 1024


@pytest.fixture
def own() -> Iterator[Segments]:
    with contextlib.closing(os.fdopen(os.dup(0))) as any_file:
        pickle.loads(ForkingPickler.dumps(DupFd(any_file.fileno()))).detach()  # starts what hands descriptors over
    yield Segments(kept_nbytes=8 * MIB)
    unmap_owners([os.getpid()])


def filled(own: Segments, value: int, count: int = MIB) -> torch.Tensor:
    tensor = from_bytes(own.empty(8 * count), torch.int64, (count,))
    return tensor.fill_(value)


def sent(own: Segments, tensor: torch.Tensor) -> torch.Tensor:
    lent = own.lend(tensor)
    assert lent is not None
    return receive(pickle.loads(ForkingPickler.dumps(lent)))


def test_the_reader_sees_the_very_memory_and_may_write_it(own):
    tensor = filled(own, 7)
    came = sent(own, tensor)
    assert (came.dtype, came.shape) == (torch.int64, (MIB,))
    assert came.data_ptr() != tensor.data_ptr()
    came[3] = 9
    assert tensor[2:5].tolist() == [7, 9, 7]


def test_memory_is_used_again_only_when_both_sides_have_dropped_it(own):
    tensor = filled(own, 1)
    first = tensor.data_ptr()
    came = sent(own, tensor)
    row = came[5:9]
    del tensor
    assert own.kept_nbytes == 0
    del came
    assert own.kept_nbytes == 0
    assert row.tolist() == [1] * 4
    del row
    assert own.kept_nbytes == 8 * MIB
    assert filled(own, 2).data_ptr() == first


def test_memory_that_the_worker_still_holds_is_not_used_again(own):
    tensor = filled(own, 1)
    came = sent(own, tensor)
    del came
    assert own.kept_nbytes == 0
    assert filled(own, 2).data_ptr() != tensor.data_ptr()


def test_every_part_lent_of_a_segment_must_be_dropped(own):
    tensor = filled(own, 1)
    parts = [sent(own, part) for part in (*tensor.split(MIB // 4), tensor)]
    del tensor
    while parts:
        assert own.kept_nbytes == 0
        assert parts.pop().unique().tolist() == [1]
    assert own.kept_nbytes == 8 * MIB


def test_the_same_tensor_lent_twice_comes_back_when_both_are_dropped(own):
    tensor = filled(own, 1)
    one, other = sent(own, tensor), sent(own, tensor)
    del tensor, one
    assert own.kept_nbytes == 0
    del other
    assert own.kept_nbytes == 8 * MIB


def test_dropped_segments_leave_no_descriptor_open(own):
    before = psutil.Process().num_fds()
    held = [sent(own, filled(own, value)) for value in range(4)]
    assert psutil.Process().num_fds() > before
    held.clear()
    assert own.kept_nbytes == 8 * MIB
    unmap(os.getpid(), own.retired())
    kept = 3  # the one that is kept: the worker's descriptor, and one that each mapping keeps for itself
    assert psutil.Process().num_fds() <= before + kept


def test_a_segment_used_again_is_known_to_the_reader(own):
    for value in range(5):
        lent = own.lend(filled(own, value))
        assert lent is not None
        assert (lent.segment, lent.descriptor is not None) == (0, value == 0)
        assert receive(pickle.loads(ForkingPickler.dumps(lent))).unique().tolist() == [value]


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(LEAST_NBYTES), torch.from_numpy(np.arange(LEAST_NBYTES))],
    ids=["of torch", "of NumPy"],
)
def test_memory_from_elsewhere_is_not_lent(own, tensor):
    filled(own, 1)
    assert own.lend(tensor) is None


def test_what_does_not_lie_in_one_piece_is_not_lent(own):
    assert own.lend(filled(own, 1)[::2]) is None


def test_in_a_process_without_segments_nothing_is_lent():
    assert module.lend(torch.zeros(LEAST_NBYTES)) is None
    assert module.retired() == []


def test_small_memory_is_left_to_the_allocator(own):
    tensor = from_bytes(own.empty(LEAST_NBYTES - 8), torch.int64, (-1,))
    assert own.lend(tensor) is None


def test_a_full_page_of_places_ends_what_is_lent_of_a_segment(own):
    tensor = filled(own, 1)
    lent = [own.lend(tensor) for _ in range(module._SLOTS + 1)]
    assert [type(each) for each in lent[-2:]] == [Lent, type(None)]
    lent[0].descriptor.detach()


def test_more_than_so_many_segments_are_not_made_and_idle_ones_make_way(own):
    own = Segments(most=3)
    held = [filled(own, value, MIB // 8) for value in range(3)]
    assert own.lend(filled(own, 9, MIB // 8)) is None
    sent(own, held.pop())
    other = filled(own, 9, MIB // 2)
    assert sent(own, other)[0] == 9
    assert own.retired() == [2]
    assert own.retired() == []


def test_idle_memory_beyond_the_limit_is_given_up_on_both_sides(own):
    held = [filled(own, value) for value in range(3)]
    for tensor in held:
        sent(own, tensor)
    del tensor
    held.clear()
    assert own.kept_nbytes == 8 * MIB
    assert sorted(own.retired()) == [1, 2]  # a list drops its last item first
    unmap(os.getpid(), [1, 2])
    assert [segment for owner, segment in module._mapped if owner == os.getpid()] == [0]


def test_what_is_read_when_the_process_forks_is_never_written_again(own):
    came = sent(own, filled(own, 4))
    told_read, told_write = os.pipe()
    seen_read, seen_write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.read(told_read, 1)
            os.write(seen_write, bytes(set(came.tolist())))
        finally:
            os._exit(0)
    del came
    again = [filled(own, 5) for _ in range(3)]
    os.write(told_write, b"x")
    assert os.read(seen_read, 8) == b"\x04"
    os.waitpid(child, 0)
    assert (own.retired(), len(again)) == ([0], 3)
    for descriptor in (told_read, told_write, seen_read, seen_write):
        os.close(descriptor)


def test_a_fork_that_drops_what_its_parent_reads_gives_nothing_back(own):
    came = sent(own, filled(own, 4))
    child = os.fork()
    if not child:
        del came
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert own.kept_nbytes == 0
    assert came.unique().tolist() == [4]
