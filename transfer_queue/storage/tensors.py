# SPDX-License-Identifier: Apache-2.0
"""Tensors as plain bytes and back, for every dtype: no copy where the memory allows it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from transfer_queue.errors import ProtocolError
from transfer_queue.storage.pieces import ByteArray, Piece, dense_layout, ragged_layout


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"this torch ({torch.__version__}) has no dtype {name!r}: the writer's is newer")
    return dtype


def is_plain(tensor: torch.Tensor) -> bool:
    """False for what isn't a block of elements: nested, sparse, quantized."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def as_bytes(tensor: torch.Tensor) -> ByteArray:
    """The elements in row-major order; shares memory with a contiguous CPU tensor."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy()


def from_bytes(data: ByteArray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over this memory, which must be writable."""
    if data.nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(data).view(dtype).view(tuple(shape))


def dense_piece(tensor: torch.Tensor) -> Piece:
    """[n, ...] as n rows."""
    layout = dense_layout(dtype_name(tensor.dtype), tensor.element_size(), tensor.shape[1:])
    return Piece(layout, tensor.shape[0], as_bytes(tensor))


def jagged_piece(tensor: Any) -> Piece | None:
    """A jagged tensor's values as they lie; None when they have holes or are ragged in another than the first dim."""
    # ``_ragged_idx`` has no public twin, and reading the wrong dim as the ragged one would mix up rows.
    if tensor.lengths() is not None or tensor._ragged_idx != 1:
        return None
    offsets, values = tensor.offsets().cpu().numpy(), tensor.values()
    if offsets[0] != 0 or offsets[-1] != len(values):
        values = values[offsets[0] : offsets[-1]]
    shapes = np.empty((len(offsets) - 1, values.ndim), np.int64)
    shapes[:, 0] = np.diff(offsets)
    shapes[:, 1:] = values.shape[1:]
    layout = ragged_layout(dtype_name(values.dtype), values.element_size(), values.ndim)
    return Piece(layout, len(shapes), as_bytes(values), shapes)


def rows_piece(rows: Sequence[torch.Tensor]) -> Piece | None:
    """One tensor per row: dense when all shapes agree, else ragged; None when dtypes or ranks differ."""
    if not rows or len({(row.dtype, row.ndim) for row in rows}) > 1 or not all(map(is_plain, rows)):
        return None
    first = rows[0]
    data = np.concatenate([as_bytes(row) for row in rows])
    if len({row.shape for row in rows}) == 1:
        return Piece(dense_layout(dtype_name(first.dtype), first.element_size(), first.shape), len(rows), data)
    shapes = np.array([row.shape for row in rows], np.int64)
    return Piece(ragged_layout(dtype_name(first.dtype), first.element_size(), first.ndim), len(rows), data, shapes)


def rows_of(piece: Piece) -> list[torch.Tensor]:
    """One tensor per row of a dense or ragged piece, each in memory of its own."""
    ragged, dtype = piece.as_ragged(), dtype_of(piece.layout.dtype)
    if not piece.layout.shape:
        return list(from_bytes(piece.data.copy(), dtype, (piece.rows,)).unbind())
    assert ragged.side is not None
    edges = ragged.bounds.tolist()
    shapes = ragged.side.tolist()
    return [
        from_bytes(ragged.data[start:stop].copy(), dtype, shape)
        for (start, stop), shape in zip(pairwise(edges), shapes, strict=True)
    ]
