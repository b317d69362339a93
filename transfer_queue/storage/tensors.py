# SPDX-License-Identifier: Apache-2.0
"""Converts tensors of every dtype to plain bytes and back, without a copy if the memory allows it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from transfer_queue.errors import ProtocolError
from transfer_queue.storage.wire_columns import ByteArray, WireColumn, dense_layout, ragged_layout


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"this torch ({torch.__version__}) has no dtype {name!r}: the writer's is newer")
    return dtype


def is_plain(tensor: torch.Tensor) -> bool:
    """Return False for tensors that are not one block of elements: nested, sparse, quantized."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def as_bytes(tensor: torch.Tensor) -> ByteArray:
    """Return the elements in row-major order, sharing memory with a contiguous CPU tensor."""
    tensor = resolved(tensor)
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = tensor.cpu().contiguous()
    if tensor.dtype in _KNOWN_TO_NUMPY:
        return tensor.numpy().reshape(-1).view(np.uint8)
    return tensor.reshape(-1).view(torch.uint8).numpy()


_KNOWN_TO_NUMPY = frozenset(
    (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
)  # fmt: skip


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Detach the tensor, and apply lazy conjugation and negation."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def from_bytes(data: ByteArray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Make a tensor over this memory, which must be writable."""
    if data.nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    return flat if len(shape) == 1 else flat.view(tuple(shape))


def are_alike(values: Sequence[Any]) -> bool:
    """Return whether these are tensors of one dtype and rank (at least one), so that they can form a column."""
    if not values or not all(isinstance(value, torch.Tensor) for value in values):
        return False
    return len({(row.dtype, row.ndim) for row in values}) == 1 and all(map(is_plain, values))


def join_rows(rows: Sequence[torch.Tensor]) -> WireColumn:
    """Join one tensor per row, all alike: dense if all shapes agree, else ragged."""
    first = rows[0]
    data = np.concatenate([as_bytes(row) for row in rows])
    if len({row.shape for row in rows}) == 1:
        return WireColumn(dense_layout(dtype_name(first.dtype), first.element_size(), first.shape), len(rows), data)
    shapes = np.array([row.shape for row in rows], np.int64)
    return WireColumn(ragged_layout(dtype_name(first.dtype), first.element_size(), first.ndim), len(rows), data, shapes)


def rows_of(column: WireColumn) -> list[torch.Tensor]:
    """Return one tensor per row of a dense or ragged wire column, each in memory of its own."""
    ragged, dtype = column.as_ragged(), dtype_of(column.layout.dtype)
    if not column.layout.shape:
        numbers = from_bytes(column.data.copy(), dtype, (-1,))
        return list((numbers if column.selection is None else numbers[torch.from_numpy(column.selection)]).unbind())
    assert ragged.row_meta is not None
    starts, shapes = ragged.starts, ragged.row_meta
    stops = starts + shapes.prod(axis=1) * column.layout.itemsize
    return [
        from_bytes(ragged.data[start:stop].copy(), dtype, shape)
        for start, stop, shape in zip(starts.tolist(), stops.tolist(), shapes.tolist(), strict=True)
    ]
