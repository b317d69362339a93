# SPDX-License-Identifier: Apache-2.0
"""One partition: its samples, their fields, tags, keys and producers; what each task consumed; sealed or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from transfer_queue.control.consumer import Consumer
from transfer_queue.control.indexes import IndexAllocator
from transfer_queue.control.keys import KeyMap
from transfer_queue.control.rows import Rows, RowState, RowTable
from transfer_queue.control.schema import Schema
from transfer_queue.errors import InvalidRequestError, SampleClearedError
from transfer_queue.protocol import FieldSpec, Indexes, Tags

COUNTED = (RowState.FREE, RowState.HELD_FREE, RowState.LIVE)
HELD = (RowState.HELD, RowState.HELD_FREE)


class Partition:
    """Mutated by the plane only. ``preallocate``: least number of samples its first insert makes room for."""

    def __init__(self, name: str, incarnation: int, preallocate: int = 1, num_samples: int | None = None) -> None:
        self.name = name
        self.num_samples = num_samples
        self.sealed = False
        self.table = RowTable()
        self.table.add_column("holder", np.int32)
        self.schema = Schema(self.table)
        self.keys = KeyMap()
        self.tags: dict[int, Tags] = {}
        self.consumers: dict[str, Consumer] = {}
        self.last_published: float | None = None
        self.num_live = 0
        self.num_published = 0
        self.num_free = 0
        self._preallocate = preallocate
        self._incarnation = incarnation

    @property
    def num_used(self) -> int:
        """Samples and reservations: what a capacity counts."""
        return self.table.size - self.table.num_dead - self.num_free

    # ---- writers ----

    def hold(self, allocator: IndexAllocator, count: int, holder: int, state: RowState = RowState.HELD) -> Rows:
        """Rows for one put: pre-allocated ones first, lowest first, then new ones."""
        if self.sealed:
            raise InvalidRequestError(
                f"partition {self.name!r} is sealed after {self.num_published} samples, {count} more were put. "
                f"Put them into another partition, or seal later."
            )
        if not self.table.size and self._preallocate > 1:
            self.table.append(allocator.allocate(self._preallocate), RowState.FREE)
            self.num_free = self._preallocate
        rows = self._take_free(count) if self.num_free else np.empty(0, dtype=np.intp)
        if len(rows) < count:
            rows = np.concatenate([rows, self.table.append(allocator.allocate(count - len(rows)), state)])
        self.table.column("holder")[rows] = holder
        self.table.column("put_offset")[rows] = np.arange(count)
        self.table.column("put_size")[rows] = count
        return rows

    def _take_free(self, count: int) -> Rows:
        rows = np.flatnonzero(self.table.column("state") == RowState.FREE)[:count]
        self.table.column("state")[rows] = RowState.HELD_FREE
        self.num_free -= len(rows)
        return rows

    def rows_of(self, indexes: Indexes) -> Rows:
        """Rows of indexes that must be there. Raises SampleClearedError naming those that aren't."""
        rows, found = self.table.find(indexes)
        if not found.all():
            missing = indexes[~found]
            raise SampleClearedError(
                f"{len(missing)} of {len(indexes)} samples aren't in partition {self.name!r} (any more), first: "
                f"{missing[:5].tolist()}. They were cleared, or belong to another partition; fetch new metadata."
            )
        return rows

    def publish(self, indexes: Indexes, specs: Mapping[str, FieldSpec], tags: Mapping[int, Tags], now: float) -> None:
        """Fields become readable; held rows become samples. All or nothing."""
        rows = self.rows_of(indexes)
        if self.table.column("state")[rows].min(initial=RowState.LIVE) == RowState.FREE:
            raise InvalidRequestError(f"partition {self.name!r}: pre-allocated samples must be inserted before a put.")
        self.schema.check(specs, self.name)
        self.make_live(rows)
        self.schema.record(rows, specs)
        self.set_tags(tags, merge=True)
        self.last_published = now
        names = set(specs)
        for consumer in self.consumers.values():
            consumer.published(rows, names)

    def make_live(self, rows: Rows) -> None:
        """Held rows become samples; the partition seals itself at its declared number."""
        state = self.table.column("state")
        fresh = int(np.count_nonzero(state[rows] != RowState.LIVE))
        state[rows] = RowState.LIVE
        self.num_live += fresh
        self.num_published += fresh
        if self.num_samples is not None and self.num_published >= self.num_samples:
            self.seal()

    def seal(self) -> None:
        """No more samples. Writes under way may still publish; reservations kept for later are void."""
        self.sealed = True
        self._release(np.flatnonzero(self.table.column("state") == RowState.HELD_AHEAD))

    def give_back(self, rows: Rows) -> Indexes:
        """Held rows whose write failed or whose writer is gone. Returns their indexes; live rows are left alone."""
        state = self.table.column("state")[rows]
        return self._release(rows[np.isin(state, (*HELD, RowState.HELD_AHEAD))])

    def _release(self, rows: Rows) -> Indexes:
        indexes = self.table.column("index")[rows].copy()
        self.keys.forget(indexes.tolist())
        self.table.mark_dead(rows)
        return indexes

    def held_by(self, holder: int) -> Rows:
        """Rows a writer has reserved and not published."""
        mask = np.isin(self.table.column("state"), (*HELD, RowState.HELD_AHEAD))
        return np.flatnonzero(mask & (self.table.column("holder") == holder))

    def num_held(self) -> int:
        """Samples that writers are about to publish."""
        return int(np.isin(self.table.column("state"), HELD).sum())

    # ---- tags ----

    def set_tags(self, tags: Mapping[int, Tags], merge: bool) -> None:
        """Per sample a whole new dict, or only the keys named; samples that aren't here are ignored."""
        if not tags:
            return
        indexes = np.fromiter(tags, dtype=np.int64, count=len(tags))
        _, found = self.table.find(indexes)
        for index in indexes[found].tolist():
            self.tags[index] = {**self.tags.get(index, {}), **tags[index]} if merge else dict(tags[index])

    def tags_of(self, indexes: Iterable[int]) -> dict[int, Tags]:
        """The non-empty ones."""
        if not self.tags:
            return {}
        return {index: self.tags[index] for index in indexes if self.tags.get(index)}

    # ---- readers ----

    def consumer(self, task: str) -> Consumer:
        if task not in self.consumers:
            self.consumers[task] = Consumer(task, self.name, self._incarnation, self.table, self.schema)
        return self.consumers[task]

    def counted(self) -> Rows:
        """Rows that status calls report: samples and pre-allocated ones."""
        return np.flatnonzero(np.isin(self.table.column("state"), COUNTED))

    def live(self) -> npt.NDArray[np.bool_]:
        return self.table.column("state") == RowState.LIVE

    def is_exhausted(self, consumer: Consumer) -> bool:
        """Some samples, none pre-allocated or under way, and all of them consumed by the task."""
        if not self.num_live or self.num_free or self.num_held():
            return False
        return bool(consumer.consumed[self.live()].all())

    def all_inserted(self) -> bool:
        """More than one sample was pre-allocated, and every one of them has come."""
        return self._preallocate > 1 and self.num_published >= self._preallocate

    def clear(self, indexes: Indexes) -> Indexes:
        """Forget samples; returns the indexes that were here. Unknown ones are ignored."""
        rows, found = self.table.find(np.unique(indexes))
        rows = rows[found]
        state = self.table.column("state")[rows]
        self.num_free -= int(np.count_nonzero(state == RowState.FREE))
        self.num_live -= int(np.count_nonzero(state == RowState.LIVE))
        for consumer in self.consumers.values():
            consumer.cleared(rows)
        cleared = self._release(rows)
        if self.tags:
            for index in cleared.tolist():
                self.tags.pop(index, None)
        if self.table.wants_compaction():
            self.table.compact()
            for consumer in self.consumers.values():
                consumer.rebuild()
        return cleared

    def all_indexes(self) -> Indexes:
        """Every index that may have values in storage."""
        return self.table.column("index")[self.table.column("state") != RowState.DEAD].copy()

    def check_invariants(self) -> None:
        """Raises AssertionError where the books disagree; for tests."""
        index, state = self.table.column("index"), self.table.column("state")
        assert (np.diff(index) > 0).all(), "indexes ascend"
        assert int((state == RowState.LIVE).sum()) == self.num_live, "live rows are counted"
        assert int((state == RowState.FREE).sum()) == self.num_free, "free rows are counted"
        assert int((state == RowState.DEAD).sum()) == self.table.num_dead, "dead rows are counted"
        for consumer in self.consumers.values():
            consumer.check_invariants()
