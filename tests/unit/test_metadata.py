# SPDX-License-Identifier: Apache-2.0
"""BatchMeta: rows stay aligned over every operation, and what was fetched is told apart from what changed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from transfer_queue import BatchMeta, KVBatchMeta

DENSE = {"dtype": torch.float32, "shape": (4,), "is_nested": False, "is_non_tensor": False}
OBJECTS = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}


def ragged(*lengths):
    shapes = [(length,) for length in lengths]
    return {"dtype": torch.int64, "shape": None, "is_nested": True, "is_non_tensor": False, "per_sample_shapes": shapes}


def make(size, first=0, **changes):
    """A batch whose every row attribute names its sample."""
    indexes = range(first, first + size)
    rows = {
        "global_indexes": list(indexes),
        "partition_ids": [f"p{index % 2}" for index in indexes],
        "field_schema": {"x": DENSE, "ids": ragged(*indexes), "text": OBJECTS},
        "production_status": [index % 2 for index in indexes],
        "extra_info": {"step": 7},
        "custom_meta": [{"tag": index} if index % 3 else {} for index in indexes],
        "_custom_backend_meta": [{"x": f"block{index}", "_unit": index} for index in indexes],
        "padding_mask": [index % 4 == 3 for index in indexes],
        "token": "t1",
        "batch_index": 5,
    }
    return BatchMeta(**{**rows, **changes})


def assert_aligned(meta, indexes):
    """Every row attribute of ``meta`` is the one ``make`` gave to these samples."""
    assert meta.global_indexes == indexes
    assert meta.partition_ids == [f"p{index % 2}" for index in indexes]
    assert meta.production_status.tolist() == [index % 2 for index in indexes]
    assert meta.custom_meta == [{"tag": index} if index % 3 else {} for index in indexes]
    assert meta._custom_backend_meta == [{"x": f"block{index}", "_unit": index} for index in indexes]
    assert meta.padding_mask == [index % 4 == 3 for index in indexes]
    assert meta.get_shapes("ids") == [(index,) for index in indexes]
    assert meta.get_shapes("x") == [(4,)] * len(indexes)
    assert meta.changed_custom_meta() == {}, "the snapshot of the tags went out of step with the rows"
    assert (meta.extra_info, meta.token, meta.batch_index) == ({"step": 7}, "t1", 5)


# --- construction ---


def test_no_arguments_make_an_empty_batch():
    meta = BatchMeta()
    assert (meta.size, len(meta), bool(meta), meta.is_ready, meta.field_names) == (0, 0, False, False, [])
    assert meta == BatchMeta.empty() == BatchMeta([], [])


def test_defaults_are_zero_status_and_empty_annotations_per_row():
    meta = BatchMeta([3, 4], ["p", "p"])
    assert (meta.production_status.tolist(), meta.production_status.dtype) == ([0, 0], np.int8)
    assert (meta.field_schema, meta.extra_info) == ({}, {})
    assert (meta.custom_meta, meta._custom_backend_meta, meta.padding_mask) == ([{}, {}], [{}, {}], [False, False])
    assert (meta.token, meta.batch_index) == (None, None)


def test_integers_of_any_kind_become_plain_ints():
    for indexes in (np.array([1, 2]), torch.tensor([1, 2]), (np.int64(1), np.int32(2))):
        assert [type(index) for index in BatchMeta(indexes, ["p", "p"]).global_indexes] == [int, int]


def test_containers_are_copied_one_level():
    indexes, partitions, tags, backend, extra = [1], ["p"], [{"a": 1}], [{"x": 1}], {"k": 1}
    schema = {"ids": ragged(3)}
    meta = BatchMeta(indexes, partitions, schema, None, extra, tags, backend)
    before = copy.deepcopy(meta)
    for container in (indexes, partitions, tags, backend):
        container.append("changed")
    tags[0]["a"] = backend[0]["x"] = extra["k"] = schema["ids"]["dtype"] = "changed"
    schema["ids"]["per_sample_shapes"].append("changed")
    assert meta == before


def test_one_dict_given_for_all_rows_is_not_shared_between_them():
    meta = BatchMeta([1, 2], ["p", "p"], custom_meta=[{}] * 2)
    meta.custom_meta[0]["a"] = 1
    assert meta.custom_meta == [{"a": 1}, {}]


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition_ids": ["p"]},
        {"production_status": [1]},
        {"custom_meta": [{}]},
        {"_custom_backend_meta": [{}]},
        {"padding_mask": [True]},
        {"field_schema": {"ids": ragged(3)}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_lengths_that_disagree_are_refused(wrong):
    with pytest.raises(
        ValueError, match=next(iter(wrong)).replace("field_schema", "per_sample_shapes of field 'ids' has 1")
    ):
        BatchMeta(**{"global_indexes": [1, 2], "partition_ids": ["p", "p"], **wrong})


def test_shapes_off_the_wire_become_tuples():
    schema = {"x": {**DENSE, "shape": [4]}, "ids": {**ragged(1, 2), "per_sample_shapes": [[1], [2]]}}
    assert BatchMeta([1, 2], ["p", "p"], schema).field_schema == {"x": DENSE, "ids": ragged(1, 2)}


# --- what it says of itself ---


def test_properties_follow_attributes_that_are_assigned():
    meta = make(2)
    assert (meta.size, meta.is_ready, meta.field_names) == (2, False, ["ids", "text", "x"])
    meta.production_status = np.ones(2, dtype=np.int8)
    meta.field_schema = {"z": DENSE, "a": DENSE}
    assert (meta.is_ready, meta.field_names) == (True, ["a", "z"])
    meta.field_schema = {}
    assert meta.is_ready, "rows without fields can be ready"
    meta.global_indexes = []
    assert (meta.size, bool(meta), meta.is_ready) == (0, False, False)


def test_str_names_the_batch():
    expected = (
        "BatchMeta(size=2, field_names=['ids', 'text', 'x'], is_ready=False, "
        "global_indexes=[0, 1], extra_info={'step': 7})"
    )
    assert (str(make(2)), repr(make(2))) == (expected, expected)


def test_dtypes_and_shapes_come_one_per_row():
    meta = make(3)
    assert meta.get_dtypes("x") == [torch.float32] * 3
    assert meta.get_shapes("x") == [(4,)] * 3
    assert meta.get_shapes("ids") == [(0,), (1,), (2,)]
    assert (meta.get_dtypes("text"), meta.get_shapes("text")) == ([None] * 3, [None] * 3)
    for method in (meta.get_dtypes, meta.get_shapes):
        with pytest.raises(KeyError, match=r"'nope'.*'ids'"):
            method("nope")


def test_equality_is_by_value_and_takes_arrays():
    extra = {"a": np.array([1.0, np.nan]), "t": torch.ones(2)}
    assert make(3, extra_info=extra) == make(3, extra_info=copy.deepcopy(extra))
    assert make(3, extra_info=extra) != make(3, extra_info={**extra, "t": torch.zeros(2)})
    for changes in (
        {"production_status": [1, 1, 1]},
        {"token": "t2"},
        {"padding_mask": [True, False, False]},
        {"field_schema": {}},
    ):
        assert make(3) != make(3, **changes)
    assert make(3) != "not a batch"
    with pytest.raises(TypeError, match="unhashable"):
        hash(make(1))


# --- rows ---


@given(
    size=st.integers(0, 9),
    start=st.none() | st.integers(-10, 10),
    stop=st.none() | st.integers(-10, 10),
    step=st.sampled_from([None, 1, 2, -1, -3]),
)
def test_a_slice_keeps_rows_aligned(size, start, stop, step):
    assert_aligned(make(size)[start:stop:step], list(range(size))[start:stop:step])


@given(st.integers(1, 8).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(0, size - 1)))))
def test_select_samples_keeps_rows_aligned_and_allows_repeats(case):
    size, positions = case
    assert_aligned(make(size).select_samples(positions), positions)


@given(size=st.integers(1, 12), chunks=st.integers(1, 12))
def test_concat_of_chunks_is_the_original(size, chunks):
    chunks = min(chunks, size)
    parts = make(size).chunk(chunks)
    assert [part.size for part in parts] == [size // chunks + (part < size % chunks) for part in range(chunks)]
    whole = BatchMeta.concat(parts)
    assert_aligned(whole, list(range(size)))
    assert whole == make(size)


@given(st.lists(st.integers(0, 4), max_size=6))
def test_chunk_by_size_cuts_where_it_is_told(sizes):
    parts = make(sum(sizes)).chunk_by_size(sizes)
    assert [part.size for part in parts] == sizes
    rows = iter(range(sum(sizes)))
    for part in parts:
        assert_aligned(part, [next(rows) for _ in range(part.size)])


@given(st.integers(0, 9).flatmap(lambda size: st.permutations(range(size))))
def test_reorder_keeps_rows_aligned_and_its_inverse_undoes_it(permutation):
    meta = make(len(permutation))
    meta.reorder(permutation)
    assert_aligned(meta, list(permutation))
    meta.reorder(np.argsort(np.array(permutation, dtype=np.int64)))
    assert meta == make(len(permutation))


def test_an_int_gives_a_batch_of_one_row():
    meta = make(4)
    for item in (1, -3, np.int64(1), torch.tensor(1)):
        assert_aligned(meta[item], [1])
    assert [part.global_indexes for part in meta] == [[0], [1], [2], [3]]


def test_an_item_out_of_range_or_of_another_type_is_refused():
    meta = make(2)
    for item in (2, -3):
        with pytest.raises(IndexError, match=f"row {item}"):
            meta[item]
    for item in ([0], "0", 1.0, None):
        with pytest.raises(TypeError, match="select_samples"):
            meta[item]


def test_select_samples_refuses_positions_out_of_range_or_negative():
    for positions in ([2], [-1], [0, 5]):
        with pytest.raises(ValueError, match="out of range"):
            make(2).select_samples(positions)


def test_more_chunks_than_rows_gives_empty_ones_with_a_warning():
    with pytest.warns(UserWarning, match="2 rows was cut into 4 chunks: 2 of them are empty"):
        parts = make(2).chunk(4)
    assert [part.global_indexes for part in parts] == [[0], [1], [], []]
    assert [part.field_names for part in parts] == [["ids", "text", "x"]] * 4


def test_chunk_sizes_that_make_no_sense_are_refused():
    for chunks in (0, -1):
        with pytest.raises(ValueError, match="ask for 1 or more"):
            make(2).chunk(chunks)
    for sizes in ([1], [2, 1], [3, -1]):
        with pytest.raises(ValueError, match="the batch has 2 rows"):
            make(2).chunk_by_size(sizes)


def test_chunk_by_partition_keeps_first_appearance_and_row_order():
    parts = make(5, first=1).chunk_by_partition()
    assert_aligned(parts[0], [1, 3, 5])
    assert_aligned(parts[1], [2, 4])
    assert len(parts) == 2
    assert BatchMeta().chunk_by_partition() == []


def test_reorder_refuses_what_is_no_permutation():
    for indexes, text in (
        ([0, 1], "does not match"),
        ([0, 1, 1], "duplicate"),
        ([0, 1, 3], "range"),
        ([0, 1, -1], "range"),
    ):
        meta = make(3)
        with pytest.raises(ValueError, match=text):
            meta.reorder(indexes)
        assert meta == make(3)


@pytest.mark.parametrize(
    "operation",
    [
        lambda meta: meta[0:2],
        lambda meta: meta.select_samples([0, 1]),
        lambda meta: meta.select_fields(["x", "ids", "text"]),
        lambda meta: meta.chunk(1)[0],
        lambda meta: meta.copy(),
        lambda meta: BatchMeta.concat([meta]),
        lambda meta: meta.union(make(2)),
    ],
    ids=["slice", "select_samples", "select_fields", "chunk", "copy", "concat", "union"],
)
def test_writing_to_a_part_leaves_the_original_alone(operation):
    meta = make(2, custom_meta=[{"list": [1]}, {}])
    before = copy.deepcopy(meta)
    part = operation(meta)
    part.global_indexes[0] = part.partition_ids[0] = "changed"
    part.production_status[:] = 9
    part.custom_meta[0]["list"].append(2)
    part.custom_meta[1]["new"] = 1
    part._custom_backend_meta[0]["x"] = part.extra_info["step"] = "changed"
    part.field_schema["ids"]["per_sample_shapes"][0] = part.field_schema["x"]["dtype"] = "changed"
    assert meta == before
    assert meta.changed_custom_meta() == {}


def test_repeated_rows_have_their_own_tags():
    meta = make(2).select_samples([1, 1])
    meta.custom_meta[0]["tag"] = 9
    assert meta.custom_meta == [{"tag": 9}, {"tag": 1}]


def test_copy_is_deep():
    meta = make(1, extra_info={"nested": {"list": [1]}}, _custom_backend_meta=[{"x": {"slots": [1]}}])
    copied = meta.copy()
    assert copied == meta
    copied.extra_info["nested"]["list"].append(2)
    copied._custom_backend_meta[0]["x"]["slots"].append(2)
    assert meta.extra_info == {"nested": {"list": [1]}}
    assert meta._custom_backend_meta == [{"x": {"slots": [1]}}]


# --- fields ---


def test_select_fields_ignores_unknown_names_and_filters_backend_meta():
    meta = make(2, _custom_backend_meta=[{"x": 1, "text": 2, "_unit": 3}] * 2)
    selected = meta.select_fields(["x", "nope"])
    assert selected.field_schema == {"x": DENSE}
    assert selected._custom_backend_meta == [{"x": 1, "_unit": 3}] * 2
    assert (selected.custom_meta, selected.token) == (meta.custom_meta, "t1")
    assert meta.field_names == ["ids", "text", "x"]
    assert meta.select_fields([]).field_names == []


def test_select_fields_takes_a_bare_string_as_one_name():
    assert make(1).select_fields("ids").field_names == ["ids"]


def test_add_fields_describes_new_columns_replaces_old_ones_and_sets_ready():
    meta = make(2)
    data = TensorDict({"x": torch.zeros(2, 3, dtype=torch.int64), "new": torch.ones(2)}, batch_size=2)
    assert meta.add_fields(data) is meta
    assert meta.field_schema["x"] == {**DENSE, "dtype": torch.int64, "shape": (3,)}
    assert meta.field_schema["new"] == {**DENSE, "shape": (1,)}
    assert meta.is_ready


def test_add_fields_can_leave_the_status_alone():
    meta = make(2).add_fields(TensorDict({"x": torch.zeros(2, 3)}, batch_size=2), set_all_ready=False)
    assert meta.production_status.tolist() == [0, 1]


def test_add_fields_refuses_another_number_of_rows_and_skips_zero_rows():
    with pytest.raises(ValueError, match="the columns have 3 rows, the batch has 2"):
        make(2).add_fields(TensorDict({"x": torch.zeros(3)}, batch_size=3))
    assert make(2).add_fields(TensorDict({"new": torch.zeros(0)}, batch_size=0)) == make(2)


# --- union ---


@given(st.integers(1, 6))
def test_union_with_itself_none_or_empty_is_a_copy(size):
    meta = make(size)
    for other in (meta, None, BatchMeta()):
        assert meta.union(other) == meta
    assert BatchMeta().union(meta) == meta
    assert meta.union(meta) is not meta


def test_union_lets_the_other_win_and_is_ready_where_both_are():
    left = BatchMeta([1, 2], ["p", "p"], {"x": DENSE, "a": DENSE}, [1, 1], {"k": 1, "l": 1}, [{"t": 1, "u": 1}, {}])
    right = BatchMeta([1, 2], ["p", "p"], {"x": OBJECTS, "b": DENSE}, [1, 0], {"k": 2}, [{"t": 2}, {"v": 3}])
    assert left.union(right) == BatchMeta(
        [1, 2],
        ["p", "p"],
        {"x": OBJECTS, "a": DENSE, "b": DENSE},
        [1, 0],
        {"k": 2, "l": 1},
        [{"t": 2, "u": 1}, {"v": 3}],
    )


def test_union_refuses_other_samples():
    with pytest.raises(ValueError, match=r"global_indexes do not match: row 1 has 1 and 2"):
        make(2).union(BatchMeta([0, 2], ["p0", "p1"]))
    with pytest.raises(ValueError, match="global_indexes do not match"):
        make(2).union(make(3))
    with pytest.raises(ValueError, match="partition_ids do not match"):
        make(2).union(BatchMeta([0, 1], ["p0", "p0"]))


def test_union_keeps_the_token_of_the_side_that_has_one():
    bare = BatchMeta([0], ["p0"])
    assert (make(1).union(bare).token, bare.union(make(1)).batch_index) == ("t1", 5)
    assert make(1).union(make(1, token="t2")).token is None


def test_union_keeps_what_changed_on_either_side():
    left, right = (BatchMeta([1], ["p"], custom_meta=[{"old": 0}]) for _ in range(2))
    left.custom_meta[0]["left"] = 1
    right.custom_meta[0].update(old=5, right=2)
    assert left.union(right).changed_custom_meta() == {1: {"old": 5, "left": 1, "right": 2}}


# --- pickle ---


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_round_trip(protocol):
    restored = pickle.loads(pickle.dumps(make(3), protocol=protocol))
    assert restored == make(3)
    assert_aligned(restored, [0, 1, 2])


def test_status_is_writable_after_unpickling_from_a_read_only_buffer():
    buffers = []
    payload = pickle.dumps(make(3), protocol=5, buffer_callback=buffers.append)
    read_only = [bytes(buffer) for buffer in buffers]
    assert read_only, "the status travels out of band"
    restored = pickle.loads(payload, buffers=read_only)
    restored.production_status[0] = 1
    assert restored.production_status.tolist() == [1, 1, 0]


def test_state_that_lacks_an_attribute_gets_its_default():
    state = make(2).__getstate__()
    del state["_padding"], state["token"]
    restored = BatchMeta.__new__(BatchMeta)
    restored.__setstate__(state)
    assert (restored.padding_mask, restored.token, restored.global_indexes) == ([False, False], None, [0, 1])


def test_metadata_is_no_container_that_lightning_would_rebuild():
    from collections.abc import Mapping, Sequence
    from dataclasses import is_dataclass

    meta = make(1)
    assert not isinstance(meta, (Mapping, Sequence))
    assert not is_dataclass(meta)
    assert not hasattr(meta, "__dict__")


def test_both_kinds_of_metadata_are_importable_from_here():
    assert KVBatchMeta(keys=["a"], tags=[{}]).size == 1
