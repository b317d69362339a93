# SPDX-License-Identifier: Apache-2.0
"""What kind of column comes back for what was put, through real processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def round_trip(client: tq.TransferQueueClient, name: str, column: Any, count: int) -> tuple[Any, dict[str, Any]]:
    """The column as it comes back, and its entry in the schema of a fetch."""
    client.put(TensorDict({"x": column}, batch_size=[count]), partition_id=name)
    meta = client.get_meta(["x"], count, name, task_name="t")
    data = client.get_data(meta)
    assert data.batch_size == (count,)
    return data["x"] if isinstance(column, torch.Tensor) else data.get("x"), meta.field_schema["x"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_are_kept_bit_by_bit(client, name, dtype):
    column = torch.arange(12).to(torch.float32).to(dtype).reshape(3, 4)
    back, entry = round_trip(client, name, column, 3)
    assert (back.dtype, entry["dtype"], entry["shape"]) == (dtype, dtype, (4,))
    assert torch.equal(back.values().view(torch.uint8), column.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_column_cut_from_a_wider_tensor_keeps_its_values_also_with_one_row(client, name, dtype, rows):
    column = torch.arange(2 * rows).reshape(rows, 2).to(torch.float32).to(dtype)[:, 1:]
    for part in (column, [*column]):
        meta = client.put({"x": part}, partition_id=name)
        back = client.get_data(meta, layout="dense")["x"]
        assert back.dtype == dtype
        assert torch.equal(back.to(torch.complex64), column.to(torch.complex64))


def test_tensors_of_equal_shape_come_back_jagged(client, name):
    column = torch.randn(3, 4, 2)
    back, entry = round_trip(client, name, column, 3)
    assert (back.is_nested, back.layout, back.offsets().tolist()) == (True, torch.jagged, [0, 4, 8, 12])
    assert torch.equal(back.values(), column.flatten(0, 1))
    assert torch.equal(back[1], column[1])
    assert torch.equal(back._values, back.values())
    assert entry == {"dtype": torch.float32, "shape": (4, 2), "is_nested": False, "is_non_tensor": False}


def test_rows_of_different_length_come_back_jagged_with_their_shapes(client, name):
    parts = [torch.arange(n) for n in (3, 1, 0, 2)]
    back, entry = round_trip(client, name, torch.nested.nested_tensor(parts, layout=torch.jagged), 4)
    assert back.layout == torch.jagged
    assert [row.tolist() for row in back.unbind()] == [part.tolist() for part in parts]
    assert (entry["is_nested"], entry["per_sample_shapes"]) == (True, [(3,), (1,), (0,), (2,)])
    assert back.to_padded_tensor(padding=-1).shape == (4, 3)


def test_columns_whose_rows_have_the_same_lengths_are_computed_with_together(client, name):
    ids = torch.nested.nested_tensor([torch.arange(n) for n in (3, 1, 5)], layout=torch.jagged)
    columns = {"ids": ids, "mask": ids * 0 + 2, "even": torch.ones(3, 4), "weights": torch.arange(12.0).reshape(3, 4)}
    client.put(TensorDict(columns, batch_size=[3]), partition_id=name)
    data = client.get_data(client.get_meta(list(columns), 3, name, task_name="t"))
    assert (data["ids"] * data["mask"]).values().tolist() == (2 * ids.values()).tolist()
    assert (data["even"] + data["weights"]).values().tolist() == [float(n) for n in range(1, 13)]


def test_rows_that_differ_in_an_inner_dim_come_back_strided(client, name):
    parts = [torch.ones(1, 2), torch.ones(2, 1), torch.ones(3, 3)]
    back, _ = round_trip(client, name, torch.nested.as_nested_tensor(parts, layout=torch.strided), 3)
    assert (back.is_nested, back.layout) == (True, torch.strided)
    assert all(torch.equal(a, b) for a, b in zip(back.unbind(), parts, strict=True))


def test_a_strided_nested_tensor_in_a_dict_is_a_column(client, name):
    ragged = [torch.rand(2, 3), torch.rand(3, 2)]
    meta = client.put({"x": torch.nested.as_nested_tensor(ragged, layout=torch.strided)}, partition_id=name)
    assert all(map(torch.equal, client.get_data(meta)["x"].unbind(), ragged))


def test_ints_beyond_64_bits_are_objects(client, name):
    meta = client.put({"x": [2**70, -1], "y": [1, 2]}, partition_id=name)
    data = client.get_data(meta)
    assert (list(data["x"]), data["y"].dtype, data["y"].tolist()) == ([2**70, -1], torch.int64, [1, 2])


def test_lists_of_numbers_are_tensors_whatever_their_lengths_and_in_a_stack_they_are_objects(client, name):
    lists = [[1, 2, 3], [], [4]]
    meta = client.put(
        {"ids": lists, "logprobs": [[0.5, 1], [], [2]], "even": [[1, 2]] * 3, "as_objects": NonTensorStack(*lists)},
        partition_id=name,
    )
    data = client.get_data(meta)
    assert {field: data[field].dtype for field in ("ids", "logprobs", "even")} == {
        "ids": torch.int64, "logprobs": torch.float32, "even": torch.int64,
    }  # fmt: skip
    assert [row.tolist() for row in data["ids"].unbind()] == lists
    assert [row.tolist() for row in data["logprobs"].unbind()] == [[0.5, 1.0], [], [2.0]]
    assert list(data["as_objects"]) == lists
    assert meta.field_schema["even"]["shape"] == (2,)


@pytest.mark.parametrize(
    "column",
    [
        [[1, None], [2, 3]], [[[1, 2], [3]], [[1], [2]]], [[1j], [1, 2]], [[[1, 2], [3]]], [[[1, 2], [3]], [[1]]],
        [[], [[1]]], [[[1], [2]], [[3]]], [[1, [2]], [[3], 4]], [[1], 2], [[[2**63]]], [[["a"]]], [[[None]]],
        [[[1, None]], [[1, 2]]], [[[{"role": "user"}]]],
    ],
    ids=str,
)  # fmt: skip
def test_lists_of_other_values_are_objects(client, name, column):
    assert list(client.get_data(client.put({"x": column}, partition_id=name))["x"]) == column


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        ([[[1, 2], [3, 4]]], torch.int64), ([[[1, 0.5]], [[1, 2]]], torch.float32), ([[[True]], [[False]]], torch.bool),
        ([[[True]], [[2]]], torch.int64), ([[[]], [[]]], torch.int64), ([1, 0.5], torch.float32), ([True], torch.bool),
        ([[[np.float64(0.1), 0.0]]], torch.float64), ([np.float64(0.1), 1], torch.float64),
    ],
    ids=str,
)  # fmt: skip
def test_plain_numbers_and_lists_of_lists_of_one_shape_are_dense(client, name, column, dtype):
    for container in (column, tuple(column)):
        back = client.get_data(client.put({"x": container}, partition_id=name), layout="dense")["x"]
        assert (back.dtype, back.tolist()) == (dtype, column)


def test_tensors_in_lists_are_one_tensor_if_all_are_of_one_shape(client, name):
    column = [[torch.ones(2), torch.zeros(2)], [torch.zeros(2), torch.ones(2)]]
    meta = client.put({"x": column, "y": [[torch.ones(2)], []]}, partition_id=name)
    data = client.get_data(meta, layout="dense")
    assert torch.equal(data["x"], torch.stack([torch.stack(row) for row in column]))
    assert [len(row) for row in data["y"]] == [1, 0]


@pytest.mark.parametrize("number", [2**24 + 1, -(2**40) - 1, 1e39])
@pytest.mark.parametrize("wrap", [lambda number: number, lambda number: [[number]]], ids=["plain", "lists of lists"])
def test_no_number_of_a_column_changes_in_silence(client, name, wrap, number):
    column = [wrap(0.5), wrap(number)]
    with pytest.raises(ValueError, match=r"field 'x': .* row 1 does not fit.* Put .*torch\.float64"):
        client.put({"x": column}, partition_id=name)
    meta = client.put({"x": torch.tensor(column, dtype=torch.float64)}, partition_id=name)
    assert client.get_data(meta, layout="dense")["x"].tolist() == column


def test_lists_become_what_a_field_is_declared_as_by_ragged(client, name):
    client.create_partition(name, fields={"ids": ("int32", [None])})
    with pytest.raises(tq.SchemaConflictError):
        client.put({"ids": [[1, 2], [3]]}, partition_id=name)
    meta = client.put({"ids": tq.ragged([[1, 2], [3]], torch.int32)}, partition_id=name)
    assert client.get_data(meta)["ids"].values().tolist() == [1, 2, 3]


def test_rows_of_different_rank_come_back_as_a_stack_of_tensors(client, name):
    parts = [torch.ones(2), torch.ones(2, 2)]
    back, _ = round_trip(client, name, NonTensorStack(*parts), 2)
    assert isinstance(back, NonTensorStack)
    assert all(torch.equal(a, b) for a, b in zip(back.tolist(), parts, strict=True))


def test_scalars_come_back_dense_and_count_as_shape_one(client, name):
    back, entry = round_trip(client, name, torch.tensor([1.5, 2.5]), 2)
    assert (back.is_nested, back.tolist(), entry["shape"]) == (False, [1.5, 2.5], (1,))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
def test_zero_sized_rows_are_values_too(client, name, shape):
    back, _ = round_trip(client, name, torch.zeros(3, *shape), 3)
    assert [tuple(row.shape) for row in back.unbind()] == [shape] * 3


@pytest.mark.parametrize(
    "values",
    [
        ["a", "", "ü" * 1000],
        [b"", b"\x00\xff", b"x"],
        [1, 2.5, None],
        [{"a": [1, {"b": None}]}, {}, {"t": (1, 2)}],
        [True, "mixed", b"kinds"],
    ],
    ids=["text", "bytes", "numbers", "containers", "mixed"],
)
def test_plain_objects_come_back_as_a_stack(client, name, values):
    back, entry = round_trip(client, name, NonTensorStack(*values), 3)
    assert isinstance(back, NonTensorStack)
    assert back.tolist() == values
    assert (entry["dtype"], entry["shape"], entry["is_non_tensor"]) == (None, None, True)


def test_one_object_is_a_stack_as_well(client, name):
    back, _ = round_trip(client, name, NonTensorStack("only"), 1)
    assert (isinstance(back, NonTensorStack), back.tolist()) == (True, ["only"])


def test_arrays_and_tensors_within_objects_keep_their_type(client, name):
    values = [{"array": np.arange(3, dtype=np.int16), "tensor": torch.ones(2, dtype=torch.bfloat16)}, {"none": None}]
    back, _ = round_trip(client, name, NonTensorStack(*values), 2)
    first = back.tolist()[0]
    assert (first["array"].dtype, first["array"].tolist()) == (np.int16, [0, 1, 2])
    assert torch.equal(first["tensor"], values[0]["tensor"])


def test_a_list_of_strings_and_an_object_array_are_columns_of_objects(client, name):
    client.put(TensorDict({"s": ["x", "y"]}, batch_size=[2]), partition_id=name)
    client.put({"o": np.array([{"a": 1}, None], dtype=object)}, partition_id=f"{name}/2")
    assert client.get_data(client.get_meta(["s"], 2, name, task_name="t"))["s"] == ["x", "y"]
    assert client.get_data(client.get_meta(["o"], 2, f"{name}/2", task_name="t"))["o"] == [{"a": 1}, None]


def test_a_field_that_becomes_ragged_is_nested_in_later_metadata(client, name):
    client.put(TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]), partition_id=name)
    client.put(TensorDict({"x": torch.ones(1, 5)}, batch_size=[1]), partition_id=name)
    meta = client.get_meta(["x"], 3, name, task_name="t")
    assert (meta.field_schema["x"]["is_nested"], meta.get_shapes("x")) == (True, [(3,), (3,), (5,)])
    assert [len(row) for row in client.get_data(meta)["x"].unbind()] == [3, 3, 5]


def test_regular_puts_of_two_shapes_do_not_take_the_shape_of_the_first(client, name):
    one = client.put(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2]), partition_id=name)
    two = client.put(TensorDict({"x": torch.zeros(2, 4)}, batch_size=[2]), partition_id=name)
    assert tq.BatchMeta.concat([one, two]).get_shapes("x") == [(3,), (3,), (4,), (4,)]


def test_ragged_rows_in_any_order_and_over_both_units(client, name):
    parts = [torch.full((i % 7,), i, dtype=torch.int16) for i in range(300)]
    column = torch.nested.nested_tensor(parts, layout=torch.jagged)
    meta = client.put(TensorDict({"x": column, "s": [str(i) for i in range(300)]}, batch_size=[300]), partition_id=name)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).tolist()
    data = client.get_data(meta.select_samples(order))
    assert [row.tolist() for row in data["x"].unbind()] == [[i] * (i % 7) for i in order]
    assert data["s"] == [str(i) for i in order]


def test_dense_layout_gives_dense_where_shapes_agree(queue, client, name):
    dense = tq.TransferQueueClient("dense", queue.controller.zmq_info)
    dense.initialize_storage_manager("SimpleStorage", queue.backend.SimpleStorage, layout="dense")
    even = client.put(TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]), partition_id=name)
    odd = client.put(TensorDict({"x": torch.ones(1, 4)}, batch_size=[1]), partition_id=name)
    assert torch.equal(dense.get_data(even)["x"], torch.ones(2, 3))
    assert dense.get_data(tq.BatchMeta.concat([even, odd]))["x"].is_nested
    dense.close()


@pytest.mark.parametrize("layout", ["jagged", "dense", None])
def test_a_call_may_name_its_layout(client, name, layout):
    meta = client.put(TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]), partition_id=name)
    assert client.get_data(meta, layout=layout)["x"].is_nested is (layout != "dense")
    with pytest.raises(tq.ConfigError, match="layout is 'flat', must be one of 'jagged', 'dense'"):
        client.get_data(meta, layout="flat")


def test_tensors_that_need_grad_or_are_views_are_stored_by_value(client, name):
    source = torch.randn(4, 6, requires_grad=True)
    meta = client.put(TensorDict({"x": source.t()[::2]}, batch_size=[3]), partition_id=name)
    back = client.get_data(meta)["x"]
    assert not back.requires_grad
    assert torch.equal(back.values().reshape(3, 4), source.detach().t()[::2])


def test_columns_with_more_batch_dims_than_one_are_rows_of_the_first(client, name):
    data = TensorDict({"x": torch.arange(6).reshape(2, 3)}, batch_size=[2, 3])
    meta = client.put(data, partition_id=name)
    assert client.get_data(meta)["x"].unbind()[1].tolist() == [3, 4, 5]
