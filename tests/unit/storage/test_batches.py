# SPDX-License-Identifier: Apache-2.0
"""What no user sees of columns: values that are not copied on their way, and an answer that lacks rows."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from transfer_queue.errors import ProtocolError
from transfer_queue.storage.pack import pack
from transfer_queue.storage.unpack import relaid, unpack


def wire_of(column, count: int):
    return pack(TensorDict({"x": column}, batch_size=[count]))["x"]


def test_a_contiguous_tensor_is_not_copied_into_its_piece():
    tensor = torch.arange(6).view(3, 2)
    assert wire_of(tensor, 3).data.ctypes.data == tensor.data_ptr()
    nested = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2, 3])], layout=torch.jagged)
    assert wire_of(nested, 2).data.ctypes.data == nested.values().data_ptr()


def test_rows_missing_from_an_answer_are_an_error_not_garbage():
    with pytest.raises(ProtocolError, match="answered 2 rows of field 'x', 3 were asked for"):
        unpack({"x": [(slice(0, 2), wire_of(torch.zeros(2), 2))]}, 3)


def test_relaid_changes_the_layout_of_tensors_and_leaves_the_rest():
    data = TensorDict({"z": torch.arange(4).view(2, 2), "o": ["a", "b"], "n": torch.zeros(2)}, batch_size=[2])
    nested = relaid(data, "jagged")
    assert list(nested.keys()) == ["n", "o", "z"]
    assert [row.tolist() for row in nested["z"].unbind()] == [[0, 1], [2, 3]]
    assert (nested["n"].tolist(), list(nested["o"])) == ([0, 0], ["a", "b"])
    assert relaid(nested, "dense")["z"].tolist() == [[0, 1], [2, 3]]
