# SPDX-License-Identifier: Apache-2.0
"""TQBatch: the pair of values and metadata that a loader yields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_tq.positions import Position
from transfer_queue import BatchMeta
from transfer_queue.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensordict import TensorDict


class TQBatch:
    """Values and metadata of one micro-batch: ``data, meta = batch``.

    It is deliberately not a tuple, mapping or dataclass. Lightning's precision plugins walk into those, treat a
    TensorDict as a dict and lose its batch size, strings and dtypes. Moving a batch leaves its metadata alone.
    """

    __slots__ = ("data", "meta", "position")

    def __init__(self, data: TensorDict, meta: BatchMeta, position: Position | None = None) -> None:
        self.data = data
        self.meta = meta
        self.position = position
        """Where the stream continues after this batch."""

    @property
    def size(self) -> int:
        """Number of rows."""
        return int(self.meta.size)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> TQBatch:
        """The same batch with its values on another device."""
        return TQBatch(self.data.to(device, non_blocking=non_blocking), self.meta, self.position)

    def pin_memory(self) -> TQBatch:
        """The same batch with its values in page-locked memory."""
        return TQBatch(self.data.pin_memory(), self.meta, self.position)

    def select(self, rows: list[int]) -> TQBatch:
        """A batch of these rows only."""
        # Nested tensors that are ragged in several dimensions can't be indexed by a list.
        ragged: dict[str, Any] = {
            name: column
            for name, column in self.data.items()
            if getattr(column, "is_nested", False) and getattr(column, "layout", None) is torch.strided
        }
        data = self.data.exclude(*ragged)[rows]
        for name, column in ragged.items():
            tensors = column.unbind()
            data.set(name, torch.nested.as_nested_tensor([tensors[row] for row in rows]))
        return TQBatch(data, self.meta.select_samples(rows), self.position)

    # Unpacking uses __getitem__ only. With __iter__, Lightning would walk into the batch to find its size, and a
    # BatchMeta iterates over one-row BatchMetas without end.

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return (self.data, self.meta)[index]

    def __repr__(self) -> str:
        return f"TQBatch(data={self.data!r}, meta={self.meta!r})"

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Any]: ...


def meta_of(batch: Any) -> BatchMeta:
    """The metadata of a batch, also of one that a transfer hook turned into a tuple."""
    meta = batch[1] if isinstance(batch, Sequence) or hasattr(batch, "meta") else None
    if not isinstance(meta, BatchMeta):
        raise InvalidRequestError(
            f"the batch is a {type(batch).__name__} without BatchMeta, so its samples are unknown. A hook that changes "
            f"a batch must return the pair (data, meta)."
        )
    return meta
