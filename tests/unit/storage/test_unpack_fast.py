# SPDX-License-Identifier: Apache-2.0
"""Jagged tensors and batches made the short way are what the public way makes of the same parts."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from transfer_queue.storage import unpack_fast
from transfer_queue.storage.pack import jagged_values
from transfer_queue.storage.unpack_fast import Jagged, batch

OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""The short ways are those of newer versions; older ones take the public ways."""

OFFSETS = [[0, 3], [0, 1, 3], [0, 0, 2, 2, 5], [0, 0]]


def parts(offsets, *inner, dtype=torch.float32):
    count = offsets[-1] * int(np.prod(inner, dtype=int))
    return torch.arange(count).to(dtype).view(offsets[-1], *inner), np.array(offsets, np.int64)


def jagged(values, offsets):
    return Jagged()(values, offsets)


def rows(tensor):
    return [row.tolist() for row in tensor.unbind()]


def both(offsets, *inner, dtype=torch.float32):
    values, edges = parts(offsets, *inner, dtype=dtype)
    lengths = np.diff(edges)
    known = torch.nested.nested_tensor_from_jagged(
        values.clone(), torch.from_numpy(edges), min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )
    return jagged(values, edges), known


@pytest.mark.skipif(OLD, reason="an older torch")
def test_this_torch_and_this_tensordict_allow_the_short_ways():
    assert unpack_fast._make_jagged() is unpack_fast._short_jagged
    assert unpack_fast._make_batch() is unpack_fast._short_batch


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")], ids=["inference", "meta"])
def test_what_is_read_first_in_another_mode_is_as_good_for_training(mode):
    for kept in (unpack_fast._make_jagged, unpack_fast._length, unpack_fast._kept_even):
        kept.cache_clear()
    values, edges = parts([0, 1, 3])
    with mode():
        jagged(values, edges)
        Jagged().even(values, 1, 3)
    assert OLD or unpack_fast._make_jagged() is unpack_fast._short_jagged
    lengths = jagged(*parts([0, 1, 3]))._metadata_cache["max_seqlen"]
    assert (lengths.is_inference(), lengths.device.type) == (False, "cpu")
    offsets = Jagged().even(values, 1, 3).offsets()
    assert (offsets.is_inference(), offsets.device.type) == (False, "cpu")


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("inner", [(), (2,), (2, 3)])
def test_a_jagged_tensor_has_the_rows_shapes_and_lengths_that_torch_gives_it(offsets, inner):
    made, known = both(offsets, *inner)
    assert rows(made) == rows(known)
    assert (made.dtype, made.layout, made.dim(), made.size(0)) == (
        known.dtype,
        known.layout,
        known.dim(),
        known.size(0),
    )
    assert made.shape[2:] == known.shape[2:]
    assert made._max_seqlen == known._max_seqlen
    assert made._min_seqlen == known._min_seqlen
    assert made.offsets().tolist() == known.offsets().tolist()
    assert torch.equal(made.values(), known.values())
    assert torch.equal(jagged_values(made), jagged_values(known))


def test_gradients_flow_through_what_is_computed_from_it():
    made, known = both([0, 1, 3], 2)
    grads = []
    for tensor in (made, known):
        weight = torch.ones(2, requires_grad=True)
        (tensor * weight).values().sum().backward()
        grads.append(weight.grad.tolist())
    assert grads[0] == grads[1] == [6.0, 9.0]


def test_it_may_be_a_leaf_that_wants_a_gradient():
    made, _ = both([0, 1, 3])
    made.requires_grad_(True)
    (made * 2).values().sum().backward()
    assert rows(made.grad) == [[2.0], [2.0, 2.0]]


@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        lambda tensor: pickle.loads(pickle.dumps(tensor)),
        lambda tensor: tensor.clone(),
        lambda tensor: tensor.to(torch.float64).to(torch.float32),
        lambda tensor: tensor.contiguous(),
    ],
)
def test_it_survives_copies_pickles_and_casts(again):
    made, known = both([0, 1, 3], 2)
    assert rows(again(made)) == rows(known)


def test_it_can_be_saved_and_loaded():
    made, known = both([0, 1, 3])
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    assert rows(torch.load(file, weights_only=False)) == rows(known)


def test_writing_into_it_writes_into_its_values():
    values, edges = parts([0, 1, 3])
    made = jagged(values, edges)
    made.mul_(2)
    assert values.tolist() == [0.0, 2.0, 4.0]


def test_values_of_a_tensor_with_a_graph_are_detached():
    weight = torch.ones(3, requires_grad=True)
    tensor = torch.nested.nested_tensor_from_jagged(weight * 2, torch.tensor([0, 1, 3]))
    values = jagged_values(tensor)
    assert not values.requires_grad
    assert values.tolist() == [2.0, 2.0, 2.0]


def test_a_batch_is_a_tensordict_like_any_other():
    columns = {"a": torch.arange(2), "n": both([0, 1, 3])[0], "s": NonTensorStack("x", "y")}
    made = batch(columns, 2)
    known = TensorDict(dict(columns), batch_size=[2])
    assert type(made) is TensorDict
    assert made.batch_size == known.batch_size
    assert (made.device, made.is_locked, made.names) == (known.device, known.is_locked, known.names)
    assert made["a"].tolist() == [0, 1]
    assert made["s"] == known["s"] == ["x", "y"]
    assert made[1]["a"].item() == 1
    assert list(made.to("cpu").keys()) == ["a", "n", "s"]
    made["b"] = torch.zeros(2)
    assert list(made.keys()) == ["a", "n", "s", "b"]
    assert made.select("a", "b").lock_().is_locked
    with pytest.raises(RuntimeError):
        made["c"] = torch.zeros(3)


def test_a_batch_does_not_change_with_the_columns_it_was_made_of():
    columns = {"a": torch.arange(2)}
    made = batch(columns, 2)
    columns["b"] = torch.zeros(2)
    assert list(made.keys()) == ["a"]


@pytest.mark.skipif(OLD, reason="an older torch")
def test_what_torch_keeps_beside_a_jagged_tensor_is_there():
    made, known = both([0, 1, 3], 2)
    assert vars(made).keys() == vars(known).keys()
    assert made._dynamo_propagated_dynamic_indices == known._dynamo_propagated_dynamic_indices
    assert vars(made._values) == vars(known._values)
    assert made._strides[1:] == known._strides[1:]
    assert str(made._strides[0].node.coeff) == str(known._strides[0].node.coeff) == "2"


def test_tensors_of_one_batch_whose_rows_have_the_same_lengths_can_be_computed_together():
    make = Jagged()
    some, other = (make(torch.arange(3.0) + 1, np.array([0, 1, 3])) for _ in range(2))
    assert rows(some + other) == [[2.0], [4.0, 6.0]]
    even = make.even(torch.arange(4.0), 2, 2)
    assert rows(even * make(torch.ones(4), np.array([0, 2, 4]))) == [[0.0, 1.0], [2.0, 3.0]]
    assert rows(even + make.even(torch.ones(4), 2, 2)) == [[1.0, 2.0], [3.0, 4.0]]


def test_rows_of_one_length_that_begin_elsewhere_are_these_rows():
    make = Jagged()
    make.even(torch.ones(4), 2, 2)
    assert make(torch.arange(5.0), np.array([1, 3, 5])).offsets().tolist() == [1, 3, 5]


def test_a_great_many_rows_of_one_length_can_be_computed_together_too():
    make, count = Jagged(), 2 * unpack_fast._MOST_EVEN
    even, other = make.even(torch.ones(count), count, 1), make(torch.ones(count), np.arange(count + 1))
    assert (even + other).values().sum() == 2 * count


def test_batches_with_rows_of_one_length_can_be_computed_together():
    first, second = (Jagged().even(torch.arange(4.0), 2, 2) for _ in range(2))
    assert rows(first * second) == [[0.0, 1.0], [4.0, 9.0]]


def test_tensors_of_one_batch_whose_rows_differ_in_length_are_not_taken_for_alike():
    make = Jagged()
    made = [
        make(torch.ones(3), np.array([0, 1, 3])),
        make(torch.ones(3), np.array([0, 2, 3])),
        make.even(torch.ones(3), 3, 1),
    ]
    for some, other in itertools.combinations(made, 2):
        with pytest.raises(RuntimeError, match="shape"):
            some + other


def test_a_compiled_step_takes_batches_of_any_lengths():
    step = torch.compile(lambda ids, mask: (ids * 2 + 1, mask.sum(1)), backend="aot_eager", fullgraph=True)
    for offsets, others in (([0, 3, 5], [0, 3, 5]), ([0, 1, 5], [0, 2, 4]), ([0, 4, 8, 9], [0, 4, 6, 9])):
        ids, mask = jagged(*parts(offsets)), jagged(*parts(others))  # the longest rows of both are sometimes the same
        doubled, sums = step(ids, mask)
        assert rows(doubled) == [[2 * value + 1 for value in row] for row in rows(ids)]
        assert sums.tolist() == [sum(row) for row in rows(mask)]


def test_a_compiled_step_computes_with_columns_that_fit_together():
    step = torch.compile(lambda ids, mask: ids * mask * 2 + 1, backend="aot_eager", fullgraph=True)
    for offsets in ([0, 3, 6], [0, 3, 6], [0, 5, 10, 15], [0, 1, 4], [0, 3, 4, 9]):
        make, count = Jagged(), offsets[-1]
        ids, mask = (make(values, np.array(offsets)) for values in (torch.arange(float(count)), torch.ones(count)))
        assert step(ids, mask).values().tolist() == [2 * value + 1 for value in range(count)]
