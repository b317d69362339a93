# SPDX-License-Identifier: Apache-2.0
"""Where the next iterator of a stream starts, in memory that DataLoader workers share, persistent ones included."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transfer_queue.errors import InvalidRequestError

_MAX_NAME_BYTES = 1024
_RING = 64
_EDITION, _BATCH, _MICRO, _NAME_LENGTH, _ITERATION = range(5)


@dataclass(frozen=True, slots=True)
class Start:
    """A place in a stream: partition, batch, and how many micro-batches of it were taken already."""

    partition_id: str
    batch_index: int = 0
    micro_batch: int = 0


class Cursor:
    """Written by the process of the loader, read by whoever starts an iterator. A live iterator never looks here
    for its place, only whether it was given up."""

    def __init__(self, partition_id: str) -> None:
        self._numbers = torch.zeros(5, dtype=torch.int64).share_memory_()
        self._name = torch.zeros(_MAX_NAME_BYTES, dtype=torch.uint8).share_memory_()
        self._given_up = torch.zeros(_RING, dtype=torch.int64).share_memory_()
        self.move(Start(partition_id))

    def move(self, start: Start) -> None:
        """The next iterator starts here. Raises ValueError for a name of more than 1024 bytes."""
        name = start.partition_id.encode()
        if len(name) > _MAX_NAME_BYTES:
            raise InvalidRequestError(f"a partition's name may have {_MAX_NAME_BYTES} bytes, got {len(name)}.")
        self._numbers[_EDITION] += 1  # odd: being written
        self._name[: len(name)] = torch.frombuffer(bytearray(name or b"\0"), dtype=torch.uint8)[: len(name)]
        self._numbers[_NAME_LENGTH] = len(name)
        self._numbers[_BATCH] = start.batch_index
        self._numbers[_MICRO] = start.micro_batch
        self._numbers[_EDITION] += 1

    def read(self) -> Start:
        """Where to start now."""
        while True:
            edition = int(self._numbers[_EDITION])
            _, batch, micro, length, _ = self._numbers.tolist()
            name = bytes(self._name[:length].tolist())
            if edition % 2 == 0 and int(self._numbers[_EDITION]) == edition:
                return Start(name.decode(), batch, micro)

    def begin_iteration(self) -> int:
        """A number for the iterator that starts now."""
        self._numbers[_ITERATION] += 1
        return int(self._numbers[_ITERATION])

    def iteration(self) -> int:
        """The number of the iterator that started last."""
        return int(self._numbers[_ITERATION])

    def give_up(self, iteration: int) -> None:
        """Nobody takes from that iterator any more; its workers may stop waiting."""
        self._given_up[iteration % _RING] = iteration

    def is_given_up(self, iteration: int) -> bool:
        return int(self._given_up[iteration % _RING]) == iteration
