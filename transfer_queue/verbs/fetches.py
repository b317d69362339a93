# SPDX-License-Identifier: Apache-2.0
"""Fetches: ask the controller for a batch, read its values from the storage, settle it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensordict import TensorDict

from transfer_queue import protocol as p
from transfer_queue.config import fetch_wait_s
from transfer_queue.errors import BatchTimeoutError, EndOfPartitionError, InvalidRequestError
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata_wire import to_meta
from transfer_queue.storage.base import Wish
from transfer_queue.verbs.line import Line
from transfer_queue.verbs.read_ahead import FetchedBatch, ReadAhead


class Fetches(Line):
    """``async_get_meta``, ``async_get_data``, and what a stream is made of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_ahead = ReadAhead()

    async def async_get_meta(
        self,
        data_fields: Sequence[str] | str | None = None,
        batch_size: int | None = None,
        partition_id: str | None = None,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> BatchMeta:
        """Metadata of samples.

        Args:
            data_fields: Names, or one name. None in mode "force_fetch": every field that all samples have.
            mode: "fetch" gives ``task_name`` its next ``batch_size`` ready samples; "insert" makes new samples;
                "force_fetch" describes all samples of the partition, consumed or not, and marks nothing.
            sampling_config: ``dp_rank``, ``batch_index``, ``dp_size``; ``first_index`` (where several readers of one
                stream began: its batches are drawn in their order); ``pass_start`` (where this pass over a finite
                stream began: who reads the same pass is told the same end); ``after`` (token of the last batch, whose
                partition may have been cleared since); the rest goes to the sampler as keywords.
            timeout_s: Longest wait of a fetch (None: TQ_CONTROLLER_GET_METADATA_TIMEOUT, or 0 when polling).
        Returns:
            Empty ("not yet") only when the queue is configured with ``polling_mode``.
        Raises:
            BatchTimeoutError: not enough ready samples in time; says which fields were missing.
            EndOfPartitionError: no batch will come any more.
        """
        if partition_id is None:
            raise InvalidRequestError("get_meta needs a partition_id.")
        if mode == "force_fetch":
            wanted = None if data_fields is None else as_names(data_fields)
            return to_meta(await self.session.ask(p.Describe, p.Batch, partition_id, wanted, None))
        fields = as_names(data_fields or [])
        if mode not in ("fetch", "insert"):
            near = difflib.get_close_matches(str(mode), ["fetch", "insert", "force_fetch"], 1, 0.0)
            raise InvalidRequestError(
                f"unknown mode {mode!r}; did you mean {near[0]!r}? Also: fetch, insert, force_fetch."
            )
        if batch_size is None:
            raise InvalidRequestError(f"get_meta in mode {mode!r} needs a batch_size.")
        if mode == "insert":
            wait_s = await self.put_timeout_s()
            return to_meta(
                await self.session.ask(p.Insert, p.Batch, partition_id, batch_size, fields, wait_s, wait_s=wait_s)
            )
        if task_name is None:
            raise InvalidRequestError("get_meta in mode 'fetch' needs a task_name: who consumes the samples.")
        polling = bool((await self.session.config())["controller"]["polling_mode"])
        wait_s = timeout_s if timeout_s is not None else (0.0 if polling else fetch_wait_s())
        request = self._fetch(fields, batch_size, partition_id, task_name, sampling_config, wait_s)
        storage = None if self._storage is None else self.storage_manager
        wish = Wish() if storage is None or not self._read_ahead.pays else await storage.wish(fields, small=True)
        reply, frames = await self._fetched(request, wish, wait_s)
        if isinstance(reply, p.NotReady):
            if polling:
                return BatchMeta.empty()
            raise BatchTimeoutError(explain(reply, task_name, partition_id, fields, wait_s))
        meta = to_meta(reply)
        self._read_ahead.keep(FetchedBatch(meta, wish, frames), storage)
        return meta

    async def async_fetch(
        self,
        fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        task_name: str,
        sampling_config: Mapping[str, Any] | None = None,
        *,
        wait_s: float = 0.0,
        finite: bool = False,
        acks: Sequence[str] = (),
    ) -> p.Batch | p.NotReady:
        """One fetch as the controller answers it, parked there for up to ``wait_s`` seconds.

        Raises:
            EndOfPartitionError: the third answer.
        """
        request = self._fetch(fields, batch_size, partition_id, task_name, sampling_config, wait_s, finite, acks)
        return _checked(await self.session.send(request, p.Reply, wait_s), request)

    async def async_fetch_batch(
        self,
        fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        task_name: str,
        sampling_config: Mapping[str, Any] | None = None,
        *,
        wait_s: float = 0.0,
        finite: bool = False,
    ) -> FetchedBatch | p.NotReady:
        """``async_fetch`` of a batch to ``take``. Where the storage is near the controller its values come along."""
        request = self._fetch(fields, batch_size, partition_id, task_name, sampling_config, wait_s, finite)
        await self.session.config()
        wish = await self.storage_manager.wish(fields)
        reply, frames = await self._fetched(request, wish, wait_s)
        return reply if isinstance(reply, p.NotReady) else FetchedBatch(to_meta(reply), wish, frames)

    async def _fetched(
        self, request: p.Fetch, wish: Wish, wait_s: float
    ) -> tuple[p.Batch | p.NotReady, list[memoryview]]:
        """The answer, and what came beside it; without a batch the wish is closed."""
        try:
            beside = [wish.message] if wish.message else []
            answer, frames = await self.session.send_beside(beside, request, p.Reply, wait_s)
            wish.answered(frames)
            reply = _checked(answer, request)
        except BaseException:
            wish.close()
            raise
        if isinstance(reply, p.NotReady):
            wish.close()
        return reply, frames

    async def async_take(self, batch: FetchedBatch) -> TensorDict:
        """The values of a batch, as ``async_get_data`` gives them; once."""
        if batch.closed:
            raise InvalidRequestError(
                "this batch was taken or closed; its values may be gone. Use get_data(batch.meta)."
            )
        data = batch.values()
        return await self.async_get_data(batch.meta) if data is None else data

    def _fetch(
        self,
        fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        task_name: str,
        sampling_config: Mapping[str, Any] | None,
        wait_s: float,
        finite: bool = False,
        acks: Sequence[str] = (),
    ) -> p.Fetch:
        arguments = {str(key): value for key, value in (sampling_config or {}).items()}
        named = [arguments.pop(name, None) for name in ("dp_rank", "batch_index", "dp_size")]
        first_index, skip = arguments.pop("first_index", None), arguments.pop("skip", 0)
        pass_start, after = arguments.pop("pass_start", None), arguments.pop("after", None)
        for name in ("partition_id", "task_name"):
            arguments.pop(name, None)
        return self.session.message(
            p.Fetch, partition_id, task_name, list(fields), batch_size, *named, wait_s, finite, arguments, list(acks),
            first_index, skip, pass_start, after,
        )  # fmt: skip

    async def async_get_data(self, metadata: BatchMeta, copy: bool = True) -> TensorDict:
        """Values of ``metadata.field_names``, rows in the metadata's order; writable memory of the caller's own.

        Args:
            copy: False: values that lie together in a storage unit of this host are given as views of its memory,
                which keep that from being recycled until the last of them is gone; only for reading (who writes
                changes pages of his own, never what is stored), and only in this process, not in its forks.
        Raises:
            StorageKeyNotFoundError: a sample was cleared (a KeyError), or a field was never put.
        """
        if not metadata.size:
            return TensorDict({}, batch_size=[0])
        await self.session.config()
        storage = self.storage_manager
        if copy:
            data = self._read_ahead.take(metadata, storage)
            return await storage.get_data(metadata) if data is None else data
        return await storage.get_views(metadata)

    async def async_ack(self, metadata: BatchMeta, task_name: str, earlier: bool = False) -> int:
        """Settle the batch this metadata came from: nobody will ask for it again. Returns 0 if it was already.

        Args:
            earlier: Settle all batches before it of the same data-parallel rank, too.
        Returns:
            How many batches that settled.
        """
        if metadata.token is None:
            return 0
        partition, tokens = metadata.partition_ids[0], [metadata.token]
        return int((await self.session.ask(p.Ack, p.Done, partition, task_name, tokens, earlier)).value)


def _checked(reply: Any, request: p.Fetch) -> p.Batch | p.NotReady:
    if isinstance(reply, p.Ended):
        raise EndOfPartitionError(
            f"no more batches of partition {request.partition!r} for task {request.task!r}: it is {reply.reason}; "
            f"{reply.dropped} samples were left over by the tail policy."
        )
    return reply  # type: ignore[no-any-return]


def as_names(fields: Sequence[str] | str) -> list[str]:
    """A list of field names; one string is one name. Raises TypeError for anything else."""
    names = [fields] if isinstance(fields, str) else list(fields)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"data_fields must be a string or a list of strings, got {fields!r}.")
    return names


def explain(reply: p.NotReady, task: str, partition: str, fields: Iterable[str], waited_s: float) -> str:
    """Why a fetch got nothing, in one or two sentences."""
    lacking = ", ".join(f"{count} lack field {name!r}" for name, count in reply.lacking.items())
    last = "nothing was published yet" if reply.last_published_s is None else f"{reply.last_published_s:.0f} s ago"
    text = (
        f"task {task!r} waited {waited_s:.1f} s for {reply.wanted} samples of {partition!r}: {reply.ready} ready"
        f"{', ' + lacking if lacking else ''} (last published: {last})."
    )
    unknown = [name for name in fields if reply.known_fields and name not in reply.known_fields]
    if unknown:
        known = ", ".join(reply.known_fields)
        text += f" Nobody has put field {unknown[0]!r} so far; fields there are: {known}."
    return text + " Check the producers, lower batch_size, or wait longer (timeout_s)."
