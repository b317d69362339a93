# SPDX-License-Identifier: Apache-2.0
"""A put onto samples that others know, which may have to be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from transfer_queue.errors import TransferQueueError
from transfer_queue.storage.base import Update

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.storage.simple.manager import SimpleStorageManager


class UnitUpdate(Update):
    """``number`` names the write at the units that it touched."""

    def __init__(
        self, stored: TensorDict, absent: bool, number: int, units: Sequence[int], manager: SimpleStorageManager
    ) -> None:
        super().__init__(stored, absent)
        self.number = number
        self._units = units
        self._manager = manager

    def settle(self) -> None:
        self._manager.settle(self.number, self._units)

    async def take_back(self, indexes: Sequence[int]) -> None:
        await self._manager.take_back(self.number, indexes)

    async def abandon(self, indexes: Sequence[int]) -> None:
        """It failed. Where a unit can't be told, it remembers what is open, and takes it back when this client ends."""
        with suppress(TransferQueueError):
            await self.take_back(indexes)
            self.settle()
