# SPDX-License-Identifier: Apache-2.0
"""Plain objects: every value comes back as what it was, and nothing is unpickled unasked."""

from __future__ import annotations

import datetime
import fractions
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.errors import ProtocolError, UnsupportedValueError
from transfer_queue.storage.pack import encode_rows
from transfer_queue.storage.unpack import decode_rows
from transfer_queue.storage.wire import OBJECTS, WireColumn


def back(value, allow_pickle=False):
    (result,) = decode_rows(encode_rows([value], "f", allow_pickle), "f", allow_pickle)
    return result


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, np.ndarray):
        equal = same(a.tolist(), b.tolist()) if a.dtype == object else a.tobytes() == b.tobytes()
        return a.dtype == b.dtype and a.shape == b.shape and equal
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and repr(a) == repr(b)
    return a == b or a != a


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.binary(), st.text(),
    st.text(st.characters(), max_size=3), st.binary().map(bytearray),
)  # fmt: skip
hashable = st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.text()), st.frozensets(st.integers()))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.text(), inner),
        st.dictionaries(hashable, inner), st.sets(hashable), st.frozensets(hashable),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=100, deadline=None, print_blob=True)
@given(value=values)
def test_builtin_values_come_back_with_their_types(value):
    assert same(back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        1 << 64, -(1 << 63) - 1, (1 << 64) - 1, -(1 << 63), 10**100, [10**30, {"a": (10**30,)}], "\udc80",
        {"\udc80": 1}, math.nan, -0.0, [1, (2, [3, ("x",)])], {1: 2, "1": 3, (4, "b"): {5}}, {"k": {True: None}},
        np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.zeros((0, 3), np.float16),
        np.array(5), np.array(["ab", "c"]), np.array([b"x"]), np.array(["2020-01-01"], "M8[D]"), np.arange(4)[::2],
        np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", ">f8")]), np.array([[None, "a"], [{"b": 1}, (2,)]], object),
        np.array([True]), np.arange(3, dtype=">i2"), np.array([""]), np.array([1 + 2j]),
        np.float32(1.5), np.float64(2.5), np.int8(-3), np.bool_(True), np.str_("hé"), np.str_(""), np.bytes_(b"q"),
        np.datetime64("2020-01-01"), np.complex64(1j),
        torch.arange(6).reshape(2, 3), torch.tensor(3.5), torch.zeros(0, 4), torch.tensor([True]), torch.arange(6)[::2],
        torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64).conj(),
        {"image": [torch.ones(2), "x"]}, torch.ones(3).to(torch.float8_e4m3fn), torch.zeros(3, dtype=torch.uint16),
    ],
    ids=repr,
)  # fmt: skip
def test_arrays_tensors_and_odd_numbers_come_back_with_their_types(value):
    assert same(back(value), value)


def test_what_comes_back_may_be_modified():
    array, tensor = back([np.zeros(2), torch.zeros(2)])
    array += 1
    tensor += 1
    assert (array.tolist(), tensor.tolist()) == ([1, 1], [1, 1])


def test_a_parameter_comes_back_as_a_plain_tensor_without_gradient():
    value = back([torch.nn.Parameter(torch.ones(2))])[0]
    assert (type(value), value.requires_grad, value.tolist()) == (torch.Tensor, False, [1, 1])


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (datetime.datetime(2020, 1, 1), "datetime.datetime"),
        (fractions.Fraction(1, 3), "fractions.Fraction"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        (int, "builtins.type"),
        (torch.eye(2).to_sparse(), "torch.Tensor"),
    ],
)
def test_what_needs_pickle_is_refused_by_type_field_and_switch(value, kind):
    for nested in (value, [value], {"k": (value,)}):
        with pytest.raises(UnsupportedValueError) as caught:
            encode_rows(["fine", nested], "answers")
        assert f"field 'answers': a value of type {kind} can't be stored without pickle" in str(caught.value)
        assert "backend.SimpleStorage.allow_pickle: true" in str(caught.value)


def test_allowed_pickle_carries_only_what_needs_it():
    value = {"when": datetime.date(2020, 1, 1), "n": (1, OrderedDict(a=1))}
    assert same(back(value, allow_pickle=True), value)


def test_what_can_not_be_pickled_either_says_so():
    with pytest.raises(UnsupportedValueError, match=r"field 'f': a value of type builtins\.function can't be pickled"):
        encode_rows([lambda: 0], "f", allow_pickle=True)


class _Bomb:
    def __reduce__(self):
        return pytest.fail, ("unpickled although the reader's configuration forbids it",)


def test_a_reader_that_does_not_allow_pickle_never_runs_it():
    wire = encode_rows([[_Bomb()]], "f", allow_pickle=True)
    with pytest.raises(UnsupportedValueError, match="field 'f' holds a pickled value"):
        decode_rows(wire, "f")


def test_a_value_that_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(UnsupportedValueError, match="nested too deep to be stored, or contains itself"):
        encode_rows([loop], "f")


def test_bytes_that_are_no_value_are_a_protocol_error():
    broken = WireColumn(OBJECTS, 1, np.frombuffer(b"\xc1", np.uint8), np.array([[1]]))
    with pytest.raises(ProtocolError, match="field 'f' can't be decoded"):
        decode_rows(broken, "f")
