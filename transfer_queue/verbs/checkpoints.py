# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the whole queue as it is at one moment, into a directory and back."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from transfer_queue import protocol as p
from transfer_queue.checkpoint.directory import Staging
from transfer_queue.checkpoint.manifest import CONTROLLER, STORAGE
from transfer_queue.checkpoint.npy import replace_bytes, write_bytes
from transfer_queue.checkpoint.opened import Opened, check_user_metadata, complete, read_state, read_values, reading
from transfer_queue.checkpoint.values import SavedValues, off_loop, save_values
from transfer_queue.control.saved import SavedQueue
from transfer_queue.control.snapshot import decode, saved_indexes
from transfer_queue.errors import TransferQueueError
from transfer_queue.transport.modes import is_blocking
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.verbs.line import Line

AnyPath = str | os.PathLike[str]
_log = get_logger(__name__)


class Checkpoints(Line):
    """Whatever goes on in the queue may go on: only puts that replace values being saved wait until these are read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shift = 0
        self._freezes = itertools.count(1)

    async def async_save_checkpoint(
        self, checkpoint_dir: AnyPath, *, include_storage: bool = True, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Save the whole queue: partitions, tasks, what was given to whom, and the values.

        Args:
            checkpoint_dir: Made, parents included; a checkpoint that is there is replaced once the new one is whole.
            include_storage: The storage units hold values in memory only, so False changes nothing there.
            metadata: Of your own, as JSON in ``metadata.json``.
        Raises:
            CheckpointError: it could not be written; nothing new is left, and an earlier checkpoint is as it was.
        """
        user = check_user_metadata(metadata)
        if not include_storage:
            _log.warning("include_storage=False is ignored: SimpleStorage holds values in memory only, they are saved.")
        staging = Staging(checkpoint_dir)
        staging.begin()
        with staging:
            async with self._frozen() as state:
                controller = await off_loop(write_bytes, staging.path / CONTROLLER, state)
                await self._save_storage(staging.path)
            await off_loop(complete, staging.path, user, controller)
            await off_loop(staging.commit)

    async def async_load_checkpoint(self, checkpoint_dir: AnyPath) -> None:
        """Replace the whole queue by a saved one; other storage units than it had then are no obstacle.

        Samples keep their indexes in a queue that never used these; else they get new ones. Consumers that wait are
        looked at again. What was reserved for puts under way is void: they reserve anew, or fail.

        Raises:
            CheckpointNotFoundError: no checkpoint there (a FileNotFoundError), or a file of it is missing.
            CheckpointError: foreign, damaged, of a newer version. The queue is as it was.
            StorageFullError: it doesn't fit beside what the queue holds. The queue is as it was.
        """
        with reading(checkpoint_dir):
            opened = await off_loop(Opened, checkpoint_dir)
            await self._load(opened.data, opened.state, opened.values)

    async def async_save_controller_checkpoint(self, path: AnyPath) -> None:
        """Save the state of the queue alone, without values, to a file."""
        async with self._frozen() as state:
            await off_loop(replace_bytes, Path(path), state)

    async def async_load_controller_checkpoint(self, path: AnyPath) -> None:
        """Replace the state of the queue by a saved one, whose values ``load_storage_checkpoint`` has stored."""
        with reading(path):
            data = await off_loop(read_state, Path(path))
        shift, self._shift = self._shift, 0
        await self._restore(data, shift)

    async def async_save_storage_checkpoint(self, checkpoint_dir: AnyPath) -> None:
        """Save the values of the samples whose state is saved in this directory, or else of all there are now."""
        directory = Path(checkpoint_dir)
        if (directory / CONTROLLER).exists():
            saved = decode(await off_loop(read_state, directory / CONTROLLER))
            await save_values(self.storage_manager, saved, directory / STORAGE)
            return
        async with self._frozen() as state:
            await off_loop(write_bytes, directory / CONTROLLER, state)
            await save_values(self.storage_manager, decode(state), directory / STORAGE)

    async def async_load_storage_checkpoint(self, checkpoint_dir: AnyPath) -> None:
        """Store the values of a checkpoint; ``load_controller_checkpoint`` of the same client makes them visible."""
        directory = Path(checkpoint_dir)
        with reading(directory):
            saved = decode(await off_loop(read_state, directory / CONTROLLER))
            self._shift = await self._store(saved, await off_loop(read_values, directory, saved))

    # ---- saving ----

    @asynccontextmanager
    async def _frozen(self) -> AsyncIterator[bytes]:
        """The queue's state; inside, the values that belong to it stay as they are."""
        number, wait_s = next(self._freezes), self.session.timeout_s
        try:
            yield (await self.session.ask(p.Freeze, p.Frozen, number, wait_s, wait_s=wait_s)).state
        except BaseException:
            with contextlib.suppress(TransferQueueError):  # the first error is the one to tell
                await self._thaw(number)
            raise
        await self._thaw(number)

    async def _thaw(self, number: int) -> None:
        await self.forget(p.Thaw, number)

    async def _save_storage(self, directory: Path) -> None:
        twin = getattr(self, "save_storage_checkpoint", None)
        if twin is not None and is_blocking():  # by its public name, which a subclass may have given a meaning
            twin(directory)
        else:
            await self.async_save_storage_checkpoint(directory)

    # ---- loading ----

    async def _load(self, data: bytes, saved: SavedQueue, values: SavedValues | None) -> None:
        shift = 0 if values is None else await self._store(saved, values)
        try:
            await self._restore(data, shift)
        except BaseException:
            await self._give_up((saved_indexes(saved) + shift).tolist())
            raise

    async def _store(self, saved: SavedQueue, values: SavedValues) -> int:
        """Returns what was added to the samples' indexes. Nobody sees the values before ``_restore``."""
        indexes = saved_indexes(saved)
        shift = int((await self.session.ask(p.Stage, p.Done, p.pack_indexes(indexes))).value)
        try:
            await values.put(self.storage_manager, shift)
        except BaseException:
            await self._give_up((indexes + shift).tolist())
            raise
        return shift

    async def _restore(self, data: bytes, shift: int) -> None:
        await self.forget(p.Restore, data, shift)

    async def _give_up(self, indexes: Sequence[int]) -> None:
        with contextlib.suppress(TransferQueueError):  # the first error is the one to tell
            await self.cancel("", indexes)
