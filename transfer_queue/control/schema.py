# SPDX-License-Identifier: Apache-2.0
"""The fields of one partition: dtype and shape of a row, and one of them per row where rows differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from transfer_queue.control.rows import PUBLISHED, Rows, RowState, RowTable, all_of, ascending
from transfer_queue.control.saved import SavedField
from transfer_queue.errors import InvalidRequestError, SchemaConflictError
from transfer_queue.protocol import DeclaredField, FieldSpec, by_row, runs_of

_MAX_SIZE = 2**31 - 1
_MOST_DTYPES = 64
"""Of one field. The number of a row's dtype must fit into a byte."""
_HAS, _SHAPES, _UNIT, _DTYPES = "has:", "shapes:", "unit:", "dtypes:"
"""How the names of a field's columns begin."""


@dataclass(slots=True)
class _Field:
    """``dtypes``: where there are several, a column holds the number of each row's. ``shape`` None: rows differ;
    ``ndim``: the rank, if shapes are stored per row; ``mixed``: ranks differ, too.
    """

    dtypes: tuple[str | None, ...]
    shape: tuple[int, ...] | None
    is_nested: bool
    is_non_tensor: bool
    ndim: int | None = None
    mixed: bool = False


def _kind(dtype: str | None) -> str:
    return "plain objects" if dtype is None else f"dtype {dtype}"


class Schema:
    """Which rows have which field, with its dtype and shapes. Field columns are in the partition's table."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._fields: dict[str, _Field | None] = {}
        self._declared: dict[str, DeclaredField] = {}
        self._placed: set[str] = set()
        """Fields of which some values lie in another unit than 0. Only they have a column of units."""
        self.counts: dict[str, int] = {}
        """By field that was written or is expected, the number of samples that have it."""

    @property
    def names(self) -> list[str]:
        """Fields in order of registration, including expected ones without values."""
        return list(self._fields)

    def written(self) -> list[str]:
        """Fields that some row has, in order of registration."""
        return [name for name, field in self._fields.items() if field is not None]

    def dtypes_with(self, specs: Mapping[str, FieldSpec]) -> dict[str, list[str | None]]:
        """The dtypes of those fields that have several, these of a write included."""
        found = {}
        for name, spec in specs.items():
            field = self._fields.get(name)
            known = () if field is None else field.dtypes
            if len(known) > 1 or (known and spec.dtype not in known):
                found[name] = list(dict.fromkeys((*known, spec.dtype)))
        return found

    def declare(self, fields: Mapping[str, DeclaredField], partition: str) -> None:
        """Check these fields in every later write.

        Raises:
            SchemaConflictError: a field was declared otherwise before, or has samples of another dtype.
        """
        for name, declared in fields.items():
            field = self._fields.get(name)
            dtypes = {declared.dtype} if field is None else {declared.dtype, *field.dtypes}
            if self._declared.get(name, declared) != declared or len(dtypes) > 1:
                raise SchemaConflictError(
                    f"field {name!r} of partition {partition!r} can't be declared as {_declaration(declared)}: it was "
                    f"declared otherwise, or has samples of another dtype. Declare it alike, and before the first put."
                )
        self._table.copies.make()
        for name, declared in fields.items():
            self._declared[name] = declared
            self.expect(name)

    def expect(self, name: str) -> None:
        """Register a field that has no values yet."""
        if name not in self._fields:
            self._fields[name] = None
            self.counts[name] = 0
            self._table.add_column(_HAS + name, np.bool_)

    def has(self, name: str) -> npt.NDArray[np.bool_]:
        """[rows] Which rows have the field. All False for an unknown field."""
        if name not in self._fields:
            return np.zeros(self._table.size, dtype=np.bool_)
        return self._table.column(_HAS + name)

    def complete(self, rows: Rows, names: Iterable[str]) -> npt.NDArray[np.bool_]:
        """[len(rows)] Which of these rows have all the named fields."""
        result = np.ones(len(rows), dtype=np.bool_)
        for name in names:
            if name not in self._fields:
                return np.zeros(len(rows), dtype=np.bool_)
            result &= self._table.column(_HAS + name)[rows]
        return result

    def fields_of(self, rows: Rows) -> list[str]:
        """Written fields that every one of the rows has."""
        return [name for name in self.written() if all_of(self.has(name)[rows])]

    def lose_unit(self, unit: int) -> dict[str, Rows]:
        """The values in this storage unit are gone. Returns, by field, the samples that don't have it any more."""
        lost = {}
        for name in self.written():
            if name in self._placed:
                has, units = self._table.column(_HAS + name), self._table.column(_UNIT + name)
                rows = (has & (units == unit) & PUBLISHED[self._table.column("state")]).nonzero()[0]
                if len(rows):
                    self._table.copies.make()
                    has[rows], units[rows] = False, 0
                    self.counts[name] -= len(rows)
                    lost[name] = rows
        return lost

    def count_deleted(self, rows: Rows) -> None:
        """These rows, each once, are about to be deleted."""
        for name in self._fields:
            self.counts[name] -= int(np.count_nonzero(self._table.column(_HAS + name)[rows]))

    def fields_of_some(self, rows: Rows, besides: Sequence[str]) -> list[str]:
        """Written fields that some of the rows have, without those ``besides``."""
        return [name for name in self.written() if name not in besides and self.has(name)[rows].any()]

    def check(self, specs: Mapping[str, FieldSpec], partition: str, num_rows: int) -> None:
        """Raises SchemaConflictError if a field of a put of so many rows isn't as it was declared."""
        for name, spec in specs.items():
            _check_rows(spec, num_rows, name)
            declared, known = self._declared.get(name), self._fields.get(name)
            if declared is not None and not _fits(spec, declared, num_rows):
                raise SchemaConflictError(
                    f"field {name!r} of partition {partition!r} is declared as {_declaration(declared)}, this put "
                    f"brings {_kind(spec.dtype)}, shape {_shape_text(spec)}. Convert it before the put, or use another "
                    f"field name."
                )
            if known is not None and spec.dtype not in known.dtypes and len(known.dtypes) == _MOST_DTYPES:
                raise InvalidRequestError(
                    f"field {name!r} of partition {partition!r} has {_MOST_DTYPES} dtypes already."
                )

    def record(self, rows: Rows, specs: Mapping[str, FieldSpec], are_new: bool = False) -> dict[str, Rows]:
        """Record that the rows have these fields now. Returns, by field, the rows that did not, each once. Call
        ``check`` first. ``are_new``: the rows are different ones without any field.
        """
        news = {}
        for name, spec in specs.items():
            self.expect(name)
            has = self._table.column(_HAS + name)
            news[name] = rows if are_new else ascending(rows[~has[rows]])
            self.counts[name] += len(news[name])
            has[rows] = True
            if spec.units is not None or name in self._placed:
                self._placed.add(name)
                units = 0 if spec.units is None else by_row(spec.units)
                self._table.ensure_column(_UNIT + name, np.int32)[rows] = units
            known = self._fields[name]
            if known is None or (spec.dtype not in known.dtypes and not self._have_others(name, rows)):
                self._table.drop_column(_SHAPES + name)
                self._table.drop_column(_DTYPES + name)
                known = _Field((spec.dtype,), spec.shape, spec.is_nested, spec.is_non_tensor)
                self._fields[name] = known
            if known.dtypes != (spec.dtype,):  # only a field of several dtypes takes memory per row for them
                if spec.dtype not in known.dtypes:
                    known.dtypes += (spec.dtype,)
                self._table.ensure_column(_DTYPES + name, np.uint8)[rows] = known.dtypes.index(spec.dtype)
            known.is_nested |= spec.is_nested
            if spec.is_non_tensor or (spec.shape is not None and known.shape == spec.shape):
                continue
            shapes = _row_shapes(spec, len(rows))
            self._become_ragged(name, known, shapes)
            if known.ndim is not None:
                self._table.column(_SHAPES + name)[rows] = shapes
        return news

    def _units_of(self, name: str, rows: Rows) -> npt.NDArray[np.int32] | None:
        """The unit of each row; None: all of them are in unit 0."""
        units = self._table.column(_UNIT + name)[rows] if name in self._placed else None
        return None if units is None or not units.any() else units

    def _have_others(self, name: str, rows: Rows) -> bool:
        """Whether rows besides these have the field."""
        held = self.has(name) & (self._table.column("state") != RowState.DEAD)
        held[rows] = False
        return bool(held.any())

    def _become_ragged(self, name: str, field: _Field, new: npt.NDArray[np.int32] | None) -> None:
        """Store a shape per row from now on, unless ranks differ, too."""
        before, field.shape, field.is_nested = field.shape, None, True
        if field.mixed:
            return
        ndim = None if new is None else new.shape[1]
        if field.ndim is None and ndim is not None and (before is None or len(before) == ndim):
            self._table.ensure_column(_SHAPES + name, np.int32, ndim)[:] = 0 if before is None else before
            field.ndim = ndim
        elif field.ndim != ndim or ndim is None:
            self._table.drop_column(_SHAPES + name)
            field.ndim, field.mixed = None, True

    # ---- checkpoints ----

    def save(self, rows: Rows) -> list[SavedField]:
        """Save every field for these rows, in order of registration."""
        return [self._save(name, rows) for name in self._fields]

    def _save(self, name: str, rows: Rows) -> SavedField:
        field, has, declared = self._fields[name], self.has(name)[rows].tobytes(), self._declared.get(name)
        if field is None:
            return SavedField(name, False, has, declared=declared)
        shapes = None if field.ndim is None else self._table.column(_SHAPES + name)[rows].astype("<i4").tobytes()
        several = len(field.dtypes) > 1
        row_dtypes = self._table.column(_DTYPES + name)[rows].tobytes() if several else None
        units = self._units_of(name, rows)
        return SavedField(
            name, True, has, field.dtypes[0], field.shape, field.is_nested, field.is_non_tensor, field.ndim,
            field.mixed, shapes, list(field.dtypes) if several else [], row_dtypes, declared,
            None if units is None else units.astype("<i4").tobytes(),
        )  # fmt: skip

    def frozen(self, table: RowTable) -> Schema:
        """As it is now; ``table``: the rows as they are now."""
        copy = Schema(table)
        copy._fields = {name: field and replace(field) for name, field in self._fields.items()}
        copy._declared = dict(self._declared)
        copy._placed = set(self._placed)
        return copy

    def load(self, fields: Iterable[SavedField], start: int) -> None:
        """Load what was saved, or the next slice of it: the rows from ``start`` on."""
        count = self._table.size - start
        published = PUBLISHED[self._table.column("state")[start:]]
        for saved in fields:
            self.expect(saved.name)
            has = np.frombuffer(saved.has, dtype=np.bool_) & published  # only in a damaged file has another row values
            self._table.column(_HAS + saved.name)[start:] = has
            self.counts[saved.name] += int(np.count_nonzero(has))
            if saved.declared is not None:
                self._declared[saved.name] = saved.declared
            if not saved.written:
                continue
            dtypes = tuple(saved.dtypes) or (saved.dtype,)
            field = _Field(dtypes, saved.shape, saved.is_nested, saved.is_non_tensor, saved.ndim, saved.mixed)
            self._fields[saved.name] = field
            if len(dtypes) > 1:
                self._load_dtypes(saved, start)
            if saved.ndim is not None:
                shapes = np.frombuffer(saved.shapes or b"", dtype="<i4").reshape(count, saved.ndim)
                self._table.ensure_column(_SHAPES + saved.name, np.int32, saved.ndim)[start:] = shapes
            if saved.units is not None:
                self._placed.add(saved.name)
                self._table.ensure_column(_UNIT + saved.name, np.int32)[start:] = np.frombuffer(saved.units, "<i4")

    def _load_dtypes(self, saved: SavedField, start: int) -> None:
        numbers = np.frombuffer(saved.row_dtypes or b"", dtype=np.uint8)
        if (len(numbers) and int(numbers.max()) >= len(saved.dtypes)) or len(saved.dtypes) > _MOST_DTYPES:
            raise ValueError(f"rows of field {saved.name!r} have unknown dtypes")
        self._table.ensure_column(_DTYPES + saved.name, np.uint8)[start:] = numbers

    def spec(self, name: str, rows: Rows) -> FieldSpec:
        """Describe the field for these rows; a field without values is a placeholder."""
        field = self._fields.get(name)
        if field is None:
            return FieldSpec(None, None)
        shapes = None
        if field.ndim is not None:
            shapes = np.ascontiguousarray(self._table.column(_SHAPES + name)[rows], dtype="<i4").tobytes()
        by_unit = self._units_of(name, rows)
        units = None if by_unit is None else runs_of(by_unit)
        if len(field.dtypes) == 1:
            return FieldSpec(field.dtypes[0], field.shape, field.is_nested, field.is_non_tensor, shapes, units=units)
        numbers = self._table.column(_DTYPES + name)[rows]
        dtype = field.dtypes[int(numbers[0]) if len(numbers) else 0]
        row_dtypes = numbers.tobytes() if len(numbers) and (numbers != numbers[0]).any() else None
        if dtype is None and row_dtypes is None:
            return FieldSpec(None, None, is_non_tensor=True, dtypes=list(field.dtypes), units=units)
        return FieldSpec(dtype, field.shape, field.is_nested, False, shapes, list(field.dtypes), row_dtypes, units)


def _declaration(declared: DeclaredField) -> str:
    return _kind(declared.dtype) + ("" if declared.shape is None else f", shape {list(declared.shape)}")


def _shape_text(spec: FieldSpec) -> str:
    return "not the same for all" if spec.shape is None else str(list(spec.shape))


def _fits(spec: FieldSpec, declared: DeclaredField, num_rows: int) -> bool:
    """Whether the dtype, and the shape of every row, is the declared one."""
    if spec.dtype != declared.dtype:
        return False
    if declared.shape is None or spec.is_non_tensor:
        return True
    wanted = declared.shape or (1,)  # a column of scalars has rows of shape (1,)
    shapes = _row_shapes(spec, num_rows if spec.shape is None else 1)
    if shapes is None:  # rows of different rank
        return False
    if shapes.shape[1] != len(wanted):
        return not len(shapes)  # no rows have no rank
    return all(size is None or bool((shapes[:, dim] == size).all()) for dim, size in enumerate(wanted))


def _check_rows(spec: FieldSpec, count: int, name: str) -> None:
    """Raises InvalidRequestError if shapes or places are those of another number of rows."""
    if spec.units is not None and sum(own for _, own in spec.units) != count:
        raise InvalidRequestError(f"field {name!r} says of other than {count} rows where their values lie.")
    if spec.is_non_tensor:
        return
    if spec.row_shapes is not None:
        if len(spec.row_shapes) % (4 * count) if count else spec.row_shapes:
            raise InvalidRequestError(
                f"field {name!r} brings {len(spec.row_shapes)} bytes of row shapes for {count} rows; expected int32 "
                f"[rows, ndim]."
            )
    elif spec.shape and not 0 <= min(spec.shape) <= max(spec.shape) <= _MAX_SIZE:
        raise InvalidRequestError(f"field {name!r} has shape {spec.shape}; sizes go from 0 to {_MAX_SIZE}.")


def _row_shapes(spec: FieldSpec, count: int) -> npt.NDArray[np.int32] | None:
    """[count, ndim]; None if the shapes are unknown."""
    if spec.row_shapes is not None:
        return np.frombuffer(spec.row_shapes, dtype="<i4").reshape(count, -1 if spec.row_shapes else 0)
    if spec.shape is None:
        return None
    return np.broadcast_to(np.array(spec.shape, dtype=np.int32), (count, len(spec.shape)))
