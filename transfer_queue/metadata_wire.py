# SPDX-License-Identifier: Apache-2.0
"""Converts BatchMeta and its schema to and from the controller's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from transfer_queue.errors import UnsupportedValueError
from transfer_queue.metadata import BatchMeta
from transfer_queue.protocol import Batch, FieldSpec, SetTags, encode, unpack_indexes


def to_specs(schema: Mapping[str, Mapping[str, Any]]) -> dict[str, FieldSpec]:
    """A schema as ``extract_field_schema`` makes it, for the wire."""
    return {name: _to_spec(entry) for name, entry in schema.items()}


def _to_spec(entry: Mapping[str, Any]) -> FieldSpec:
    dtype, shape, rows = entry["dtype"], entry["shape"], entry.get("per_sample_shapes")
    packed = None
    if rows and len({len(row) for row in rows}) == 1:
        packed = np.asarray(rows, dtype="<i4").tobytes()
    return FieldSpec(
        None if dtype is None else str(dtype).removeprefix("torch."),
        None if shape is None else tuple(shape),
        bool(entry.get("is_nested")),
        bool(entry.get("is_non_tensor")),
        packed,
    )


def _to_entry(spec: FieldSpec, count: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "dtype": None if spec.dtype is None else getattr(torch, spec.dtype),
        "shape": spec.shape,
        "is_nested": spec.is_nested,
        "is_non_tensor": spec.is_non_tensor,
    }
    if spec.row_shapes is not None and count:
        rows = np.frombuffer(spec.row_shapes, dtype="<i4").reshape(count, -1)
        entry["per_sample_shapes"] = [tuple(row) for row in rows.tolist()]
    return entry


def to_meta(batch: Batch, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
    """The metadata that a reply describes."""
    indexes = unpack_indexes(batch.indexes).tolist()
    count = len(indexes)
    padding = None if batch.padding is None else np.frombuffer(batch.padding, dtype=np.uint8).astype(bool).tolist()
    meta = BatchMeta(
        indexes,
        [batch.partition] * count,
        None,
        np.frombuffer(batch.status, dtype=np.int8),
        extra_info,
        [batch.tags.get(index, {}) for index in indexes] if batch.tags else None,
        padding_mask=padding,
        token=batch.token,
        batch_index=batch.batch_index,
    )
    if count:  # set directly, because these entries are new and already normalized
        meta.field_schema = {name: _to_entry(spec, count) for name, spec in batch.fields.items()}
    return meta


def check_tags(tags: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise UnsupportedValueError for tags that can't be sent, before anything is written for their samples."""
    if not tags:
        return
    names = [name for own in tags.values() for name in own if not isinstance(name, str)]
    if names:
        raise UnsupportedValueError(f"tags are named by strings, got {names[0]!r}; use {str(names[0])!r}.")
    try:
        encode(SetTags(0, {"": {index: dict(own) for index, own in tags.items()}}))
    except (OverflowError, UnicodeEncodeError) as error:
        raise UnsupportedValueError(f"a tag can't be sent: {error}. Store it as a field instead.") from error
