# SPDX-License-Identifier: Apache-2.0
"""Values that come beside a batch's metadata: for a stream, which takes them next; else in case a read follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.base import Wish

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.storage.base import StorageManager


class FetchedBatch:
    """A batch whose values are kept where they are until they are taken, or it is closed."""

    def __init__(self, meta: BatchMeta, wish: Wish, frames: Sequence[memoryview]) -> None:
        self.meta = meta
        self.wish = wish
        self.frames = frames
        self.closed = False

    def values(self) -> TensorDict | None:
        """Taken: closed afterwards. None: read them."""
        try:
            return self.wish.values(self.meta.global_indexes, self.frames)
        finally:
            self.close()

    def close(self) -> None:
        """Idempotent."""
        if not self.closed:
            self.closed = True
            self.wish.close()


class _Last(NamedTuple):
    batch: FetchedBatch
    storage: StorageManager
    indexes: list[int]
    fields: list[str]


class ReadAhead:
    """Few bytes travel beside their metadata, because a ``get_data`` of just this metadata often comes next.

    Given once, and only while they are what a read would give. A client that doesn't read what it fetches stops asking
    for values, and begins anew when it does; one that got no answer to that stops for good. Any thread may use it.
    """

    def __init__(self) -> None:
        self._near = True
        # By the metadata's ``id``, nearly always one at most; a dictionary, because its ``pop`` is one step. Without
        # values only the ``id`` is kept, which may come to mean other metadata: then a wish too many is all there is.
        self._last: dict[int, _Last | None] = {}

    @property
    def pays(self) -> bool:
        """Was read what was fetched last?"""
        return self._near and not self._last

    def keep(self, batch: FetchedBatch, storage: StorageManager | None) -> None:
        """This was fetched, with or without values."""
        for key in list(self._last):
            if (last := self._last.pop(key, None)) is not None:
                last.batch.close()
        meta, values = batch.meta, None
        if batch.wish.came and storage is not None:
            values = _Last(batch, storage, list(meta.global_indexes), meta.field_names)
        else:
            batch.close()
            self._near = self._near and (bool(batch.frames) or not batch.wish.message)
        self._last[id(meta)] = values

    def take(self, meta: BatchMeta, storage: StorageManager) -> TensorDict | None:
        """The values of this metadata, if it is what was fetched last; None: read them."""
        last = self._last.pop(id(meta), None)
        if last is None:
            return None
        fields, indexes = meta.field_names, list(meta.global_indexes)
        if last.storage is storage and last.indexes == indexes and last.fields == fields:
            return last.batch.values()
        last.batch.close()
        return None
