# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the whole queue as it is at one moment, into a directory and back."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transfer_queue import protocol as p
from transfer_queue.checkpoint.directory import Staging, is_url
from transfer_queue.checkpoint.files import CONTROLLER, STORAGE, DataFile, GrowingFile, replace
from transfer_queue.checkpoint.opened import Opened, check_user_metadata, complete, read_values, reading
from transfer_queue.checkpoint.remote import RemoteCheckpoint
from transfer_queue.checkpoint.saved_state import SavedState, write_slice
from transfer_queue.checkpoint.saved_values import NewPlaces, SavedValues, save_values
from transfer_queue.checkpoint.spool import spooled_checkpoint
from transfer_queue.client.base import ClientBase
from transfer_queue.control.saved import SavedBatch, SavedQueue, saved_indexes
from transfer_queue.errors import UnitLostError
from transfer_queue.transport.blocking import is_blocking, off_loop
from transfer_queue.utils.logging_utils import get_logger

AnyPath = str | os.PathLike[str]
_log = get_logger(__name__)


class _Staged(NamedTuple):
    """Values that are stored for a restore: the call that made room for them, what was added to their indexes, and
    where they lie.
    """

    call: int = 0
    shift: int = 0
    places: NewPlaces = NewPlaces()


_LOSSES = 3
"""Losses of storage units that one save outlives."""


class Checkpoints(ClientBase):
    """The queue stays in use meanwhile. Only puts that replace values being saved wait until these are read."""

    _staged = _Staged()

    async def async_save_checkpoint(
        self, checkpoint_dir: AnyPath, *, include_storage: bool = True, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Save the whole queue: partitions, tasks, the batches that each task was given, and the values.

        Args:
            checkpoint_dir: A directory, which is made with its parents. A checkpoint that is there is replaced once the
                new one is whole. It may be a URL that fsspec knows (``s3://...``, ``gs://...``). The files are then
                written to a temporary local directory while the queue goes on, and copied from there.
            include_storage: The storage units hold values in memory only, so False changes nothing there.
            metadata: Your own data, which ``metadata.json`` keeps.
        Raises:
            CheckpointError: it could not be written; nothing new is left, and an earlier checkpoint is as it was.
            UnitLostError: storage units have ended again and again meanwhile.
            ConfigError: fsspec has no file system for this URL, or a package for it is missing.
        Examples:
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> client.save_checkpoint("runs/queue", metadata={"step": 100})
        """
        if is_url(checkpoint_dir):
            remote = RemoteCheckpoint(os.fspath(checkpoint_dir))
            await off_loop(remote.check)
            with spooled_checkpoint(remote.url) as directory:
                await self.async_save_checkpoint(directory, include_storage=include_storage, metadata=metadata)
                await off_loop(remote.write, directory)
            return
        user = check_user_metadata(metadata)
        if not include_storage:
            _log.warning("include_storage=False is ignored: SimpleStorage holds values in memory only, they are saved.")
        await self._save(checkpoint_dir, user)

    async def async_save_batches(
        self, directory: AnyPath, task_name: str, metadata: Mapping[str, Any] | None = None
    ) -> int:
        """Save the batches that a task was given and has not acknowledged, then acknowledge them.

        They are a checkpoint of these samples alone, with all their fields and tags, and the heads of their groups.

        Args:
            metadata: Your own data, which ``metadata.json`` keeps. With ``{"gap": True}`` readers of the record are
                warned that batches may lack before these.
        Returns:
            How many batches.
        Raises:
            CheckpointError: it could not be written. Nothing new is left, and nothing is acknowledged.
        Examples:
            >>> client.register_task("copy", follows="sft")
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> first = {"dp_rank": 0, "batch_index": 0}
            >>> batch = client.get_meta(["x"], 4, "train", task_name="sft", sampling_config=first)
            >>> client.save_batches("runs/record/000000", "copy")
            1
        """
        saved = await self._save(directory, {**check_user_metadata(metadata), "task": task_name}, task_name)
        by_partition: dict[str, list[str]] = {}
        for partition, batch in saved:
            by_partition.setdefault(partition, []).append(batch.token)
        for partition, tokens in by_partition.items():
            await self.session.ask(p.Ack, p.Done, partition, task_name, tokens)
        return len(saved)

    async def async_load_checkpoint(self, checkpoint_dir: AnyPath) -> None:
        """Replace the whole queue by a saved one; other storage units than it had then are no obstacle.

        Samples keep their indexes in a queue that never used these; else they get new ones. Waiting consumers are
        served from the new state. Reservations of puts under way are void: such a put reserves anew, or fails.

        Raises:
            CheckpointNotFoundError: no checkpoint there (a FileNotFoundError), or a file of it is missing.
            CheckpointError: foreign, damaged, of a newer version. The queue is as it was.
            StorageFullError: it doesn't fit next to what the queue holds. The queue is as it was.
            ConfigError: fsspec has no file system for this URL, or a package for it is missing.
        Examples:
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> client.save_checkpoint("runs/queue")
            >>> client.clear_partition("train")
            >>> client.load_checkpoint("runs/queue")
            >>> client.get_meta(["x"], 4, "train", task_name="update_actor").size
            4
        """
        if is_url(checkpoint_dir):
            remote = RemoteCheckpoint(os.fspath(checkpoint_dir))
            with spooled_checkpoint(remote.url) as directory:
                await off_loop(remote.read, directory)
                await self.async_load_checkpoint(directory)
            return
        with reading(checkpoint_dir):
            opened = await off_loop(Opened, checkpoint_dir)
            if opened.values is not None:
                await self._store(opened.state, opened.values)
            await self._restore(opened.state)

    async def async_save_controller_checkpoint(self, path: AnyPath) -> None:
        """Save the state of the queue alone, without values, to a file.

        Raises:
            CheckpointError: it could not be written.
        """
        temporary = Path(f"{os.fspath(path)}.tmp")
        await off_loop(temporary.unlink, True)
        async with self._frozen(temporary):
            await off_loop(replace, Path(path), temporary)

    async def async_load_controller_checkpoint(self, path: AnyPath) -> None:
        """Replace the state of the queue by a saved one, whose values ``load_storage_checkpoint`` has stored.

        Raises:
            CheckpointNotFoundError: there is no such file.
            CheckpointError: it is damaged, of a newer version, or its values were not stored by this client.
        """
        with reading(path):
            await self._restore(await off_loop(SavedState, Path(path)))

    async def async_save_storage_checkpoint(self, checkpoint_dir: AnyPath) -> None:
        """Save the values of the samples whose state is saved in this directory, or else of all there are now.

        Raises:
            CheckpointError: they could not be written.
        """
        directory = Path(checkpoint_dir)
        is_saved = (directory / CONTROLLER).exists()
        async with nullcontext() if is_saved else self._frozen(directory / CONTROLLER):
            await save_values(self.storage_manager, SavedState(directory / CONTROLLER), directory / STORAGE)

    async def async_load_storage_checkpoint(self, checkpoint_dir: AnyPath) -> None:
        """Store the values of a checkpoint; ``load_controller_checkpoint`` of the same client makes them visible.

        Raises:
            CheckpointNotFoundError: a file of the checkpoint is missing.
            CheckpointError: they are damaged.
            StorageFullError: they don't fit next to what the queue holds.
        """
        directory = Path(checkpoint_dir)
        with reading(directory):
            state = await off_loop(SavedState, directory / CONTROLLER)
            await self._store(state, await off_loop(read_values, directory, state))

    # ---- saving ----

    async def _save(
        self, directory: AnyPath, user: dict[str, Any], task: str | None = None
    ) -> list[tuple[str, SavedBatch]]:
        """Save the whole queue, or the open batches of a task; returns these, each with its partition.

        If values are lost with a storage unit meanwhile, it begins anew, without them.
        """
        for _ in range(_LOSSES):
            with suppress(UnitLostError):  # the queue knows of it by now
                return await self._save_once(directory, user, task)
        return await self._save_once(directory, user, task)

    async def _save_once(
        self, directory: AnyPath, user: dict[str, Any], task: str | None
    ) -> list[tuple[str, SavedBatch]]:
        with Staging(directory) as staging:
            async with self._frozen(staging.path / CONTROLLER, task) as controller:
                await self._save_storage(staging.path)
            await off_loop(complete, staging.path, user, controller)
            saved = [] if task is None else await off_loop(_batches, staging.path / CONTROLLER, controller)
            await off_loop(staging.commit)
        return saved

    @asynccontextmanager
    async def _frozen(self, path: Path, task: str | None = None) -> AsyncIterator[DataFile]:
        """Write the queue's state to a new file. Inside, the values that belong to it stay as they are."""
        session, wait_s = self.session, self.session.timeout_s
        freeze = p.Freeze(session.number(), wait_s, task)
        frozen = await session.send(freeze, p.Frozen, wait_s, keep=True)
        try:
            await self.storage_manager.commit_everywhere(frozen.committing)
            file, part = await off_loop(GrowingFile, path), 1
            try:
                await off_loop(write_slice, file, frozen.state)
                while part < frozen.num_parts:
                    frozen = await session.ask(p.ReadFrozen, p.Frozen, freeze.id, part)
                    await off_loop(write_slice, file, frozen.state)
                    part += 1
                written = await off_loop(file.close)
            finally:
                file.discard()
            yield written
        except BaseException:
            await session.cancel(freeze.id)
            raise
        await self.clear(p.Thaw, freeze.id)
        session.done(session.controller, freeze.id)

    async def _save_storage(self, directory: Path) -> None:
        twin = getattr(self, "save_storage_checkpoint", None)
        if twin is not None and is_blocking():  # by its public name, which a subclass may have given a meaning
            twin(directory)
        else:
            await self.async_save_storage_checkpoint(directory)

    # ---- loading ----

    async def _store(self, state: SavedState, values: SavedValues) -> None:
        """Nobody sees the values before ``_restore``."""
        session = self.session
        await self._unstage()
        stage = p.Stage(session.number(), await off_loop(_indexes, state))
        shift = int((await session.send(stage, p.Done, keep=True)).value)
        self._staged = _Staged(stage.id, shift)
        try:
            self._staged = _Staged(stage.id, shift, await values.put(self.storage_manager, shift))
        except BaseException:
            await self._unstage()
            raise

    async def _restore(self, state: SavedState) -> None:
        session, shift, first_call, number = self.session, self._staged.shift, 0, 0
        slices = state.slices()
        try:
            part = await off_loop(_encoded, slices, self._staged.places)
            while following := await off_loop(_encoded, slices, self._staged.places):
                call = session.number()
                first_call = first_call or call
                await session.send(
                    p.RestorePart(call, first_call, number, part, shift), p.Done, keep=call == first_call
                )
                part, number = following, number + 1
            await self.clear(p.Restore, part, shift, first_call)
        except BaseException:
            if first_call:
                await session.cancel(first_call)
            await self._unstage()
            raise
        if first_call:
            session.done(session.controller, first_call)
        self.session.done(self.session.controller, self._staged.call)
        self._staged = _Staged()

    async def _unstage(self) -> None:
        """The controller has the values deleted that were stored for a restore that does not come."""
        call, self._staged = self._staged.call, _Staged()
        if call:
            await self.session.cancel(call)


def _batches(path: Path, written: DataFile) -> list[tuple[str, SavedBatch]]:
    return list(SavedState(path, written).batches())


def _indexes(state: SavedState) -> bytes:
    """All that the saved rows have."""
    return p.pack_indexes(np.concatenate([saved_indexes(saved) for saved in state.slices()]))


def _encoded(slices: Iterator[SavedQueue], places: NewPlaces) -> bytes:
    """The next slice, which says where its values lie now; b"" if there is none."""
    saved = next(slices, None)
    if saved is None:
        return b""
    places.tell(saved)
    return msgspec.msgpack.encode(saved)
