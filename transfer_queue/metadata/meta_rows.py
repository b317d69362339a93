# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch's metadata: the positions that name them."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any, TypeVar

from transfer_queue.errors import InvalidRequestError

T = TypeVar("T")


def as_ints(values: Iterable[Any]) -> list[int]:
    """Plain ints of any iterable of integers; arrays and tensors without a Python object per element."""
    tolist = getattr(values, "tolist", None)
    return list(map(operator.index, values if tolist is None else tolist()))


def pick(rows: Sequence[T], positions: slice | list[int]) -> list[T]:
    """The rows at these positions, as a new list."""
    if isinstance(positions, slice):
        return list(rows[positions])
    return [rows[position] for position in positions]


def check_lengths(named: Mapping[str, Sized | None], size: int) -> None:
    """Raise ValueError unless each of these has one entry per row; None passes."""
    for name, rows in named.items():
        if rows is not None and len(rows) != size:
            raise InvalidRequestError(
                f"{name} has {len(rows)} entries, the batch has {size} samples. Give one per sample."
            )


def check_in_range(positions: Sequence[int], size: int) -> None:
    """Raise ValueError unless every position is in [0, size)."""
    if positions and (min(positions) < 0 or max(positions) >= size):
        outside = [position for position in positions if not 0 <= position < size][:5]
        raise InvalidRequestError(f"positions {outside} are out of range: the batch has {size} rows, 0 to {size - 1}.")


def check_permutation(positions: Sequence[int], size: int) -> None:
    """Raise ValueError unless ``positions`` names each of ``size`` rows exactly once."""
    if len(positions) != size:
        raise InvalidRequestError(
            f"the number of indexes, {len(positions)}, does not match the {size} rows of the batch. "
            "Give every row's position exactly once."
        )
    if len(set(positions)) != size:
        raise InvalidRequestError(f"Contain duplicate indexes: {positions}. Give every row's position exactly once.")
    check_in_range(positions, size)


def even_sizes(size: int, chunks: int) -> list[int]:
    """Sizes of ``chunks`` parts of ``size`` rows, the first ``size % chunks`` of them one larger."""
    chunks = operator.index(chunks)
    if chunks < 1:
        raise InvalidRequestError(f"can't cut a batch into {chunks} chunks: ask for 1 or more.")
    if chunks > size:
        message = f"a batch of {size} rows was cut into {chunks} chunks: {chunks - size} of them are empty."
        warnings.warn(message, UserWarning, stacklevel=3)
    small, larger = divmod(size, chunks)
    return [small + 1] * larger + [small] * (chunks - larger)


def consecutive(sizes: Iterable[int], size: int) -> list[slice]:
    """One slice per given size, one after the other; together they cover exactly ``size`` rows."""
    sizes = as_ints(sizes)
    if any(part < 0 for part in sizes) or sum(sizes) != size:
        raise InvalidRequestError(
            f"chunk sizes {sizes} add up to {sum(sizes)}, the batch has {size} rows. "
            "Give sizes >= 0 that add up to the number of rows."
        )
    return [slice(end - part, end) for part, end in zip(sizes, accumulate(sizes), strict=True)]
