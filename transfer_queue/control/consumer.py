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
    """Status columns and ready sets of one task. "given" holds the ledger entry's number, 0 where still to draw."""

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
        table.add_column(self._consumed, np.uint8)
        self._ready: dict[FieldNames, ReadySet] = {}

    @property
    def given(self) -> npt.NDArray[np.int32]:
        return self._table.column(self._given)

    @property
    def consumed(self) -> npt.NDArray[np.uint8]:
        return self._table.column(self._consumed)

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
        return rows[live & (self.given[rows] == 0) & self._schema.complete(rows, fields)]

    def published(self, rows: Rows, names: set[str]) -> None:
        """The rows have these fields now."""
        for fields, ready in self._ready.items():
            if not names.isdisjoint(fields):
                ready.add(self._drawable(rows, fields))

    def give(self, rows: Rows, number: int) -> int:
        """Mark rows consumed under a ledger entry's number; returns how many hadn't been given before."""
        fresh = rows[self.given[rows] == 0]
        self.given[fresh] = number
        self.consumed[rows] = 1
        self._discard(fresh)
        return len(fresh)

    def cleared(self, rows: Rows) -> None:
        """The rows' samples are being cleared."""
        self.ledger.samples_cleared(self.given[rows])
        self._discard(rows)

    def _discard(self, rows: Rows) -> None:
        for ready in self._ready.values():
            ready.discard(rows)

    def reset(self) -> None:
        """Nothing is consumed any more. Ledger entries stay: equal questions get equal answers."""
        self.given[:] = 0
        self.consumed[:] = 0
        self.ended, self.dropped = None, 0
        self.ledger.reset()
        self.rebuild()

    def rebuild(self) -> None:
        """Row numbers changed: make the ready sets again at their next use."""
        self._ready.clear()

    def check_invariants(self) -> None:
        """Raises AssertionError where the books disagree; for tests."""
        every = np.arange(self._table.size)
        for fields, ready in self._ready.items():
            expected = self._drawable(every, fields)
            kept = [rows for rows in ready.blocks()]
            assert np.array_equal(np.concatenate(kept) if kept else np.empty(0, dtype=np.intp), expected), fields
            assert ready.count == len(expected), fields
        self.ledger.check_invariants(self.given[self._table.column("state") == RowState.LIVE])
