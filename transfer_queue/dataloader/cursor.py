# SPDX-License-Identifier: Apache-2.0
"""Where a stream starts. A loader passes this to its workers, even persistent ones, through shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transfer_queue.errors import InvalidRequestError

_MAX_NAME_BYTES = 1024
_ITERATION, _CANCELLED, _BATCH, _MICRO, _NAME_LENGTH, _NAME = range(6)


@dataclass(frozen=True, slots=True)
class Start:
    """A position in a stream: partition, batch, and how many of its micro-batches were already taken."""

    partition_id: str
    batch_index: int = 0
    micro_batch: int = 0

    def __post_init__(self) -> None:
        if len(self.partition_id.encode()) > _MAX_NAME_BYTES:
            raise InvalidRequestError(
                f"a stream's partition name may have {_MAX_NAME_BYTES} bytes, got {len(self.partition_id.encode())}."
            )
        if self.batch_index < 0 or self.micro_batch < 0:
            raise InvalidRequestError(
                f"a stream starts at batch 0 or later, got batch {self.batch_index}, micro-batch {self.micro_batch}."
            )


class Cursor:
    """Start positions for one set of workers. The loader opens iterations, numbered from 1; every worker joins each
    once.
    """

    def __init__(self) -> None:
        self._cells = torch.zeros(_NAME + _MAX_NAME_BYTES // 8, dtype=torch.int64).share_memory_()
        self._opened = self._joined = 0

    # ---- in the loader's process ----

    def open(self, start: Start) -> int:
        """End the current iteration and start the next one here. Returns its number."""
        name = start.partition_id.encode()
        cells = self._cells
        cells[_ITERATION] = 0  # a worker that reads meanwhile finds its iteration over
        cells[_BATCH], cells[_MICRO], cells[_NAME_LENGTH] = start.batch_index, start.micro_batch, len(name)
        cells[_NAME:].view(torch.uint8).numpy()[: len(name)] = list(name)
        self._opened += 1
        cells[_ITERATION] = self._opened
        return self._opened

    def cancel(self, iteration: int) -> None:
        """Cancel this iteration, so that its workers may stop waiting."""
        self._cells[_CANCELLED] = max(iteration, int(self._cells[_CANCELLED]))

    # ---- in a worker ----

    def join(self) -> int:
        """Return the number of the iteration that this worker begins."""
        self._joined += 1
        return self._joined

    def start_of(self, iteration: int) -> Start | None:
        """Return where this iteration starts; None if it is already over."""
        current, _, batch, micro, length, *_ = self._cells.tolist()
        name = bytes(self._cells[_NAME:].view(torch.uint8)[:length].tolist())
        if not current == iteration == int(self._cells[_ITERATION]):  # it may also have ended while this was read
            return None
        return Start(name.decode(), batch, micro)

    # ---- in both ----

    def is_over(self, iteration: int) -> bool:
        """Return whether the iteration was cancelled or the next one opened."""
        return int(self._cells[_CANCELLED]) >= iteration or int(self._cells[_ITERATION]) != iteration
