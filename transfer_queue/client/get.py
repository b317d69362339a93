# SPDX-License-Identifier: Apache-2.0
"""Gets: ask the controller for a batch, read its values from the storage, acknowledge it."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from tensordict import TensorDict

from transfer_queue import protocol as p
from transfer_queue.client.base import ClientBase, as_names, check_meta, checked_wait, joined, parts_of, to_meta
from transfer_queue.config import fetch_wait_s
from transfer_queue.diagnosis import not_ready
from transfer_queue.errors import (
    BatchTimeoutError,
    EndOfPartitionError,
    InvalidRequestError,
    SampleClearedError,
    StorageKeyNotFoundError,
    UnknownPartitionError,
)
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.batch_meta import UnreadBatch
from transfer_queue.metadata.field_schema import common_dtypes
from transfer_queue.storage.base import InFront, Places
from transfer_queue.storage.shm.choose import values_lost
from transfer_queue.storage.unpack import relaid
from transfer_queue.transport.caller import SocketCaller

_OF_THE_FETCH = ("dp_rank", "batch_index", "dp_size", "first_index", "skip", "pass_start", "after", "where")
_SAID_ELSEWHERE = ("partition_id", "task_name")
_MOST_WITH_VALUES = 8
"""Batches with values that wait to be read. Of a client that reads none, further ones bring none."""


class FetchedBatch:
    """A batch, and the values that came with it. They stay where they are until they are taken, or it is closed."""

    def __init__(
        self,
        meta: BatchMeta,
        call: tuple[SocketCaller, int],
        front: InFront | None,
        frames: Sequence[memoryview],
        places: Places,
    ) -> None:
        """``call``: whose session pins the values."""
        self.meta = meta
        self.places = places
        self._call = call
        self._front = front if frames else None
        self._frames = frames
        self.closed = False

    async def values(self) -> TensorDict | None:
        """Once. None: none came, so read them."""
        front, self._front, self.closed = self._front, None, True
        if front is None:
            return None
        return await front.decode_read(self._frames[0], self._frames[1:], self.meta.field_names, self.meta.size)

    async def close(self) -> None:
        """Idempotent."""
        front, self._front, self.closed = self._front, None, True
        if front is not None:
            await front.release(self._call[1])


class Gets(ClientBase):
    """``async_get_meta``, ``async_get_data``, and what a stream is made of."""

    async def async_get_meta(
        self,
        data_fields: Sequence[str] | str | None = None,
        batch_size: int | None = None,
        partition_id: str | None = None,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        where: str | None = None,
        adds: Sequence[str] | str | None = None,
    ) -> BatchMeta:
        """Metadata of samples.

        Args:
            data_fields: Names, or one name. None in mode "force_fetch": every field that all samples have.
            partition_id: One name. A pattern such as "train@*", which ``lease`` takes, is a name like any other here.
            mode: "fetch" gives ``task_name`` its next ``batch_size`` ready samples; "insert" makes new samples;
                "force_fetch" describes all samples of the partition, consumed or not, and marks nothing.
            sampling_config: ``dp_rank``, ``batch_index``, ``dp_size``; ``first_index`` (where several readers of one
                stream began: its batches are drawn in their order); ``pass_start`` (where this pass over a finite
                stream began: all readers of a pass get the same end); ``after`` (token of the last batch, whose
                partition may have been cleared since); ``where`` (as below); the rest goes to the sampler as keywords.
            timeout_s: Longest wait of a fetch (None: TQ_CONTROLLER_GET_METADATA_TIMEOUT, or 0 when polling).
            where: Only samples whose tags match, such as ``"policy_version >= 7 and env == 'math'"``. The others stay
                for other fetches. A missing tag matches no comparison. docs/semantics.md has the grammar.
            adds: Fields that you will put onto these samples, as a teacher or a reward model does. What you have not
                put when your process ends, or when the queue is restored from a checkpoint, goes to other clients of
                the task. They get the end of a sealed partition once no sample is in another's hands. So put the fields
                of all samples that you take, or clear the samples. Not for batches of a ``dp_rank``.
        Returns:
            Empty ("not yet") only when the queue is configured with ``polling_mode``.
        Raises:
            BatchTimeoutError: not enough ready samples in time; says which fields were missing.
            EndOfPartitionError: no batch will come any more.
            InvalidRequestError: ``where`` is no filter; says at which character.
        Examples:
            >>> tags = [{"policy_version": version} for version in (6, 7, 7, 8)]
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train", tags=tags)
            >>> batch = client.get_meta(["x"], 2, "train", task_name="update_actor", where="policy_version == 7")
            >>> client.get_data(batch)["x"]
            tensor([1, 2])
            >>> prompts = client.get_meta(["x"], 4, "train", task_name="teacher", adds=["logits"])
            >>> meta = client.put({"logits": torch.zeros(4, 8)}, metadata=prompts)
        """
        if partition_id is None:
            raise InvalidRequestError("get_meta needs a partition_id.")
        added = [] if adds is None else as_names(adds, "adds")
        if added and mode != "fetch":
            raise InvalidRequestError(f"get_meta can't have adds={adds!r} in mode {mode!r}, only in mode 'fetch'.")
        if mode == "force_fetch":
            named = None if data_fields is None else as_names(data_fields)
            return joined(await self.pages(p.Describe, p.Batch, partition_id, named, None))
        fields = as_names(data_fields or [])
        if mode not in ("fetch", "insert"):
            near = difflib.get_close_matches(str(mode), ["fetch", "insert", "force_fetch"], 1, 0.0)
            raise InvalidRequestError(
                f"unknown mode {mode!r}; did you mean {near[0]!r}? Also: fetch, insert, force_fetch."
            )
        if mode == "insert":
            return await self._insert(partition_id, batch_size, fields)
        if task_name is None:
            raise InvalidRequestError("get_meta in mode 'fetch' needs a task_name, which names the consumer.")
        polling = (await self.session.config()).controller.polling_mode
        wait_s = timeout_s if timeout_s is not None else (0.0 if polling else fetch_wait_s())
        fetch = fetch_request(fields, batch_size or 0, partition_id, task_name, sampling_config, wait_s)
        where = fetch.where if where is None else where
        front = self.storage_manager.front
        small = front is not None and len(self._with_values) < _MOST_WITH_VALUES and await front.decide_mapping()
        number = self.session.number()
        fetch = msgspec.structs.replace(fetch, id=number, adds=added, where=where, small_values=small)
        reply, frames = await self._fetched(fetch)
        if isinstance(reply, p.NotReady):
            if polling:
                return BatchMeta.empty()
            raise BatchTimeoutError(str(not_ready(reply, task_name, partition_id, fields, wait_s)))
        if not reply.indexes:
            raise InvalidRequestError(
                f"nothing is left of batch {reply.batch_index} of task {task_name!r}, partition {partition_id!r}: all "
                f"its groups have left since it was drawn. Ask for a later batch_index."
            )
        return self._to_read(reply, frames)

    async def _insert(self, partition: str, count: int | None, fields: list[str]) -> BatchMeta:
        if count is None:
            raise InvalidRequestError("get_meta in mode 'insert' needs a batch_size.")
        wait_s = await self.put_timeout_s()
        return to_meta(await self.session.ask(p.Insert, p.Batch, partition, count, fields, wait_s, wait_s=wait_s))

    async def async_fetch_batch(self, fetch: p.Fetch) -> FetchedBatch | p.NotReady:
        """One fetch, which waits in the controller for up to ``fetch.wait_s`` seconds.

        Where the storage shares the controller's process, the batch's values come along.

        Raises:
            EndOfPartitionError: no batch will come any more.
        Examples:
            >>> from transfer_queue.client.get import fetch_request
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> fetched = client.fetch_batch(fetch_request(["x"], 2, "train", "update_actor", None, wait_s=5.0))
            >>> fetched.meta.size
            2
        """
        await self.session.config()
        front, caller = self.storage_manager.front, self.session.caller
        if front is not None:
            fetch = msgspec.structs.replace(fetch, with_values=True, mapped=await front.decide_mapping())
        fetch = msgspec.structs.replace(fetch, id=self.session.number())
        try:
            reply, frames = await self._fetched(fetch)
            if isinstance(reply, p.NotReady):
                return reply
            meta = to_meta(reply) if frames else self._to_read(reply)
            places = Places({name: spec.units for name, spec in reply.fields.items()}, reply.committing)
            return FetchedBatch(meta, (caller, reply.id), front, frames, places)
        except KeyboardInterrupt:
            if front is not None:  # the answer may have come, and have pinned something
                await front.release(fetch.id)
            raise

    def _to_read(self, batch: p.Batch, values: Sequence[memoryview] = ()) -> BatchMeta:
        """Metadata of a batch. What is in no ledger is kept for as long as it may be read."""
        meta = to_meta(batch)
        if batch.batch_index is None or values:
            read = self.session.done_reading if batch.batch_index is None else None
            unread = UnreadBatch(batch.id, meta.global_indexes, batch.fields, read)
            if values:
                unread.keep_values(meta.global_indexes, values, self._with_values)
            meta.unread = (unread,)
        return meta

    async def _fetched(self, fetch: p.Fetch) -> tuple[p.Batch | p.NotReady, list[memoryview]]:
        reply, frames = await self.session.send_with_frames(fetch, p.Reply, fetch.wait_s)
        if isinstance(reply, p.Ended):
            raise EndOfPartitionError(
                f"no more batches of partition {fetch.partition!r} for task {fetch.task!r}: it is {reply.reason}; "
                f"{reply.dropped} samples were left over by the tail policy."
            )
        assert isinstance(reply, p.Batch | p.NotReady)
        return reply, frames

    async def async_take(self, batch: FetchedBatch) -> TensorDict:
        """The values of a batch, as ``async_get_data`` gives them; once.

        Raises:
            InvalidRequestError: the batch was taken or closed before.
        Examples:
            >>> from transfer_queue.client.get import fetch_request
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> fetched = client.fetch_batch(fetch_request(["x"], 4, "train", "update_actor", None, wait_s=5.0))
            >>> client.take(fetched)["x"]
            tensor([0, 1, 2, 3])
        """
        if batch.closed:
            raise InvalidRequestError(
                "this batch was taken or closed; its values may be gone. Use get_data(batch.meta)."
            )
        if not batch.meta.size:
            await batch.close()
            return TensorDict({}, batch_size=[0])
        data = await batch.values()
        if data is None:
            data = await self._read(batch.meta, batch.places)
        common = common_dtypes(batch.meta.field_schema, batch.meta.global_indexes)  # fails once nothing is pinned
        return relaid(data, self.storage_manager.layout, common) if common else data

    async def async_get_data(self, metadata: BatchMeta, layout: str | None = None) -> TensorDict:
        """Values of ``metadata.field_names``, rows in the metadata's order; writable memory of the caller's own.

        Args:
            metadata: Metadata of N samples, from ``put`` or ``get_meta``, or a selection or concatenation of such.
            layout: "jagged": tensors of at least one dim per sample come back nested, as in TransferQueue. "dense": as
                dense tensors, where all samples have the same shape. None: ``client.layout`` of the configuration.
        Returns:
            A TensorDict of batch size [N].
        Raises:
            StorageKeyNotFoundError: a sample was cleared (a KeyError), or a field was never put.
            UnitLostError: a storage unit has ended; names the values that were lost with it.
            SchemaConflictError: some samples of a field are tensors, and others are objects, or their dtypes have no
                common one; the text names both.
        Examples:
            >>> rows = [torch.arange(2), torch.arange(3)]
            >>> columns = {"ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "text": ["a b", "a b c"]}
            >>> meta = client.put(columns, partition_id="train")
            >>> client.get_data(meta)["ids"].offsets()
            tensor([0, 2, 5])
        """
        check_meta("get_data", metadata)
        if not metadata.size:
            return TensorDict({}, batch_size=[0])
        common = common_dtypes(metadata.field_schema, metadata.global_indexes)
        await self.session.config()
        data = self._came_along(metadata, layout)
        if data is None:
            data = await self._read_there(metadata, layout)
        return relaid(data, layout or self.storage_manager.layout, common) if common else data

    async def _read_there(self, meta: BatchMeta, layout: str | None) -> TensorDict:
        """The values, from where they lie now."""
        storage, places = self.storage_manager, None
        if await storage.in_several_units():
            places = await self._places(meta, meta.field_names)
        try:
            return await self._read(meta, places, layout)
        except StorageKeyNotFoundError:  # they may be in another unit, which has joined, or which has ended
            if places is None and await storage.in_several_units(fresh=True):
                return await self._read(meta, await self._places(meta, meta.field_names), layout)
            for part in meta.chunk_by_partition():
                await self._check_lost(part.partition_ids[0], part.field_names, part.global_indexes)
            raise

    def _came_along(self, meta: BatchMeta, layout: str | None) -> TensorDict | None:
        """The values, if they came with exactly this metadata and are still those."""
        front, batches = self.storage_manager.front, meta.unread
        if front is None or len(batches) != 1:
            return None
        values = batches[0].take_values(meta.global_indexes, meta.field_names, self._with_values)
        if values is None:
            return None
        data = front.decode_small(values[0], values[1:], meta, layout)
        if data is not None:
            batches[0].was_read(meta.global_indexes, meta.field_names)
        return data

    async def _read(self, meta: BatchMeta, places: Places | None, layout: str | None = None) -> TensorDict:
        """The values, which lie there; the metadata's batches are read then."""
        data = await self.storage_manager.read(meta, places, layout)
        for batch in meta.unread:
            batch.was_read(meta.global_indexes, meta.field_names)
        return data

    async def _places(self, meta: BatchMeta, names: Sequence[str]) -> Places:
        """Where the values lie now."""
        committing: dict[p.WriteName, None] = {}
        units = {name: np.zeros(meta.size, dtype=np.int32) for name in names}
        partitions = np.array(meta.partition_ids, dtype=object)
        for partition in dict.fromkeys(meta.partition_ids):
            mine = np.flatnonzero(partitions == partition)
            for some in parts_of(len(mine)):
                at = mine[some]
                own = p.pack_indexes([meta.global_indexes[row] for row in at])
                described = await self._described(partition, names, own)
                committing |= dict.fromkeys(described.committing)
                for name, spec in described.fields.items():
                    if spec.units is not None:
                        units[name][at] = p.by_row(spec.units)
        return Places({name: p.runs_of(own) for name, own in units.items()}, list(committing))

    async def _described(self, partition: str, names: Sequence[str], indexes: bytes) -> p.Batch:
        """Samples that have all these fields."""
        try:
            described = await self.session.ask(p.Describe, p.Batch, partition, list(names), indexes)
        except (SampleClearedError, UnknownPartitionError) as error:
            raise StorageKeyNotFoundError(str(error)) from None
        if not np.frombuffer(described.status, dtype=np.int8).all():
            await self._check_lost(partition, names, p.unpack_indexes(indexes))
            each = {name: await self.session.ask(p.Describe, p.Batch, partition, [name], indexes) for name in names}
            lacking = [name for name, own in each.items() if not np.frombuffer(own.status, dtype=np.int8).all()]
            if not lacking:  # they were put meanwhile
                return await self._described(partition, names, indexes)
            raise StorageKeyNotFoundError(
                f"some of these samples of partition {partition!r} lack the fields {lacking}: they were not "
                "put yet, or never. Fetch again, or correct the names."
            )
        return described

    async def _check_lost(self, partition: str, names: Sequence[str], indexes: Sequence[int] | p.Indexes) -> None:
        """Raises UnitLostError for values that were lost with a storage unit."""
        lost = (await self.session.ask(p.ListLost, p.Done, partition)).value
        found = {name: np.intersect1d(indexes, p.unpack_indexes(lost.get(name, b""))).tolist() for name in names}
        if any(found.values()):
            raise values_lost({name: some for name, some in found.items() if some})

    async def async_ack(self, metadata: BatchMeta, task_name: str, earlier: bool = False) -> int:
        """Acknowledge the batch of this metadata: no reader will ask for it again. Returns 0 if it already was.

        Args:
            earlier: Acknowledge all batches before it of the same data-parallel rank, too.
        Returns:
            How many batches this acknowledged.
        Examples:
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> first = {"dp_rank": 0, "batch_index": 0}
            >>> batch = client.get_meta(["x"], 2, "train", task_name="sft", sampling_config=first)
            >>> client.ack(batch, "sft")
            1
        """
        check_meta("ack", metadata)
        if metadata.token is None:
            return 0
        partition, tokens = metadata.partition_ids[0], [metadata.token]
        return int((await self.session.ask(p.Ack, p.Done, partition, task_name, tokens, earlier)).value)

    async def async_ack_before(self, partition_id: str, task_name: str, before: int, dp_rank: int = 0) -> int:
        """Acknowledge all batches of a rank below ``before``. Returns how many this acknowledged.

        A trainer that resumes does so: its checkpoint holds those batches, and it has no metadata of them.

        Examples:
            >>> client.ack_before("train", "sft", before=1)
            0
        """
        acked = await self.session.ask(p.Ack, p.Done, partition_id, task_name, [], False, before, dp_rank)
        return int(acked.value)


def fetch_request(
    fields: Sequence[str],
    batch_size: int,
    partition: str,
    task: str,
    sampling_config: Mapping[str, Any] | None,
    wait_s: float,
) -> p.Fetch:
    """A fetch from the public ``sampling_config``: what it says of the batch is split from the sampler's arguments."""
    if sampling_config is not None and not isinstance(sampling_config, Mapping):
        raise InvalidRequestError(f"sampling_config must be a mapping, got {sampling_config!r}.")
    arguments = {str(key): value for key, value in (sampling_config or {}).items() if key not in _SAID_ELSEWHERE}
    for key in arguments:
        if key not in _OF_THE_FETCH and (meant := _misspelt(key)):
            raise InvalidRequestError(
                f"sampling_config has {key!r}; did you mean {meant!r}? A sampler's own keyword needs another name."
            )
    wait_s = checked_wait("a fetch", wait_s)
    named = {name: arguments.pop(name) for name in _OF_THE_FETCH if name in arguments}
    if named.get("skip") is None:
        named.pop("skip", None)
    return p.Fetch(0, partition, task, list(fields), batch_size, wait_s=wait_s, sampler_args=arguments, **named)


@functools.lru_cache
def _misspelt(key: str) -> str | None:
    """What this key of a sampling_config was meant to be, if it looks like a misspelt one."""
    return next(iter(difflib.get_close_matches(key, _OF_THE_FETCH, 1, 0.8)), None)
