# SPDX-License-Identifier: Apache-2.0
"""Tags and extra_info of a BatchMeta: merging, and telling what changed from what was fetched."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue import BatchMeta

# --- tags ---


def test_tags_merge_per_row():
    meta = BatchMeta([5, 6], ["p", "p"], custom_meta=[{"a": 1}, {"a": 2}])
    meta.update_custom_meta([{"a": 9, "b": 1}, None])
    assert meta.custom_meta == [{"a": 9, "b": 1}, {"a": 2}]
    meta.update_custom_meta(None)
    assert meta.get_all_custom_meta() == [{"a": 9, "b": 1}, {"a": 2}]
    with pytest.raises(ValueError, match="custom_meta has 1 entries, the batch has 2"):
        meta.update_custom_meta([{}])
    meta.clear_custom_meta()
    assert meta.custom_meta == [{}, {}]


def test_get_all_custom_meta_is_a_deep_copy():
    meta = BatchMeta([5], ["p"], custom_meta=[{"a": [1]}])
    meta.get_all_custom_meta()[0]["a"].append(2)
    assert meta.custom_meta == [{"a": [1]}]


tag_values = st.sampled_from([None, True, 0, 1, -0.5, float("nan"), "", "a", [], [1]])
tag_rows = st.dictionaries(st.sampled_from("abcd"), tag_values, max_size=4)


def different(a, b):
    return not (a == b or (a != a and b != b))


@given(st.lists(st.tuples(tag_rows, tag_rows), min_size=1, max_size=5))
def test_changed_tags_are_the_new_and_the_different_ones(rows):
    fetched, updates = [row[0] for row in rows], [row[1] for row in rows]
    meta = BatchMeta(range(len(rows)), ["p"] * len(rows), custom_meta=fetched)
    assert meta.changed_custom_meta() == {}
    meta.update_custom_meta(updates)
    assert str(meta.changed_custom_meta()) == str(  # as text: NaN is not equal to itself
        {
            row: changed
            for row, (before, now) in enumerate(zip(fetched, meta.custom_meta, strict=True))
            if (changed := {k: v for k, v in now.items() if k not in before or different(v, before[k])})
        }
    )
    meta.mark_custom_meta_clean()
    assert meta.changed_custom_meta() == {}


def test_changed_tags_follow_their_rows_through_every_operation():
    meta = BatchMeta([5, 6, 7], ["p"] * 3, custom_meta=[{"a": 1}, {}, {"a": 3}])
    meta.custom_meta[0]["a"] = 10
    meta.custom_meta[1]["b"] = 20
    changed = {5: {"a": 10}, 6: {"b": 20}}
    shuffled = meta.copy()
    shuffled.reorder([2, 0, 1])
    for same in (shuffled, meta.copy(), BatchMeta.concat(meta.chunk(3)), pickle.loads(pickle.dumps(meta)), meta[::-1]):
        assert same.changed_custom_meta() == changed
    assert meta.select_samples([1, 2]).changed_custom_meta() == {6: {"b": 20}}
    assert meta.changed_custom_meta() == changed


def test_tags_changed_in_place_are_noticed_whatever_their_type():
    tags = {"list": [1], "array": np.zeros(2), "tensor": torch.zeros(2), "same": np.ones(2)}
    meta = BatchMeta([5], ["p"], custom_meta=[tags])
    meta.custom_meta[0]["list"].append(2)
    meta.custom_meta[0]["array"][1] = 1
    meta.custom_meta[0]["tensor"][1] = 1
    assert set(meta.changed_custom_meta()[5]) == {"list", "array", "tensor"}


def test_removed_tags_are_no_change():
    meta = BatchMeta([5], ["p"], custom_meta=[{"a": 1}])
    meta.clear_custom_meta()
    assert meta.changed_custom_meta() == {}


def test_rows_that_fill_the_batch_write_no_tags():
    meta = BatchMeta([5, 5], ["p", "p"], padding_mask=[False, True])
    meta.update_custom_meta([{"a": 1}, {"a": 2}])
    assert meta.changed_custom_meta() == {5: {"a": 1}}


# --- extra_info ---


def test_extra_info_is_a_dict_with_methods():
    meta = BatchMeta(extra_info={"a": [1]})
    meta.set_extra_info("b", 2)
    meta.update_extra_info({"c": 3})
    assert (meta.get_extra_info("b"), meta.get_extra_info("z"), meta.get_extra_info("z", 9)) == (2, None, 9)
    assert (meta.has_extra_info("c"), meta.has_extra_info("z")) == (True, False)
    assert (meta.remove_extra_info("c"), meta.remove_extra_info("c")) == (3, None)
    everything = meta.get_all_extra_info()
    everything["a"].append(2)
    assert meta.extra_info == {"a": [1], "b": 2}
    meta.clear_extra_info()
    assert meta.extra_info == {}
    meta.extra_info = {"assigned": True}
    assert meta.has_extra_info("assigned")
