# SPDX-License-Identifier: Apache-2.0
"""One task's view of one partition: what is ready for it, what it consumed, its ledger."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from transfer_queue.control.ledger import Ledger
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.rows import Rows, RowState, RowTable
from transfer_queue.control.schema import Schema

UNLEDGERED = -1
"""In the "given" column: handed out without a ledger entry."""

FieldNames = tuple[str, ...]


class Consumer:
    """Status columns and ready sets of one task. "given" holds the ledger entry's number, 0 where still to draw.

    ``num_undrawn`` and ``num_unconsumed`` count live samples. They differ only after a reset of consumption: what the
    ledger still names isn't consumed then, and isn't drawn into another batch either.
    """

    def __init__(self, task: str, partition: str, incarnation: int, table: RowTable, schema: Schema) -> None:
        self.task = task
        self.ledger = Ledger(f"{partition}/{task}/{incarnation}")
        self.ended: str | None = None
        self.dropped = 0
        self._table = table
        self._schema = schema
        self._given = f"given:{task}"
        self._consumed = f"consumed:{task}"
        table.add_column(self._given, np.int32)
        table.add_column(self._consumed, np.bool_)
        self.num_undrawn = self.num_unconsumed = len(self._live())
        self._ready: dict[FieldNames, ReadySet] = {}
        self._over_at: int | None = None
        self._told: set[int] = set()

    @property
    def given(self) -> npt.NDArray[np.int32]:
        return self._table.column(self._given)

    @property
    def consumed(self) -> npt.NDArray[np.bool_]:
        return self._table.column(self._consumed)

    def _live(self) -> Rows:
        return np.flatnonzero(self._table.column("state") == RowState.LIVE)

    # ---- what is ready ----

    def ready(self, fields: FieldNames) -> ReadySet:
        """The set for these fields, made by one scan at first use and kept up to date after."""
        if fields not in self._ready:
            ready = self._ready[fields] = ReadySet(self._table.size)
            ready.add(self._drawable(np.arange(self._table.size), fields))
        return self._ready[fields]

    def ready_counts(self) -> dict[FieldNames, int]:
        """Samples ready, for every set of fields that was asked for."""
        return {fields: ready.count for fields, ready in self._ready.items()}

    def _drawable(self, rows: Rows, fields: FieldNames) -> Rows:
        live = self._table.column("state")[rows] == RowState.LIVE
        drawable: Rows = rows[live & (self.given[rows] == 0) & self._schema.complete(rows, fields)]
        return drawable

    def inserted(self, count: int) -> None:
        """So many rows became samples."""
        self.num_undrawn += count
        self.num_unconsumed += count

    def published(self, rows: Rows, names: set[str]) -> None:
        """The rows have these fields now."""
        for fields, ready in self._ready.items():
            if not names.isdisjoint(fields):
                ready.add(self._drawable(rows, fields))

    # ---- what was given ----

    def give(self, rows: Rows, number: int) -> int:
        """Mark live rows consumed under a ledger entry's number; returns how many hadn't been given before."""
        given = self.given
        fresh = rows[given[rows] == 0]
        given[fresh] = number
        self.num_undrawn -= len(fresh)
        self.num_unconsumed -= int(np.count_nonzero(~self.consumed[rows]))
        self.consumed[rows] = True
        self._discard(fresh)
        return len(fresh)

    def cleared(self, rows: Rows) -> None:
        """The rows are about to be cleared. Ledger entries with no sample left are settled."""
        live = rows[self._table.column("state")[rows] == RowState.LIVE]
        given = self.given[live]
        self.num_undrawn -= int(np.count_nonzero(given == 0))
        self.num_unconsumed -= int(np.count_nonzero(~self.consumed[live]))
        self.ledger.samples_cleared(given)
        self._discard(live)

    def _discard(self, rows: Rows) -> None:
        for ready in self._ready.values():
            ready.discard(rows)

    def reset(self) -> None:
        """Nothing is consumed any more. Batches of the ledger keep their samples: equal questions, equal answers."""
        kept = self.ledger.reset()
        given = self.given
        given[~np.isin(given, kept)] = 0
        self.consumed[:] = False
        live = self._live()
        self.num_undrawn, self.num_unconsumed = int(np.count_nonzero(given[live] == 0)), len(live)
        self.ended, self.dropped = None, 0
        self._over_at, self._told = None, set()
        self.rebuild()

    def rebuild(self) -> None:
        """Row numbers changed: make the ready sets again at their next use."""
        self._ready.clear()

    # ---- the end of a stream that nobody sealed ----

    def is_over(self, batch_index: int | None) -> bool:
        """One rank was told that this batch doesn't exist, so the others are told the same."""
        return batch_index is not None and self._over_at is not None and batch_index >= self._over_at

    def tell_over(self, batch_index: int, dp_rank: int, dp_size: int) -> None:
        """A rank is told so. Once all of them were, samples that came since may be drawn."""
        self._over_at = batch_index if self._over_at is None else min(batch_index, self._over_at)
        self._told.add(dp_rank)
        if len(self._told) >= dp_size:
            self._over_at, self._told = None, set()

    def check_invariants(self) -> None:
        """Raises AssertionError where the books disagree; for tests."""
        every = np.arange(self._table.size)
        for fields, ready in self._ready.items():
            expected = self._drawable(every, fields)
            kept = list(ready.blocks())
            assert np.array_equal(np.concatenate(kept) if kept else np.empty(0, dtype=np.intp), expected), fields
            assert ready.count == len(expected), fields
        live = self._live()
        assert self.num_undrawn == np.count_nonzero(self.given[live] == 0), "undrawn samples are counted"
        assert self.num_unconsumed == np.count_nonzero(~self.consumed[live]), "unconsumed samples are counted"
        assert not (self.consumed[live] & (self.given[live] == 0)).any(), "what is consumed was given"
        self.ledger.check_invariants(self.given[live])
