# SPDX-License-Identifier: Apache-2.0
"""What every storage backend must do, run against each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from tests.contract.storage_kit import BACKENDS, Backend, assert_same, blocking, get_rows, meta, rows, simple, some
from transfer_queue.errors import StorageFullError, StorageKeyNotFoundError, UnsupportedValueError


@pytest.fixture(params=BACKENDS)
def storage(request, tmp_path) -> Iterator[Backend]:
    with BACKENDS[request.param](tmp_path) as backend:
        yield backend
        blocking(backend.manager.close())


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # since torch 2.7
]  # fmt: skip
SHUFFLED = np.random.default_rng(0).permutation(150).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (2, 2)], ids=str)
def test_tensors_of_every_dtype_and_shape_come_back(storage, dtype, shape):
    data = some(dtype, 150, *shape)
    storage.put({"x": data}, range(150))
    dense = storage.column(SHUFFLED, "x", "dense")
    assert_same(dense, data[SHUFFLED] if data.numel() else data)
    default = storage.column(SHUFFLED, "x")
    assert default.is_nested == bool(shape)
    assert_same(rows(default), rows(dense))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [(), (3,), (0,)], ids=str)
def test_jagged_tensors_of_every_dtype_come_back(storage, dtype, inner):
    lengths = [n % 7 for n in range(150)]
    values = some(dtype, sum(lengths), *inner)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    expected = [values[a:b] for a, b in pairwise(offsets)]
    storage.put({"x": torch.nested.nested_tensor_from_jagged(values, offsets)}, range(150))
    for layout in ("jagged", "dense"):
        column = storage.column(SHUFFLED, "x", layout)
        assert (column.layout, column.values().shape) == (torch.jagged, values.shape)
        assert_same(rows(column), [expected[n] for n in SHUFFLED])


def test_strided_nested_tensors_come_back(storage):
    expected = [torch.full((1 + n % 3, 1 + n % 2), float(n)) for n in range(150)]
    storage.put({"x": torch.nested.as_nested_tensor(expected, layout=torch.strided)}, range(150))
    column = storage.column(SHUFFLED, "x")
    assert column.is_nested
    assert_same(rows(column), [expected[n] for n in SHUFFLED])
    alike = [n for n in range(150) if n % 6 == 0]
    assert_same(storage.column(alike, "x", "dense"), torch.stack([expected[n] for n in alike]))


OBJECTS = ["text", b"bytes", 1, 2**70, 1.5, None, True, 1j, [1, ["a"]], (1, (2,)), {"k": 1}, {3: "v"}, {1, 2}]


def test_objects_come_back_with_their_types_one_per_sample(storage):
    values = [*OBJECTS, np.arange(3), np.float32(2.5), [torch.ones(2), "caption"], {"pixels": torch.zeros(2, 2)}]
    count = len(values)
    storage.put({"x": NonTensorStack(*values)}, range(count))
    for order in (list(range(count)), list(range(count))[::-1], [0]):
        column = storage.column(order, "x")
        assert isinstance(column, NonTensorStack)
        for got, n in zip(rows(column), order, strict=True):
            if isinstance(values[n], dict):
                assert list(got) == list(values[n])
                assert_same(list(got.values()), list(values[n].values()))
            else:
                assert_same(got, values[n])


@settings(max_examples=40, deadline=None, print_blob=True)
@given(data=st.data())
def test_any_rows_at_any_indexes_come_back_in_any_order(data):
    storage = simple()
    indexes = data.draw(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=40, unique=True))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=len(indexes), max_size=len(indexes)))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    nested = torch.nested.nested_tensor_from_jagged(torch.arange(int(offsets[-1])), offsets)
    given_ = {"d": torch.arange(len(indexes) * 2).view(-1, 2), "j": nested, "o": [f"{n}" for n in range(len(indexes))]}
    storage.put(given_, indexes)
    order = data.draw(st.lists(st.integers(0, len(indexes) - 1), min_size=1, max_size=60))
    got = storage.get([indexes[n] for n in order], "d", "j", "o", layout="dense")
    assert got["d"].tolist() == [[2 * n, 2 * n + 1] for n in order]
    assert [row.tolist() for row in got["j"].unbind()] == [list(range(offsets[n], offsets[n + 1])) for n in order]
    assert got.get("o").tolist() == [f"{n}" for n in order]


def test_large_rows_come_back_from_slices_and_from_scattered_rows(storage):
    data = torch.arange(300 * 4096).view(300, 4096)
    storage.put({"x": data}, range(1000, 1300))
    for order in (range(300), range(299, -1, -1), [*range(100, 200), 5, 5, 299, *range(64)]):
        assert torch.equal(storage.column([1000 + n for n in order], "x", "dense"), data[list(order)])


def test_a_batch_is_sorted_by_field_and_as_long_as_what_was_asked_for(storage):
    storage.put({"b": torch.zeros(3), "a": torch.zeros(3)}, range(3))
    got = blocking(storage.manager.get_data(meta([2, 0], ["b", "a"])))
    assert (list(got.keys()), got.batch_size) == (["a", "b"], torch.Size([2]))


def test_a_field_asked_for_twice_is_one_column(storage):
    storage.put({"a": torch.arange(3)}, range(3))
    assert storage.get([0, 2], "a", "a")["a"].tolist() == [0, 2]


def test_no_fields_give_a_batch_of_the_rows_asked_for_and_no_rows_an_empty_one(storage):
    storage.put({"a": torch.zeros(3)}, range(3))
    assert blocking(storage.manager.get_data(meta([0, 2]))).batch_size == torch.Size([2])
    empty = blocking(storage.manager.get_data(meta([], ["a"])))
    assert (empty.batch_size, list(empty.keys())) == (torch.Size([0]), [])
    storage.put(TensorDict({"a": torch.zeros(0, 2)}, batch_size=[0]), [])
    blocking(storage.manager.clear_data(meta([])))


def test_fields_put_by_different_producers_in_different_orders_are_read_together(storage):
    storage.put({"a": torch.arange(200)}, range(200))
    storage.put({"b": torch.arange(200)}, range(199, -1, -1))
    for start in range(0, 200, 10):
        storage.put({"c": [f"{n}" for n in range(start, start + 10)]}, range(start, start + 10))
    got = storage.get([150, 3, 77], "a", "b", "c")
    assert (got["a"].tolist(), got["b"].tolist(), list(got["c"])) == ([150, 3, 77], [49, 196, 122], ["150", "3", "77"])


def test_samples_put_one_by_one_are_read_as_one_batch(storage):
    for n in range(150):
        storage.put({"x": torch.full((1, 1 + n % 4), n), "s": [f"{n}"]}, [n])
    got = storage.get(SHUFFLED, "x", "s")
    assert [row.tolist() for row in got["x"].unbind()] == [[n] * (1 + n % 4) for n in SHUFFLED]
    assert list(got["s"]) == [f"{n}" for n in SHUFFLED]


def test_a_second_put_replaces_the_field_of_these_samples_only(storage):
    storage.put({"a": torch.zeros(100, 2), "b": torch.zeros(100)}, range(100))
    storage.put({"a": torch.ones(50, 3)}, range(0, 100, 2))
    assert [row.tolist() for row in storage.column([0, 1], "a").unbind()] == [[1, 1, 1], [0, 0]]
    assert storage.column(range(100), "b").tolist() == [0] * 100


def test_a_value_that_was_cleared_or_never_put_is_an_error_that_names_it(storage):
    storage.put({"a": torch.zeros(2)}, [5, 70])
    with pytest.raises(StorageKeyNotFoundError, match="field 'a' for sample 6"):
        storage.get([5, 6], "a")
    with pytest.raises(StorageKeyNotFoundError, match="field 'b' for sample 5"):
        storage.get([5], "b")
    blocking(storage.manager.clear_data(meta([70, 9999])))
    with pytest.raises(StorageKeyNotFoundError, match="field 'a' for sample 70"):
        storage.get([5, 70], "a")


def test_what_was_read_may_be_modified_without_changing_what_is_stored(storage):
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    storage.put({"d": torch.zeros(2, 2), "j": nested, "o": [{"n": 0}, {"n": 0}], "s": torch.zeros(2)}, [0, 1])
    first = storage.get([0, 1], "d", "j", "o", "s", layout="dense")
    first["d"] += 1
    first["s"] += 1
    first["j"].values().add_(1)
    for value in first["o"]:
        value["n"] = 1
    again = storage.get([0, 1], "d", "j", "o", "s", layout="dense")
    assert (again["d"].sum(), again["s"].sum(), again["j"].values().sum()) == (0, 0, 0)
    assert list(again["o"]) == [{"n": 0}, {"n": 0}]


def test_the_source_may_be_modified_once_the_put_returned(storage):
    source, texts = torch.zeros(2, 2), [["a"], ["b"]]
    storage.put({"d": source, "o": texts}, [0, 1])
    source += 1
    texts[0].append("later")
    got = storage.get([0, 1], "d", "o", layout="dense")
    assert (got["d"].sum(), list(got["o"])) == (0, [["a"], ["b"]])


def test_what_was_read_stays_valid_when_it_is_overwritten_and_cleared(storage):
    data = torch.arange(100 * 2048).view(100, 2048)
    storage.put({"x": data}, range(100))
    got = storage.column(range(100), "x", "dense")
    storage.put({"x": torch.zeros_like(data)}, range(100))
    blocking(storage.manager.clear_data(meta(range(100))))
    storage.put({"x": torch.ones_like(data)}, range(100, 200))
    assert torch.equal(got, data)


def test_bytes_held_follow_what_is_not_cleared(storage):
    row = 8 * 1024
    storage.put({"x": torch.zeros(64, 1024, dtype=torch.int64), "o": ["x" * row] * 64}, range(64))
    assert storage.held_nbytes() >= 128 * row
    blocking(storage.manager.clear_data(meta(range(62))))
    assert 4 * row <= storage.held_nbytes() <= 5 * row
    assert storage.column([63], "x", "dense").shape == (1, 1024)
    blocking(storage.manager.clear_data(meta(range(64))))
    assert storage.held_nbytes() == 0


def test_another_number_of_rows_than_samples_is_refused_before_anything_is_stored(storage):
    data = TensorDict({"a": torch.zeros(3)}, batch_size=[3])
    with pytest.raises(ValueError, match="put of 3 rows for 2 samples"):
        blocking(storage.manager.put_data(data, meta([0, 1])))
    assert storage.held_nbytes() == 0


def test_an_unstorable_value_is_refused_before_anything_is_stored(storage):
    with pytest.raises(UnsupportedValueError, match=r"field 'o': a value of type builtins\.object"):
        storage.put({"a": torch.zeros(1), "o": NonTensorStack(object())}, [0])
    with pytest.raises(UnsupportedValueError, match="nested TensorDict"):
        storage.put({"a": torch.zeros(1), "o": TensorDict({"b": torch.zeros(1)}, batch_size=[1])}, [0])
    assert storage.held_nbytes() == 0


def test_pickled_values_are_read_only_by_those_who_allow_it(storage):
    trusting = storage.another(allow_pickle=True)
    data = TensorDict({"o": NonTensorStack(1 + 2j, slice(1, 2))}, batch_size=[2])
    blocking(trusting.put_data(data, meta([0, 1])))
    assert blocking(get_rows(trusting, [0, 1], ["o"])).get("o").tolist() == [1 + 2j, slice(1, 2)]
    assert storage.column([0], "o").tolist() == [1 + 2j]
    with pytest.raises(UnsupportedValueError, match="holds a pickled value"):
        storage.get([1], "o")


def test_a_parser_changes_what_is_stored_and_the_put_returns_it(storage):
    stored = storage.put(
        {"url": ["a", "bb"]}, [0, 1], lambda columns: {"url": [torch.ones(len(u)) for u in columns["url"]]}
    )
    assert [row.tolist() for row in stored["url"].unbind()] == [[1], [1, 1]]
    assert [row.tolist() for row in storage.column([1, 0], "url").unbind()] == [[1, 1], [1]]


def test_a_failing_parser_stores_nothing(storage):
    with pytest.raises(RuntimeError, match="data_parser changed the count"):
        storage.put({"a": ["x"]}, [0], lambda columns: {"a": []})
    assert storage.held_nbytes() == 0


def test_every_verb_works_on_an_event_loop(storage):
    async def story() -> list[int]:
        data = TensorDict({"a": torch.arange(200)}, batch_size=[200])
        await storage.manager.put_data(data, meta(range(200)), lambda columns: {"a": columns["a"] * 2})
        halves = [get_rows(storage.manager, range(n, 200, 2), ["a"]) for n in (0, 1)]
        even, odd = await asyncio.gather(*halves)
        await storage.manager.clear_rows(range(200))
        return [int(even["a"].sum()), int(odd["a"].sum())]

    assert asyncio.run(story()) == [19800, 20000]
    assert storage.held_nbytes() == 0


def test_a_put_without_room_waits_for_a_clear():
    storage = simple(capacity_bytes=10_000)
    row = TensorDict({"a": torch.zeros(1, 1000, dtype=torch.int64)}, batch_size=[1])

    async def story() -> None:
        await storage.manager.put_data(row, meta([0]))
        waiting = asyncio.ensure_future(storage.manager.put_data(row, meta([1])))
        await asyncio.sleep(0)
        assert not waiting.done()
        await storage.another().clear_rows([0])
        await waiting

    asyncio.run(story())
    assert storage.held_nbytes() == 8000


def test_a_put_that_found_no_room_in_time_fails():
    storage = simple(capacity_bytes=10_000)
    row = TensorDict({"a": torch.zeros(1, 1000, dtype=torch.int64)}, batch_size=[1])
    manager = storage.another(put_timeout_s=0.05)
    blocking(manager.put_data(row, meta([0])))
    with pytest.raises(StorageFullError, match=r"Storage capacity exceeded: a put of .* for 7\.812 KiB: "):
        blocking(manager.put_data(row, meta([1])))
    assert storage.column([0], "a", "dense").shape == (1, 1000)
