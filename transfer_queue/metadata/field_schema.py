# SPDX-License-Identifier: Apache-2.0
"""Field schemas: dtype and sample shapes per field. Read from a TensorDict, cut and joined like its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from transfer_queue.errors import InvalidRequestError, SchemaConflictError, UnsupportedValueError
from transfer_queue.metadata.meta_rows import check_lengths, pick

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase

Shape: TypeAlias = tuple[int, ...]
Entry: TypeAlias = dict[str, Any]
"""dtype (None: objects), shape of one sample (None: nested or objects), is_nested, is_non_tensor, per_sample_shapes?,
per_sample_dtypes? (only where they differ; ``dtype`` is the first row's then)
"""
Schema: TypeAlias = dict[str, Entry]
_PER_ROW = ("per_sample_shapes", "per_sample_dtypes")


def extract_field_schema(data: TensorDictBase) -> Schema:
    """Describe each column of ``data``: one entry per field, {} if there are no rows.

    Raises:
        ValueError: a column's length is not the number of rows, or a column is itself a TensorDict.
    """
    return described_rows(data)[0]


def described_rows(data: Any) -> tuple[Schema, int]:
    """(``extract_field_schema``, number of rows). ``data``: a TensorDict, or a dict with a ``batch_size``."""
    columns, schema = _columns(data), {}
    num_rows = data.batch_size[0] if data.batch_size else None
    for name, column in columns.items():
        length = _length(name, column)
        num_rows = length if num_rows is None else num_rows  # that of its columns, if it was made without a batch size
        if length is not None and length != num_rows:
            raise InvalidRequestError(
                f"Inconsistent batch dimension: field {name!r} has {length} rows, the batch has {num_rows}. "
                "Give every column one value per sample."
            )
    if not num_rows:
        return {}, 0
    for name, column in columns.items():
        schema[str(name)] = _describe(column)
    return schema, num_rows


def _columns(data: Any) -> Mapping[str, Any]:
    if isinstance(data, dict):
        return data
    from tensordict import LazyStackedTensorDict

    # A lazy stack with rows of different shapes raises on plain access, and data[name] unwraps object columns to lists.
    as_list: Any = {"as_list": True} if isinstance(data, LazyStackedTensorDict) else {}
    return {name: data.get(name, **as_list) for name in data.keys()}  # noqa: SIM118  iterating it gives rows


def _length(name: str, column: Any) -> int | None:
    """Rows of a column; None for one object that stands for every row."""
    import torch

    if isinstance(column, torch.Tensor):
        if not column.dim():
            raise InvalidRequestError(
                f"Inconsistent batch dimension: field {name!r} is one scalar, not a row per sample."
            )
        return int(column.size(0))
    from tensordict import is_non_tensor, is_tensor_collection

    if is_non_tensor(column):
        return int(column.batch_size[0]) if len(column.batch_size) else None
    kinds = set(map(type, column)) if isinstance(column, list) else ()
    if is_tensor_collection(column) or any(map(is_tensor_collection, kinds)):
        raise UnsupportedValueError(
            f"field {name!r} is a {type(column).__name__}, a column must be a tensor or objects. "
            "Flatten it first, for instance with data.flatten_keys('.')."
        )
    return len(column)


_OBJECTS: Entry = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}


def _describe(column: Any) -> Entry:
    import torch

    if not isinstance(column, torch.Tensor):
        rows = _tensors_of(column)
        return dict(_OBJECTS) if rows is None else _describe_rows(rows)
    if column.is_nested:
        return _nested(column.dtype, _nested_shapes(column))
    return _dense(column.dtype, tuple(column.shape[1:]))


def _tensors_of(column: Any) -> list[torch.Tensor] | None:
    """The rows of a list, or of a stack of objects, if all of them are tensors."""
    import torch
    from tensordict import NonTensorStack

    if isinstance(column, NonTensorStack) and isinstance(getattr(column.tensordicts[0], "data", None), torch.Tensor):
        column = column.tolist()
    if isinstance(column, list) and all(isinstance(value, torch.Tensor) for value in column):
        return column
    return None


def _describe_rows(rows: list[torch.Tensor]) -> Entry:
    if len({row.dtype for row in rows}) > 1:
        return dict(_OBJECTS)
    shapes = [tuple(row.shape) or (1,) for row in rows]
    return _dense(rows[0].dtype, shapes[0]) if len(set(shapes)) == 1 else _nested(rows[0].dtype, shapes)


def _dense(dtype: torch.dtype, shape: Shape) -> Entry:
    # A column of scalars counts as one value per sample: (1,), never ().
    return {"dtype": dtype, "shape": shape or (1,), "is_nested": False, "is_non_tensor": False}


def _nested(dtype: torch.dtype, shapes: list[Shape]) -> Entry:
    return {"dtype": dtype, "shape": None, "is_nested": True, "is_non_tensor": False, "per_sample_shapes": shapes}


def _nested_shapes(column: Any) -> list[Shape]:
    import torch

    if column.layout is not torch.jagged:
        return [tuple(row.shape) for row in column.unbind()]
    # From the offsets only, because unbinding makes a tensor object per row.
    lengths = column.lengths()
    if lengths is None:
        lengths = np.diff(column.offsets().numpy(force=True))
    before, after = tuple(column.shape[1 : column._ragged_idx]), tuple(column.shape[column._ragged_idx + 1 :])
    if not before and not after:
        return [(n,) for n in lengths.tolist()]
    return [(*before, n, *after) for n in lengths.tolist()]


def normalized(schema: Mapping[str, Mapping[str, Any]], num_rows: int) -> Schema:
    """A copy one level deep, with shapes as tuples (lists on the wire). ValueError unless one shape per row."""
    return {name: _normalized_entry(name, entry, num_rows) for name, entry in schema.items()}


def _normalized_entry(name: str, entry: Mapping[str, Any], num_rows: int) -> Entry:
    copied = dict(entry)
    if copied.get("shape") is not None:
        copied["shape"] = tuple(copied["shape"])
    check_lengths({f"{key} of field {name!r}": copied.get(key) for key in _PER_ROW}, num_rows)
    if copied.get("per_sample_shapes") is not None:
        shapes = copied["per_sample_shapes"]
        copied["per_sample_shapes"] = [shape if shape is None else tuple(shape) for shape in shapes]
    return copied


def shapes_of(entry: Mapping[str, Any], num_rows: int) -> list[Shape | None]:
    """One shape per row."""
    shapes = entry.get("per_sample_shapes")
    return [entry.get("shape")] * num_rows if shapes is None else list(shapes)


def dtypes_of(entry: Mapping[str, Any], num_rows: int) -> list[Any]:
    """One dtype per row, None for objects."""
    dtypes = entry.get("per_sample_dtypes")
    return [entry.get("dtype")] * num_rows if dtypes is None else list(dtypes)


def with_dtypes(entry: Entry, dtypes: list[Any]) -> Entry:
    """The entry for rows that have these dtypes; what all of them share is said once."""
    if not dtypes:
        return {key: value for key, value in entry.items() if key != "per_sample_dtypes"}
    if all(dtype is None for dtype in dtypes):
        return dict(_OBJECTS)
    given = {**entry, "dtype": dtypes[0], "is_non_tensor": False, "per_sample_dtypes": dtypes}
    if all(dtype == dtypes[0] for dtype in dtypes):
        del given["per_sample_dtypes"]
    elif None in dtypes:  # objects have no shape
        shapes = shapes_of(entry, len(dtypes))
        given["per_sample_shapes"] = [
            None if dtype is None else shape for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
    return given


def common_dtypes(schema: Schema, global_indexes: Sequence[int]) -> dict[str, torch.dtype]:
    """By field whose samples have several dtypes: the one that their column gets, as ``torch.cat`` would give it.

    Raises:
        SchemaConflictError: no column holds them together: some are objects, or torch has no common dtype for them.
    """
    import torch  # it is slow to load, and servers don't need it

    common: dict[str, torch.dtype] = {}
    for name, entry in schema.items():
        dtypes = entry.get("per_sample_dtypes")
        if dtypes is None:
            continue
        if None in dtypes:
            raise _no_common_dtype(name, dtypes, global_indexes)
        try:
            common[name] = reduce(torch.promote_types, dtypes)
        except RuntimeError:  # of float8, or unsigned, and others
            raise _no_common_dtype(name, dtypes, global_indexes) from None
    return common


def _no_common_dtype(name: str, dtypes: Sequence[Any], global_indexes: Sequence[int]) -> SchemaConflictError:
    samples: dict[str, list[int]] = {}
    for index, dtype in zip(global_indexes, dtypes, strict=True):
        samples.setdefault("objects" if dtype is None else str(dtype), []).append(index)
    text = ", ".join(
        f"{dtype} in {len(own)} samples ({', '.join(map(str, own[:5]))}{', …' if len(own) > 5 else ''})"
        for dtype, own in samples.items()
    )
    return SchemaConflictError(
        f"field {name!r} of these samples has several dtypes: {text}. Put some of them again with another dtype, "
        f"get them apart (meta.select_samples), or select other fields."
    )


def take_rows(schema: Schema, positions: slice | list[int]) -> Schema:
    """The schema of a selection of rows."""
    return {name: _take_rows(entry, positions) for name, entry in schema.items()}


def _take_rows(entry: Entry, positions: slice | list[int]) -> Entry:
    taken = dict(entry)
    for key in _PER_ROW:
        if taken.get(key) is not None:
            taken[key] = pick(taken[key], positions)
    return with_dtypes(taken, taken["per_sample_dtypes"]) if taken.get("per_sample_dtypes") is not None else taken


def join_rows(schemas: Sequence[Schema], sizes: Sequence[int], *, validate: bool = True) -> Schema:
    """The schema of the rows of all parts, one part after the other.

    Without ``validate`` only the fields common to all parts are kept, and dtypes may differ.

    Raises:
        ValueError: the parts differ in their fields, or in the dtype of one.
    """
    if validate:
        _check_joinable(schemas)
    shared = [name for name in schemas[0] if all(name in schema for schema in schemas)]
    return {name: _join_entries([schema[name] for schema in schemas], sizes) for name in shared}


def _check_joinable(schemas: Sequence[Schema]) -> None:
    first = schemas[0]
    for schema in schemas[1:]:
        if schema.keys() != first.keys():
            raise SchemaConflictError(
                f"field_names mismatch: {sorted(first)} and {sorted(schema)}. "
                "Select the same fields of every part before concatenating."
            )
        for name, entry in schema.items():
            if _kind(entry) != _kind(first[name]):
                raise SchemaConflictError(
                    f"dtype mismatch in field {name!r}: {_kind(first[name])} and {_kind(entry)}. "
                    "Cast the column before putting it."
                )


def _kind(entry: Entry) -> Any:
    if entry.get("per_sample_dtypes") is not None:
        return " and ".join(sorted({str(dtype) for dtype in entry["per_sample_dtypes"]}))
    return "objects" if entry.get("is_non_tensor") else entry.get("dtype")


def _join_entries(entries: Sequence[Entry], sizes: Sequence[int]) -> Entry:
    joined = {key: value for key, value in entries[0].items() if key not in _PER_ROW}
    nested = any(entry.get("is_nested") or entry.get("per_sample_shapes") is not None for entry in entries)
    if nested or any(entry.get("shape") != entries[0].get("shape") for entry in entries):
        shapes = [shape for entry, size in zip(entries, sizes, strict=True) for shape in shapes_of(entry, size)]
        joined.update(shape=None, is_nested=True, per_sample_shapes=shapes)
    if len({entry.get("dtype") for entry in entries}) == 1 and not any("per_sample_dtypes" in each for each in entries):
        return joined
    return with_dtypes(
        joined, [dtype for entry, size in zip(entries, sizes, strict=True) for dtype in dtypes_of(entry, size)]
    )
