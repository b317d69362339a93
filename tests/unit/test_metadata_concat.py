# SPDX-License-Identifier: Apache-2.0
"""BatchMeta.concat: parts that agree become one batch, parts that don't are refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue import BatchMeta

DENSE = {"dtype": torch.float32, "shape": (4,), "is_nested": False, "is_non_tensor": False}
OBJECTS = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}


def ragged(*lengths):
    shapes = [(length,) for length in lengths]
    return {"dtype": torch.int64, "shape": None, "is_nested": True, "is_non_tensor": False, "per_sample_shapes": shapes}


def make(size, first=0, **changes):
    given = {"field_schema": {"x": DENSE, "text": OBJECTS}, "extra_info": {"step": 7}, "token": "t1", "batch_index": 5}
    return BatchMeta(range(first, first + size), ["p"] * size, **{**given, **changes})


def test_concat_skips_none_and_empty_and_of_nothing_is_empty():
    meta = make(2)
    assert BatchMeta.concat([None, BatchMeta(), meta, BatchMeta(extra_info={"step": 8})]) == meta
    assert BatchMeta.concat([]) == BatchMeta.concat([None, BatchMeta()]) == BatchMeta.empty()


def test_concat_refuses_other_fields_and_other_dtypes():
    with pytest.raises(ValueError, match="field_names mismatch"):
        BatchMeta.concat([make(1), make(1).select_fields(["x"])])
    other = make(1, field_schema={**make(1).field_schema, "x": {**DENSE, "dtype": torch.int64}})
    with pytest.raises(ValueError, match="dtype mismatch in field 'x'"):
        BatchMeta.concat([make(1), other])
    with pytest.raises(ValueError, match="dtype mismatch in field 'x'"):
        BatchMeta.concat([make(1), make(1, field_schema={**make(1).field_schema, "x": OBJECTS})])


def test_concat_without_validation_keeps_common_fields_and_the_last_extra_info():
    parts = [make(1), make(1, first=1, extra_info={"step": 8}).select_fields(["x"])]
    whole = BatchMeta.concat(parts, validate=False)
    assert (whole.global_indexes, whole.field_names, whole.extra_info) == ([0, 1], ["x"], {"step": 8})


def test_concat_unites_extra_info_and_refuses_conflicting_values():
    whole = BatchMeta.concat([make(1, extra_info={"a": 1}), make(1, extra_info={"b": 2})])
    assert whole.extra_info == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="conflicting values for 'a': 1 and 2"):
        BatchMeta.concat([make(1, extra_info={"a": 1}), make(1, extra_info={"a": 2})])


@pytest.mark.parametrize(
    "value",
    [[np.arange(3)], {"t": torch.ones(2)}, float("nan"), np.array([1.0, np.nan]), [torch.tensor([float("nan")])]],
    ids=["array in list", "tensor in dict", "nan", "nan in array", "nan in tensor"],
)
def test_concat_takes_equal_values_that_are_distinct_objects(value):
    parts = [make(1, extra_info={"k": value}), make(1, extra_info={"k": pickle.loads(pickle.dumps(value))})]
    assert BatchMeta.concat(parts).size == 2


def test_concat_becomes_nested_when_a_part_is_or_shapes_differ():
    dense = BatchMeta([0, 1], ["p"] * 2, {"x": {**DENSE, "dtype": torch.int64}})
    nested = BatchMeta([2], ["p"], {"x": ragged(3)})
    wider = BatchMeta([3], ["p"], {"x": {**DENSE, "dtype": torch.int64, "shape": (9,)}})
    assert BatchMeta.concat([dense, nested]).field_schema == {"x": ragged(4, 4, 3)}
    assert BatchMeta.concat([nested, dense]).field_schema == {"x": ragged(3, 4, 4)}
    assert BatchMeta.concat([dense, wider]).field_schema == {"x": ragged(4, 4, 9)}
    assert BatchMeta.concat([dense, dense]).field_schema == dense.field_schema


def test_token_and_batch_index_survive_concat_only_when_all_parts_agree():
    whole = BatchMeta.concat([make(1), make(1, token="t2")])
    assert (whole.token, whole.batch_index) == (None, 5)
    assert BatchMeta.concat([make(1), make(1, batch_index=None)]).batch_index is None


def test_padding_and_snapshot_of_parts_that_have_none_are_filled_in():
    plain = BatchMeta([10], ["p"], make(1).field_schema)
    whole = BatchMeta.concat([plain, make(1, first=7, custom_meta=[{"tag": 7}], padding_mask=[True])])
    assert (whole.padding_mask, whole.changed_custom_meta()) == ([False, True], {})


# ---- samples of several dtypes ----

DTYPES = st.lists(st.sampled_from([torch.int64, torch.float32, None]), min_size=1, max_size=8)


def of_dtypes(dtypes: list[torch.dtype | None]) -> BatchMeta:
    """One row per dtype, made as pages of a large partition are joined; None: an object."""
    tensor = {"shape": (2,), "is_nested": False, "is_non_tensor": False}
    objects = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    rows = [
        BatchMeta([at], ["p"], {"x": objects if dtype is None else {**tensor, "dtype": dtype}})
        for at, dtype in enumerate(dtypes)
    ]
    return BatchMeta.concat(rows, validate=False)


@given(DTYPES, st.data())
def test_dtypes_and_shapes_follow_their_rows_and_are_said_once_where_they_agree(dtypes, data):
    meta = of_dtypes(dtypes)
    positions = data.draw(st.lists(st.integers(0, len(dtypes) - 1), min_size=1))
    part = meta.select_samples(positions)
    wanted = [dtypes[at] for at in positions]
    assert part.get_dtypes("x") == wanted
    assert part.get_shapes("x") == [None if dtype is None else (2,) for dtype in wanted]
    assert [row.fields["x"]["is_non_tensor"] for row in part.samples] == [dtype is None for dtype in wanted]
    assert ("per_sample_dtypes" in part.field_schema["x"]) == (len(set(wanted)) > 1)
    assert BatchMeta.concat(part.chunk(2) if part.size > 1 else [part], validate=False).get_dtypes("x") == wanted
