# SPDX-License-Identifier: Apache-2.0
"""KVBatchMeta: keys and tags stay together, and names are unique."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue import KVBatchMeta


def make(size, **changes):
    names = range(size)
    rows = {"keys": [f"k{n}" for n in names], "tags": [{"n": n} for n in names]}
    return KVBatchMeta(**{**rows, "partition_id": "p", "fields": ["x", "y"], "extra_info": {"e": 1}, **changes})


def test_no_arguments_make_an_empty_batch():
    meta = KVBatchMeta()
    assert (meta.keys, meta.tags, meta.partition_id, meta.fields, meta.extra_info) == ([], [], None, None, {})
    assert (meta.size, len(meta), bool(meta)) == (0, 0, False)


def test_it_is_a_dataclass_by_value_with_assignable_attributes():
    meta = make(2)
    assert meta == make(2)
    assert repr(meta) == (
        "KVBatchMeta(keys=['k0', 'k1'], tags=[{'n': 0}, {'n': 1}], partition_id='p', "
        "fields=['x', 'y'], extra_info={'e': 1})"
    )
    meta.fields, meta.partition_id, meta.extra_info = ["z"], "q", {}
    assert meta == make(2, fields=["z"], partition_id="q", extra_info={})
    assert pickle.loads(pickle.dumps(meta)) == meta


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tags": [{}]}, "keys and tags must have same length"),
        ({"keys": ["a", "a"]}, r"Got duplicated keys: \['a'\]"),
        ({"fields": ["x", "x"]}, r"Got duplicated fields: \['x'\]"),
    ],
)
def test_bad_input_is_refused_at_construction(wrong, text):
    with pytest.raises(ValueError, match=text):
        make(2, **wrong)


def test_tags_and_extra_info_are_deep_copied_row_by_row():
    tags, extra = [{"list": [1]}] * 2, {"list": [1]}
    meta = make(2, tags=tags, extra_info=extra)
    meta.tags[0]["new"] = 1
    meta.tags[0]["list"].append(2)
    meta.extra_info["list"].append(2)
    assert meta.tags == [{"list": [1, 2], "new": 1}, {"list": [1]}]
    assert (tags, extra) == ([{"list": [1]}] * 2, {"list": [1]})


def test_select_keys_keeps_the_order_asked_for():
    assert make(3).select_keys(["k2", "k0"]) == make(3, keys=["k2", "k0"], tags=[{"n": 2}, {"n": 0}])
    assert make(3).select_keys([]).size == 0


def test_select_keys_refuses_repeats_and_unknown_keys():
    with pytest.raises(ValueError, match="Contain duplicate keys"):
        make(2).select_keys(["k0", "k0"])
    with pytest.raises(RuntimeError, match=r"not found in current batch of 2, first of them \['z'\]"):
        make(2).select_keys(["k0", "z"])


@given(st.integers(0, 8).flatmap(lambda size: st.permutations(range(size))))
def test_reorder_keeps_rows_together_and_its_inverse_undoes_it(permutation):
    meta = make(len(permutation))
    meta.reorder(permutation)
    assert (meta.keys, meta.tags) == ([f"k{n}" for n in permutation], [{"n": n} for n in permutation])
    meta.reorder(np.argsort(np.array(permutation, dtype=np.int64)))
    assert meta == make(len(permutation))


def test_reorder_refuses_what_is_no_permutation():
    for indexes, text in (
        ([0], "does not match"),
        ([0, 0], "Contain duplicate indexes"),
        ([0, 2], "out of range"),
        ([0, -1], "out of range"),
    ):
        meta = make(2)
        with pytest.raises(ValueError, match=text):
            meta.reorder(indexes)
        assert meta == make(2)


@given(size=st.integers(1, 10), chunks=st.integers(1, 10))
def test_concat_of_chunks_is_the_original(size, chunks):
    chunks = min(size, chunks)
    parts = make(size).chunk(chunks)
    assert [part.size for part in parts] == [size // chunks + (part < size % chunks) for part in range(chunks)]
    assert KVBatchMeta.concat(parts) == make(size)


def test_more_chunks_than_rows_gives_empty_ones_with_a_warning():
    with pytest.warns(UserWarning, match="1 rows was cut into 3 chunks"):
        assert [part.keys for part in make(1).chunk(3)] == [["k0"], [], []]
    with pytest.raises(ValueError, match="ask for 1 or more"):
        make(1).chunk(0)


def test_concat_skips_empty_parts_and_of_nothing_is_empty():
    assert KVBatchMeta.concat([None, KVBatchMeta(), make(1), KVBatchMeta(partition_id="q")]) == make(1)
    assert KVBatchMeta.concat([]) == KVBatchMeta()


def test_concat_of_parts_without_extra_info_has_an_empty_one():
    parts = [make(1, extra_info={}), make(1, keys=["b"], extra_info={})]
    assert KVBatchMeta.concat(parts).extra_info == {}


def test_concat_compares_fields_as_sets():
    whole = KVBatchMeta.concat([make(1), make(1, keys=["b"], fields=["y", "x"])])
    assert (whole.keys, whole.fields) == (["k0", "b"], ["x", "y"])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"fields": ["x"]}, "Field names do not match"),
        ({"fields": None}, "Field names do not match"),
        ({"partition_id": "q"}, "Partition do not match"),
        ({"extra_info": {"e": 2}}, "conflicting values for 'e'"),
        ({"keys": ["k0"]}, "Got duplicated keys"),
    ],
)
def test_concat_refuses_parts_that_differ_whichever_comes_first(wrong, text):
    other = make(1, **{"keys": ["b"], **wrong})
    for parts in ([make(1), other], [other, make(1)]):
        with pytest.raises(ValueError, match=text):
            KVBatchMeta.concat(parts)


def test_concat_takes_equal_extra_info_that_holds_arrays():
    parts = [make(1, keys=[key], extra_info={"a": [np.array([1.0, np.nan])]}) for key in "ab"]
    assert KVBatchMeta.concat(parts).keys == ["a", "b"]
