# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device on a side stream, while the device computes.

Pinned memory is not pooled here: torch's own allocator reuses it, and not before the copies that use it are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, is_non_tensor
from torch import Tensor

_NEEDED = ("Stream", "Event", "stream", "current_stream")


class SideStream:
    """A stream for copies, beside the device's current stream.

    A device without streams gets torch's stand-ins for the CPU. Its copies are done when they are started.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        module: Any = getattr(torch, device.type, None)
        self._torch: Any = module if all(hasattr(module, name) for name in _NEEDED) else torch.cpu
        self._stream = self._torch.Stream(device)

    @property
    def is_real(self) -> bool:
        """Whether the device has streams, so that copies from and to pinned memory run beside other work."""
        return self._torch is not torch.cpu

    @contextmanager
    def copies(self) -> Iterator[Any]:
        """Copies that are started within run on this stream. Gives the event that completes with them."""
        done = self._torch.Event()
        with self._torch.stream(self._stream):
            yield done
            done.record(self._stream)

    def start(self, data: TensorDict) -> DeviceCopy | None:
        """Start the copy of a batch. None: it has jagged or nested fields, which can't be copied ahead."""
        tensors = [value for value in data.values() if not is_non_tensor(value)]
        if any(type(value) is not Tensor or value.is_nested for value in tensors):
            return None
        # The source was written by the host, so this need not wait for the device.
        with self.copies() as done:
            copied = data.to(self.device, non_blocking=True)
        return DeviceCopy(copied, done, self)

    def follow(self, read: Iterable[Tensor]) -> None:
        """Copies that start from now on wait for what the device was given so far.

        Args:
            read: What they read. Its memory is not reused before they are done.
        """
        self._stream.wait_stream(self._torch.current_stream(self.device))
        self._keep(read, self._stream)

    def lead(self, done: Any, written: Iterable[Tensor] = ()) -> None:
        """What the device is given from now on waits for these copies. The host doesn't wait.

        Args:
            written: What they write, in memory that was allocated within ``copies``. It is not reused before the device
                is done with it.
        """
        current = self._torch.current_stream(self.device)
        done.wait(current)
        self._keep(written, current)

    def _keep(self, tensors: Iterable[Tensor], stream: Any) -> None:
        for tensor in tensors:
            if self.is_real:  # the stand-ins are not accepted
                tensor.record_stream(stream)


class DeviceCopy(NamedTuple):
    """A batch's values on the device, where their copy may still run."""

    data: TensorDict
    done: Any
    side: SideStream

    def finish(self) -> TensorDict:
        """The values, for the device's current stream: what it is given from now on waits for them."""
        self.side.lead(self.done, (value for value in self.data.values() if isinstance(value, Tensor)))
        return self.data


def device_copies(device: torch.device) -> SideStream | None:
    """A stream for copies of batches. None: the device has no streams, so a copy can't run beside a step."""
    side = SideStream(device)
    return side if side.is_real else None
