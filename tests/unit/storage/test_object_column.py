# SPDX-License-Identifier: Apache-2.0
"""A column whose objects are wrapped only when needed is what TensorDict makes of the same objects."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from tests.unit.storage.test_unpack_fast import OLD
from transfer_queue.storage import unpack_fast as module
from transfer_queue.storage.unpack_fast import object_column

VALUES = ["a", 1, None, {"k": [1]}, [1, 2]]

READS = {
    "row": lambda column: column[3],
    "slice": lambda column: column[1:3],
    "rows by tensor": lambda column: column[torch.tensor([2, 0])],
    "rows by mask": lambda column: column[torch.tensor([True, False, False, True, False])],
    "iteration": list,
    "unbind": lambda column: column.unbind(0),
    "split": lambda column: column.split(2),
    "stack": lambda column: torch.stack([column, column]),
    "cat": lambda column: torch.cat([column, column]),
    "clone": lambda column: column.clone(),
    "to": lambda column: column.to("cpu"),
    "contiguous": lambda column: column.contiguous(),
    "reshape": lambda column: column.reshape(1, 5),
    "unsqueeze": lambda column: column.unsqueeze(0),
    "expand": lambda column: column.expand(2, 5),
    "to_dict": lambda column: column.to_dict(),
    "lock": lambda column: (column.lock_().is_locked, column.unlock_().is_locked),
    "is_locked": lambda column: column.is_locked,
    "length": len,
    "shape": lambda column: (column.shape, column.batch_size, column.ndim, column.device, column.numel()),
    "compared": lambda column: column == column,
    "shallow copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda column: pickle.loads(pickle.dumps(column)),
    "one value for all": lambda column: column.data,
    "unknown attribute": lambda column: column.no_such_thing,
    "text": str,
}


def read(how, column):
    try:
        return repr(READS[how](column))
    except (AttributeError, RuntimeError, TypeError) as error:
        return type(error), str(error).replace("_UnmadeStack", "NonTensorStack")


@pytest.mark.skipif(OLD, reason="an older tensordict")
def test_this_tensordict_lets_its_stacks_be_made_when_needed():
    assert module._may_wait()
    assert type(object_column(VALUES)) is module._UnmadeStack


@pytest.mark.parametrize("how", READS)
def test_every_use_sees_what_a_stack_of_the_same_objects_shows(how):
    assert read(how, object_column(VALUES)) == read(how, NonTensorStack(*VALUES))


@pytest.mark.parametrize(
    "values",
    [["a"], [b"x", b""], [1.5, True], [(1, "t"), ()], [{1}, {2}], [[], ["x"]], ["same", "same"], [np.int64(3), 4]],
    ids=str,
)
def test_lists_come_back_with_the_very_objects(values):
    column, known = object_column(values), NonTensorStack(*values)
    for got, want in ((column.tolist(), known.tolist()), (column[:].tolist(), known[:].tolist())):
        assert got == want == values
        assert all(one is other for one, other in zip(got, values, strict=True))


def test_arrays_and_tensors_come_back_as_they_are():
    values = [np.arange(3), torch.ones(2)]
    array, tensor = object_column(values).tolist()
    assert array is values[0]
    assert tensor is values[1]


@pytest.mark.skipif(OLD, reason="an older tensordict")
def test_nothing_is_made_for_a_reader_of_the_list_or_for_a_pickle():
    column = object_column(VALUES)
    data = TensorDict._new_unsafe(source={"x": column}, batch_size=torch.Size([5]))
    assert data["x"] == column.tolist() == pickle.loads(pickle.dumps(column)).tolist() == VALUES
    assert "tensordicts" not in vars(column)


def test_a_list_that_was_given_away_is_the_readers_own():
    column = object_column(VALUES)
    column.tolist().clear()
    assert column.tolist() == VALUES


def test_the_objects_given_may_change_their_list_afterwards():
    values = ["a", "b"]
    column = object_column(values)
    values.append("c")
    assert column.tolist() == ["a", "b"]


def test_what_is_assigned_through_the_batch_lands_in_the_column():
    data = TensorDict({"x": object_column(["a", "b"])}, [2])
    data["x"][0] = "z"
    assert data["x"] == data.get("x").tolist() == ["z", "b"]
    data[1] = TensorDict({"x": "y"}, [])
    assert data["x"] == ["z", "y"]


def test_threads_that_ask_at_once_get_the_same_members():
    for _ in range(20):
        column, start, seen = object_column(VALUES * 20), threading.Barrier(4), []

        def ask(column=column, start=start, seen=seen):
            start.wait()
            seen.append(column.tensordicts)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(members) for members in seen}) == 1
        assert type(column) is NonTensorStack


def test_no_values_at_all_are_an_empty_stack():
    assert object_column([]).tolist() == []
    assert type(object_column([])) is NonTensorStack


def test_a_tensordict_that_works_otherwise_gets_plain_stacks(monkeypatch):
    monkeypatch.setattr(module, "_may_wait", lambda: False)
    column = object_column(VALUES)
    assert type(column) is NonTensorStack
    assert column.tolist() == VALUES
