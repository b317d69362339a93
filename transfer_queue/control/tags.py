# SPDX-License-Identifier: Apache-2.0
"""Tags of one partition's samples, stored packed: one dict each would take most of the controller's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.control.rows import Rows, RowTable
from transfer_queue.protocol import Indexes, Tags

_COLUMN = "tags"
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Tags)
_list_decoder = msgspec.msgpack.Decoder(list[Tags])


class TagStore(Mapping[int, Tags]):
    """Global index -> tags, for samples with tags, in a column of the partition's table. Reads return copies."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._num_freed = 0
        self._watches: list[dict[int, bytes | None]] = []

    def put(self, row: int, tags: Tags, merge: bool) -> None:
        """Set the row's tags; ``merge`` keeps other existing tags."""
        if not self._table.has_column(_COLUMN):
            self._table.add_column(_COLUMN, np.object_, None)
        column = self._table.column(_COLUMN)
        for watch in self._watches:
            watch.setdefault(self._table.column("index").item(row), column[row])
        if merge and column[row]:
            tags = {**_decoder.decode(column[row]), **tags}
        column[row] = _encoder.encode(tags) if tags else None

    def of(self, indexes: Indexes, rows: Rows) -> dict[int, Tags]:
        """The tags of those samples that have some; ``rows`` are the samples' rows."""
        if not self._table.has_column(_COLUMN):
            return {}
        packed = self._table.column(_COLUMN)[rows].tolist()
        return {i: _decoder.decode(own) for i, own in zip(indexes.tolist(), packed, strict=True) if own}

    def tagged(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """[len(rows)] Which of these rows have tags."""
        if not self._table.has_column(_COLUMN):
            return np.zeros(len(rows), dtype=np.bool_)
        return self._table.column(_COLUMN)[rows].astype(np.bool_)

    def has_any(self) -> bool:
        """Whether any sample has had tags."""
        return self._table.has_column(_COLUMN)

    def shrink(self, count: int) -> bool:
        """Free the tags of up to ``count`` rows, the last ones first. Returns whether there are more."""
        if not self._table.has_column(_COLUMN):
            return False
        column = self._table.column(_COLUMN)
        self._num_freed = min(len(column), self._num_freed + count)
        column[len(column) - self._num_freed :][:count] = None
        return self._num_freed < len(column)

    def watch(self) -> dict[int, bytes | None]:
        """From now on tags are kept in here before they change, for ``save``."""
        self._watches.append({})
        return self._watches[-1]

    def unwatch(self, watch: dict[int, bytes | None]) -> None:
        self._watches = [each for each in self._watches if each is not watch]

    def save(self, indexes: Indexes, before: Mapping[int, bytes | None]) -> tuple[list[int], list[bytes]]:
        """Which of these samples had tags when ``before`` began, by their position; and the tags, packed."""
        if not self._table.has_column(_COLUMN):
            return [], []
        rows, found = self._table.find(indexes)
        column = self._table.column(_COLUMN)[rows] if self._table.size else np.empty(len(rows), dtype=np.object_)
        column[~found] = None
        packed = column.tolist()
        if before:
            packed = [before.get(i, own) for i, own in zip(indexes.tolist(), packed, strict=True)]
        return [at for at, own in enumerate(packed) if own], [own for own in packed if own]

    def load(self, rows: Rows, packed: Sequence[bytes]) -> None:
        """Tags of these rows, which must have none. Raises msgspec.DecodeError for what are none."""
        if not len(packed):
            return
        _list_decoder.decode(b"\xdd" + len(packed).to_bytes(4, "big") + b"".join(packed))  # a msgpack array of them
        if not self._table.has_column(_COLUMN):
            self._table.add_column(_COLUMN, np.object_, None)
        column = self._table.column(_COLUMN)
        for row, own in zip(rows.tolist(), packed, strict=True):
            column[row] = own

    def forget(self, rows: Rows) -> None:
        """These rows' samples are gone."""
        if not self._table.has_column(_COLUMN):
            return
        column = self._table.column(_COLUMN)
        for watch in self._watches:
            for index, own in zip(self._table.column("index")[rows].tolist(), column[rows].tolist(), strict=True):
                if own:
                    watch.setdefault(index, own)
        column[rows] = None

    def __getitem__(self, index: int) -> Tags:
        wanted = np.array([index], dtype=np.int64)
        rows, found = self._table.find(wanted)
        return self.of(wanted[found], rows[found])[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._table.column("index")[self._rows()].tolist())

    def __len__(self) -> int:
        return len(self._rows())

    def _rows(self) -> Rows:
        if not self._table.has_column(_COLUMN):
            return np.empty(0, dtype=np.intp)
        return self._table.column(_COLUMN).nonzero()[0]
