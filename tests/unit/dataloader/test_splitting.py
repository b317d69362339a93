# SPDX-License-Identifier: Apache-2.0
"""Micro-batches: values and metadata cut by the same sizes, whatever the columns are."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from transfer_queue import BatchMeta, chunk_batch_fn, token_budget_batch_fn
from transfer_queue.dataloader.splitting import chunk_groups
from transfer_queue.errors import InvalidRequestError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def meta_of(rows: int, tags: list[dict[str, Any]] | None = None) -> BatchMeta:
    return BatchMeta(list(range(100, 100 + rows)), ["p"] * rows, custom_meta=tags)


def every_kind(rows: int) -> TensorDict:
    """Each column tells the row's number, so that a row in the wrong place shows."""
    ragged = [torch.full((1 + row % 3,), row) for row in range(rows)]
    return TensorDict(
        {
            "dense": torch.arange(rows * 2).reshape(rows, 2) // 2,
            "scalar": torch.arange(rows),
            "jagged": torch.nested.nested_tensor(ragged, layout=torch.jagged),
            "strided": torch.nested.as_nested_tensor(ragged, layout=torch.strided),
            "text": NonTensorStack(*[str(row) for row in range(rows)]),
        },
        batch_size=[rows],
    )


def rows_told(td: TensorDict) -> list[set[int]]:
    """Per row the numbers that its columns tell: one each, if all is well."""
    columns = [td["dense"], td["scalar"], td["jagged"].unbind(), td["strided"].unbind()]
    told = [{int(value) for column in columns for value in column[row].reshape(-1)} for row in range(td.batch_size[0])]
    return [values | {int(td["text"][row])} for row, values in enumerate(told)]


def check_aligned(parts: list[Any], rows: int) -> None:
    assert [index for _, meta in parts for index in meta.global_indexes] == list(range(100, 100 + rows))
    for td, meta in parts:
        assert td.batch_size == torch.Size([meta.size])
        assert rows_told(td) == [{index - 100} for index in meta.global_indexes]
        assert (td["jagged"].layout, td["strided"].layout) == (torch.jagged, torch.strided)


@given(rows=st.integers(1, 12), data=st.data())
@settings(max_examples=40, deadline=None, print_blob=True)
def test_chunks_hold_data_and_metadata_of_the_same_rows(rows, data):
    size = data.draw(st.integers(1, rows))
    parts = chunk_batch_fn(every_kind(rows), meta_of(rows), size)
    assert [meta.size for _, meta in parts] == [size] * (rows // size) + ([rows % size] if rows % size else [])
    check_aligned(parts, rows)


def numbered(rows: int) -> TensorDict:
    return TensorDict({"x": torch.arange(rows)}, batch_size=[rows])


def what_is_left(remains: list[bool], most_rows: int) -> BatchMeta:
    """Row n of the batch as it was drawn is sample n."""
    meta = BatchMeta(own := [row for row, there in enumerate(remains) if there], ["p"] * len(own))
    meta.remains, meta.most_rows = remains, most_rows
    return meta


@given(remains=st.lists(st.booleans(), min_size=1, max_size=12), micro=st.integers(1, 5), data=st.data())
@settings(max_examples=100, deadline=None, print_blob=True)
def test_what_is_left_of_a_batch_of_groups_is_cut_where_the_batch_was_cut(remains, micro, data):
    rows = len(remains)
    cut = [range(start, min(start + micro, rows)) for start in range(0, rows, micro)]
    taken = data.draw(st.integers(0, len(cut) - 1))
    left = numbered(rows)[torch.tensor(remains)]
    parts, numbers = chunk_groups(left, what_is_left(remains, most_rows=0), micro, taken)
    assert [td["x"].tolist() for td, _ in parts] == [meta.global_indexes for _, meta in parts]
    found = {number: meta.global_indexes for number, (_, meta) in zip(numbers, parts, strict=True)}
    expected = {number: [row for row in own if remains[row]] for number, own in enumerate(cut, 1) if number > taken}
    assert found == {number: own for number, own in expected.items() if own}


@given(remains=st.lists(st.booleans(), min_size=1, max_size=12), micro=st.integers(1, 5), data=st.data())
@settings(max_examples=100, deadline=None, print_blob=True)
def test_a_rank_of_which_rows_have_left_keeps_as_many_micro_batches_as_the_others(remains, micro, data):
    rows = len(remains)
    most = data.draw(st.integers(rows, rows * micro))
    count = -(-most // micro)
    drawn, _ = chunk_groups(numbered(rows), what_is_left([True] * rows, most), micro)
    taken = data.draw(st.integers(0, count - 1))
    rest = [row for _, meta in drawn[taken:] for row in meta.global_indexes if remains[row]]
    left = numbered(rows)[torch.tensor(remains)]
    if len(rest) < count - taken:
        with pytest.raises(InvalidRequestError, match=f"{len(rest)} rows are left for {count - taken} micro-batches"):
            chunk_groups(left, what_is_left(remains, most), micro, taken)
        return
    parts, numbers = chunk_groups(left, what_is_left(remains, most), micro, taken)
    assert list(numbers) == list(range(taken + 1, count + 1))
    assert [row for _, meta in parts for row in meta.global_indexes] == rest
    assert all(0 < meta.size <= micro for _, meta in parts)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12), most=st.none() | st.integers(1, 4))
@settings(max_examples=60, deadline=None, print_blob=True)
def test_token_budget_chunks_keep_rows_budget_and_greed(lengths, most):
    tags = [{"total_lengths": length} for length in lengths]
    parts = token_budget_batch_fn(every_kind(len(lengths)), meta_of(len(lengths), tags), most, max_tokens=10)
    check_aligned(parts, len(lengths))
    sums = [sum(tag["total_lengths"] for tag in meta.custom_meta) for _, meta in parts]
    assert max(sums) <= 10
    for (_, meta), total, (_, following) in zip(parts, sums, parts[1:], strict=False):
        full = most is not None and meta.size == most
        assert full or total + following.custom_meta[0]["total_lengths"] > 10, "a chunk ends only where it must"


def test_ten_rows_by_four_are_four_four_two_on_both_sides():
    parts = chunk_batch_fn(TensorDict({"a": torch.arange(10)}, batch_size=[10]), meta_of(10), 4)
    assert [(td["a"].tolist(), meta.global_indexes) for td, meta in parts] == [
        ([0, 1, 2, 3], [100, 101, 102, 103]),
        ([4, 5, 6, 7], [104, 105, 106, 107]),
        ([8, 9], [108, 109]),
    ]


def test_lengths_may_come_from_a_field_of_numbers_or_from_a_jagged_one():
    td = every_kind(5)
    td["n"] = torch.tensor([2, 2, 2, 2, 2])
    by_number = token_budget_batch_fn(td, meta_of(5), max_tokens=4, lengths="n")
    assert [meta.size for _, meta in by_number] == [2, 2, 1]
    by_jagged = token_budget_batch_fn(td, meta_of(5), max_tokens=3, lengths="jagged")  # 1, 2, 3, 1, 2 tokens
    assert [meta.size for _, meta in by_jagged] == [2, 1, 2]


def test_the_budget_splitter_is_a_process_function():
    split = partial(token_budget_batch_fn, max_tokens=8, lengths="scalar")
    sizes = [meta.size for _, meta in split(every_kind(6), meta_of(6), micro_batch_size=2)]
    assert sizes == [2, 2, 1, 1]  # 0 1 | 2 3 | 4 | 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int8, torch.complex64])
def test_jagged_chunks_keep_dtype_and_pad_to_their_own_longest_row(dtype):
    rows = [torch.ones(length, 2, dtype=dtype) for length in (1, 2, 7, 3)]
    td = TensorDict({"j": torch.nested.nested_tensor(rows, layout=torch.jagged)}, batch_size=[4])
    first, second = chunk_batch_fn(td, meta_of(4), 2)
    assert (first[0]["j"].dtype, second[0]["j"].dtype) == (dtype, dtype)
    assert [row.shape for row in second[0]["j"].unbind()] == [(7, 2), (3, 2)]
    if dtype is torch.bfloat16:
        assert torch.nested.to_padded_tensor(first[0]["j"], 0).shape == (2, 2, 2)


def test_jagged_columns_that_fit_together_still_do_in_every_chunk():
    def column(edges: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(torch.arange(8.0), edges)

    edges = torch.tensor([0, 1, 3, 4, 8])
    whole = TensorDict({"ids": column(edges), "mask": column(edges)}, batch_size=[4])
    whole["other"] = column(torch.tensor([0, 4, 5, 7, 8]))
    for part, _ in chunk_batch_fn(whole, meta_of(4), 2):
        assert (part["ids"] + part["mask"]).values().tolist() == (2 * part["ids"].values()).tolist()
        with pytest.raises(RuntimeError, match="shape"):
            part["ids"] + part["other"]


def test_a_jagged_column_ragged_in_its_second_dimension_keeps_its_rows():
    rows = [torch.full((2, length), length) for length in (1, 3, 2)]
    column = torch.nested.nested_tensor([row.t() for row in rows], layout=torch.jagged).transpose(1, 2)
    parts = chunk_batch_fn(TensorDict({"j": column}, batch_size=[3]), meta_of(3), 2)
    cut = [row for td, _ in parts for row in td["j"].unbind()]
    assert [row.tolist() for row in cut] == [row.tolist() for row in rows]


@pytest.mark.parametrize("names", [np.array(["a", "b", "c"]), ["a", "b", "c"]], ids=["array", "list"])
def test_text_that_a_fetch_function_gave_as_one_value_is_cut_by_rows_and_a_value_of_all_rows_is_not(names):
    data = TensorDict({"name": NonTensorData(names, batch_size=[3]), "run": NonTensorData("x", batch_size=[3])}, [3])
    first, last = (part for part, _ in chunk_batch_fn(data, meta_of(3), 2))
    assert [list(first["name"]), list(last["name"])] == [["a", "b"], ["c"]]
    assert (first["run"], last["run"]) == ("x", "x")


def test_chunks_may_be_changed_without_changing_each_other():
    first, second = chunk_batch_fn(every_kind(4), meta_of(4), 2)
    first[0]["jagged"].values().fill_(77)
    first[0]["dense"].fill_(77)
    assert rows_told(second[0]) == [{2}, {3}]


def test_a_single_chunk_is_the_batch_itself():
    td, meta = every_kind(3), meta_of(3)
    assert chunk_batch_fn(td, meta, 3)[0][0] is td


@pytest.mark.parametrize(
    ("td", "size", "error", "text"),
    [
        ({"a": torch.zeros(2)}, 1, TypeError, "expected a TensorDict, got dict"),
        (TensorDict({}, batch_size=[]), 1, ValueError, "no batch dimension"),
        (TensorDict({}, batch_size=[2]), 0, ValueError, "positive int, got 0"),
        (TensorDict({}, batch_size=[2]), True, ValueError, "positive int, got True"),
        (TensorDict({}, batch_size=[2]), 1.0, ValueError, "positive int, got 1.0"),
        (TensorDict({}, batch_size=[2]), 3, ValueError, "3 is larger than the batch of 2"),
        (TensorDict({}, batch_size=[3]), 1, ValueError, "3 rows came with metadata of 2"),
    ],
)
def test_bad_input_is_refused_with_the_value_seen(td, size, error, text):
    with pytest.raises(error, match=text):
        chunk_batch_fn(td, meta_of(2), size)


def test_bad_budgets_name_the_sample_or_the_value():
    td = TensorDict({"text": NonTensorStack("a", "b")}, batch_size=[2])
    split = partial(token_budget_batch_fn, td)
    with pytest.raises(ValueError, match="sample 101 has 9 tokens, more than max_tokens=8"):
        split(meta_of(2, [{"total_lengths": 1}, {"total_lengths": 9}]), max_tokens=8)
    with pytest.raises(ValueError, match="sample 101 has no tag 'total_lengths'"):
        split(meta_of(2, [{"total_lengths": 1}, {}]), max_tokens=8)
    with pytest.raises(ValueError, match="'text' holds no numbers"):
        split(meta_of(2), max_tokens=8, lengths="text")
    with pytest.raises(ValueError, match="at least 1, got 0 and None"):
        split(meta_of(2), max_tokens=0)
