# SPDX-License-Identifier: Apache-2.0
"""One partition: its samples, their fields, tags, keys and producers; what each task consumed; sealed or not."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from transfer_queue.calls import PIECE
from transfer_queue.control.commits import Commits
from transfer_queue.control.consumer import IN_HAND, Consumer
from transfer_queue.control.groups import Groups
from transfer_queue.control.keys_and_tags import KeyMap, TagStore
from transfer_queue.control.listed_keys import ListedKeys
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.rows import (
    PUBLISHED,
    IndexAllocator,
    Rows,
    RowState,
    RowTable,
    all_of,
    ascending,
    one_of,
)
from transfer_queue.control.schema import Schema
from transfer_queue.errors import InvalidRequestError, SampleClearedError
from transfer_queue.protocol import NO_INDEXES, FieldSpec, Indexes, Members, Tags

_COUNTED = one_of(RowState.FREE, RowState.RESERVED_FREE, RowState.LIVE)
_RESERVED = one_of(RowState.RESERVED, RowState.RESERVED_FREE)
_CHUNK = 4096
_OF_COLUMNS = 32 * PIECE
_serials = itertools.count(1)


class Partition:
    """Only the plane changes it. ``preallocate``: the fewest samples that its first insert makes room for."""

    def __init__(
        self, name: str, incarnation: int, allocator: IndexAllocator, preallocate: int = 1,
        num_samples: int | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.num_samples = num_samples
        self.sealed = False
        self.table = RowTable()
        self.schema = Schema(self.table)
        self.keys = KeyMap()
        self.tags = TagStore(self.table)
        self.listed = ListedKeys(self.table, self.keys, self.tags)
        self.groups: Groups | None = None
        self.consumers: dict[str, Consumer] = {}
        self.adders: dict[str, None] = {}
        """Tasks whose clients have taken samples to add fields to them."""
        self.clears: list[str] | None = None
        """Samples are deleted once these tasks, and all others here, are done with them. None: nobody asked for it."""
        self.last_published: float | None = None
        self.num_live = 0
        self.num_published = 0
        self.num_heads = 0  # of groups that were ever added
        self.num_withdrawn = 0
        """Samples that were published and no longer count as such, because their put was cancelled."""
        self.num_rewrites = 0
        self.commits = Commits()
        self.free = ReadySet()
        """Rows that were pre-allocated for the next inserts."""
        self.num_reserved = 0
        self.missing_free = 0
        """While it is loaded: pre-allocated samples that writers had reserved, and that are made anew."""
        self.num_puts = 0
        self.preallocate = preallocate
        self.incarnation = incarnation
        self.serial = next(_serials)  # of this object; a restored partition keeps the saved incarnation
        self._restored: int | None = None
        self._num_forgotten = 0
        self._lost: dict[str, Indexes] = {}
        self._allocator = allocator

    @property
    def num_used(self) -> int:
        """Samples and reservations, which count towards the capacity."""
        return self.table.size - self.table.num_dead - self.free.count

    @property
    def num_heads_held(self) -> int:
        """Heads of groups, also of those that have left."""
        return self.num_used - self.num_live - self.num_reserved

    @property
    def is_final(self) -> bool:
        """Whether no more samples will come: it is sealed, and none of its groups is still worked on."""
        return self.sealed and (self.groups is None or not self.groups.may_grow)

    # ---- writers ----

    def check_open(self, count: int) -> None:
        """Raises InvalidRequestError if the partition takes no new samples."""
        if self.sealed:
            raise InvalidRequestError(
                f"partition {self.name!r} is sealed after {self.num_published} samples, {count} more were put. "
                f"Put them into another partition, or seal later."
            )

    def reserve(self, count: int, for_group: bool = False) -> Rows:
        """Reserve rows for one put: pre-allocated ones first, lowest first, then new ones.

        ``for_group``: they become members of a group, which may be put after the partition was sealed.
        """
        if not for_group:
            self.check_open(count)
        if self.table.copies:
            self.table.copies.make()
        if self.preallocate > 1 and not (self.table.size or self.num_published):
            self.make_free(self.preallocate)
        at: Rows | slice
        if self.free.count:
            rows = self.free.first(count)
            self.free.discard(rows)
            self.table.column("state")[rows] = RowState.RESERVED_FREE
            missing = self._allocator.allocate(count - len(rows))
            at = rows = np.concatenate([rows, self.table.append(missing, RowState.RESERVED)])
        else:
            rows = self.table.append(self._allocator.allocate(count), RowState.RESERVED)
            at = slice(self.table.size - count, self.table.size)  # the same rows, as a faster slice
        self.num_reserved += count
        self._count_put(at, count)
        return rows

    def _count_put(self, at: Rows | slice, count: int) -> None:
        """These rows are new, and belong to one put."""
        self._allocator.num_used += count
        self.num_puts += 1
        if count > 1:  # it is 0 already
            self.table.column("put_offset")[at] = np.arange(count)
        self.table.column("put_size")[at] = count
        self.table.column("put_number")[at] = self.num_puts

    @property
    def takes_whole_puts(self) -> bool:
        """Whether new samples are rows at the end, because none was made for them."""
        return not self.free.count and (self.preallocate < 2 or bool(self.table.size))

    def add(
        self, indexes: Indexes, specs: Mapping[str, FieldSpec], tags: Mapping[int, Tags], now: float,
        members: Members | None = None,
    ) -> None:  # fmt: skip
        """New samples with these fields, of one put: ``reserve`` and ``publish`` in one step, where it takes whole puts
        and is open. Call ``schema.check`` first. ``members``: of which group they are.
        """
        count = len(indexes)
        if self.table.copies:
            self.table.copies.make()
        rows = self.table.append(indexes, RowState.LIVE)
        at = slice(self.table.size - count, self.table.size)
        self._count_put(at, count)
        if members is not None and self.groups is not None:
            self.groups.mark(members, at, count, specs)
        self.set_tags(tags, merge=True)
        self._count_live(count)
        self._written(rows, specs, now, are_new=True)

    def make_free(self, count: int) -> None:
        """Pre-allocate samples for the next inserts."""
        self.free.add(self.table.append(self._allocator.allocate(count), RowState.FREE))

    def rows_of(self, indexes: Indexes) -> Rows:
        """Rows of indexes that must exist. Raises SampleClearedError that names missing ones."""
        rows, found = self.table.find(indexes)
        if not all_of(found):
            missing = indexes[~found]
            raise SampleClearedError(
                f"{len(missing)} of {len(indexes)} samples aren't in partition {self.name!r} (any more), first: "
                f"{missing[:5].tolist()}. They were cleared, or belong to another partition; go on with the next batch."
            )
        return rows

    def publish(
        self, indexes: Indexes, specs: Mapping[str, FieldSpec], tags: Mapping[int, Tags], now: float,
        become: int = RowState.LIVE,
    ) -> Rows:  # fmt: skip
        """Make fields readable; reserved rows become samples, or heads. Returns the rows. All or nothing."""
        rows = self.rows_of(indexes)
        if self.free.count and self.free.contains(rows).any():
            raise InvalidRequestError(f"partition {self.name!r}: pre-allocated samples must be inserted before a put.")
        self.schema.check(specs, self.name, len(rows))
        if self.table.copies:
            self.table.copies.make()
        self.set_tags(tags, merge=True)
        self.num_rewrites += not self.num_reserved or bool((self.table.column("state")[rows] == RowState.LIVE).any())
        self.make_live(rows, become)
        self._written(rows, specs, now)
        return rows

    def _written(self, rows: Rows, specs: Mapping[str, FieldSpec], now: float, are_new: bool = False) -> None:
        """These rows have these fields now. ``are_new``: they are samples without any field before."""
        self.last_published = now
        news = self.schema.record(rows, specs, are_new) if len(rows) else {}
        if self.num_heads and not are_new:  # its groups are made after their heads
            samples = rows[self.table.column("state")[rows] == RowState.LIVE]
            news = {name: own[self.table.column("state")[own] == RowState.LIVE] for name, own in news.items()}
        else:
            samples = rows
        for consumer in self.consumers.values():
            consumer.published(samples, news)

    def lose_unit(self, unit: int) -> Indexes:
        """The values in this storage unit are gone. Returns the samples and heads that have lost some."""
        lost = self.schema.lose_unit(unit)
        for consumer in self.consumers.values():
            consumer.lost(lost)
        indexes = {name: self.table.column("index")[rows] for name, rows in lost.items()}
        self.has_lost(indexes)
        return np.unique(np.concatenate([NO_INDEXES, *indexes.values()]))

    def has_lost(self, lost: Mapping[str, Indexes]) -> None:
        """``lost``: by field, samples and heads that don't have it any more since a storage unit went."""
        for name, indexes in lost.items():
            self._lost[name] = np.union1d(self._lost.get(name, NO_INDEXES), indexes)

    def lost(self) -> dict[str, Indexes]:
        """By field, the samples that lost it with a storage unit, and that nobody has put again."""
        for name, indexes in list(self._lost.items()):
            rows, found = self.table.find(indexes)
            self._lost[name] = indexes[found][~self.schema.has(name)[rows[found]]]
            if not len(self._lost[name]):
                del self._lost[name]
        return dict(self._lost)

    def all_lost(self) -> Indexes:
        """Those samples and heads; one that lost several fields repeats."""
        return np.concatenate([NO_INDEXES, *self.lost().values()])

    def lost_of(self, indexes: Indexes) -> list[str]:
        """The fields that one of these samples lost with a storage unit."""
        return [name for name, lost in self.lost().items() if np.isin(indexes, lost).any()]

    def lost_heads(self) -> set[int]:
        """The heads of groups that lost a field with a storage unit."""
        if not self._lost:
            return set()
        lost = self.all_lost()
        rows, _ = self.table.find(lost)
        return set(lost[self.table.column("state")[rows] == RowState.HEAD].tolist())

    def make_live(self, rows: Rows, become: int = RowState.LIVE) -> None:
        """Reserved rows become samples, or heads; the partition seals itself at its declared number of samples."""
        state = self.table.column("state")
        fresh = rows[~PUBLISHED[state[rows]]]
        if len(fresh):
            fresh = ascending(fresh)  # a repeated row is one sample
            self.num_reserved -= int(np.count_nonzero(_RESERVED[state[fresh]]))
            state[fresh] = become
            if become == RowState.LIVE:
                self._count_live(len(fresh))
            else:
                self.num_heads += len(fresh)
            self.listed.appeared(fresh)

    def _count_live(self, count: int) -> None:
        self.num_live += count
        self.num_published += count
        for consumer in self.consumers.values():
            consumer.inserted(count)
        self.seal_if_complete()

    def seal_if_complete(self) -> None:
        if self.num_samples is not None and self.num_published >= self.num_samples:
            self.seal()

    def seal(self) -> None:
        """Allow no more samples. Active writes may still publish; unused pre-allocated rows are deleted."""
        self.table.copies.make()
        self.sealed = True
        if self.free.count:
            self._release(self.free.all_rows())

    def has_reserved(self, indexes: Indexes) -> bool:
        """Whether one of these is reserved and not published."""
        rows, found = self.table.find(indexes)
        return bool(_RESERVED[self.table.column("state")[rows[found]]].any())

    def release_reserved(self, rows: Rows) -> None:
        """Release reserved rows of a write that won't be published, but no live rows."""
        self.table.copies.make()
        state = self.table.column("state")
        held = ascending(rows[_RESERVED[state[rows]]])
        missing = int(np.count_nonzero(state[held] == RowState.RESERVED_FREE))
        self._release(held)
        if missing and not self.sealed:
            self.make_free(missing)  # new indexes, so that a late write of the old ones can't create samples
        self._compact_if_due()

    def uninsert(self, indexes: Indexes) -> None:
        """Delete inserted samples, except those that got values or tags meanwhile."""
        rows, found = self.table.find(indexes)
        rows = rows[found]
        bare = np.array([not tags for tags in self.tags.packed(rows)], dtype=np.bool_)
        for name in self.schema.written():
            bare &= ~self.schema.has(name)[rows]
        self._withdraw(indexes[found][bare])

    def take_back(self, indexes: Indexes, num_rewrites: int) -> bool:
        """Delete samples of a put that its caller cancelled.

        False: some were cleared, given to a task, or maybe written to since (``num_rewrites``: as it was then). Or the
        partition is sealed, and a reader may know its end.
        """
        _, found = self.table.find(indexes)
        if self.sealed or self.num_rewrites != num_rewrites or not all_of(found) or self.has_given(indexes):
            return False
        self._withdraw(indexes)
        return True

    def has_given(self, indexes: Indexes) -> bool:
        """Whether some task was given one of these samples."""
        rows, found = self.table.find(indexes)
        return any(consumer.given[rows[found]].any() for consumer in self.consumers.values())

    def _withdraw(self, indexes: Indexes) -> None:
        self.table.copies.make()
        self.num_published -= len(indexes)
        self.num_withdrawn += len(indexes)
        self.clear(indexes)

    def _release(self, rows: Rows) -> Indexes:
        """Release rows. Row numbers stay valid until the caller compacts."""
        state, num_used = self.table.column("state")[rows], self.num_used
        self.num_live -= int(np.count_nonzero(state == RowState.LIVE))
        self.num_reserved -= int(np.count_nonzero(_RESERVED[state]))
        indexes: Indexes = self.table.column("index")[rows].copy()
        if len(self.keys):
            self.listed.removing(rows)
            self.keys.unbind(indexes.tolist())
        self.tags.delete(rows)
        self.schema.count_deleted(rows)
        self.free.discard(rows)
        self.table.mark_dead(rows)
        self._allocator.num_used -= num_used - self.num_used
        return indexes

    def _compact_if_due(self) -> None:
        if self.table.wants_compaction():
            self.table.compact()
            self.free = ReadySet(self.table.column("state") == RowState.FREE)
            self.listed.rebuild()
            if self.groups is not None:
                self.groups.rebuild()
            for consumer in self.consumers.values():
                consumer.rebuild()

    # ---- tags ----

    def set_tags(self, tags: Mapping[int, Tags], merge: bool) -> None:
        """Replace each sample's tags, or merge them; samples that aren't here are ignored."""
        if not tags:
            return
        self.table.copies.make()
        indexes = np.fromiter(tags, dtype=np.int64, count=len(tags))
        rows, found = self.table.find(indexes)
        self.tags.put(rows[found], [tags[index] for index in indexes[found].tolist()], merge)
        for consumer in self.consumers.values():
            consumer.retagged(rows[found])
        self.listed.retagged(rows[found])

    # ---- readers ----

    def consumer(self, task: str) -> Consumer:
        consumer = self.consumers.get(task)
        if consumer is None:
            self.table.copies.make()
            made = [str(number) for number in (self._restored, self._num_forgotten or None) if number is not None]
            tokens = ".".join([self._tokens(task), *made])  # no earlier consumer of the task used this prefix
            consumer = Consumer(task, tokens, self.table, self.schema, self.tags)
            self.consumers[task] = consumer
        return consumer

    def restored_as(self, number: int) -> None:
        """Put this number into all later tokens."""
        self._restored = number
        for task, consumer in self.consumers.items():
            consumer.ledger.name = f"{self._tokens(task)}.{number}"

    def _tokens(self, task: str) -> str:
        return f"{self.name}/{task}/{self.incarnation}"

    @staticmethod
    def incarnation_of(token: str) -> str:
        """What the tokens of a partition have in common, and no other partition's, also after a restore."""
        return token.rsplit("/", 2)[1].partition(".")[0]

    def gave(self, token: str, task: str) -> bool:
        """Whether this is the token of a batch of this partition, also from before a restore."""
        return token.startswith((f"{self._tokens(task)}/", f"{self._tokens(task)}."))

    def page(self, after: int | None, limit: int) -> tuple[Rows, bool]:
        """The first rows after this index that status calls report, and whether there are more.

        These are samples and pre-allocated ones.
        """
        state = self.table.column("state")
        start = 0 if after is None else int(self.table.column("index").searchsorted(after, side="right"))
        found, missing = [np.empty(0, dtype=np.intp)], limit + 1
        while missing and start < self.table.size:
            rows = _COUNTED[state[start : start + _CHUNK]].nonzero()[0][:missing] + start
            found.append(rows)
            start, missing = start + _CHUNK, missing - len(rows)
        together = np.concatenate(found)
        return together[:limit], len(together) > limit

    def common_fields(self) -> list[str]:
        """Written fields that every row has that status calls report; none if there are no such rows."""
        other = ~_COUNTED[self.table.column("state")]
        if all_of(other):
            return []
        return [name for name in self.schema.written() if all_of(self.schema.has(name) | other)]

    def forget_task(self, task: str) -> bool:
        """Delete everything about a task. Returns whether it has read here."""
        if task not in self.consumers:
            return False
        self.table.copies.make()
        consumer = self.consumers.pop(task)
        for name in (*consumer.columns, consumer.hands.column):
            self.table.drop_column(name)
        self._num_forgotten += 1
        return True

    def lacks_inserts(self) -> bool:
        """Whether some pre-allocated samples haven't been inserted yet."""
        return bool(
            self.free.count or (self.num_reserved and (self.table.column("state") == RowState.RESERVED_FREE).any())
        )

    def is_exhausted(self, consumer: Consumer, unmatched: int) -> bool:
        """Whether there are samples, none is still to come, and the task consumed all but ``unmatched``."""
        under_way = self.free.count or self.num_reserved or (self.num_samples is not None and not self.sealed)
        return bool(self.num_live) and not under_way and consumer.num_unconsumed == unmatched

    def all_inserted(self) -> bool:
        """Whether several samples were pre-allocated, and every one of them was inserted."""
        return self.preallocate > 1 and self.num_published >= self.preallocate

    def done_with(self, tasks: Iterable[str], most: int, being_read: Iterable[Indexes] = ()) -> Indexes:
        """Up to ``most`` samples that every task here and each of ``tasks`` has consumed, and that no open batch has.

        ``being_read``: samples to leave out, because a reader has yet to read them.
        """
        found = [NO_INDEXES]
        if not self.consumers or not self.consumers.keys() >= set(tasks):
            return found[0]
        open_rows: Rows | None = None
        for start in range(0, self.table.size, _OF_COLUMNS):
            rows = self._consumed_by_all(slice(start, start + _OF_COLUMNS))
            if not len(rows):
                continue
            if open_rows is None:
                open_batches = [consumer.ledger.open_indexes() for consumer in self.consumers.values()]
                at, here = self.table.find(np.concatenate([*open_batches, *being_read]))
                open_rows = np.unique(at[here])
            found.append(self.table.column("index")[np.setdiff1d(rows, open_rows, assume_unique=True)][:most])
            most -= len(found[-1])
            if not most:
                break
        return np.concatenate(found)

    def _consumed_by_all(self, part: slice) -> Rows:
        consumed = self.table.column("state")[part] == RowState.LIVE
        for consumer in self.consumers.values():
            consumed &= consumer.consumed[part]
            if consumer.hands.counts:
                consumed &= consumer.given[part] != IN_HAND
        rows: Rows = consumed.nonzero()[0] + part.start
        return rows

    def clear(self, indexes: Indexes, unsettled: Collection[str] = ()) -> Indexes:
        """Delete samples. Returns the indexes that were here; unknown ones are ignored.

        ``unsettled``: tasks whose batches of which nothing is left stay open. Those of others are settled.
        """
        rows, found = self.table.find(indexes)
        rows = ascending(rows[found])
        if len(rows):
            self.table.copies.make()
        if self.groups is not None and len(rows):
            self.groups.removing(rows)
        for task, consumer in self.consumers.items():
            consumer.cleared(rows, settles=task not in unsettled)
        cleared = self._release(rows)
        self._compact_if_due()
        return cleared

    def drop(self) -> Indexes:
        """Delete the whole partition. Returns every index that may have values in storage."""
        self._allocator.num_used -= self.num_used
        indexes: Indexes = self.table.column("index")[self.table.column("state") != RowState.DEAD]
        return indexes

    def freeing(self) -> Iterator[None]:
        """Frees the Python objects per sample of a deleted partition, its keys and tags, a piece at a time."""
        yield from self.keys.freeing()
        yield from self.tags.freeing()
