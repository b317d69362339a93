# SPDX-License-Identifier: Apache-2.0
"""UnreadBatch: a batch that the queue keeps until this process has read its values, or can't read them any more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class UnreadBatch:
    """Shared by all metadata made from one batch: its copies, chunks and joins. With the last of them it ends.

    A pickled one is of no effect, because another process can't say what this one may still read.
    """

    __slots__ = ("_call", "_fields", "_left", "_read")

    def __init__(
        self, call: int = 0, indexes: Iterable[int] = (), fields: Iterable[str] = (), read: set[int] | None = None
    ) -> None:
        """``read``: where the session collects such fetches; ``call`` is added to it at the end."""
        self._call = call
        self._fields = frozenset(fields)
        self._read = set() if read is None else read
        self._left = set(indexes)

    def was_read(self, indexes: Iterable[int], fields: Iterable[str]) -> None:
        """These fields of these samples were read. Some of the fields are not enough: the others may still be read."""
        if self._left and self._fields.issubset(fields):
            self._left.difference_update(indexes)
            if not self._left:
                self._read.add(self._call)

    def __del__(self) -> None:  # in any thread, between any two steps of it: adding to a set is one step
        if getattr(self, "_left", None):  # Ctrl-C may have come before it was set
            self._read.add(self._call)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnreadBatch:
        return self

    def __reduce__(self) -> tuple[type[UnreadBatch], tuple[()]]:
        return UnreadBatch, ()
