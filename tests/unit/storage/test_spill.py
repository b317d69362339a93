# SPDX-License-Identifier: Apache-2.0
"""Spilling: where memory is full the oldest blocks go to a file, in steps, and nothing is lost on the way."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.storage.spill_kit import Spiller
from transfer_queue.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
PAGE_NBYTES = 4096
SPILL_STEP_NBYTES = 512 * KIB


@pytest.fixture
def spiller(tmp_path: Path) -> Iterator[Spiller]:
    made = Spiller(tmp_path, 256 * KIB, 4 * MIB)
    yield made
    made.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 4), st.integers(1, 60 * KIB)),
        st.tuples(st.just("replace"), st.integers(0, 99), st.integers(1, 60 * KIB)),
        st.tuples(st.just("delete"), st.integers(0, 99), st.integers(1, 3)),
        st.tuples(st.just("get"), st.integers(0, 99), st.integers(1, 5)),
        st.tuples(st.just("turns"), st.integers(1, 4), st.just(0)),
    ),
    max_size=60,
)


def change(spiller: Spiller, verb: str, number: int, more: int, seed: int) -> None:
    known, pending = sorted(spiller.values), {index for values in spiller.pending.values() for index in values}
    some = known[number % len(known) :][:more] if known else []
    if verb == "get":
        assert not some or spiller.get(some) == [spiller.values[index] for index in some]
    elif some and verb == "replace" and some[0] not in pending:
        spiller.put(some[:1], more, seed)
    elif some and verb == "delete" and not pending & set(some):
        spiller.delete(some)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(steps=STEPS, with_arena=st.booleans())
def test_whatever_was_put_is_read_back_equal_and_memory_is_bounded(steps, with_arena):
    with tempfile.TemporaryDirectory() as directory:
        spiller = Spiller(Path(directory), 256 * KIB, 1 * MIB, with_arena)
        for seed, (verb, number, more) in enumerate(steps):
            if verb == "put":
                spiller.put(list(range(10 * seed, 10 * seed + number)), more, seed)
            elif verb == "turns":
                for _ in range(number):
                    spiller.step()
            else:
                change(spiller, verb, number, more, seed)
        spiller.settle()
        for index, value in list(spiller.values.items()):
            assert spiller.get([index]) == [value]
        while spiller.values:  # room for those that still wait
            spiller.delete(sorted(spiller.values))
            spiller.settle()
        assert not spiller.pending
        assert not spiller.failed
        stats = spiller.unit.stats()
        assert (stats.held_nbytes, stats.spilled_nbytes, spiller.file.used_nbytes) == (0, 0, 0)
        spiller.close()


def test_the_oldest_blocks_go_first_and_only_as_many_as_are_in_the_way(spiller):
    for index in range(6):
        spiller.put([index], 64 * KIB, index)
        spiller.settle()
    stats = spiller.unit.stats()
    assert (stats.held_nbytes, stats.spilled_nbytes) == (6 * 64 * KIB, 2 * 64 * KIB)
    assert spiller.get([0, 1]) == [spiller.values[0], spiller.values[1]]


def test_a_large_block_goes_in_steps_and_is_read_from_memory_meanwhile(tmp_path):
    spiller = Spiller(tmp_path, 8 * SPILL_STEP_NBYTES, 4 * 8 * SPILL_STEP_NBYTES)
    spiller.put([0], 8 * SPILL_STEP_NBYTES, 1)
    call, turns = spiller.put([1], PAGE_NBYTES, 2), 0
    while call in spiller.pending:
        read = spiller.begin_get([0])
        assert read in spiller.rows, "it is answered at once, whatever goes on"
        assert spiller.step()
        turns += 1
    assert turns == 8
    spiller.close()


@pytest.fixture
def large_on_disk(tmp_path) -> Spiller:
    """Sample 0 takes four steps to be read."""
    spiller = Spiller(tmp_path, 4 * SPILL_STEP_NBYTES, 16 * SPILL_STEP_NBYTES)
    spiller.put([0], 4 * SPILL_STEP_NBYTES, 1)
    spiller.put([1], 4 * SPILL_STEP_NBYTES, 2)
    spiller.settle()
    return spiller


def test_values_on_disk_are_read_in_steps_before_they_are_answered(large_on_disk):
    spiller = large_on_disk
    read, turns = spiller.begin_get([0]), 0
    while read not in spiller.rows:
        assert spiller.step()
        turns += 1
    assert turns == 3, "and the first step in its own turn"


@pytest.mark.parametrize("ends", ["cancelled", "gone"])
def test_a_read_that_nobody_waits_for_any_more_is_not_gone_on_with(large_on_disk, ends):
    spiller = large_on_disk
    read = spiller.begin_get([0])
    spiller.take(spiller.unit.cancel("me", read, 0.0) if ends == "cancelled" else spiller.unit.client_gone("me", 0.0))
    assert spiller.unit.next_deadline() != -math.inf
    assert read not in spiller.rows


def test_a_value_that_is_cleared_while_it_is_read_from_disk_is_an_error(large_on_disk):
    spiller = large_on_disk
    read = spiller.begin_get([0])
    spiller.delete([0])
    spiller.settle()
    assert spiller.failed[read].startswith("StorageKeyNotFoundError: ")


def test_objects_and_ragged_rows_come_back_from_disk(spiller):
    texts = ["x" * n for n in (70_000, 0, 60_000)]
    nbytes = spiller.put_objects([0, 1, 2], texts)
    spiller.put([3], 200 * KIB, 3)
    spiller.settle()
    assert spiller.unit.stats().spilled_nbytes == nbytes
    assert spiller.get([2, 0, 1]) == [spiller.values[index] for index in (2, 0, 1)]


def test_dead_rows_on_disk_are_dropped_and_their_space_is_used_again(spiller):
    spiller.put(list(range(16)), 15 * KIB, 1)
    spiller.put([100], 200 * KIB, 2)
    spiller.settle()
    before = spiller.unit.stats().spilled_nbytes
    spiller.delete(list(range(14)))
    spiller.settle()
    assert spiller.unit.stats().spilled_nbytes * 4 < before
    assert spiller.get([15, 14]) == [spiller.values[15], spiller.values[14]]
    assert spiller.unit.stats().held_nbytes - spiller.unit.stats().spilled_nbytes == 200 * KIB


def test_a_large_block_on_disk_is_compacted_there_in_steps(tmp_path):
    spiller = Spiller(tmp_path, 4 * MIB, 16 * MIB)
    spiller.put(list(range(256)), 16 * KIB, 1)
    spiller.put([1000], 4 * MIB, 2)
    spiller.settle()
    spiller.delete(list(range(160)))
    turns = 0
    while spiller.step():
        assert spiller.unit.stats().held_nbytes - spiller.unit.stats().spilled_nbytes == 4 * MIB
        turns += 1
    assert turns >= 96 * 16 * KIB // SPILL_STEP_NBYTES
    assert spiller.unit.stats().spilled_nbytes == 96 * 16 * KIB
    assert spiller.get(list(range(160, 256))) == [spiller.values[index] for index in range(160, 256)]
    spiller.close()


def test_a_put_waits_where_memory_and_disk_are_full_and_goes_on_after_a_clear(tmp_path):
    spiller = Spiller(tmp_path, 256 * KIB, 512 * KIB)
    for index in range(12):
        spiller.put([index], 64 * KIB, index)
        spiller.settle()
    assert not spiller.pending
    call = spiller.put([12], 64 * KIB, 12, wait_s=5.0)
    spiller.settle()
    assert call in spiller.pending
    spiller.delete([0])
    spiller.settle()
    assert 12 in spiller.values
    late = spiller.put([13], 64 * KIB, 13, wait_s=5.0)
    spiller.settle()
    spiller.now = 6.0
    spiller.take(spiller.unit.expire(6.0))
    assert spiller.failed[late].startswith("StorageFullError: ")
    assert [spiller.get([index]) for index in range(1, 13)] == [[spiller.values[index]] for index in range(1, 13)]
    spiller.close()


def test_a_full_disk_makes_puts_wait_and_loses_nothing(spiller, monkeypatch):
    taken = os.posix_fallocate

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        if offset + nbytes > 100 * KIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    for index in range(6):
        spiller.put([index], 64 * KIB, index)
        spiller.settle()
    assert list(spiller.pending) == [6]
    late = spiller.put([6], 64 * KIB, 6, wait_s=5.0)
    spiller.take(spiller.unit.expire(6.0))
    assert "its disk: No space left on device, at '" in spiller.failed[late]
    assert [spiller.get([index]) for index in range(5)] == [[spiller.values[index]] for index in range(5)]
    spiller.delete([4])
    spiller.settle()
    assert spiller.get([5]) == [spiller.values[5]]


def test_the_file_has_no_name(spiller, tmp_path):
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_a_directory_that_is_no_directory_is_refused_with_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"ssd_offload: no file of 4096 bytes can be made in .*ssd_offload\.path"):
        Spiller(tmp_path / "file", 256 * KIB, 4096)
