# SPDX-License-Identifier: Apache-2.0
"""One task's view of one partition: what is ready for it, what it consumed, and its ledger."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transfer_queue.control.filtered import matching
from transfer_queue.control.hands import Hands
from transfer_queue.control.kept_sets import KeptSets
from transfer_queue.control.keys_and_tags import TagStore
from transfer_queue.control.ledger import Ledger
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.rows import Rows, RowState, RowTable, ascending
from transfer_queue.control.saved import SavedConsumer
from transfer_queue.control.schema import Schema

UNLEDGERED = -1
"""In the "given" column: given without a ledger entry."""

IN_HAND = -2
"""In the "given" column: given without a ledger entry to a client that has yet to add fields."""

FieldNames = tuple[str, ...]
ReadyKey = tuple[FieldNames, str | None]
"""The fields of a fetch, and its filter."""

_MAX_ENDS = 64
"""How many ends of passes are remembered, the latest ones; no reader lags further behind."""

_MAX_FILTERS_ENDED = 64
"""Filters whose end of stream is remembered, the latest ones."""


class StreamEnd(NamedTuple):
    """Why a stream ended, and how many samples its tail dropped."""

    reason: str
    dropped: int


class Consumer:
    """Status columns and ready sets of one task. "given" is the number of the ledger entry, 0 for undrawn samples.

    ``num_undrawn`` and ``num_unconsumed`` count live samples. They differ only after a reset of consumption: samples
    in the ledger are then unconsumed, but not drawn into another batch. ``num_done`` counts samples that were consumed
    or cleared, each time: it only grows. ``asked_at``: when a fetch of the task was looked at last; None: never.
    """

    def __init__(self, task: str, tokens: str, table: RowTable, schema: Schema, tags: TagStore) -> None:
        """``tokens``: the prefix of its batches' tokens."""
        self.task = task
        self.ledger = Ledger(tokens, table.copies)
        self._ended: dict[str | None, StreamEnd] = {}  # by filter
        self._table = table
        self._schema = schema
        self._tags = tags
        self.columns = f"given:{task}", f"consumed:{task}"
        table.add_column(self.columns[0], np.int32)
        table.add_column(self.columns[1], np.bool_)
        self.num_undrawn = self._num_offered = len(self._live())
        self.num_done = 0
        self.asked_at: float | None = None
        self.starved_s: float | None = None
        """How long the reader of the first rank's stream has waited for batches, as it has said last."""
        self.hands = Hands(task, table)
        self._ready: KeptSets[ReadyKey] = KeptSets()
        self._undrawn_with: dict[str, int] = {}  # by field, once a reply has reported how many samples lack it
        self._decided = 0
        self._over_at: int | None = None
        self._over_ranks: set[int] = set()
        self._ends: dict[int | None, list[int]] = {}

    @property
    def given(self) -> npt.NDArray[np.int32]:
        return self._table.column(self.columns[0])

    @property
    def consumed(self) -> npt.NDArray[np.bool_]:
        return self._table.column(self.columns[1])

    @property
    def num_unconsumed(self) -> int:
        return self._num_offered - self.num_done

    def take_decided(self) -> bool:
        """Whether something has happened since the last call that may decide a fetch which must not draw."""
        before, self._decided = self._decided, self.ledger.num_changes
        return before != self._decided

    def _live(self) -> Rows:
        live: Rows = (self._table.column("state") == RowState.LIVE).nonzero()[0]
        return live

    # ---- what is ready ----

    def ready(self, fields: FieldNames, where: str | None = None) -> ReadySet:
        """The ready set for these fields, made by one scan on first use and then kept up to date.

        With a filter it is a ``FilteredSet``, and each sample is compared once, and again when its tags change.
        """
        return self._ready.get((fields, where), lambda: matching(where, self._tags, self._every_drawable(fields)))

    def lacking(self, name: str) -> int:
        """The number of undrawn samples without this field: counted once, then updated by each publish."""
        if name not in self._undrawn_with:
            if name not in self._schema.counts:
                return self.num_undrawn
            self._undrawn_with[name] = int(np.count_nonzero(self._every_drawable((name,))))
        return self.num_undrawn - self._undrawn_with[name]

    def ready_counts(self) -> dict[str, int]:
        """Ready samples for every set of fields that was requested, as "a,b" or "a,b where <filter>"."""
        return {
            ",".join(fields) + (f" where {where}" if where is not None else ""): ready.count
            for (fields, where), ready in self._ready.items()
        }

    def _every_drawable(self, fields: FieldNames) -> npt.NDArray[np.bool_]:
        mask: npt.NDArray[np.bool_] = (self._table.column("state") == RowState.LIVE) & (self.given == 0)
        for name in fields:
            mask &= self._schema.has(name)
        return mask

    def inserted(self, count: int) -> None:
        """Count new samples."""
        self.num_undrawn += count
        self._num_offered += count

    def published(self, rows: Rows, news: Mapping[str, Rows]) -> None:
        """Live rows have these fields now. ``news``: by field, the rows that did not have it before, each once."""
        self.ledger.samples_changed()
        if self.hands.counts:
            added = ascending(rows[self.given[rows] == IN_HAND])
            added = added[self._schema.complete(added, self.hands.fields)]
            self.given[added] = UNLEDGERED
            self._leave_hands(added)
        undrawn = rows[self.given[rows] == 0]
        for (fields, _), ready in self._ready.items():
            if not news.keys().isdisjoint(fields):
                ready.add(undrawn[self._schema.complete(undrawn, fields)])
        for name in self._undrawn_with.keys() & news.keys():
            self._undrawn_with[name] += int(np.count_nonzero(self.given[news[name]] == 0))

    def lost(self, lost: Mapping[str, Rows]) -> None:
        """``lost``: by field, the rows that don't have it any more."""
        for (fields, _), ready in self._ready.items():
            for name in lost.keys() & set(fields):
                ready.discard(lost[name])
        for name in self._undrawn_with.keys() & lost.keys():
            self._undrawn_with[name] -= int(np.count_nonzero(self.given[lost[name]] == 0))

    def retagged(self, rows: Rows) -> None:
        """The tags of these rows changed: filters are to be compared with them again."""
        for (fields, where), ready in self._ready.items():
            if where is not None:
                undrawn = rows[(self.given[rows] == 0) & (self._table.column("state")[rows] == RowState.LIVE)]
                ready.add(undrawn[self._schema.complete(undrawn, fields)])

    # ---- what was given ----

    def give(self, rows: Rows, number: int | npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Mark live rows as consumed under a ledger entry's number, or each under its own.

        Returns which of them were not given before.
        """
        if self._table.copies:
            self._table.copies.make()
        given, consumed = self.given, self.consumed
        is_fresh: npt.NDArray[np.bool_] = given[rows] == 0
        fresh = rows[is_fresh]
        given[fresh] = number if isinstance(number, int) else number[is_fresh]
        self.num_undrawn -= len(fresh)
        self.num_done += int(np.count_nonzero(~consumed[rows]))
        consumed[rows] = True
        self._drawn(fresh)
        return is_fresh

    def hand(self, client: str, rows: Rows, adds: FieldNames) -> None:
        """The client that was given these rows without a ledger entry is to add fields to those that lack one."""
        self.hands.fields = adds
        lacking = rows[~self._schema.complete(rows, adds)]
        self.given[lacking] = IN_HAND
        self.hands.take(client, lacking)

    def drop_hand(self, client: str) -> None:
        """The client has ended. What it had in hand is given again."""
        self.release(self.hands.of(client, self.given == IN_HAND), IN_HAND)

    def _leave_hands(self, rows: Rows) -> None:
        self.hands.leave(rows)
        if self._ended or not self.num_undrawn:
            self.ledger.num_changes += 1  # other clients of the task wait for its end until nothing is in hand

    def release(self, rows: Rows, number: int) -> None:
        """Return rows given under this number to the undrawn ones, because no client received them."""
        back = ascending(rows[self.given[rows] == number])
        if not len(back):
            return
        self._table.copies.make()
        self.given[back] = 0
        if number == IN_HAND:
            self._leave_hands(back)
        self.num_undrawn += len(back)
        self._num_offered += int(np.count_nonzero(self.consumed[back]))
        self.consumed[back] = False
        for (fields, _), ready in self._ready.items():
            ready.add(back[self._schema.complete(back, fields)])
        for name in self._undrawn_with:
            self._undrawn_with[name] += int(np.count_nonzero(self._schema.has(name)[back]))
        self._ended.clear()  # they may have been the last ones

    def cleared(self, rows: Rows, settles: bool = True) -> None:
        """The rows are about to be cleared. ``settles``: ledger entries without samples are acknowledged."""
        live = rows[self._table.column("state")[rows] == RowState.LIVE]
        given = self.given[live]
        undrawn = live[given == 0]
        if self.hands.counts:
            gone = ascending(live[given == IN_HAND])
            self.given[gone] = UNLEDGERED
            self._leave_hands(gone)
        self.num_undrawn -= len(undrawn)
        self.num_done += int(np.count_nonzero(~self.consumed[live]))
        self.ledger.samples_cleared(given, settles)
        self.ledger.samples_changed()
        self._drawn(undrawn)

    def _drawn(self, rows: Rows) -> None:
        """Rows are no longer undrawn."""
        if not len(rows):
            return
        for _, ready in self._ready.items():
            ready.discard(rows)
        for name in self._undrawn_with:
            self._undrawn_with[name] -= int(np.count_nonzero(self._schema.has(name)[rows]))

    def reset(self, dp_size: int | None = None) -> None:
        """Mark all samples as unconsumed. Batches in the ledger keep their samples, so equal requests get equal
        answers, but for those that were drawn for another number of ranks than ``dp_size`` (None: not known).
        """
        self._table.copies.make()
        for entry in self.ledger.open_entries():
            if not self._table.find(entry.indexes)[1].any():
                self.ledger.close(entry)
        kept = self.ledger.reset(dp_size)
        given = self.given
        given[~np.isin(given, kept)] = 0
        self.consumed[:] = False
        self.hands.clear()
        live = self._live()
        self.num_undrawn, self._num_offered = int(np.count_nonzero(given[live] == 0)), self.num_done + len(live)
        self._ended.clear()
        self._over_at, self._over_ranks = None, set()
        self._ends.clear()
        self._undrawn_with.clear()
        self.rebuild()

    def rebuild(self) -> None:
        """Row numbers changed: rebuild the ready sets on next use."""
        self._ready.clear()

    # ---- the end of a sealed stream ----

    def end(self, where: str | None, reason: str, dropped: int) -> None:
        """The stream of fetches with this filter ended. Other filters go on."""
        self._table.copies.make()
        self._ended[where] = StreamEnd(reason, dropped)
        self.ledger.num_changes += 1
        if len(self._ended) > _MAX_FILTERS_ENDED:
            del self._ended[next(name for name in self._ended if name is not None)]

    def end_of(self, where: str | None) -> StreamEnd | None:
        """How the stream with this filter ended; None: it didn't."""
        return self._ended.get(where)

    @property
    def has_ended(self) -> bool:
        """Whether the stream has ended, with some filter or without."""
        return bool(self._ended)

    @property
    def num_dropped(self) -> int:
        """Samples that the ended streams, one per filter, have left over."""
        return sum(end.dropped for end in self._ended.values())

    # ---- the end of an unsealed stream ----

    def is_past_end(self, readers: int | None, pass_start: int, batch_index: int) -> bool:
        """Whether the pass that began at ``pass_start`` has ended at this batch or before."""
        ends = self._ends.get(readers, [])
        at = bisect_right(ends, pass_start)
        return at < len(ends) and ends[at] <= batch_index

    def end_pass(self, readers: int | None, batch_index: int) -> None:
        """A pass that began earlier ends before this batch for all of its readers; the next pass may begin here."""
        self._table.copies.make()
        ends = self._ends.setdefault(readers, [])
        if batch_index not in ends:
            insort(ends, batch_index)
            self.ledger.num_changes += 1
            del ends[:-_MAX_ENDS]

    def is_over(self, batch_index: int | None) -> bool:
        """Whether one rank got the end of stream for this batch, so that the other ranks must get it, too."""
        return batch_index is not None and self._over_at is not None and batch_index >= self._over_at

    def record_over(self, batch_index: int, dp_rank: int, dp_size: int) -> None:
        """Record that a rank got the end of stream. Once all ranks did, samples that arrived since may be drawn."""
        self._table.copies.make()
        self._over_at = batch_index if self._over_at is None else min(batch_index, self._over_at)
        self._over_ranks.add(dp_rank)
        self.ledger.num_changes += 1
        if len(self._over_ranks) >= dp_size:
            self._over_at, self._over_ranks = None, set()

    # ---- checkpoints ----

    def save(self) -> SavedConsumer:
        """Save everything except the columns and the ledger's entries. Ready sets are made again at their next use."""
        ended = {} if self.hands.counts else self._ended  # a load gives that to others, so the end comes again
        reason, dropped = ended.get(None, (None, 0))
        with_filter = [(where, *end) for where, end in ended.items() if where is not None]
        return SavedConsumer(
            self.task, b"", b"", self.ledger.save(), reason, dropped,
            self._over_at, sorted(self._over_ranks), list(self._ends.items()), with_filter,
        )  # fmt: skip

    def load(self, saved: SavedConsumer, shift: int, start: int) -> npt.NDArray[np.int32]:
        """Load what was saved of the rows from ``start`` on, which count as inserted. Returns their batch numbers.

        Raises ValueError where that contradicts itself.
        """
        given, consumed = self.given[start:], self.consumed[start:]
        given[:] = np.frombuffer(saved.given, dtype="<i4")
        consumed[:] = np.frombuffer(saved.consumed, dtype=np.bool_)
        in_hand = given == IN_HAND  # of clients that there are no more
        given[in_hand], consumed[in_hand] = 0, False
        live = self._table.column("state")[start:] == RowState.LIVE
        if (consumed & (given == 0) & live).any():
            raise ValueError(f"task {self.task!r} has consumed what it wasn't given")
        self.num_undrawn -= int(np.count_nonzero(given[live]))
        self._num_offered -= int(np.count_nonzero(consumed[live]))
        self.ledger.load(saved.ledger, shift)
        self._ended = {where: StreamEnd(reason, dropped) for where, reason, dropped in saved.ended_filters}
        if saved.ended is not None:
            self._ended[None] = StreamEnd(saved.ended, saved.dropped)
        self._over_at, self._over_ranks = saved.over_at, set(saved.over_ranks)
        self._ends = {readers: list(ends) for readers, ends in saved.ends}
        of_batches: npt.NDArray[np.int32] = given[live & (given > 0)]
        return of_batches

    def check_invariants(self) -> None:
        """Raise AssertionError if the records disagree; for tests."""
        for (fields, _), ready in self._ready.items():
            ready.check_invariants(self._every_drawable(fields).nonzero()[0])
        for name, count in self._undrawn_with.items():
            assert count == np.count_nonzero(self._every_drawable((name,))), f"undrawn ones with {name!r} are counted"
        live = self._live()
        assert self.num_undrawn == np.count_nonzero(self.given[live] == 0), "undrawn samples are counted"
        assert self.num_unconsumed == np.count_nonzero(~self.consumed[live]), "unconsumed samples are counted"
        assert not (self.consumed[live] & (self.given[live] == 0)).any(), "what is consumed was given"
        in_hand = live[self.given[live] == IN_HAND]
        assert not self._schema.complete(in_hand, self.hands.fields).any(), "what is in hand lacks a field"
        self.hands.check_invariants(in_hand)
        self.ledger.check_invariants(self.given[live])
