# SPDX-License-Identifier: Apache-2.0
"""TQBatch: the pair that a loader yields, closed to whoever takes collections apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from transfer_queue import BatchMeta

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensordict import TensorDict


class TQBatch:
    """Values and metadata of one micro-batch: ``data, meta = batch``.

    No tuple, mapping or dataclass: the precision plugins of Lightning walk into those, take a TensorDict for a dict and
    lose its batch size, strings and dtypes. Moving it to a device moves the values and leaves the metadata alone.
    """

    __slots__ = ("data", "meta", "place")

    def __init__(self, data: TensorDict, meta: BatchMeta, place: dict[str, Any] | None = None) -> None:
        self.data = data
        self.meta = meta
        self.place = place
        """Where the stream goes on behind this batch, as ``StreamingDataset.state_dict`` says it."""

    @property
    def size(self) -> int:
        """Rows."""
        return int(self.meta.size)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> TQBatch:
        """The pair with its values on another device."""
        return TQBatch(self.data.to(device, non_blocking=non_blocking), self.meta, self.place)

    def pin_memory(self) -> TQBatch:
        """The pair with its values in page-locked memory."""
        return TQBatch(self.data.pin_memory(), self.meta, self.place)

    def select(self, positions: list[int]) -> TQBatch:
        """The pair of these rows."""
        # Nested tensors that are ragged in several dimensions can't be indexed by a list.
        ragged: dict[str, Any] = {
            name: column
            for name, column in self.data.items()
            if getattr(column, "is_nested", False) and getattr(column, "layout", None) is torch.strided
        }
        data = self.data.exclude(*ragged)[positions]
        for name, column in ragged.items():
            rows = column.unbind()
            data.set(name, torch.nested.as_nested_tensor([rows[position] for position in positions]))
        return TQBatch(data, self.meta.select_samples(positions), self.place)

    # Unpacking goes by __getitem__ alone. With __iter__ Lightning would walk in after the batch size, and a BatchMeta
    # iterates over BatchMetas of one row, for ever.

    def __len__(self) -> int:
        return 2

    def __getitem__(self, position: int) -> Any:
        return (self.data, self.meta)[position]

    def __repr__(self) -> str:
        return f"TQBatch(data={self.data!r}, meta={self.meta!r})"

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Any]: ...
