# SPDX-License-Identifier: Apache-2.0
"""When a batch is done with: all of it was read, or this process has no metadata of it any more."""

from __future__ import annotations

import copy
import gc
import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue import BatchMeta
from transfer_queue.metadata.batch_meta import UnreadBatch

FIELDS = {"x": {"dtype": torch.int64, "shape": (1,)}, "y": {"dtype": torch.int64, "shape": (1,)}}


def fetched(call: int, indexes: list[int], done: set[int]) -> BatchMeta:
    meta = BatchMeta(indexes, ["p"] * len(indexes), FIELDS)
    meta.unread = (UnreadBatch(call, indexes, FIELDS, done),)
    return meta


def read(meta: BatchMeta) -> None:
    for batch in meta.unread:
        batch.was_read(meta.global_indexes, meta.field_names)


def test_a_batch_is_done_with_once_all_its_samples_were_read_in_whatever_parts():
    done: set[int] = set()
    meta = fetched(7, [0, 1, 2, 3], done)
    first, second = meta.chunk(2)
    read(first)
    read(first)
    assert done == set()
    meta.reorder([3, 2, 1, 0])
    read(meta.select_samples([1, 0, 0]))
    assert done == {7}
    done.clear()  # the queue was told
    del meta, first, second
    gc.collect()
    assert done == set(), "once is enough"


def test_who_reads_some_of_the_fields_may_still_read_the_others():
    done: set[int] = set()
    meta = fetched(7, [0, 1], done)
    read(meta.select_fields(["x"]))
    assert done == set()
    meta.field_schema = {**meta.field_schema, "z": FIELDS["x"]}
    read(meta)
    assert done == {7}


def test_what_was_never_read_is_done_with_when_its_last_metadata_is_gone():
    done: set[int] = set()
    meta = fetched(7, [0, 1, 2], done)
    kept = [meta[0], copy.copy(meta), copy.deepcopy(meta), meta.copy(), meta.union(meta)]
    kept.append(BatchMeta.concat([meta[1:], fetched(8, [5], done)]))
    del meta
    while kept:
        assert 7 not in done
        kept.pop(0)
    assert done == {7, 8}


def test_a_pickled_copy_keeps_nothing_and_ends_nothing():
    done: set[int] = set()
    meta = fetched(7, [0, 1], done)
    other = pickle.loads(pickle.dumps(meta))
    assert other == meta
    read(other)
    del other
    assert done == set()
    del meta
    assert done == {7}


def test_a_join_of_two_batches_ends_each_of_them_once_it_was_read():
    done: set[int] = set()
    one, two = fetched(1, [0, 1], done), fetched(2, [2, 3], done)
    joined = BatchMeta.concat([one, two])
    read(joined[:3])
    assert done == {1}
    read(joined[3:])
    assert done == {1, 2}


@given(st.data())
def test_the_queue_is_told_once_and_never_while_something_unread_can_be_read(data):
    done: set[int] = set()
    size = data.draw(st.integers(1, 5))
    held, unread = [fetched(1, list(range(size)), done)], set(range(size))
    while held and unread:
        assert done == set()
        meta = held.pop(data.draw(st.integers(0, len(held) - 1)))
        act = data.draw(st.sampled_from(["read", "cut", "copy", "drop"]))
        if act == "read":
            read(meta)
            unread.difference_update(meta.global_indexes)
        elif act == "cut":
            held += meta.chunk_by_size([1] * meta.size)
        elif act == "copy":
            held += [meta, meta.copy()]
        del meta
    assert done == {1}
