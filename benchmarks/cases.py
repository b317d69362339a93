# SPDX-License-Identifier: Apache-2.0
"""Batches as users put them: dense, the batch of an RL step, jagged prompts, texts; and touching what was got."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

PAGE = 4096
CHECKED_ROWS = 5


def dense(mib: float, rows: int = 64) -> TensorDict:
    """Rows of random float32."""
    return TensorDict({"x": torch.rand(rows, int(mib * 2**20) // (4 * rows))}, batch_size=[rows])


def rl_batch(samples: int = 1024, length: int = 2048) -> TensorDict:
    """What a policy update reads: 56 MiB in five fields."""
    fields = {
        "input_ids": torch.randint(150_000, (samples, length)),
        "attention_mask": torch.ones(samples, length, dtype=torch.int64),
        "position_ids": torch.arange(length).repeat(samples, 1),
        "old_log_probs": torch.rand(samples, length),
        "rewards": torch.rand(samples, 1),
    }
    return TensorDict(fields, batch_size=[samples])


def strided(samples: int = 1024, length: int = 2048) -> TensorDict:
    """The same fields cut out of wider tensors, as slices of a padded batch are: no row touches the next."""
    wide = rl_batch(samples, 2 * length)
    cut = {name: value[:, ::2] if value.shape[1] > 1 else value for name, value in wide.items()}
    return TensorDict(cut, batch_size=[samples])


def jagged(samples: int = 256, shortest: int = 64, longest: int = 4096) -> TensorDict:
    """Token ids of prompts and responses without padding."""
    lengths = torch.randint(shortest, longest + 1, (samples,), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randint(150_000, (int(offsets[-1]),))
    return TensorDict({"ids": torch.nested.nested_tensor_from_jagged(values, offsets)}, batch_size=[samples])


def strings(samples: int = 1024, length: int = 200) -> TensorDict:
    texts = [f"{number:06d} ".ljust(length, "x") for number in range(samples)]
    return TensorDict({"text": NonTensorStack(*texts)}, batch_size=[samples])


def nbytes(data: TensorDict) -> int:
    """Bytes of the values; of texts, their characters."""
    total = 0
    for value in data.values():
        if isinstance(value, torch.Tensor):
            total += sum(part.numel() * part.element_size() for part in _flat(value))
        else:
            total += sum(len(text) for text in value.tolist())
    return total


def touch(data: TensorDict) -> int:
    """Read a byte of every page of every tensor and the length of every text: what isn't there yet must come now."""
    total = 0
    for value in data.values():
        if isinstance(value, torch.Tensor):
            total += sum(int(part.view(torch.uint8).numpy()[::PAGE].sum()) for part in _flat(value))
        else:
            total += sum(len(text) for text in value.tolist())
    return total


def total(data: TensorDict) -> float:
    """The sum of every value of every tensor."""
    tensors = (value for value in data.values() if isinstance(value, torch.Tensor))
    return sum(float(part.sum()) for tensor in tensors for part in _flat(tensor))


def check(put: TensorDict, got: TensorDict) -> None:
    """Some rows of what was got are what was put, byte for byte."""
    rows = torch.linspace(0, len(put) - 1, CHECKED_ROWS).long().tolist()
    for name, column in put.items():
        want, have = _rows(column), _rows(got.get(name))
        for row in rows:
            same = want[row] == have[row] if isinstance(want[row], str) else _equal(want[row], have[row])
            if not same:
                raise RuntimeError(f"row {row} of field {name!r} came back different from what was put.")


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.flatten(), other.flatten())


def _rows(column: Any) -> Any:
    if not isinstance(column, torch.Tensor):
        return column.tolist()
    return column.unbind() if column.is_nested else column


def _flat(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's memory in one-dimensional pieces."""
    if type(value) is not torch.Tensor:  # jagged; to ask it what it is takes longer than to ask for its values
        yield value.values().reshape(-1)
    elif value.is_nested:
        yield from (part.reshape(-1) for part in value.unbind())
    else:
        yield value.reshape(-1)
