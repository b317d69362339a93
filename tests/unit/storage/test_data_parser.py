# SPDX-License-Identifier: Apache-2.0
"""data_parser: what it is given, what it may return, what a wrong one does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from transfer_queue.storage.unpack import parsed


@pytest.fixture
def data() -> TensorDict:
    nested = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2, 3])], layout=torch.jagged)
    return TensorDict({"t": torch.arange(4).view(2, 2), "n": nested, "o": ["a", "b"]}, batch_size=[2])


def test_dense_columns_go_in_as_one_tensor_and_others_as_lists(data):
    seen = {}
    parsed(data, lambda columns: seen.update(columns) or columns)
    assert {name: type(column) for name, column in seen.items()} == {"t": torch.Tensor, "n": list, "o": list}
    assert ([row.tolist() for row in seen["n"]], seen["o"]) == ([[1], [2, 3]], ["a", "b"])


def test_what_it_returns_is_what_is_stored(data):
    def fetch(columns):
        return {"t": columns["t"].float().numpy(), "n": [row * 10 for row in columns["n"]], "o": [1.5, {"u": 1}]}

    made = parsed(data, fetch)
    assert (made.batch_size, made["t"].dtype, made["t"].tolist()) == (torch.Size([2]), torch.float32, [[0, 1], [2, 3]])
    assert [row.tolist() for row in made["n"].unbind()] == [[10], [20, 30]]
    assert isinstance(made.get("o"), NonTensorStack)
    assert made.get("o").tolist() == [1.5, {"u": 1}]
    assert data["o"] == ["a", "b"]


def test_text_that_becomes_tensors_becomes_a_tensor_column(data):
    made = parsed(data, lambda columns: {**columns, "o": [torch.zeros(1), torch.zeros(2)]})
    assert made["o"].layout == torch.jagged


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
def test_a_wrong_parser_is_a_runtime_error_that_names_the_cause(data, parser, cause):
    with pytest.raises(RuntimeError, match=cause):
        parsed(data, parser)
