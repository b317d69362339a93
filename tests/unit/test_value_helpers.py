# SPDX-License-Identifier: Apache-2.0
"""same_value and copy_tags: comparing and copying what users attach, whatever it is."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from transfer_queue.metadata.annotations import copy_tags, same_value

NAN = float("nan")
EQUAL = [
    1,
    "a",
    None,
    NAN,
    [1, {"k": (2, NAN)}],
    np.array([1.0, NAN]),
    np.array(["a", None], dtype=object),
    np.array(["a", "b"]),
    np.float32(2.0),
    torch.tensor([1.0, NAN]),
    torch.zeros(0, 3),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    {"deep": [{"t": torch.ones(2)}]},
]


@pytest.mark.parametrize("value", EQUAL, ids=lambda value: type(value).__name__)
def test_a_deep_copy_is_the_same_value(value):
    assert same_value(value, copy.deepcopy(value))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 2),
        (1, "1"),
        (NAN, 1.0),
        ([1, 2], [1]),
        ({"a": 1}, {"b": 1}),
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.zeros(2, dtype=np.int64)),
        (np.zeros(2), [0.0, 0.0]),
        (np.zeros(1), 0.0),
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(1), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2), np.zeros(2, dtype=np.float32)),
        (torch.zeros(2), 0.0),
    ],
    ids=str,
)
def test_different_values_are_not_the_same_from_either_side(a, b):
    assert not same_value(a, b)
    assert not same_value(b, a)


def test_a_tuple_is_the_list_it_becomes_on_the_wire():
    assert same_value((1, (2,)), [1, [2]])


def test_an_object_whose_comparison_has_no_truth_value_counts_as_different():
    class Vague:
        def __eq__(self, other):
            return np.array([True, False])

        __hash__ = None

    assert not same_value(Vague(), Vague())


def test_copied_tags_share_nothing():
    tags = {"plain": 1, "list": [1]}
    copied = copy_tags(tags)
    copied["list"].append(2)
    assert tags == {"plain": 1, "list": [1]}
