# SPDX-License-Identifier: Apache-2.0
"""What requests are made of: numbers with their bounds, fields of samples, and the class of all requests."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Tags = dict[str, Any]
# Bounds keep what a server does with a number small. What is below 0 or 1 is refused where it is used, which says more.
Call = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Number of a call within its client's session: ascending, never reused."""
Count = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Position = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
NumRanks = Annotated[int, msgspec.Meta(ge=-(2**16), le=2**16)]
MOST_ROWS = 2048
"""Keys, fields, tags or samples that a request names one by one, so that it holds up others for 20 ms at most."""
FewNames = Annotated[list[str], msgspec.Meta(max_length=MOST_ROWS)]
TagsOf = Annotated[dict[int, Tags], msgspec.Meta(max_length=MOST_ROWS)]
FewIndexes = Annotated[bytes, msgspec.Meta(max_length=8 * MOST_ROWS)]
WriteName = tuple[str, Call]
"""A write: its client, and the first call of it."""
LONGEST_WAIT_S = 1e9
"""What infinitely long means on the wire."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S)]
UnitNumber = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
UnitRuns = list[tuple[UnitNumber, Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]]]
"""Where the values of consecutive rows lie: (number of the storage unit, number of rows)."""


class FieldSpec(msgspec.Struct, frozen=True, array_like=True):
    """What the controller knows of one field of some rows. ``row_shapes`` is [rows, ndim], only where rows differ.

    ``dtypes``: all that the field has in its partition, if there are several. ``row_dtypes`` is one uint8 per row, a
    position in them, only where these rows differ; ``dtype`` is the first row's then.
    ``units`` None: all values lie in unit 0, which shares the controller's process.
    """

    dtype: str | None
    shape: tuple[int, ...] | None
    is_nested: bool = False
    is_non_tensor: bool = False
    row_shapes: bytes | None = None
    dtypes: list[str | None] = []
    row_dtypes: bytes | None = None
    units: UnitRuns | None = None


class DeclaredField(msgspec.Struct, frozen=True, array_like=True):
    """What every write of a field must bring. ``dtype`` None: plain objects; ``shape`` of a row, None: any (size)."""

    dtype: str | None
    shape: tuple[Size | None, ...] | None = None


class Request(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fields are positional on the wire: append with a default, never reorder. No kw_only: it would move ``id``."""

    id: Call
