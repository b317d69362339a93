# SPDX-License-Identifier: Apache-2.0
"""Which samples of a task its clients have in hand, to add fields to them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transfer_queue.control.rows import Rows, RowTable
from transfer_queue.errors import InvalidRequestError


class Hands:
    """``fields``: what the clients add. ``counts``: by client, the samples that it has and that lack one of these."""

    def __init__(self, task: str, table: RowTable) -> None:
        self.fields: tuple[str, ...] = ()
        self.counts: dict[str, int] = {}
        self.column = f"holder:{task}"
        """The number of each sample's client, valid while that has it."""
        self._task, self._table = task, table
        self._numbers: dict[str, int] = {}
        self._next_number = itertools.count(1)

    @property
    def _holders(self) -> npt.NDArray[np.int32]:
        return self._table.ensure_column(self.column, np.int32)

    def check(self, fields: Sequence[str]) -> None:
        """Raises InvalidRequestError while clients add other fields."""
        if self.counts and set(self.fields) != set(fields):
            raise InvalidRequestError(
                f"other clients of task {self._task!r} add {list(self.fields)}, and this fetch says "
                f"adds={list(fields)}. Use another task name for other fields."
            )

    def take(self, client: str, rows: Rows) -> None:
        """Rows that nobody has are in this client's hand from now on."""
        if len(rows):
            self._holders[rows] = self._numbers.setdefault(client, next(self._next_number))
            self.counts[client] = self.counts.get(client, 0) + len(rows)

    def leave(self, rows: Rows) -> None:
        """Rows that some client has, each once, are in no hand any more."""
        left = Counter(self._holders[rows].tolist())
        for client, number in list(self._numbers.items()) if left else ():
            if number in left:
                self.counts[client] -= left[number]
                if not self.counts[client]:
                    del self.counts[client], self._numbers[client]

    def of(self, client: str, in_hand: npt.NDArray[np.bool_]) -> Rows:
        """What this client has of the rows that are in some hand."""
        rows: Rows = (in_hand & (self._holders == self._numbers.get(client, 0))).nonzero()[0]
        return rows

    def others_have(self, client: str) -> bool:
        """Whether other clients than this one have some."""
        return len(self.counts) > (client in self.counts)

    def clear(self) -> None:
        self.counts.clear()
        self._numbers.clear()

    def check_invariants(self, in_hand: Rows) -> None:
        """Raise AssertionError if the records disagree; for tests."""
        numbers = self._holders[in_hand].tolist()
        found = {client: numbers.count(number) for client, number in self._numbers.items()}
        assert self.counts == found, "what each client has in hand is counted"
        assert set(numbers) == set(self._numbers.values()), "whatever is in hand has a client"
