# SPDX-License-Identifier: Apache-2.0
"""KeyMap knows a sample's key both ways; IndexAllocator counts up."""

from __future__ import annotations

from transfer_queue.control.keys_and_tags import KeyMap
from transfer_queue.control.rows import IndexAllocator


def test_a_key_and_its_sample_are_known_both_ways_until_forgotten():
    keys = KeyMap()
    keys.bind("b", 4)
    keys.bind("a", 2)
    assert (keys.index_of("a"), keys.key_of(4), len(keys)) == (2, "b", 2)
    assert (keys.index_of("c"), keys.key_of(9)) == (None, None)
    keys.unbind([4, 9])
    assert (list(keys.items()), keys.index_of("b"), keys.key_of(4), len(keys)) == ([("a", 2)], None, None, 1)


def test_keys_keep_the_order_of_insertion_and_a_mapping_is_a_copy():
    keys = KeyMap()
    for index, key in enumerate("zmb"):
        keys.bind(key, index)
    copy = keys.mapping()
    copy["new"] = 9
    assert list(keys.items()) == [("z", 0), ("m", 1), ("b", 2)]


def test_a_forgotten_key_may_name_another_sample():
    keys = KeyMap()
    keys.bind("k", 1)
    keys.unbind([1])
    keys.bind("k", 2)
    assert (keys.index_of("k"), keys.key_of(1)) == (2, None)


def test_indexes_are_contiguous_per_call_and_never_come_again():
    allocator = IndexAllocator()
    assert [allocator.allocate(count).tolist() for count in (2, 1, 3)] == [[0, 1], [2], [3, 4, 5]]
    assert allocator.allocate(1).dtype == "int64"
