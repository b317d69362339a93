# SPDX-License-Identifier: Apache-2.0
"""Gets: ask the controller for a batch, read its values from the storage, acknowledge it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue import protocol as p
from transfer_queue.client.base import ClientBase, checked_wait, to_meta
from transfer_queue.config import fetch_wait_s
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
from transfer_queue.metadata.field_schema import common_dtypes, dtypes_of
from transfer_queue.storage.base import InFront
from transfer_queue.storage.pack import named_columns, values_of
from transfer_queue.storage.unpack import from_rows

_OF_THE_FETCH = ("dp_rank", "batch_index", "dp_size", "first_index", "skip", "pass_start", "after", "where")
_SAID_ELSEWHERE = ("partition_id", "task_name")


class FetchedBatch:
    """A batch, and the values that came with it. They stay where they are until they are taken, or it is closed."""

    def __init__(
        self,
        meta: BatchMeta,
        call: int,
        front: InFront | None,
        frames: Sequence[memoryview],
        units: Mapping[str, p.UnitRuns | None],
    ) -> None:
        """``units``: by field, where the values lie."""
        self.meta = meta
        self.units = units
        self._call = call
        self._front = front if frames else None
        self._frames = frames
        self.closed = False

    async def values(self) -> TensorDict | None:
        """Once. None: none came, so read them."""
        front, self.closed = self._front, True
        if front is None:
            return None
        self._front = None
        return await front.decode_read(self._frames[0], self._frames[1:], self.meta.field_names, self.meta.size)

    async def close(self) -> None:
        """Idempotent."""
        front, self._front, self.closed = self._front, None, True
        if front is not None:
            await front.release(self._call)


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
    ) -> BatchMeta:
        """Metadata of samples.

        Args:
            data_fields: Names, or one name. None in mode "force_fetch": every field that all samples have.
            mode: "fetch" gives ``task_name`` its next ``batch_size`` ready samples; "insert" makes new samples;
                "force_fetch" describes all samples of the partition, consumed or not, and marks nothing.
            sampling_config: ``dp_rank``, ``batch_index``, ``dp_size``; ``first_index`` (where several readers of one
                stream began: its batches are drawn in their order); ``pass_start`` (where this pass over a finite
                stream began: all readers of a pass get the same end); ``after`` (token of the last batch, whose
                partition may have been cleared since); ``where`` (as below); the rest goes to the sampler as keywords.
            timeout_s: Longest wait of a fetch (None: TQ_CONTROLLER_GET_METADATA_TIMEOUT, or 0 when polling).
            where: Only samples whose tags match, such as ``"policy_version >= 7 and env == 'math'"``. The others stay
                for other fetches. A missing tag matches no comparison. docs/semantics.md has the grammar.
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
        """
        if partition_id is None:
            raise InvalidRequestError("get_meta needs a partition_id.")
        if mode == "force_fetch":
            return await self._describe(partition_id, None if data_fields is None else as_names(data_fields))
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
            raise InvalidRequestError("get_meta in mode 'fetch' needs a task_name, which names the consumer.")
        polling = (await self.session.config()).controller.polling_mode
        wait_s = timeout_s if timeout_s is not None else (0.0 if polling else fetch_wait_s())
        fetch = fetch_request(fields, batch_size, partition_id, task_name, sampling_config, wait_s, where)
        reply, _ = await self._fetched(msgspec.structs.replace(fetch, id=self.session.number()))
        if isinstance(reply, p.NotReady):
            if polling:
                return BatchMeta.empty()
            raise BatchTimeoutError(explain(reply, task_name, partition_id, fields, wait_s))
        return self._to_read(reply)

    async def _describe(self, partition_id: str, fields: Sequence[str] | None) -> BatchMeta:
        """In pages, so that a large partition holds up no other client."""
        page = await self.session.ask(p.Describe, p.Batch, partition_id, fields)
        pages = [to_meta(page)]
        while page.more:
            last = pages[-1].global_indexes[-1]
            page = await self.session.ask(p.Describe, p.Batch, partition_id, fields, None, last)
            pages.append(to_meta(page))
        if fields is None and len(pages) > 1:  # every field that all samples have
            common = set.intersection(*(set(each.field_names) for each in pages))
            pages = [each.select_fields([name for name in each.field_names if name in common]) for each in pages]
        return BatchMeta.concat(pages, validate=False) if len(pages) > 1 else pages[0]

    async def async_fetch_batch(self, fetch: p.Fetch) -> FetchedBatch | p.NotReady:
        """One fetch, parked in the controller for up to ``fetch.wait_s`` seconds.

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
        front = self.storage_manager.front
        if front is not None:
            fetch = msgspec.structs.replace(fetch, with_values=True, mapped=await front.decide_mapping())
        fetch = msgspec.structs.replace(fetch, id=self.session.number())
        try:
            reply, frames = await self._fetched(fetch)
            if isinstance(reply, p.NotReady):
                return reply
            meta = to_meta(reply) if frames else self._to_read(reply)
            units = {name: spec.units for name, spec in reply.fields.items()}
            return FetchedBatch(meta, reply.id, front, frames, units)
        except KeyboardInterrupt:
            if front is not None:  # the answer may have come, and have pinned something
                await front.release(fetch.id)
            raise

    def _to_read(self, batch: p.Batch) -> BatchMeta:
        """Metadata of a batch without values. What is in no ledger is kept for as long as it may be read."""
        meta = to_meta(batch)
        if batch.batch_index is None:
            meta.unread = (UnreadBatch(batch.id, meta.global_indexes, batch.fields, self.session.done_reading),)
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
        common = common_dtypes(batch.meta.field_schema, batch.meta.global_indexes)
        if common:
            await batch.close()
            return await self._read_apart(batch.meta, common)
        data = await batch.values()
        if data is not None:
            return data
        return await self._read(batch.meta, batch.units)

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
            SchemaConflictError: some samples of a field are tensors, and others are objects; the text names both.
        Examples:
            >>> rows = [torch.arange(2), torch.arange(3)]
            >>> columns = {"ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "text": ["a b", "a b c"]}
            >>> meta = client.put(columns, partition_id="train")
            >>> client.get_data(meta)["ids"].offsets()
            tensor([0, 2, 5])
        """
        if not metadata.size:
            return TensorDict({}, batch_size=[0])
        common = common_dtypes(metadata.field_schema, metadata.global_indexes)
        if common:
            return await self._read_apart(metadata, common, layout)
        await self.session.config()
        storage, units = self.storage_manager, None
        if await storage.in_several_units():
            units = await self._places(metadata, metadata.field_names)
        return await self._read(metadata, units, layout)

    async def _read_apart(
        self, meta: BatchMeta, common: Mapping[str, torch.dtype], layout: str | None = None
    ) -> TensorDict:
        """Read the samples of each dtype apart, and cast them to the common dtypes of their fields."""
        by_dtypes: dict[tuple[Any, ...], list[int]] = {}
        dtypes = [dtypes_of(meta.field_schema[name], meta.size) for name in common]
        for position, own in enumerate(zip(*dtypes, strict=True)):
            by_dtypes.setdefault(own, []).append(position)
        rows: dict[str, list[Any]] = {name: [None] * meta.size for name in meta.field_names}
        for positions in by_dtypes.values():
            part = await self.async_get_data(meta.select_samples(positions))
            for name, column in named_columns(part):
                for position, value in zip(positions, values_of(column, len(positions)), strict=True):
                    rows[name][position] = value.to(common[name]) if name in common else value
        return from_rows(rows, meta.size, layout or self.storage_manager.layout)

    async def _read(
        self, meta: BatchMeta, units: Mapping[str, p.UnitRuns | None] | None, layout: str | None = None
    ) -> TensorDict:
        """The values, which lie there; the metadata's batches are read then."""
        data = await self.storage_manager.read(meta, units, layout)
        for batch in meta.unread:
            batch.was_read(meta.global_indexes, meta.field_names)
        return data

    async def _places(self, meta: BatchMeta, names: Sequence[str]) -> dict[str, p.UnitRuns | None]:
        """By field, where the values lie now."""
        units = {name: np.zeros(meta.size, dtype=np.int32) for name in names}
        partitions = np.array(meta.partition_ids, dtype=object)
        for partition in dict.fromkeys(meta.partition_ids):
            at = np.flatnonzero(partitions == partition)
            own = p.pack_indexes([meta.global_indexes[row] for row in at])
            try:
                described = await self.session.ask(p.Describe, p.Batch, partition, list(names), own)
            except (SampleClearedError, UnknownPartitionError) as error:
                raise StorageKeyNotFoundError(str(error)) from None
            if not np.frombuffer(described.status, dtype=np.int8).all():
                raise StorageKeyNotFoundError(
                    f"samples of partition {partition!r} don't have all of the fields {list(names)}: they were not put "
                    f"yet, or were lost with a storage unit. Fetch again."
                )
            for name, spec in described.fields.items():
                if spec.units is not None:
                    units[name][at] = p.by_row(spec.units)
        return {name: p.runs_of(own) for name, own in units.items()}

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
        if metadata.token is None:
            return 0
        partition, tokens = metadata.partition_ids[0], [metadata.token]
        return int((await self.session.ask(p.Ack, p.Done, partition, task_name, tokens, earlier)).value)


def fetch_request(
    fields: Sequence[str],
    batch_size: int,
    partition: str,
    task: str,
    sampling_config: Mapping[str, Any] | None,
    wait_s: float,
    where: str | None = None,
) -> p.Fetch:
    """A fetch from the public ``sampling_config``: what it says of the batch is split from the sampler's arguments.

    ``where``: the filter, if it isn't in there.
    """
    arguments = {str(key): value for key, value in (sampling_config or {}).items() if key not in _SAID_ELSEWHERE}
    wait_s = checked_wait("a fetch", wait_s)
    named = {name: arguments.pop(name) for name in _OF_THE_FETCH if name in arguments}
    if named.get("skip") is None:
        named.pop("skip", None)
    if where is not None:
        named["where"] = where
    return p.Fetch(0, partition, task, list(fields), batch_size, wait_s=wait_s, sampler_args=arguments, **named)


def as_names(fields: Sequence[str] | str) -> list[str]:
    """A list of field names; one string is one name. Raises TypeError for anything else."""
    names = [fields] if isinstance(fields, str) else list(fields)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"data_fields must be a string or a list of strings, got {fields!r}.")
    return names


def explain(reply: p.NotReady, task: str, partition: str, fields: Iterable[str], waited_s: float) -> str:
    """Why a fetch got nothing, in one or two sentences."""
    missing = [f"{count} lack field {name!r}" for name, count in reply.lacking.items()]
    if reply.unmatched:
        missing.append(f"{reply.unmatched} don't match the filter")
    if reply.reserved:
        missing.append(_reserved(reply))
    last = "nothing was published yet" if reply.last_published_s is None else f"{reply.last_published_s:.0f} s ago"
    text = (
        f"task {task!r} waited {waited_s:.1f} s for {reply.wanted} samples of {partition!r}: {reply.ready} ready"
        f"{''.join(', ' + each for each in missing)} (last published: {last})."
    )
    if reply.ready >= reply.wanted:
        text += " Sampler returned no samples of those that are ready, or earlier fetches of the task still wait."
    unknown = [name for name in fields if reply.known_fields and name not in reply.known_fields]
    if unknown:
        known = ", ".join(reply.known_fields)
        text += f" Nobody has put field {unknown[0]!r} so far; fields there are: {known}."
    return f"{text} {_advice(reply, partition)}, or wait longer (timeout_s)."


def _advice(reply: p.NotReady, partition: str) -> str:
    is_short = reply.ready < reply.wanted
    if reply.sealed and is_short:
        return "The partition is sealed and gets no other samples: put what is missing, clear those samples"
    advice = "Check the producers, lower batch_size"
    if reply.last_published_s is None or not is_short or reply.lacking or reply.reserved:
        return advice
    return f"{advice}, seal the partition if nothing more comes (client.seal_partition({partition!r}))"


_MOST_NAMED = 5


def _reserved(reply: p.NotReady) -> str:
    """Samples that are being put, and the clients that put them."""
    verb, names = "is" if reply.reserved == 1 else "are", reply.owed_by
    text = f"{reply.reserved} {verb} reserved"
    if len(names) >= _MOST_NAMED:
        text += f" by clients {', '.join(names)} and maybe others"
    elif len(names) > 1:
        text += f" by clients {', '.join(names[:-1])} and {names[-1]}"
    elif names:
        text += f" by client {names[0]}"
    return f"{text} and not put yet"
