# SPDX-License-Identifier: Apache-2.0
"""Torch's own samples of operations on jagged tensors give the same, forwards and backwards, with tensors made the
short way."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.unit.storage.test_unpack_fast import OLD
from transfer_queue.storage import unpack_fast
from transfer_queue.storage.pack import is_simple_jagged

SAMPLES = 1
CRASHES = {"split_with_sizes"}  # torch 2.13 itself does, with its own tensors, in the backward pass
Outcome = tuple[list[Any], list[Any]] | str


def short_twin(value: Any) -> Any:
    """The same jagged tensor made the short way, over the same values and offsets."""
    if not (isinstance(value, torch.Tensor) and value.is_nested):
        return value
    nested: Any = value
    offsets = nested._offsets.numpy()
    sizes = np.diff(offsets)
    rows = unpack_fast._parts_of_jagged().rows_of(nested._offsets)
    known = unpack_fast._Offsets(offsets, nested._offsets, rows, int(sizes.min()), int(sizes.max()))
    made: Any = unpack_fast._short_jagged(nested._values.detach(), known)
    for name in set(made._metadata_cache) - set(nested._metadata_cache):
        del made._metadata_cache[name]
    return made.requires_grad_(value.requires_grad)


def is_short(value: Any) -> bool:
    """Does the short way make tensors like this one?"""
    return not (isinstance(value, torch.Tensor) and value.is_nested) or is_simple_jagged(value)


def plain(tensor: torch.Tensor | None) -> Any:
    """To compare with ``==``: what it is, and the rows of a nested one."""
    if tensor is None:
        return None
    rows = tensor.unbind() if tensor.is_nested else [tensor]
    return tensor.is_nested, [(row.dtype, row.shape, row.detach().nan_to_num().tolist()) for row in rows]


def outcome(operation: Callable[..., Any], arguments: tuple[Any, Any, Any]) -> Outcome:
    """What comes out and its gradients, or what it raises."""
    given, more, named = arguments
    torch.manual_seed(0)
    try:
        out = [leaf for leaf in tree_leaves(operation(given, *more, **named)) if isinstance(leaf, torch.Tensor)]
        leaves = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        sums = [(part.values() if part.is_nested else part).sum() for part in out if part.requires_grad]
        grads = torch.autograd.grad(sum(sums), leaves, allow_unused=True) if leaves and sums else []
    except Exception as error:
        return type(error).__name__
    return [plain(part) for part in out], [plain(grad) for grad in grads]


def samples(every: int) -> Iterator[tuple[Any, Any]]:
    """Of each of torch's operations, or of one in so many."""
    from torch.testing._internal.opinfo.definitions.nested import njt_op_db

    for operation in sorted(njt_op_db, key=lambda operation: operation.name)[::every]:
        if operation.name in CRASHES:
            continue
        try:
            found = operation.sample_inputs("cpu", torch.float32, requires_grad=operation.supports_autograd)
            usable = (sample for sample in found if all(map(is_short, tree_leaves((sample.input, sample.args)))))
            yield from ((operation, sample) for sample in itertools.islice(usable, SAMPLES))
        except Exception:  # torch has no samples of it for jagged tensors
            continue


@pytest.mark.timeout(600)  # all of them are half a minute of computing, on a machine that may have much else to do
@pytest.mark.skipif(OLD, reason="an older torch")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_operations_give_the_same(every):
    assert unpack_fast._make_jagged() is unpack_fast._short_jagged
    compared, different = Counter[bool](), []
    for operation, sample in samples(every):
        arguments = (sample.input, sample.args, sample.kwargs)
        want, have = outcome(operation.op, arguments), outcome(operation.op, tree_map(short_twin, arguments))
        compared[isinstance(want, str)] += 1
        if want != have:
            different.append((operation.name, sample.name))
    assert not different
    assert compared[False] > 150 // every, "most have an outcome to compare"
