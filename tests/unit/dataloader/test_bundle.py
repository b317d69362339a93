# SPDX-License-Identifier: Apache-2.0
"""A bundle comes out of a worker's pickle as it went in; small tensors travel in it, large ones in shared memory."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from transfer_queue import BatchMeta
from transfer_queue.dataloader.bundle import Bundle
from transfer_queue.storage.unpack_fast import Jagged

LARGE = 20_000


def sent(*items):
    bundle = pickle.loads(ForkingPickler.dumps(Bundle(3, list(items), range(2, 2 + len(items))).packed()))
    assert (bundle.batch_index, bundle.numbers) == (3, range(2, 2 + len(items)))
    return bundle.items


def rows(tensor):
    return [row.tolist() for row in tensor.unbind()]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3),
        torch.arange(6).view(2, 3).t(),
        torch.arange(12)[::2],
        torch.tensor(5),
        torch.empty(0),
        torch.zeros(3, 0),
        torch.tensor([True, False]),
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j]).conj().imag,
        torch.rand(2, LARGE),
        torch.rand(LARGE, dtype=torch.complex64).conj(),
        torch.ones(2, requires_grad=True),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_tensors_of_any_kind_arrive_as_they_are(tensor):
    (came,) = sent(tensor)
    assert (came.dtype, came.shape, came.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert came.requires_grad == tensor.requires_grad
    assert came.to_dense().to(torch.complex64).tolist() == tensor.to_dense().to(torch.complex64).tolist()


@pytest.mark.parametrize("inner", [(), (2,), (LARGE,)])
def test_jagged_tensors_arrive_with_their_rows_and_their_longest_length(inner):
    values = torch.rand(5, *inner)
    there = Jagged()(values, np.array([0, 1, 3, 3, 5]))
    (came,) = sent(there)
    assert rows(came) == rows(there)
    assert came.to_padded_tensor(0).shape == (4, 2, *inner)


def test_jagged_tensors_that_fit_together_still_do_when_they_arrive():
    make, edges = Jagged(), np.array([0, 1, 3])
    ids, mask, others = sent(
        make(torch.ones(3), edges), make(torch.ones(3), edges), make(torch.ones(3), edges[::-1] * -1 + 3)
    )
    assert rows(ids + mask) == [[2.0], [2.0, 2.0]]
    with pytest.raises(RuntimeError, match="shape"):
        ids + others


@pytest.mark.parametrize(
    "nested",
    [
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, requires_grad=True),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided),
        torch.nested.narrow(torch.ones(2, 4), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged),
    ],
    ids=["with a graph", "strided", "with holes"],
)
def test_other_nested_tensors_arrive_as_torch_sends_them(nested):
    (came,) = sent(nested)
    assert came.layout == nested.layout
    assert rows(came) == rows(nested)


def test_a_batch_arrives_with_its_metadata():
    data = TensorDict({"x": torch.arange(2), "t": NonTensorStack("a", "b"), "l": torch.rand(2, LARGE)}, [2])
    meta = BatchMeta([4, 7], ["train"] * 2, custom_meta=[{"n": 1}, {}])
    ((came, came_meta),) = sent((data, meta))
    assert came["t"] == ["a", "b"]
    assert bool((came["x"] == data["x"]).all())
    assert bool((came["l"] == data["l"]).all())
    assert (came_meta.global_indexes, came_meta.custom_meta) == ([4, 7], [{"n": 1}, {}])


def test_small_tensors_arrive_writable_in_memory_of_their_own():
    small, large = sent(torch.zeros(2), torch.zeros(LARGE))
    small += 1
    large += 1
    assert small.tolist() == [1, 1]
    assert large.is_shared()
    assert not small.is_shared()
