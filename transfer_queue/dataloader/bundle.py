# SPDX-License-Identifier: Apache-2.0
"""All micro-batches of one batch, and how they get from a worker to the loader."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import numpy as np
import torch

from transfer_queue.storage.assembling import is_simple_jagged, jagged
from transfer_queue.storage.tensors import as_bytes, dtype_name, dtype_of, from_bytes, is_plain

_INLINE_NBYTES = 64 * 1024
"""Larger tensors stay in shared memory: torch hands each over with a connection of its own, which takes 0.5 ms."""

_Inline: TypeAlias = tuple[str, tuple[int, ...], bytes]
_Jagged: TypeAlias = tuple[torch.Tensor, bytes]


@dataclass(slots=True)
class Bundle:
    """Travels as one item, so that batches stay in order."""

    batch_index: int
    items: list[Any]
    first: int = 0
    """Micro-batches of the batch before these, which were taken earlier and not read again."""

    def pin_memory(self) -> Bundle:
        from torch.utils.data._utils.pin_memory import pin_memory

        return Bundle(self.batch_index, [pin_memory(item) for item in self.items], self.first)

    def __reduce__(self) -> Any:
        return _unpacked, (self.batch_index, _packed(self.items), self.first)


class _Packer(ForkingPickler):
    """As torch pickles for another process, but small tensors travel in the message."""

    def persistent_id(self, value: Any) -> _Jagged | _Inline | None:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.requires_grad:
            return None
        if is_simple_jagged(value):
            return value.values(), value.offsets().numpy().tobytes()
        if type(value) is torch.Tensor and is_plain(value) and value.nbytes <= _INLINE_NBYTES:
            return dtype_name(value.dtype), tuple(value.shape), as_bytes(value).tobytes()
        return None


class _Unpacker(pickle.Unpickler):
    def persistent_load(self, described: _Jagged | _Inline) -> torch.Tensor:
        if len(described) == 2:
            values, offsets = described
            return jagged(values, np.frombuffer(bytearray(offsets), np.int64))
        dtype, shape, content = described
        return from_bytes(np.frombuffer(bytearray(content), np.uint8), dtype_of(dtype), shape)


def _packed(items: list[Any]) -> bytes:
    stream = io.BytesIO()
    _Packer(stream, pickle.HIGHEST_PROTOCOL).dump(items)
    return stream.getvalue()


def _unpacked(batch_index: int, packed: bytes, first: int) -> Bundle:
    # From this loader's own worker, as whatever else torch unpickles of its workers.
    return Bundle(batch_index, _Unpacker(io.BytesIO(packed)).load(), first)
