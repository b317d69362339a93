# SPDX-License-Identifier: Apache-2.0
"""BatchMeta: a handle to samples and fields: their rows, schema and tags. Plain data without I/O."""
# Processes without torch import this file, so torch is loaded only when a TensorDict comes in.

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import InvalidRequestError
from transfer_queue.metadata.annotations import Annotations, copy_tags, merge_extra_info, same_value
from transfer_queue.metadata.field_schema import (
    Schema,
    Shape,
    described_rows,
    dtypes_of,
    extract_field_schema,
    join_rows,
    normalized,
    shapes_of,
    take_rows,
)
from transfer_queue.metadata.kv_meta import KVBatchMeta
from transfer_queue.metadata.meta_rows import (
    as_ints,
    check_in_range,
    check_lengths,
    check_permutation,
    consecutive,
    even_sizes,
    pick,
)

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["BatchMeta", "KVBatchMeta", "extract_field_schema"]


class BatchMeta(Annotations):
    """Handle to a batch of samples.

    Row attributes are aligned: position ``i`` of each belongs to sample ``global_indexes[i]``.
    Row operations return new objects; what they share with the original is never written in place.

    Examples:
        >>> meta = client.put({"x": torch.arange(6), "y": torch.arange(6)}, partition_id="train")
        >>> first, second = meta.select_fields("x").chunk(2)
        >>> client.get_data(second)["x"]
        tensor([3, 4, 5])
        >>> tq.BatchMeta.concat([second, first]).size
        6
    """

    partition_ids: list[str]
    production_status: NDArray[np.int8]
    _custom_backend_meta: list[dict[str, Any]]
    field_schema: Schema
    token: str | None
    """Names the ledger entry of this batch; None if it was made by hand or joined from several."""
    batch_index: int | None
    """Position of the batch in its consumer's stream; None where it has none, or was joined from several."""
    heads: list[int] | None  # by row, its group's own row; -1: no group; None: no row has a group
    group_versions: dict[int, int]  # by head, the policy version of its first lease
    most_rows: int  # the most rows that a rank got of the round of whole groups that this is one of; 0: unknown
    cut: list[int]  # rows of each micro-batch of the batch as it was drawn, if its sampler says so
    micro_batch: tuple[int, int] | None
    """Of a stream of groups: the number of this micro-batch of its batch, from 1 on, and how many there are."""
    remains: list[bool] | None  # by row of the batch as it was drawn, whether it is still there; None: all are
    unread: tuple[UnreadBatch, ...]  # the batches of these rows that the queue keeps until they are read
    __slots__ = tuple(__annotations__)

    def __init__(
        self,
        global_indexes: Iterable[int] | None = None,
        partition_ids: Iterable[str] | None = None,
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: Any = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        _custom_backend_meta: Sequence[Mapping[str, Any]] | None = None,
        *,
        padding_mask: Sequence[bool] | None = None,
        token: str | None = None,
        batch_index: int | None = None,
    ) -> None:
        """Containers are copied one level deep.

        Args:
            production_status: [N] 1 if a sample's fields are ready; zeros by default.
            padding_mask: True for rows that only repeat a sample to fill the batch.
            token: Names the ledger entry the batch came from, for its ack.
            batch_index: Position of the batch in its consumer's stream.
        Raises:
            ValueError: lengths disagree.
        """
        self.global_indexes = as_ints(global_indexes) if global_indexes is not None else []
        self.partition_ids = list(partition_ids) if partition_ids is not None else []
        size = len(self.global_indexes)
        named = {
            "partition_ids": self.partition_ids, "production_status": production_status, "custom_meta": custom_meta,
            "_custom_backend_meta": _custom_backend_meta, "padding_mask": padding_mask,
        }  # fmt: skip
        check_lengths(named, size)
        status = np.zeros(size) if production_status is None else production_status
        self.production_status = np.array(status, dtype=np.int8)
        self.custom_meta = [{} for _ in range(size)] if custom_meta is None else list(map(dict, custom_meta))
        self._custom_backend_meta = (
            [{} for _ in range(size)] if _custom_backend_meta is None else list(map(dict, _custom_backend_meta))
        )
        self._padding = [False] * size if padding_mask is None else list(map(bool, padding_mask))
        self.field_schema = normalized(field_schema, size) if field_schema else {}
        self.extra_info = dict(extra_info or {})
        self.token = token
        self.batch_index = batch_index
        self.heads, self.group_versions, self.most_rows = None, {}, 0
        self.cut, self.micro_batch, self.remains = [], None, None
        self.unread = ()
        self.mark_custom_meta_clean()

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
        """Metadata of no samples, which means "not yet" in polling mode."""
        return cls(extra_info=extra_info)

    # --- contents ---

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.global_indexes)

    @property
    def field_names(self) -> list[str]:
        """Names of the fields that it describes, sorted."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """Whether there are rows and all of them are produced."""
        return self.size > 0 and bool(np.all(np.asarray(self.production_status) == 1))

    @property
    def samples(self) -> SamplesView:
        """Read-only rows, created on access."""
        return SamplesView(self)

    @property
    def padding_mask(self) -> list[bool]:
        """True for rows that only repeat a sample to fill the batch: mask them in a loss."""
        return list(self._padding)

    @property
    def group_index(self) -> list[int]:
        """By row, the number of its group in this batch, counted in order of first appearance. For ``get_heads``.

        Raises:
            InvalidRequestError: a row belongs to no group.
        """
        heads = self.heads or [-1] * self.size
        if -1 in heads:
            raise InvalidRequestError("some samples of this batch belong to no group: they were put without a lease.")
        numbers = {head: number for number, head in enumerate(dict.fromkeys(heads))}
        return [numbers[head] for head in heads]

    def get_dtypes(self, field_name: str) -> list[Any]:
        """One dtype per row; KeyError for an unknown field."""
        return dtypes_of(self._entry(field_name), self.size)

    def get_shapes(self, field_name: str) -> list[Shape | None]:
        """One shape per row; KeyError for an unknown field."""
        return shapes_of(self._entry(field_name), self.size)

    def _entry(self, field_name: str) -> dict[str, Any]:
        if field_name not in self.field_schema:
            raise KeyError(f"no field {field_name!r} in this batch, it has {self.field_names}")
        return self.field_schema[field_name]

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, "
            f"global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchMeta):
            return NotImplemented
        return all(same_value(getattr(self, name), getattr(other, name)) for name in _COMPARED)

    # --- rows ---

    def __getitem__(self, item: Any) -> BatchMeta:
        """The batch of one row, or of a slice."""
        if isinstance(item, slice):
            return self._take(item)
        try:
            position = operator.index(item)
        except TypeError:
            raise TypeError(
                f"a batch is indexed by an int or a slice, not by {type(item).__name__}; for a list use select_samples"
            ) from None
        if not -self.size <= position < self.size:
            raise IndexError(f"row {position} of a batch of {self.size} rows")
        position %= self.size
        return self._take(slice(position, position + 1))

    def __iter__(self) -> Iterator[BatchMeta]:
        return (self[position] for position in range(self.size))

    def select_samples(self, sample_indices: Iterable[int]) -> BatchMeta:
        """The rows at these positions, in this order, repeats allowed; ValueError if one is out of range."""
        positions = as_ints(sample_indices)
        check_in_range(positions, self.size)
        return self._take(positions)

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Consecutive parts, the first ``size % chunks`` one row larger; too many give empty ones and a warning."""
        return self.chunk_by_size(even_sizes(self.size, chunks))

    def chunk_by_size(self, sizes: Iterable[int]) -> list[BatchMeta]:
        """Consecutive parts of these sizes. Cut the data by the same sizes to keep rows aligned with their metadata."""
        return [self._take(rows) for rows in consecutive(sizes, self.size)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """One batch per partition, in order of first appearance; rows keep their order."""
        positions: dict[str, list[int]] = {}
        for position, partition in enumerate(self.partition_ids):
            positions.setdefault(partition, []).append(position)
        return [self._take(rows) for rows in positions.values()]

    def reorder(self, indices: Iterable[int]) -> None:
        """Reorder the rows in place; ValueError unless every position is named once."""
        positions = as_ints(indices)
        check_permutation(positions, self.size)
        self._adopt(self._take(positions))

    def copy(self) -> BatchMeta:
        """Deep copy."""
        copied = self._take(slice(None))
        copied.extra_info = copy.deepcopy(self.extra_info)
        copied.field_schema = copy.deepcopy(self.field_schema)
        copied._custom_backend_meta = [copy.deepcopy(row) if row else {} for row in self._custom_backend_meta]
        return copied

    @classmethod
    def concat(cls, data: Iterable[BatchMeta | None], validate: bool = True) -> BatchMeta:
        """The rows of all parts, one part after the other; None and empty parts are skipped.

        ``validate=False`` trusts the caller: it keeps the common fields, and the last value of each extra_info key.
        Dtypes may then differ; ``get_data`` wants one per field.

        Raises:
            ValueError: field names, dtypes or values in extra_info differ.
        """
        parts = [part for part in data if part is not None and part.size]
        if not parts:
            return cls.empty()
        whole = cls(extra_info=merge_extra_info([part.extra_info for part in parts], validate=validate))
        whole._set_rows({name: [row for part in parts for row in getattr(part, name)] for name in _OF_ROWS})
        whole.production_status = np.concatenate([np.asarray(part.production_status, dtype=np.int8) for part in parts])
        if any(part.heads is not None for part in parts):
            whole.heads = [head for part in parts for head in part.heads or [-1] * part.size]
            whole.group_versions = {head: version for part in parts for head, version in part.group_versions.items()}
        whole.field_schema = join_rows(
            [part.field_schema for part in parts], [p.size for p in parts], validate=validate
        )
        whole.token = _only({part.token for part in parts})
        whole.batch_index = _only({part.batch_index for part in parts})
        whole.unread = tuple({batch for part in parts for batch in part.unread})
        return whole

    def _take(self, positions: slice | list[int]) -> BatchMeta:
        """The rows at these positions (in range), sharing nothing that is written in place."""
        part = type(self).__new__(type(self))
        part._adopt(self)
        part._set_rows({name: pick(getattr(self, name), positions) for name in _OF_ROWS})
        part.production_status = np.array(np.asarray(self.production_status)[positions], dtype=np.int8)
        part.field_schema = take_rows(self.field_schema, positions)
        part.extra_info = dict(self.extra_info)
        part.heads = None if self.heads is None else pick(self.heads, positions)
        part.most_rows, part.cut, part.remains = 0, [], None
        return part

    def _set_rows(self, rows: Mapping[str, list[Any]]) -> None:
        """``rows``: the attributes ``_OF_ROWS``. What is written in place is copied."""
        for name, own in rows.items():
            setattr(self, name, own)
        self.custom_meta = list(map(copy_tags, self.custom_meta))
        self._custom_backend_meta = list(map(dict, self._custom_backend_meta))

    def _adopt(self, other: BatchMeta) -> None:
        for name in _ATTRIBUTES:
            setattr(self, name, getattr(other, name))

    # --- fields ---

    def select_fields(self, field_names: str | Iterable[str]) -> BatchMeta:
        """The same rows with these fields only; names of fields that they don't have are ignored.

        Raises:
            ValueError: the batch has fields, and none of those that are named.
        """
        names = {field_names} if isinstance(field_names, str) else set(field_names)
        if names and self.field_schema and names.isdisjoint(self.field_schema):
            raise InvalidRequestError(
                f"none of the fields {sorted(names)} is in this batch, it has {self.field_names}."
            )
        selected = self._take(slice(None))
        selected.field_schema = {name: entry for name, entry in selected.field_schema.items() if name in names}
        # Entries that start with "_" belong to the row, not to a field.
        selected._custom_backend_meta = [
            {name: value for name, value in row.items() if name in names or name.startswith("_")}
            for row in selected._custom_backend_meta
        ]
        return selected

    def add_fields(self, tensor_dict: TensorDictBase, set_all_ready: bool = True) -> BatchMeta:
        """Add the description of these columns in place, replacing existing fields. Returns self.

        Raises:
            ValueError: the number of rows differs. A TensorDict without rows changes nothing.
        """
        schema, num_rows = described_rows(tensor_dict)
        if not num_rows:
            return self
        if num_rows != self.size:
            raise InvalidRequestError(
                f"the columns have {num_rows} rows, the batch has {self.size}: give one per sample."
            )
        self.add_described(schema, set_all_ready)
        return self

    def add_described(self, schema: Schema, set_all_ready: bool = True) -> None:
        """``add_fields`` for columns with a known ``extract_field_schema``; they must have as many rows."""
        self.field_schema = {**self.field_schema, **schema}
        if set_all_ready:
            self.production_status = np.ones(self.size, dtype=np.int8)

    def union(self, other: BatchMeta | None) -> BatchMeta:
        """The same samples with the fields and tags of both; ``other`` wins. A row is ready if it is ready in both.

        Raises:
            ValueError: the two are not about the same samples in the same order.
        """
        if other is None or not other.size:
            return self.copy()
        if not self.size:
            return other.copy()
        for name in ("global_indexes", "partition_ids"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise InvalidRequestError(
                    f"{name} do not match: {_first_difference(mine, theirs)}. Reorder one side first."
                )
        return self._united(other)

    def _united(self, other: BatchMeta) -> BatchMeta:
        mine, theirs = self.copy(), other.copy()
        mine.production_status &= theirs.production_status
        for name in ("custom_meta", "_custom_backend_meta", "_tags_as_made"):
            rows = zip(getattr(mine, name), getattr(theirs, name), strict=True)
            setattr(mine, name, [{**left, **right} for left, right in rows])
        mine._padding = list(map(operator.or_, mine._padding, theirs._padding))
        mine.field_schema.update(theirs.field_schema)
        mine.extra_info.update(theirs.extra_info)
        mine.token = _only({mine.token, theirs.token} - {None})
        mine.batch_index = _only({mine.batch_index, theirs.batch_index} - {None})
        if mine.heads is None:
            mine.heads, mine.group_versions = theirs.heads, theirs.group_versions
        mine.unread = tuple({*mine.unread, *theirs.unread})
        return mine

    # --- pickle ---

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _ATTRIBUTES}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        count = len(state["global_indexes"])
        self._adopt(BatchMeta([0] * count, [""] * count))  # state of another version may lack attributes
        for name, value in state.items():
            if value is not None and name in _ATTRIBUTES:
                setattr(self, name, value)
        # An array unpickled from a shared buffer (Ray) is read-only.
        self.production_status = np.array(self.production_status, dtype=np.int8)


_OF_ROWS = ("global_indexes", "partition_ids", "custom_meta", "_custom_backend_meta", "_padding", "_tags_as_made")
_ATTRIBUTES = (*Annotations.__slots__, *BatchMeta.__slots__)
# They say how the batch came about, not what it is.
_HOW_IT_CAME = ("_tags_as_made", "most_rows", "cut", "micro_batch", "remains", "unread")
_COMPARED = tuple(name for name in _ATTRIBUTES if name not in _HOW_IT_CAME)


def _only(values: set[Any]) -> Any:
    """The only value of a set, or None if there are several."""
    return next(iter(values)) if len(values) == 1 else None


def _first_difference(mine: list[Any], theirs: list[Any]) -> str:
    if len(mine) != len(theirs):
        return f"{len(mine)} and {len(theirs)} rows"
    row = next(row for row, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
    return f"row {row} has {mine[row]!r} and {theirs[row]!r}"


# ---- row by row ----


def _row_of(schema: Mapping[str, Mapping[str, Any]], position: int) -> dict[str, dict[str, Any]]:
    """The schema of one row: its own shape and dtype, without ``per_sample_shapes`` and ``per_sample_dtypes``."""
    row = {name: dict(entry) for name, entry in schema.items()}
    for entry in row.values():
        shapes, dtypes = entry.pop("per_sample_shapes", None), entry.pop("per_sample_dtypes", None)
        if shapes is not None:
            entry["shape"] = shapes[position]
        if dtypes is not None:
            entry["dtype"], entry["is_non_tensor"] = dtypes[position], dtypes[position] is None
    return row


class SampleView(NamedTuple):
    """One row, as the batch was when the view was created. Assigning to it raises TypeError."""

    global_index: int
    partition_id: str
    production_status: int
    custom_meta: Mapping[str, Any]
    fields: Mapping[str, Mapping[str, Any]]

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise TypeError(f"a sample is a read-only view: {name!r} can't be set. Change the BatchMeta it belongs to.")

    def __delattr__(self, name: str) -> NoReturn:
        raise TypeError(f"a sample is a read-only view: {name!r} can't be deleted. Change the BatchMeta it belongs to.")

    def __repr__(self) -> str:
        return (
            f"SampleView(global_index={self.global_index}, partition_id={self.partition_id!r}, "
            f"production_status={self.production_status}, fields={sorted(self.fields)}, "
            f"custom_meta={dict(self.custom_meta)})"
        )


class SamplesView:
    """The rows of a batch: length, index, slice, iterate."""

    __slots__ = ("_meta",)

    def __init__(self, meta: BatchMeta) -> None:
        self._meta = meta

    def __len__(self) -> int:
        return self._meta.size

    def __getitem__(self, item: Any) -> Any:
        size = self._meta.size
        if isinstance(item, slice):
            return list(map(self._view, range(size)[item]))
        position = operator.index(item)
        if not -size <= position < size:
            raise IndexError(f"sample {position} of a batch of {size} rows")
        return self._view(position % size)

    def __iter__(self) -> Iterator[SampleView]:
        return map(self._view, range(self._meta.size))

    def _view(self, position: int) -> SampleView:
        meta, entries = self._meta, _row_of(self._meta.field_schema, position)
        return SampleView(
            meta.global_indexes[position],
            meta.partition_ids[position],
            int(meta.production_status[position]),
            MappingProxyType(meta.custom_meta[position]),
            MappingProxyType({name: MappingProxyType(entry) for name, entry in entries.items()}),
        )


# ---- until it is read ----


class UnreadBatch:
    """Shared by all metadata made from one batch: its copies, chunks and joins. With the last of them it ends.

    A pickled one is of no effect, because another process can't say what this one may still read.
    """

    __slots__ = ("_call", "_fields", "_left", "_read", "_rows", "_values", "_waiting")

    def __init__(
        self, call: int = 0, indexes: Iterable[int] = (), fields: Iterable[str] = (), read: set[int] | None = None
    ) -> None:
        """``read``: where the session collects such fetches; ``call`` is added to it at the end."""
        self._call = call
        self._fields = frozenset(fields)
        self._read = set() if read is None else read
        self._left = set(indexes)
        self._rows: tuple[int, ...] = ()
        self._values: list[Sequence[memoryview]] = []
        self._waiting: set[int] = set()

    def keep_values(self, indexes: Iterable[int], values: Sequence[memoryview], waiting: set[int]) -> None:
        """These came along, for these rows. While they are kept, ``call`` is in ``waiting``."""
        self._rows, self._waiting = tuple(indexes), waiting
        self._values.append(values)
        waiting.add(self._call)

    def take_values(
        self, indexes: Iterable[int], fields: Iterable[str], waiting: set[int]
    ) -> Sequence[memoryview] | None:
        """What came along to the session with this set, once; nothing for other rows than all in their order."""
        if waiting is not self._waiting or self._rows != tuple(indexes) or self._fields != set(fields):
            return None
        try:
            values = self._values.pop()  # one step, as other threads may do so
        except IndexError:
            return None
        waiting.discard(self._call)
        return values

    def was_read(self, indexes: Iterable[int], fields: Iterable[str]) -> None:
        """These fields of these samples were read. Some of the fields are not enough: the others may still be read."""
        if self._left and self._fields.issubset(fields):
            self._left.difference_update(indexes)
            if not self._left:
                self._read.add(self._call)

    def __del__(self) -> None:  # in any thread, between any two steps of it: adding to a set is one step
        if getattr(self, "_left", None):  # Ctrl-C may have come before it was set
            self._read.add(self._call)
        if getattr(self, "_values", None):
            self._waiting.discard(self._call)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnreadBatch:
        return self

    def __reduce__(self) -> tuple[type[UnreadBatch], tuple[()]]:
        return UnreadBatch, ()
