# SPDX-License-Identifier: Apache-2.0
"""All micro-batches of one batch, and how they travel from a worker to the loader."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import numpy as np
import torch

from transfer_queue.dataloader import segments
from transfer_queue.storage.pack import as_bytes, dtype_name, dtype_of, from_bytes, is_plain, is_simple_jagged
from transfer_queue.storage.unpack_fast import Jagged

_Inline: TypeAlias = tuple[str, tuple[int, ...], bytes]
_Jagged: TypeAlias = tuple[torch.Tensor, bytes]
_Described: TypeAlias = tuple[torch.Tensor] | _Jagged | _Inline | segments.Lent


@dataclass(slots=True)
class Bundle:
    """All items of a batch, sent together so that batches stay in order."""

    batch_index: int
    items: list[Any]
    numbers: Sequence[int]
    """The place of each item among the micro-batches of its batch, from 1 on."""
    has_groups: bool = False
    """Whether the queue must hear when they were trained."""

    def pin_memory(self) -> Bundle:
        from torch.utils.data._utils.pin_memory import pin_memory

        return replace(self, items=[pin_memory(item) for item in self.items])

    def packed(self) -> Packed:
        """Pickle this bundle for the loader's process. Raises whatever pickling an item raises.

        Torch would pickle in a thread that only prints errors, and the loader would wait forever.
        """
        stream = io.BytesIO()
        _Packer(stream, pickle.HIGHEST_PROTOCOL).dump(self.items)
        return Packed(replace(self, items=[]), stream.getvalue(), os.getpid(), segments.retired())


@dataclass(slots=True)
class Packed:
    """A bundle whose items are pickled. ``retired``: segments of this worker that are no longer lent."""

    bundle: Bundle
    items: bytes
    worker: int
    retired: list[int]

    def __reduce__(self) -> Any:
        return _unpacked, (self.bundle, self.items, self.worker, self.retired)


class _Packer(ForkingPickler):
    """Pickles as torch does for another process, but sends small tensors inline and lends large ones."""

    def persistent_id(self, value: Any) -> _Described | None:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.requires_grad:
            return None
        if is_simple_jagged(value) and value.offsets().dtype is torch.int64:
            return value.values(), value.offsets().numpy().tobytes()
        if type(value) is not torch.Tensor or not is_plain(value):
            return None
        if value.nbytes >= segments.LEAST_NBYTES:
            # Torch would send a conjugated or negated view as a plain tensor.
            return (value.resolve_conj().resolve_neg(),) if value.is_conj() or value.is_neg() else segments.lend(value)
        return dtype_name(value.dtype), tuple(value.shape), as_bytes(value).tobytes()


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: bytes) -> None:
        super().__init__(io.BytesIO(packed))
        self._jagged = Jagged()

    def persistent_load(self, described: _Described) -> torch.Tensor:
        if isinstance(described, segments.Lent):
            return segments.receive(described)
        if len(described) == 1:
            return described[0]
        if len(described) == 2:
            values, offsets = described
            return self._jagged(values, np.frombuffer(bytearray(offsets), np.int64))
        dtype, shape, content = described
        return from_bytes(np.frombuffer(bytearray(content), np.uint8), dtype_of(dtype), shape)


def _unpacked(bundle: Bundle, packed: bytes, worker: int, retired: list[int]) -> Bundle:
    # The pickle comes from this loader's own worker, like everything else torch unpickles from workers.
    bundle.items = _Unpacker(packed).load()
    segments.unmap(worker, retired)
    return bundle
