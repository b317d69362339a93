# SPDX-License-Identifier: Apache-2.0
"""Values that tell where they belong: sample, field, version and length stand in a row and decide its every byte."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

MAX_ROW_NBYTES = 512 * 1024
HEAD_NBYTES = 16
_NUMBER_BITS, _VERSION_BITS = 4, 16
_POOL: Words = np.random.default_rng(20).integers(0, 1 << 64, 1 << 19, dtype=np.uint64)
_GATHERED = 64
"""Rows of at most so many words are made together; longer ones one by one, as slices of the pool."""


class Field(NamedTuple):
    """``number``: what rows say of their field, below 16. ``inner``: trailing elements of a row's shape."""

    number: int
    kind: str
    dtype: torch.dtype = torch.uint8
    inner: int = 1


FIELDS = {
    "num": Field(1, "number", torch.int64),
    "u8": Field(2, "dense"),
    "half": Field(3, "dense", torch.float16),
    "flag": Field(4, "dense", torch.bool),
    "ids": Field(5, "ragged", torch.int64),
    "big": Field(6, "dense", torch.float32, 64),
    "text": Field(7, "text"),
    "obj": Field(8, "object"),
    "back": Field(9, "ragged", torch.float32),
    "late": Field(10, "dense", torch.int32),
}


class WrongValueError(AssertionError):
    """A value isn't the one that was put for this sample and field, or not as new as it must be."""


# ---- bytes of one row ----


def _heads(number: int, versions: NDArray[np.int64], nbytes: NDArray[np.int64]) -> Words:
    return (np.uint64(number << 56) | (versions.astype(np.uint64) << np.uint64(32))) | nbytes.astype(np.uint64)


def _mixed(sids: Words, heads: Words) -> Words:
    mixed = (sids * np.uint64(0x9E3779B97F4A7C15)) ^ heads
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _equal_rows(sids: Words, heads: Words, nbytes: int) -> Bytes:
    """[rows, nbytes]: what rows of one length must be."""
    count = -(-nbytes // 8)
    keys = _mixed(sids, heads)
    starts = (keys % np.uint64(len(_POOL) - count)).astype(np.int64)
    if count <= _GATHERED:
        words = _POOL[starts[:, None] + np.arange(count)]
        words ^= keys[:, None]
    else:
        words = np.empty((len(sids), count), np.uint64)
        for row, (start, key) in enumerate(zip(starts.tolist(), keys, strict=True)):
            np.bitwise_xor(_POOL[start : start + count], key, out=words[row])
    words[:, 0], words[:, 1] = sids, heads
    return words.view(np.uint8)[:, :nbytes]


def _rows(number: int, sids: NDArray[np.int64], versions: NDArray[np.int64], nbytes: NDArray[np.int64]) -> list[Bytes]:
    heads, unsigned = _heads(number, versions, nbytes), sids.astype(np.uint64)
    rows: list[Any] = [None] * len(sids)
    for length, at in _by_length(nbytes):
        for row, made in zip(at.tolist(), _equal_rows(unsigned[at], heads[at], length), strict=True):
            rows[row] = made
    return rows


def _by_length(nbytes: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    for length in np.unique(nbytes).tolist():
        yield length, np.flatnonzero(nbytes == length)


def _text(sid: int, version: int, length: int) -> str:
    pattern = f"{sid * 0x9E3779B1 + version:x}é"
    return f"{sid}/{version}/{length}/" + (pattern * (length // len(pattern) + 1))[:length]


def _object(sid: int, version: int, length: int) -> dict[str, Any]:
    return {
        "sid": sid,
        "version": version,
        "raw": _text(sid, version, length).encode(),
        "nested": [sid, (version, None)],
    }


# ---- making ----


def make(rng: random.Random, name: str, sids: NDArray[np.int64], version: int, nbytes: int) -> Any:
    """A column of one row per sample. ``nbytes``: of a dense row; the longest of the others."""
    field = FIELDS[name]
    versions = np.full(len(sids), version, np.int64)
    if field.kind == "number":
        assert version < 1 << _VERSION_BITS
        return torch.from_numpy((sids << (_NUMBER_BITS + _VERSION_BITS)) | (versions << _NUMBER_BITS) | field.number)
    if field.kind in ("text", "object"):
        build = _text if field.kind == "text" else _object
        return NonTensorStack(*(build(sid, version, rng.randrange(max(1, nbytes))) for sid in sids.tolist()))
    step = field.dtype.itemsize * field.inner if field.dtype != torch.bool else 1
    least = -(-HEAD_NBYTES // step)
    if field.kind == "dense":
        length = max(least, nbytes // step) * step
        rows = np.stack(_rows(field.number, sids, versions, np.full(len(sids), length)))
        return _scattered(rng, _elements(field, rows))
    lengths = np.array([max(least, rng.randint(1, max(1, nbytes // step))) * step for _ in sids])
    flat = np.concatenate(_rows(field.number, sids, versions, lengths))
    return _jagged(rng, _elements(field, flat), lengths // step)


def _elements(field: Field, data: Bytes) -> torch.Tensor:
    if field.dtype == torch.bool:
        return torch.from_numpy(np.unpackbits(data, axis=-1)).view(torch.bool)
    tensor = torch.from_numpy(np.ascontiguousarray(data)).view(field.dtype)
    return tensor if field.inner == 1 else tensor.unflatten(-1, (-1, field.inner))


def _scattered(rng: random.Random, dense: torch.Tensor) -> torch.Tensor:
    """The same values, often in memory that isn't contiguous."""
    way = rng.randrange(5)
    if way == 0:  # column by column
        return dense.transpose(0, 1).contiguous().transpose(0, 1)
    if way == 1:  # every second row of something larger
        holder = torch.ones((2 * len(dense), *dense.shape[1:]), dtype=dense.dtype)
        holder[::2] = dense
        return holder[::2]
    if way == 2:  # every second element
        return torch.stack([dense, torch.ones_like(dense)], dim=-1)[..., 0]
    return dense


def _jagged(rng: random.Random, flat: torch.Tensor, lengths: NDArray[np.int64]) -> torch.Tensor:
    offsets = torch.from_numpy(np.concatenate((np.zeros(1, np.int64), lengths.cumsum())))
    if rng.random() < 0.25:  # rows with holes between them
        holes = [part for row in flat.split(lengths.tolist()) for part in (row, torch.ones_like(row[:1]))]
        spread = offsets + torch.arange(len(offsets))
        return torch.nested.nested_tensor_from_jagged(torch.cat(holes), spread, lengths=torch.from_numpy(lengths))
    return torch.nested.nested_tensor_from_jagged(flat, offsets)


def nbytes_of(column: Any) -> int:
    """About how many bytes a column's values take."""
    if not isinstance(column, torch.Tensor):
        return 100 * len(column)
    return (
        (column.values() if column.is_nested and column.layout == torch.jagged else column).untyped_storage().nbytes()
    )


def quiet() -> None:
    """torch says once per process that strided nested tensors are a prototype."""
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype", UserWarning)


# ---- checking ----


def check(
    name: str, column: Any, indexes: Sequence[int], sids: NDArray[np.int64], low: NDArray[np.int64],
    high: NDArray[np.int64],
) -> tuple[NDArray[np.int64], int]:  # fmt: skip
    """Raise WrongValueError unless row i is the value of sample ``sids[i]``, its version within ``low[i] … high[i]``.

    Returns:
        The versions found, and how many bytes were compared.
    """
    field = FIELDS[name]
    if field.kind in ("text", "object"):
        return _check_objects(name, field, column, indexes, sids, low, high)
    if not isinstance(column, torch.Tensor) or column.dtype != field.dtype:
        kind = column.dtype if isinstance(column, torch.Tensor) else type(column).__name__
        raise WrongValueError(f"field {name!r} came back as {kind}, it was put as {field.dtype}")
    if field.kind == "number":
        return _check_numbers(name, field, column, indexes, sids, low, high)
    rows = _bytes_of(field, column)
    _expect(name, "rows", len(rows), len(sids), indexes, 0)
    for row, data in enumerate(rows):
        _expect(name, "a row of at least 16 bytes", len(data) >= HEAD_NBYTES, True, indexes, row)
    heads = np.stack([row[:HEAD_NBYTES] for row in rows]).view(np.uint64)
    nbytes = np.array([len(row) for row in rows])
    versions = ((heads[:, 1] >> np.uint64(32)) & np.uint64(0xFFFFFF)).astype(np.int64)
    wanted = _rows(field.number, sids, versions, nbytes)
    for row, (data, expected) in enumerate(zip(rows, wanted, strict=True)):
        if not np.array_equal(data, expected):
            raise WrongValueError(_difference(name, row, indexes[row], data, expected))
    _check_versions(name, indexes, versions, low, high)
    return versions, int(nbytes.sum())


def _bytes_of(field: Field, column: torch.Tensor) -> list[Bytes]:
    if not column.is_nested or column.layout != torch.jagged:
        return [_raw(field, row) for row in column.unbind()]
    flat = _raw_flat(column.values())
    step = column.values()[:1].numel() * field.dtype.itemsize
    edges, lengths = column.offsets().tolist(), column.lengths()
    spans = pairwise(edges)
    if lengths is not None:
        spans = ((start, start + length) for start, length in zip(edges, lengths.tolist(), strict=False))
    rows = [flat[start * step : stop * step] for start, stop in spans]
    return [np.packbits(row) for row in rows] if field.dtype == torch.bool else rows


def _raw(field: Field, row: torch.Tensor) -> Bytes:
    flat = _raw_flat(row)
    return np.packbits(flat) if field.dtype == torch.bool else flat


def _raw_flat(tensor: torch.Tensor) -> Bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


def _check_numbers(
    name: str, field: Field, column: torch.Tensor, indexes: Sequence[int], sids: Any, low: Any, high: Any
) -> tuple[NDArray[np.int64], int]:
    values = column.numpy()
    _expect(name, "shape", values.shape, sids.shape, indexes, 0)
    versions = (values >> _NUMBER_BITS) & ((1 << _VERSION_BITS) - 1)
    wanted = (sids << (_NUMBER_BITS + _VERSION_BITS)) | (versions << _NUMBER_BITS) | field.number
    wrong = np.flatnonzero(values != wanted)
    if len(wrong):
        row = int(wrong[0])
        raise WrongValueError(
            f"field {name!r} of sample {indexes[row]} (row {row}): {int(values[row]):#x} is a value of sid "
            f"{int(values[row]) >> (_NUMBER_BITS + _VERSION_BITS)}, this sample's is {int(sids[row])}"
        )
    _check_versions(name, indexes, versions, low, high)
    return versions, values.nbytes


def _check_objects(
    name: str, field: Field, column: Any, indexes: Sequence[int], sids: Any, low: Any, high: Any
) -> tuple[NDArray[np.int64], int]:
    values = column.tolist() if hasattr(column, "tolist") else list(column)
    _expect(name, "rows", len(values), len(sids), indexes, 0)
    versions, nbytes = np.zeros(len(sids), np.int64), 0
    for row, (value, sid) in enumerate(zip(values, sids.tolist(), strict=True)):
        text = value if field.kind == "text" else value["raw"].decode()
        told = text.split("/", 3)
        version, length = int(told[1]), int(told[2])
        build = _text if field.kind == "text" else _object
        _expect(name, "value", value, build(sid, version, length), indexes, row)
        versions[row] = version
        nbytes += len(text)
    _check_versions(name, indexes, versions, low, high)
    return versions, nbytes


def _check_versions(name: str, indexes: Sequence[int], versions: Any, low: Any, high: Any) -> None:
    wrong = np.flatnonzero((versions < low) | (versions > high))
    if len(wrong):
        row = int(wrong[0])
        raise WrongValueError(
            f"field {name!r} of sample {indexes[row]} (row {row}) has version {int(versions[row])}, "
            f"must be {int(low[row])} to {int(high[row])}; {len(wrong)} of {len(versions)} rows are like this"
        )


def _expect(name: str, what: str, got: Any, wanted: Any, indexes: Sequence[int], row: int) -> None:
    if got != wanted:
        raise WrongValueError(
            f"field {name!r} of sample {indexes[row]} (row {row} of {len(indexes)}): {what} is {str(got)[:200]}, "
            f"must be {str(wanted)[:200]}"
        )


def _difference(name: str, row: int, index: int, data: Bytes, expected: Bytes) -> str:
    wrong = np.flatnonzero(data != expected)
    told, must = (head[:HEAD_NBYTES].copy().view(np.uint64).tolist() for head in (data, expected))
    first = int(wrong[0])
    return (
        f"field {name!r} of sample {index} (row {row}, {len(data)} bytes): {len(wrong)} wrong bytes, the first at "
        f"{first}, the last at {int(wrong[-1])}. Its head says sid {told[0]}, field {told[1] >> 56}, version "
        f"{told[1] >> 32 & 0xFFFFFF}, {told[1] & 0xFFFFFFFF} bytes; must be sid {must[0]}, field {must[1] >> 56}. "
        f"There: {data[first : first + 16].tobytes().hex()}, must be {expected[first : first + 16].tobytes().hex()}"
    )
