# SPDX-License-Identifier: Apache-2.0
"""Columns of every making come back with their rows: what containers, layouts and mixtures of puts become."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue.errors import ConfigError, SchemaConflictError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
_numbers = itertools.count()


@pytest.fixture
def partition(client: tq.TransferQueueClient) -> str:
    return f"columns-{next(_numbers)}"


class Column:
    """The field "x" of a partition of its own, put in parts and read in any order."""

    def __init__(self, client: tq.TransferQueueClient, partition: str) -> None:
        self.client, self.partition = client, partition

    def put(self, column: Any, count: int) -> Column:
        fields = {"x": column}  # an older TensorDict takes no list of tensors
        data = fields if isinstance(column, list) else TensorDict(fields, batch_size=[count])
        self.client.put(data, partition_id=self.partition)
        return self

    def read(self, order: list[int] | None = None, layout: str | None = None) -> Any:
        meta = self.client.get_meta(["x"], partition_id=self.partition, mode="force_fetch")
        meta = meta if order is None else meta.select_samples(order)
        return self.client.get_data(meta, layout=layout).get("x")


@pytest.fixture
def column(client: tq.TransferQueueClient, partition: str) -> Column:
    return Column(client, partition)


def jagged(*rows: list) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row, dtype=torch.int64) for row in rows], layout=torch.jagged)


def lists(column: Any) -> list:
    return [row.tolist() for row in column.unbind()]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4).T,
        torch.arange(12).view(3, 4)[:, ::2],
        torch.arange(3).expand(2, 3),
        torch.ones(2, 3, requires_grad=True),
        torch.view_as_real(torch.ones(2, dtype=torch.complex64)).flip(1),
        torch.tensor([[1 + 2j]]).conj(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
)
def test_sources_of_any_memory_layout_keep_their_values(column, tensor):
    result = column.put(tensor, len(tensor)).read(layout="dense")
    assert (result.tolist(), result.dtype, result.requires_grad) == (tensor.tolist(), tensor.dtype, False)


def from_jagged(values, offsets, lengths=None, **more) -> torch.Tensor:
    lengths = None if lengths is None else torch.tensor(lengths)
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets), lengths, **more)


@pytest.mark.parametrize(
    ("nested", "rows"),
    [
        (from_jagged(torch.arange(10), [2, 4, 7]), [[2, 3], [4, 5, 6]]),
        (from_jagged(torch.arange(20)[::2], [0, 3, 10]), [[0, 2, 4], [6, 8, 10, 12, 14, 16, 18]]),
        (from_jagged(torch.arange(10), [0, 4, 10], [2, 5]), [[0, 1], [4, 5, 6, 7, 8]]),
        (from_jagged(torch.arange(6).view(3, 2), [0, 2, 3]), [[[0, 1], [2, 3]], [[4, 5]]]),
        (from_jagged(torch.arange(6).view(2, 3), [0, 2, 3], jagged_dim=2), [[[0, 1], [3, 4]], [[2], [5]]]),
        (
            torch.nested.narrow(
                torch.arange(8).view(2, 4), 1, torch.tensor([0, 2]), torch.tensor([3, 2]), torch.jagged
            ),
            [[0, 1, 2], [6, 7]],
        ),
    ],
    ids=["values before and after", "strided values", "holes", "inner dim", "ragged in the second dim", "narrowed"],
)
def test_jagged_tensors_of_every_making_keep_their_rows(column, nested, rows):
    assert lists(column.put(nested, 2).read()) == rows


def test_rows_that_jagged_can_not_hold_come_back_as_a_stack(column):
    narrow = [torch.arange(6).view(2, 3).to(torch.uint16), torch.arange(4).view(4, 1).to(torch.uint16)]
    back = column.put(NonTensorStack(*narrow), 2).read()
    assert isinstance(back, NonTensorStack)
    assert [(row.dtype, row.tolist()) for row in back.tolist()] == [(row.dtype, row.tolist()) for row in narrow]


def test_tensors_of_different_rank_or_dtype_are_kept_apart(column):
    rows = [torch.zeros(2), torch.ones(2, 2), torch.tensor(3)]
    back = column.put(NonTensorStack(*rows), 3).read()
    assert isinstance(back, NonTensorStack)
    assert [(row.dtype, row.tolist()) for row in back.tolist()] == [(row.dtype, row.tolist()) for row in rows]


@pytest.mark.parametrize(
    "source", [torch.arange(6).view(3, 2), jagged([0, 1], [2, 3], [4, 5])], ids=["dense", "jagged"]
)
def test_equal_shapes_are_jagged_by_default_and_dense_on_demand(column, source):
    column.put(source, 3)
    back = column.read()
    assert (back.is_nested, back.layout, lists(back)) == (True, torch.jagged, [[0, 1], [2, 3], [4, 5]])
    assert torch.equal(column.read(layout="dense"), torch.arange(6).view(3, 2))


def test_rows_of_different_length_are_jagged_in_the_dense_layout_too(column):
    assert lists(column.put(jagged([0], [2, 3]), 2).read(layout="dense")) == [[0], [2, 3]]


@pytest.mark.parametrize("layout", ["jagged", "dense"])
def test_one_number_per_sample_is_dense_in_both_layouts(column, layout):
    assert column.put(torch.tensor([1, 2]), 2).read(layout=layout).tolist() == [1, 2]


@pytest.mark.parametrize(
    "text",
    [
        ["a", "b"],
        NonTensorStack("a", "b"),
        NonTensorStack.from_list(["a", "b"]),
        np.array(["a", "b"]),
        np.array(["a", "b"], dtype=object),
        NonTensorData(np.array(["a", "b"]), batch_size=[2]),
    ],
    ids=["list", "stack", "stack of a list", "array", "array of objects", "one array"],
)
def test_text_in_any_container_is_one_value_per_sample(column, text):
    back = column.put(text, 2).read()
    assert isinstance(back, NonTensorStack)
    assert back.tolist() == ["a", "b"]


@pytest.mark.parametrize(
    "container",
    [lambda dates: dates, list, lambda dates: NonTensorData(dates, batch_size=[2])],
    ids=["array", "list", "one array"],
)
@pytest.mark.parametrize("kind", ["M8[ns]", "M8[us]", "M8[s]", "M8[D]", "m8[ns]", "m8[ms]", ">M8[s]"])
def test_dates_and_durations_in_any_container_are_one_value_per_sample_and_keep_their_unit(column, kind, container):
    dates = np.array([1_600_000_000_000, "NaT"], kind)
    back = column.put(container(dates), 2).read().tolist()
    assert [(type(value), value.dtype) for value in back] == [(dates.dtype.type, dates[0].dtype)] * 2
    assert np.array_equal(np.array(back), dates, equal_nan=True)


def test_dates_in_rows_are_one_row_per_sample(column):
    dates = np.array([["2020-01-01", "2021-01-01"], ["NaT", "2022-01-01"]], "M8[s]")
    for source in (dates, TensorDict({"x": dates}, [2]).get("x")):
        column.put(source, 2)
    back = column.read().tolist()
    assert [(row.dtype, row.tolist()) for row in back] == [(row.dtype, row.tolist()) for row in [*dates, *dates]]


@pytest.mark.parametrize("value", ["q", [1, 2, 3]], ids=str)
def test_a_shared_value_belongs_to_each_sample(column, value):
    assert column.put(NonTensorData(value, batch_size=[2]), 2).read().tolist() == [value, value]


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        (NonTensorData([[1], "b"], batch_size=[2]), [[1], "b"]),
        ([1, 2], [1, 2]),
        ([["a", "b"], ["c", "d"]], [["a", "b"], ["c", "d"]]),
        ([["a"], ["c", 1]], [["a"], ["c", 1]]),
    ],
    ids=["an entry per row", "numbers", "nested lists", "nested lists of both"],
)
def test_a_list_is_one_row_per_entry(column, source, rows):
    assert column.put(source, 2).read().tolist() == rows


@pytest.mark.skipif(OLD, reason="an older tensordict refuses it")
def test_lists_of_numbers_of_different_length_are_jagged(column):
    assert lists(column.put([[1, 2], [3]], 2).read()) == [[1, 2], [3]]


def test_a_lazy_stack_of_different_shapes_is_taken_row_by_row(client, partition):
    rows = [TensorDict({"t": torch.arange(n), "s": f"{n}"}, []) for n in (2, 3)]
    meta = client.put(LazyStackedTensorDict(*rows, stack_dim=0), partition_id=partition)
    back = client.get_data(meta)
    assert (lists(back["t"]), list(back["s"])) == ([[0, 1], [0, 1, 2]], ["2", "3"])


def test_a_list_of_tensors_is_of_their_dtype(column):
    column.put([torch.tensor([1, 2]), torch.tensor([3])], 2).put(jagged([5], [6, 7]), 2)
    assert lists(column.read()) == [[1, 2], [3], [5], [6, 7]]


def test_parts_of_different_kind_meet_in_one_column(column):
    column.put(torch.tensor([[1, 2], [3, 4]]), 2).put(jagged([5], [6, 7, 8]), 2).put(torch.tensor([[9, 10, 11]]), 1)
    assert lists(column.read([1, 2, 3, 4, 0])) == [[3, 4], [5], [6, 7, 8], [9, 10, 11], [1, 2]]


def test_a_batch_of_tensors_with_several_numbers_of_dimensions_has_them_as_objects_and_says_so(
    client, partition, caplog
):
    for column in (torch.ones(2), torch.ones(2, 1)):
        client.put({partition: column}, partition_id=partition)
    meta = client.get_meta([partition], 4, partition, task_name="t")
    assert [row.tolist() for row in client.get_data(meta)[partition]] == [1.0, 1.0, [1.0], [1.0]]
    client.get_data(meta)
    (warning,) = [record.getMessage() for record in caplog.records if partition in record.getMessage()]
    assert f"samples of field {partition!r} have tensors of 0 and 1 dimensions" in warning


def test_objects_and_tensors_of_one_field_are_not_read_together(column):
    column.put(["a"], 1).put(torch.tensor([[1, 2]]), 1)
    with pytest.raises(SchemaConflictError, match=r"several dtypes: objects in 1 samples .*, torch.int64 in 1 samples"):
        column.read()


@pytest.mark.parametrize(("first", "second"), [("float8_e4m3fn", "float32"), ("uint64", "int64")])
def test_dtypes_without_a_common_one_are_not_read_together(column, first, second):
    for name in (first, second):
        column.put(torch.ones(1).to(getattr(torch, name)), 1)
    text = rf"field 'x' .* torch\.{first} in 1 samples .*, torch\.{second} in 1 samples .*select_samples"
    with pytest.raises(SchemaConflictError, match=text):
        column.read()
    assert [column.read([row]).double().tolist() for row in (0, 1)] == [[1], [1]]


def test_tensors_kept_as_objects_are_jagged_again_when_the_batch_allows(column):
    column.put(NonTensorStack(torch.zeros(2), torch.ones(2, 2), torch.ones(3), torch.ones(2)), 4)
    back = column.read([0, 2])
    assert (back.layout, lists(back)) == (torch.jagged, [[0, 0], [1, 1, 1]])
    assert column.read([0, 3], "dense").tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            TensorDict({"obs": TensorDict({"a": torch.zeros(2)}, batch_size=[2])}, batch_size=[2]),
            r"field 'obs' is a TensorDict.*flatten_keys",
        ),
        ({"x": torch.eye(2).to_sparse()}, r"field 'x' is a torch\.sparse_coo tensor"),
        ({"a": [1, 2, 3], "b": torch.zeros(2)}, r"must have equally many rows, got {'a': 3, 'b': 2}"),
        (TensorDict({"a": torch.zeros(2)}, batch_size=[]), "a TensorDict without a batch dimension"),
    ],
    ids=["nested", "sparse", "lengths", "no batch"],
)
def test_what_is_no_batch_of_columns_is_refused_with_the_way_out(client, partition, data, says):
    with pytest.raises(ValueError, match=says):
        client.put(data, partition_id=partition)


def test_an_unknown_layout_names_those_that_exist(column):
    with pytest.raises(ConfigError, match="layout is 'ragged', must be one of 'jagged', 'dense'"):
        column.put([1], 1).read(layout="ragged")


# ---- data_parser ----


@pytest.fixture
def data() -> TensorDict:
    return TensorDict({"t": torch.arange(4).view(2, 2), "n": jagged([1], [2, 3]), "o": ["a", "b"]}, batch_size=[2])


def test_a_parser_gets_dense_columns_as_one_tensor_and_others_as_lists(client, partition, data):
    seen: dict[str, Any] = {}
    client.put(data, partition_id=partition, data_parser=lambda columns: seen.update(columns) or columns)
    assert {name: type(column) for name, column in seen.items()} == {"t": torch.Tensor, "n": list, "o": list}
    assert ([row.tolist() for row in seen["n"]], seen["o"]) == ([[1], [2, 3]], ["a", "b"])


def test_what_a_parser_returns_is_what_is_stored(client, partition, data):
    def parse(columns):
        return {"t": columns["t"].float().numpy(), "n": [row * 10 for row in columns["n"]], "o": [1.5, {"u": 1}]}

    back = client.get_data(client.put(data, partition_id=partition, data_parser=parse), layout="dense")
    assert (back["t"].dtype, back["t"].tolist()) == (torch.float32, [[0, 1], [2, 3]])
    assert lists(back["n"]) == [[10], [20, 30]]
    assert back.get("o").tolist() == [1.5, {"u": 1}]
    assert data["o"] == ["a", "b"]


def test_text_that_a_parser_makes_tensors_of_is_a_tensor_column(client, partition, data):
    parse = lambda columns: {**columns, "o": [torch.zeros(1), torch.zeros(2)]}  # noqa: E731
    assert client.get_data(client.put(data, partition_id=partition, data_parser=parse))["o"].layout == torch.jagged


def fails(columns):
    raise OSError("no such host")


@pytest.mark.parametrize(
    ("parser", "cause"),
    [
        ("text", "not callable: it is a str"),
        (fails, "raised OSError: no such host"),
        (lambda columns: None, "returned a NoneType, not a dict"),
        (lambda columns: {"t": columns["t"]}, r"changed the fields from \['n', 'o', 't'\] to \['t'\]"),
        (lambda columns: columns | {"new": [1, 2]}, "changed the fields"),
        (lambda columns: columns.clear() or {}, "changed the fields"),
        (lambda columns: columns | {"o": ["a"]}, "changed the count of field 'o': 2 rows went in, 1 came out"),
        (lambda columns: columns | {"t": torch.zeros(3)}, "field 't': 2 rows went in, 3 came out"),
        (lambda columns: columns | {"t": torch.tensor(1)}, "field 't': 2 rows went in, a Tensor came out"),
        (lambda columns: columns | {"o": "ab"}, "field 'o': 2 rows went in, a str came out"),
        (lambda columns: columns | {"o": np.zeros(())}, "a ndarray came out"),
    ],
)
def test_a_wrong_parser_is_a_runtime_error_that_names_the_cause_and_nothing_is_put(
    client, partition, data, parser, cause
):
    client.create_partition(partition)
    with pytest.raises(RuntimeError, match=cause):
        client.put(data, partition_id=partition, data_parser=parser)
    assert client.get_stats()["partitions"][partition]["samples"] == 0
