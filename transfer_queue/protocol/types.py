# SPDX-License-Identifier: Apache-2.0
"""What messages are made of: bounded numbers, tags, what is known of a field, and the two kinds of message.

Arrays travel as raw little-endian bytes: ``indexes`` are int64, ``status`` int8, ``row_shapes`` int32.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.errors import ProtocolError

Indexes = npt.NDArray[np.int64]
Tags = dict[str, Any]
# Bounds keep what a server does with a number small. What is below 0 or 1 is refused where it is used, which says more.
Call = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Number of a call within its client's session: ascending, never reused."""
Count = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Position = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
NumRanks = Annotated[int, msgspec.Meta(ge=-(2**16), le=2**16)]
LONGEST_WAIT_S = 1e9
"""What infinitely long means on the wire."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S)]


class FieldSpec(msgspec.Struct, frozen=True, array_like=True):
    """What the controller knows of one field of some rows. ``row_shapes`` is [rows, ndim], only where rows differ."""

    dtype: str | None
    shape: tuple[int, ...] | None
    is_nested: bool = False
    is_non_tensor: bool = False
    row_shapes: bytes | None = None


class Request(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fields are positional on the wire: append with a default, never reorder. No kw_only: it would move ``id``."""

    id: Call


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """``id`` is the id of the request this answers."""

    id: int


def pack_indexes(indexes: Any) -> bytes:
    """Indexes as they travel: int64, little-endian."""
    return np.asarray(indexes, dtype="<i8").tobytes()


def unpack_indexes(data: bytes) -> Indexes:
    """Read-only int64 view of packed indexes. Raises ProtocolError where the bytes can't be any."""
    if len(data) % 8:
        raise ProtocolError(f"indexes are 8 bytes each, got {len(data)} bytes.")
    return np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False)
