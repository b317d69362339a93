# SPDX-License-Identifier: Apache-2.0
"""TQBatch: the values and metadata that a loader yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from lightning_tq.device_copies import DeviceCopy, SideStream
from lightning_tq.progress import Position
from transfer_queue import BatchMeta
from transfer_queue.errors import InvalidRequestError


class TQBatch:
    """Values and metadata of one micro-batch: ``data, meta = batch``. With ``Stream(head_fields=...)`` also ``heads``.

    It is deliberately not a tuple, mapping or dataclass. Lightning's precision plugins walk into those, treat a
    TensorDict as a dict and lose its batch size, strings and dtypes. Moving a batch leaves its metadata alone.

    Examples:
        >>> meta = client.get_meta(["x"], 4, "train", task_name="evaluation")
        >>> data, meta = TQBatch(client.get_data(meta), meta)
        >>> TQBatch(data, meta).select([0, 2]).size
        2
    """

    __slots__ = ("_copies", "data", "heads", "meta", "position")

    def __init__(
        self,
        data: TensorDict,
        meta: BatchMeta,
        position: Position | None = None,
        heads: TensorDict | None = None,
    ) -> None:
        self.data = data
        self.meta = meta
        self.position = position
        """Where the stream continues after this batch."""
        self.heads = heads
        """[groups] Fields of the groups' heads: row ``meta.group_index[i]`` is that of row i. None: not asked for."""
        self._copies: list[DeviceCopy | None] | None = None

    def __reduce__(self) -> Any:
        return TQBatch, (self.data, self.meta, self.position, self.heads)

    @property
    def size(self) -> int:
        """Number of rows."""
        return int(self.meta.size)

    def copy_ahead(self, copies: SideStream) -> None:
        """Start the copy that ``to`` returns. The values must not change after this. Idempotent."""
        if self._copies is None:
            self._copies = [None if values is None else copies.start(values) for values in (self.data, self.heads)]

    def to(self, device: torch.device | str | int, non_blocking: bool | None = None) -> TQBatch:
        """The same batch with its values on another device, for that device's current stream.

        Args:
            non_blocking: Whether the host may go on before the values are copied, as in ``TensorDict.to``. Default:
                where that is safe.
        """
        copies, self._copies = self._copies or [None, None], None
        options: dict[str, Any] = {} if non_blocking is None else {"non_blocking": non_blocking}
        moved: list[Any] = [
            copy.finish() if copy is not None and copy.side.device == torch.device(device)
            else None if values is None else values.to(device, **options)
            for values, copy in zip((self.data, self.heads), copies, strict=True)
        ]  # fmt: skip
        return TQBatch(moved[0], self.meta, self.position, moved[1])

    def pin_memory(self) -> TQBatch:
        """The same batch with its values in page-locked memory."""
        heads = None if self.heads is None else self.heads.pin_memory()
        return TQBatch(self.data.pin_memory(), self.meta, self.position, heads)

    def select(self, rows: list[int]) -> TQBatch:
        """A batch of these rows only, with the heads of their groups."""
        heads = None
        if self.heads is not None:
            numbers = self.meta.group_index
            heads = _selected(self.heads, list(dict.fromkeys(numbers[row] for row in rows)))
        return TQBatch(_selected(self.data, rows), self.meta.select_samples(rows), self.position, heads)

    # Unpacking uses __getitem__ only. With __iter__, Lightning would walk into the batch to find its size, and a
    # BatchMeta iterates over one-row BatchMetas without end.

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        if isinstance(index, str):
            raise TypeError(_no_part(f"batch[{index!r}]", index))
        return (self.data, self.meta)[index]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # Python and other libraries ask for these
                raise AttributeError(f"'TQBatch' object has no attribute {name!r}")
            raise AttributeError(_no_part(f"batch.{name}", name))

    def __repr__(self) -> str:
        return f"TQBatch(data={self.data!r}, meta={self.meta!r})"

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Any]: ...


def _no_part(written: str, field: str) -> str:
    return f"a batch is a pair, so {written} names none of its parts. Write: data, meta = batch; data[{field!r}]."


_NOT_INDEXED = (torch.strided, torch.jagged) if torch.__version__ < "2.7" else (torch.strided,)
"""Layouts of nested tensors that can't be indexed by a list of rows."""


def _selected(values: TensorDict, rows: list[int]) -> TensorDict:
    # Jagged ones that are indexed keep what they share: one may be multiplied with another.
    nested: dict[str, Any] = {
        name: column
        for name, column in values.items()
        if getattr(column, "is_nested", False) and getattr(column, "layout", None) in _NOT_INDEXED
    }
    selected = values.exclude(*nested)[rows]
    for name, column in nested.items():
        tensors = column.unbind()
        selected.set(name, torch.nested.as_nested_tensor([tensors[row] for row in rows], layout=column.layout))
    return selected


class UnfetchedBatch:
    """What a Trainer gets instead of a batch that it fetches ahead of its last step, and will not train.

    That batch may never come. If the Trainer goes on nevertheless, because a callback raised ``max_steps``, moving
    this to the device waits for it.
    """

    def __init__(self, wait: Callable[[], TQBatch]) -> None:
        self.fetch = cache(wait)
        """Wait for the batch, once. Raises StopIteration at the end of the stream."""

    def to(self, device: torch.device | str | int, non_blocking: bool | None = None) -> TQBatch:
        """The batch, on that device."""
        return self.fetch().to(device, non_blocking=non_blocking)


def queue_batch(batch: Any) -> TQBatch | None:
    """The batch of a stream: this one, or one among those that a CombinedLoader yields together."""
    if isinstance(batch, TQBatch):
        return batch
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((found for part in parts if (found := queue_batch(part)) is not None), None)


def meta_of(batch: Any) -> BatchMeta:
    """The metadata of a batch, also of one among others, or that a transfer hook turned into a tuple."""
    found = queue_batch(batch)
    pair = isinstance(batch, Sequence) and len(batch) > 1
    meta = found.meta if found is not None else batch[1] if pair else None
    if not isinstance(meta, BatchMeta):
        raise InvalidRequestError(
            f"the batch is a {type(batch).__name__} without BatchMeta, so its samples are unknown. A hook that changes "
            f"a batch must return the pair (data, meta)."
        )
    return meta
