# SPDX-License-Identifier: Apache-2.0
"""extract_field_schema: what a TensorDict's columns are, told without touching their rows."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from transfer_queue.metadata.field_schema import extract_field_schema

OBJECTS = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}


def dense(dtype, *shape):
    return {"dtype": dtype, "shape": shape, "is_nested": False, "is_non_tensor": False}


def nested(dtype, *shapes):
    flags = {"is_nested": True, "is_non_tensor": False}
    return {"dtype": dtype, "shape": None, **flags, "per_sample_shapes": list(shapes)}


def jagged(*rows):
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def strided(*rows):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once that the strided layout is a prototype
        return torch.nested.nested_tensor(list(rows), layout=torch.strided)


def test_dense_columns_have_the_shape_of_one_sample():
    data = TensorDict(
        {
            "a": torch.zeros(2, 3, 4, dtype=torch.bfloat16),
            "flag": torch.zeros(2, dtype=torch.bool),
            "none": torch.zeros(2, 0),
            "numbers": [1, 2],
            "array": np.zeros((2, 5)),
        },
        batch_size=2,
    )
    assert extract_field_schema(data) == {
        "a": dense(torch.bfloat16, 3, 4),
        "flag": dense(torch.bool, 1),
        "none": dense(torch.float32, 0),
        "numbers": dense(torch.int64, 1),
        "array": dense(torch.float64, 5),
    }


def test_nested_columns_have_one_shape_per_sample():
    data = TensorDict(
        {
            "tokens": jagged(torch.zeros(2), torch.zeros(0), torch.zeros(3)),
            "hidden": jagged(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(3, 4)),
            "turned": jagged(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(3, 4)).transpose(1, 2),
            "image": strided(torch.zeros(2, 4), torch.zeros(1, 5), torch.zeros(3, 3)),
        },
        batch_size=3,
    )
    assert extract_field_schema(data) == {
        "tokens": nested(torch.float32, (2,), (0,), (3,)),
        "hidden": nested(torch.float32, (2, 4), (1, 4), (3, 4)),
        "turned": nested(torch.float32, (4, 2), (4, 1), (4, 3)),
        "image": nested(torch.float32, (2, 4), (1, 5), (3, 3)),
    }


def test_a_jagged_column_with_holes_is_read_by_its_lengths():
    rows = torch.arange(20.0).reshape(4, 5)
    column = torch.nested.narrow(rows, 1, torch.tensor([0, 1, 2, 0]), torch.tensor([2, 3, 1, 5]), layout=torch.jagged)
    data = TensorDict({"x": column}, batch_size=4)
    assert extract_field_schema(data) == {"x": nested(torch.float32, (2,), (3,), (1,), (5,))}


def test_objects_have_neither_dtype_nor_shape():
    data = TensorDict(
        {"text": ["a", "b"], "stack": NonTensorStack({"k": 1}, None), "array": np.array(["u", "v"], dtype=object)},
        batch_size=2,
    )
    data["one_for_all"] = NonTensorData("same", batch_size=[2])
    data["dtypes"] = NonTensorStack(NonTensorData(torch.zeros(2)), NonTensorData(torch.zeros(3, dtype=torch.int64)))
    names = ["text", "stack", "array", "one_for_all", "dtypes"]
    assert extract_field_schema(data) == dict.fromkeys(names, OBJECTS)


def test_a_stack_of_tensors_of_one_dtype_is_nested():
    data = TensorDict({"x": NonTensorStack(NonTensorData(torch.zeros(2)), NonTensorData(torch.zeros(3)))}, batch_size=2)
    assert extract_field_schema(data) == {"x": nested(torch.float32, (2,), (3,))}


def test_rows_of_a_lazy_stack_may_differ_in_shape():
    rows = [TensorDict({"x": torch.zeros(n), "y": torch.zeros(3), "s": torch.tensor(n), "t": "text"}) for n in (2, 3)]
    assert extract_field_schema(TensorDict.lazy_stack(rows)) == {
        "x": nested(torch.float32, (2,), (3,)),
        "y": dense(torch.float32, 3),
        "s": dense(torch.int64, 1),
        "t": OBJECTS,
    }


def test_zero_rows_have_no_schema():
    assert extract_field_schema(TensorDict({"a": torch.zeros(0, 3)}, batch_size=0)) == {}
    assert extract_field_schema(TensorDict({}, batch_size=3)) == {}
    assert extract_field_schema(TensorDict({})) == {}


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"Inconsistent batch dimension: field 'b' has 3 rows, the batch has 2"):
        extract_field_schema(TensorDict({"a": torch.zeros(2), "b": torch.zeros(3)}))
    with pytest.raises(ValueError, match="Inconsistent batch dimension: field 's' is one scalar"):
        extract_field_schema(TensorDict({"s": torch.tensor(1.0)}))


def test_a_batch_size_left_out_is_read_off_the_columns():
    data = TensorDict({"text": "for all", "a": torch.zeros(2, 3)})
    assert extract_field_schema(data) == {"text": OBJECTS, "a": dense(torch.float32, 3)}


def test_a_tensordict_as_a_column_is_refused_with_the_way_out():
    data = TensorDict({"inner": {"z": torch.zeros(2)}}, batch_size=2)
    with pytest.raises(ValueError, match=r"field 'inner' is a TensorDict.*flatten_keys"):
        extract_field_schema(data)
    assert extract_field_schema(data.flatten_keys(".")) == {"inner.z": dense(torch.float32, 1)}
