# SPDX-License-Identifier: Apache-2.0
"""TensorDict columns as wire columns and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from tests.unit.storage.test_unpack_fast import OLD
from transfer_queue.errors import ConfigError, InvalidRequestError, ProtocolError, UnsupportedValueError
from transfer_queue.storage.pack import pack
from transfer_queue.storage.unpack import relaid, unpack


def jagged(*rows: list) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row, dtype=torch.int64) for row in rows], layout=torch.jagged)


def wire_of(column, count: int):
    return pack(TensorDict({"x": column}, batch_size=[count]))["x"]


def kept(column, count: int, layout: str = "jagged"):
    """The column after being stored and read whole."""
    return unpack({"x": [(slice(0, count), wire_of(column, count))]}, count, layout).get("x")


def lists(column) -> list:
    return [row.tolist() for row in column.unbind()]


def test_a_contiguous_tensor_is_not_copied_into_its_piece():
    tensor = torch.arange(6).view(3, 2)
    assert wire_of(tensor, 3).data.ctypes.data == tensor.data_ptr()
    nested = jagged([1], [2, 3])
    assert wire_of(nested, 2).data.ctypes.data == nested.values().data_ptr()


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
def test_sources_of_any_memory_layout_keep_their_values(tensor):
    result = kept(tensor, len(tensor), "dense")
    assert (result.tolist(), result.dtype, result.requires_grad) == (tensor.tolist(), tensor.dtype, False)


def test_jagged_is_kept_as_values_and_row_shapes():
    wire = wire_of(jagged([1], [], [2, 3]), 3)
    assert (wire.layout.kind, wire.row_meta.tolist(), wire.data.view(np.int64).tolist()) == (
        "ragged",
        [[1], [0], [2]],
        [1, 2, 3],
    )


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
def test_jagged_tensors_of_every_making_keep_their_rows(nested, rows):
    assert lists(kept(nested, 2)) == rows


def test_rows_that_jagged_can_not_hold_come_back_strided_and_else_as_a_stack():
    first, second = torch.arange(6.0).view(2, 3), torch.arange(4.0).view(4, 1)
    column = kept(torch.nested.as_nested_tensor([first, second], layout=torch.strided), 2)
    assert (column.layout, lists(column)) == (torch.strided, [first.tolist(), second.tolist()])
    narrow = [first.to(torch.uint16), second.to(torch.uint16)]
    column = kept(NonTensorStack(*narrow), 2)
    assert isinstance(column, NonTensorStack)
    assert [(row.dtype, row.tolist()) for row in column.tolist()] == [(row.dtype, row.tolist()) for row in narrow]


def test_tensors_of_different_rank_or_dtype_are_kept_apart():
    rows = [torch.zeros(2), torch.ones(2, 2), torch.tensor(3)]
    column = kept(NonTensorStack(*rows), 3)
    assert isinstance(column, NonTensorStack)
    assert [(row.dtype, row.tolist()) for row in column.tolist()] == [(row.dtype, row.tolist()) for row in rows]


def test_equal_shapes_are_jagged_by_default_and_dense_on_demand():
    tensor = torch.arange(6).view(3, 2)
    column = kept(tensor, 3)
    assert (column.is_nested, column.layout, lists(column)) == (True, torch.jagged, tensor.tolist())
    for source in (tensor, jagged([0, 1], [2, 3], [4, 5])):
        assert torch.equal(kept(source, 3, "dense"), tensor)
    assert lists(kept(jagged([0], [2, 3]), 2, "dense")) == [[0], [2, 3]]


def test_one_number_per_sample_is_dense_in_both_layouts():
    assert kept(torch.tensor([1, 2]), 2).tolist() == kept(torch.tensor([1, 2]), 2, "dense").tolist() == [1, 2]


@pytest.mark.parametrize(
    "column",
    [
        ["a", "b"],
        NonTensorStack("a", "b"),
        NonTensorStack.from_list(["a", "b"]),
        np.array(["a", "b"]),
        np.array(["a", "b"], dtype=object),
        NonTensorData(np.array(["a", "b"]), batch_size=[2]),
    ],
)
def test_text_in_any_container_is_one_value_per_sample(column):
    result = kept(column, 2)
    assert isinstance(result, NonTensorStack)
    assert result.tolist() == ["a", "b"]


@pytest.mark.parametrize("container", [lambda dates: dates, list, lambda dates: NonTensorData(dates, batch_size=[2])])
@pytest.mark.parametrize("kind", ["M8[ns]", "M8[us]", "M8[s]", "M8[D]", "m8[ns]", "m8[ms]", ">M8[s]"])
def test_dates_and_durations_in_any_container_are_one_value_per_sample_and_keep_their_unit(kind, container):
    dates = np.array([1_600_000_000_000, "NaT"], kind)
    result = kept(container(dates), 2).tolist()
    assert [(type(value), value.dtype) for value in result] == [(dates.dtype.type, dates[0].dtype)] * 2
    assert np.array_equal(np.array(result), dates, equal_nan=True)


def test_dates_in_rows_are_one_row_per_sample():
    dates = np.array([["2020-01-01", "2021-01-01"], ["NaT", "2022-01-01"]], "M8[s]")
    for column in (dates, TensorDict({"x": dates}, [2]).get("x")):
        result = kept(column, 2).tolist()
        assert [(row.dtype, row.tolist()) for row in result] == [(row.dtype, row.tolist()) for row in dates]


def test_a_shared_value_belongs_to_each_sample():
    assert kept(NonTensorData("q", batch_size=[2]), 2).tolist() == ["q", "q"]
    assert kept(NonTensorData([1, 2, 3], batch_size=[2]), 2).tolist() == [[1, 2, 3], [1, 2, 3]]


def test_a_list_with_an_entry_per_row_is_one_row_per_entry():
    assert kept(NonTensorData([[1], "b"], batch_size=[2]), 2).tolist() == [[1], "b"]


def test_lists_of_numbers_are_what_tensordict_makes_of_them():
    assert kept([1, 2], 2).tolist() == [1, 2]
    if not OLD:  # an older tensordict refuses it
        assert lists(kept([[1, 2], [3]], 2)) == [[1, 2], [3]]


def test_nested_lists_stay_lists():
    assert kept([["a", "b"], ["c", "d"]], 2).tolist() == [["a", "b"], ["c", "d"]]
    assert kept([["a"], ["c", 1]], 2).tolist() == [["a"], ["c", 1]]


def test_a_lazy_stack_of_different_shapes_is_taken_row_by_row():
    rows = [TensorDict({"t": torch.arange(n), "s": f"{n}"}, []) for n in (2, 3)]
    lazy = LazyStackedTensorDict(*rows, stack_dim=0)
    wires = pack(lazy)
    out = unpack({name: [(slice(0, 2), wire)] for name, wire in wires.items()}, 2)
    assert (lists(out["t"]), list(out["s"])) == ([[0, 1], [0, 1, 2]], ["2", "3"])


def test_columns_come_sorted_and_the_batch_keeps_its_size_without_any():
    wires = pack(TensorDict({name: torch.zeros(2) for name in "bca"}, batch_size=[2]))
    assert list(unpack({name: [(slice(0, 2), wires[name])] for name in "cab"}, 2).keys()) == ["a", "b", "c"]
    assert (unpack({}, 5).batch_size, unpack({}, 0).batch_size) == (torch.Size([5]), torch.Size([0]))


def test_pieces_of_different_kind_meet_in_one_column():
    parts = [
        (np.array([4, 0]), wire_of(torch.tensor([[1, 2], [3, 4]]), 2)),
        (slice(1, 3), wire_of(jagged([5], [6, 7, 8]), 2)),
        (slice(3, 4), wire_of(torch.tensor([[9, 10, 11]]), 1)),
    ]
    column = unpack({"x": parts}, 5).get("x")
    assert lists(column) == [[3, 4], [5], [6, 7, 8], [9, 10, 11], [1, 2]]


def test_a_dtype_that_changed_within_a_field_is_never_cast():
    parts = [(slice(0, 1), wire_of(torch.tensor([1 << 60]), 1)), (slice(1, 2), wire_of(torch.tensor([0.5]), 1))]
    column = unpack({"x": parts}, 2).get("x")
    assert [(value.dtype, value.item()) for value in column.tolist()] == [(torch.int64, 1 << 60), (torch.float32, 0.5)]


def test_objects_and_tensors_meet_in_one_column():
    parts = [(slice(0, 1), wire_of(["a"], 1)), (slice(1, 2), wire_of(torch.tensor([[1, 2]]), 1))]
    text, tensor = unpack({"x": parts}, 2).get("x").tolist()
    assert (text, tensor.tolist()) == ("a", [1, 2])


def test_tensors_kept_as_objects_are_jagged_again_when_the_batch_allows():
    wire = wire_of(NonTensorStack(torch.zeros(2), torch.ones(2, 2), torch.ones(3)), 3)
    column = unpack({"x": [(slice(0, 1), wire.slice(0, 1)), (slice(1, 2), wire.slice(2, 3))]}, 2).get("x")
    assert (column.layout, lists(column)) == (torch.jagged, [[0, 0], [1, 1, 1]])
    alike = wire_of(NonTensorStack(torch.zeros(2), torch.ones(2, 2), torch.ones(2)), 3)
    parts = [(slice(0, 1), alike.slice(0, 1)), (slice(1, 2), alike.slice(2, 3))]
    assert unpack({"x": parts}, 2, "dense").get("x").tolist() == [[0, 0], [1, 1]]


def test_a_nested_tensordict_is_refused_with_the_way_out():
    data = TensorDict({"obs": TensorDict({"a": torch.zeros(2)}, batch_size=[2])}, batch_size=[2])
    with pytest.raises(UnsupportedValueError, match=r"field 'obs' is a nested TensorDict.*flatten_keys"):
        pack(data)


def test_tensors_that_are_no_block_of_elements_are_refused():
    with pytest.raises(UnsupportedValueError, match=r"field 'x' is a torch\.sparse_coo tensor"):
        pack({"x": torch.eye(2).to_sparse()})


def test_columns_of_different_length_are_refused():
    with pytest.raises(InvalidRequestError, match="field 'b' has 2 rows, the batch has 3"):
        pack({"a": [1, 2, 3], "b": torch.zeros(2)})
    with pytest.raises(InvalidRequestError, match="no batch dimension"):
        pack(TensorDict({"a": torch.zeros(2)}, batch_size=[]))


def test_rows_missing_from_an_answer_are_an_error_not_garbage():
    with pytest.raises(ProtocolError, match="answered 2 rows of field 'x', 3 were asked for"):
        unpack({"x": [(slice(0, 2), wire_of(torch.zeros(2), 2))]}, 3)


def test_an_unknown_layout_names_those_that_exist():
    with pytest.raises(ConfigError, match="layout is 'ragged', must be one of 'jagged', 'dense'"):
        unpack({}, 1, "ragged")


def test_relaid_changes_the_layout_of_tensors_and_leaves_the_rest():
    data = TensorDict({"z": torch.arange(4).view(2, 2), "o": ["a", "b"], "n": torch.zeros(2)}, batch_size=[2])
    nested = relaid(data, "jagged")
    assert list(nested.keys()) == ["n", "o", "z"]
    assert (lists(nested["z"]), nested["n"].tolist(), list(nested["o"])) == ([[0, 1], [2, 3]], [0, 0], ["a", "b"])
    assert relaid(nested, "dense")["z"].tolist() == [[0, 1], [2, 3]]
