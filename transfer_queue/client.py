# SPDX-License-Identifier: Apache-2.0
"""The client: every verb once, as a coroutine; TransferQueueClient adds the blocking twins, one line each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue import protocol as p
from transfer_queue.config import fetch_wait_s
from transfer_queue.errors import (
    BatchTimeoutError,
    EndOfPartitionError,
    InvalidRequestError,
    SampleClearedError,
    TransferQueueError,
    UnknownPartitionError,
)
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.metadata_wire import to_meta, to_specs
from transfer_queue.reservations import Reservations
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.session import Session
from transfer_queue.storage.registry import create as create_storage
from transfer_queue.storage.settings import storage_settings
from transfer_queue.transport.modes import blocking
from transfer_queue.utils.zmq_utils import ZMQServerInfo

if TYPE_CHECKING:
    from transfer_queue.storage.base import StorageManager

Status = tuple[torch.Tensor | None, torch.Tensor | None]
DataParser = Callable[[dict[str, Any]], dict[str, Any]]


class AsyncTransferQueueClient:
    """Talks to two parties: asks the controller what is where, moves values to and from the storage.

    Any thread and any event loop may use it. After a fork the child uses it under a name of its own.
    """

    def __init__(
        self,
        client_id: str,
        controller_info: ZMQServerInfo,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
    ) -> None:
        """``zmq_io_threads`` and ``zmq_max_sockets`` are accepted for compatibility: one I/O thread serves a process."""
        if controller_info is None:
            raise InvalidRequestError("controller_info is None: pass conf.controller.zmq_info of a running queue.")
        if not isinstance(controller_info, ZMQServerInfo):
            raise TypeError(f"controller_info must be a ZMQServerInfo, got {type(controller_info).__name__}.")
        self.client_id = client_id
        self.session = Session(client_id, controller_info.peer())
        self._storage: StorageManager | None = None
        self._storage_args: tuple[str, dict[str, Any]] | None = None
        self._reservations = Reservations()
        self._dtypes: dict[tuple[str, str], str | None] = {}

    # ---- the two parties ----

    def initialize_storage_manager(self, manager_type: str, config: Mapping[str, Any], **settings: Any) -> None:
        """Choose the backend; ``config`` is its section of a running queue's configuration."""
        self._storage_args = (manager_type, storage_settings(config, **settings))
        self._storage = create_storage(manager_type, self.session.caller, self._storage_args[1])

    @property
    def storage_manager(self) -> StorageManager:
        """Raises RuntimeError before ``initialize_storage_manager``."""
        if self._storage is None or self._storage_args is None:
            raise TransferQueueError("this client has no storage yet: call initialize_storage_manager() first.")
        if self._storage.caller is not self.session.caller:  # another process since
            self._storage = create_storage(self._storage_args[0], self.session.caller, self._storage_args[1])
        return self._storage

    async def async_get_config(self) -> dict[str, Any]:
        """The running queue's configuration."""
        return await self.session.config()

    def close(self) -> None:
        """Leave the queue; what was put stays. Idempotent."""
        self.session.close()

    # ---- put ----

    async def async_put(
        self,
        data: TensorDict | Mapping[str, Any],
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: DataParser | None = None,
    ) -> BatchMeta:
        """Store fields of samples and make them visible; they are when this returns.

        Args:
            data: One row per sample.
            metadata: The samples to write to, which is then updated in place and returned. None: new samples.
            partition_id: Where new samples go.
            data_parser: Called with {field: values} before the write; returns the same fields with the values to store.
        Raises:
            ValueError: rows and metadata disagree, no rows, or a dtype that differs from what the field holds.
            StorageFullError: there was no room in time.
        """
        rows = as_tensordict(data)
        if metadata is None:
            if partition_id is None:
                raise InvalidRequestError("put of new samples needs a partition_id (or metadata of existing samples).")
            return await self._put_new(rows, partition_id, data_parser)
        if metadata.size != rows.batch_size[0]:
            raise InvalidRequestError(
                f"put got {rows.batch_size[0]} rows of data for {metadata.size} samples of metadata; nothing was "
                f"written. Select the same rows of both."
            )
        if not metadata.size:
            raise InvalidRequestError("put got metadata of 0 samples; fetch some first, or pass a partition_id.")
        return await self._put_existing(rows, metadata, data_parser)

    async def _put_new(self, rows: TensorDict, partition: str, parser: DataParser | None) -> BatchMeta:
        count = rows.batch_size[0]
        if not count:
            raise InvalidRequestError("put got 0 rows; there is nothing to store.")
        specs = to_specs(extract_field_schema(rows)) if parser is None else {}
        ahead = self._reservations.take(partition, count) if self._known(partition, specs) else None
        if ahead is not None:
            try:
                return await self._put_reserved(rows, partition, parser, ahead)
            except (SampleClearedError, UnknownPartitionError):
                pass  # the partition was cleared since, and the reservation with it
        indexes = await self._reserve(partition, count, specs)
        return await self._put_reserved(rows, partition, parser, indexes)

    async def _reserve(self, partition: str, count: int, specs: Mapping[str, p.FieldSpec]) -> list[int]:
        await self.cancel(partition, self._reservations.drop(partition))
        wait_s = await self._put_timeout_s()
        reserved = await self.session.ask(p.Reserve, p.Reserved, partition, count, specs, wait_s, wait_s=wait_s)
        self._learn(partition, reserved.dtypes)
        return p.unpack_indexes(reserved.indexes).tolist()

    async def _put_reserved(
        self, rows: TensorDict, partition: str, parser: DataParser | None, indexes: list[int]
    ) -> BatchMeta:
        meta = BatchMeta(indexes, [partition] * len(indexes))
        try:
            await self._write(rows, meta, partition, parser, self._reservations.wish(partition, len(indexes)))
        except BaseException:
            await self.cancel(partition, indexes)
            raise
        return meta

    async def _put_timeout_s(self) -> float:
        return float((await self.session.config())["backend"]["SimpleStorage"]["put_timeout_s"])

    async def _put_existing(self, rows: TensorDict, meta: BatchMeta, parser: DataParser | None) -> BatchMeta:
        parts = meta.chunk_by_partition()
        if len(parts) == 1:
            await self._check(rows, meta, meta.partition_ids[0])
            await self._write(rows, meta, meta.partition_ids[0], parser)
            return meta
        positions: dict[str, list[int]] = {}
        for position, partition in enumerate(meta.partition_ids):
            positions.setdefault(partition, []).append(position)
        pieces = [(rows[torch.tensor(where)], part) for where, part in zip(positions.values(), parts, strict=True)]
        for data, part in pieces:
            await self._check(data, part, part.partition_ids[0])
        for data, part in pieces:
            await self._write(data, part, part.partition_ids[0], parser)
        meta.add_fields(rows)
        meta.mark_custom_meta_clean()
        return meta

    async def _check(self, rows: TensorDict, meta: BatchMeta, partition: str) -> None:
        """Refuse before values are replaced; asked only where this client doesn't know the fields yet."""
        specs = to_specs(extract_field_schema(rows))
        if self._known(partition, specs):
            return
        indexes = p.pack_indexes(meta.global_indexes)
        done = await self.session.ask(p.CheckFields, p.Done, partition, indexes, specs)
        self._learn(partition, {**done.value, **{name: spec.dtype for name, spec in specs.items()}})

    async def _write(
        self, rows: TensorDict, meta: BatchMeta, partition: str, parser: DataParser | None, reserve_next: int = 0
    ) -> None:
        stored = await self.storage_manager.put_data(rows, meta, parser)
        specs = to_specs(extract_field_schema(stored))
        tags = meta.changed_custom_meta()
        try:
            published = await self.session.ask(
                p.Publish, p.Published, partition, p.pack_indexes(meta.global_indexes), specs, tags, reserve_next
            )
        except SampleClearedError:
            await self._drop_orphans(partition, meta.global_indexes)
            raise
        self._reservations.keep(partition, p.unpack_indexes(published.indexes).tolist())
        self._learn(partition, {name: spec.dtype for name, spec in specs.items()})
        meta.add_fields(stored)
        meta.mark_custom_meta_clean()

    async def _drop_orphans(self, partition: str, indexes: Sequence[int]) -> None:
        """Values written for samples that were cleared meanwhile belong to nobody."""
        try:
            batch = await self.session.ask(p.Describe, p.Batch, partition, [], None)
            alive = set(p.unpack_indexes(batch.indexes).tolist())
        except InvalidRequestError:
            alive = set()
        await self.storage_manager.clear_rows([index for index in indexes if index not in alive])

    async def cancel(self, partition: str, indexes: Sequence[int]) -> None:
        """Give back samples that were reserved and not published, and whatever was written for them."""
        if not len(indexes):
            return
        cleared = await self.session.ask(p.Cancel, p.Cleared, partition, p.pack_indexes(indexes))
        given_back = p.unpack_indexes(cleared.indexes).tolist()
        if given_back:
            await self.storage_manager.clear_rows(given_back)

    def _known(self, partition: str, specs: Mapping[str, p.FieldSpec]) -> bool:
        return bool(specs) and all(
            self._dtypes.get((partition, name), "") == spec.dtype for name, spec in specs.items()
        )

    def _learn(self, partition: str, dtypes: Mapping[str, str | None]) -> None:
        self._dtypes.update({(partition, name): dtype for name, dtype in dtypes.items()})

    def _unlearn(self, partition: str) -> None:
        self._reservations.drop(partition)
        for key in [key for key in self._dtypes if key[0] == partition]:
            del self._dtypes[key]

    # ---- get ----

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
            mode: "fetch" gives ``task_name`` its next ``batch_size`` ready samples; "insert" makes new samples;
                "force_fetch" describes all samples of the partition, consumed or not, and marks nothing.
            sampling_config: ``dp_rank``, ``batch_index``, ``dp_size``; the rest goes to the sampler as keywords.
            timeout_s: Longest wait of a fetch (None: TQ_CONTROLLER_GET_METADATA_TIMEOUT, or 0 when polling).
        Returns:
            Empty ("not yet") only when the queue is configured with ``polling_mode``.
        Raises:
            BatchTimeoutError: not enough ready samples in time; says which fields were missing.
            EndOfPartitionError: no batch will come any more.
        """
        if partition_id is None:
            raise InvalidRequestError("get_meta needs a partition_id.")
        fields = [data_fields] if isinstance(data_fields, str) else list(data_fields or [])
        if mode == "force_fetch":
            return to_meta(await self.session.ask(p.Describe, p.Batch, partition_id, fields, None))
        if mode not in ("fetch", "insert"):
            near = difflib.get_close_matches(str(mode), ["fetch", "insert", "force_fetch"], 1, 0.0)
            raise InvalidRequestError(f"unknown mode {mode!r}; did you mean {near[0]!r}? Also: fetch, insert, force_fetch.")
        if batch_size is None:
            raise InvalidRequestError(f"get_meta in mode {mode!r} needs a batch_size.")
        if mode == "insert":
            wait_s = await self._put_timeout_s()
            return to_meta(
                await self.session.ask(p.Insert, p.Batch, partition_id, batch_size, fields, wait_s, wait_s=wait_s)
            )
        if task_name is None:
            raise InvalidRequestError("get_meta in mode 'fetch' needs a task_name: who consumes the samples.")
        polling = bool((await self.session.config())["controller"]["polling_mode"])
        wait_s = timeout_s if timeout_s is not None else (0.0 if polling else fetch_wait_s())
        reply = await self.async_fetch(fields, batch_size, partition_id, task_name, sampling_config, wait_s=wait_s)
        if isinstance(reply, p.NotReady):
            if polling:
                return BatchMeta.empty()
            raise BatchTimeoutError(explain(reply, task_name, partition_id, fields, wait_s))
        return to_meta(reply)

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
        arguments = {str(key): value for key, value in (sampling_config or {}).items()}
        named = [arguments.pop(name, None) for name in ("dp_rank", "batch_index", "dp_size")]
        for name in ("partition_id", "task_name"):
            arguments.pop(name, None)
        reply: Any = await self.session.ask(
            p.Fetch, p.Reply, partition_id, task_name, list(fields), batch_size, *named, wait_s, finite, arguments,
            list(acks), wait_s=wait_s,
        )  # fmt: skip
        if isinstance(reply, p.Ended):
            raise EndOfPartitionError(
                f"no more batches of partition {partition_id!r} for task {task_name!r}: it is {reply.reason}; "
                f"{reply.dropped} samples were left over by the tail policy."
            )
        return reply  # type: ignore[no-any-return]

    async def async_get_data(self, metadata: BatchMeta) -> TensorDict:
        """Values of ``metadata.field_names``, rows in the metadata's order; writable memory of the caller's own.

        Raises:
            StorageKeyNotFoundError: a sample was cleared (a KeyError), or a field was never put.
        """
        if not metadata.size:
            return TensorDict({}, batch_size=[0])
        await self.session.config()
        return await self.storage_manager.get_data(metadata)

    async def async_ack(self, metadata: BatchMeta, task_name: str) -> int:
        """Settle the batch this metadata came from: nobody will ask for it again. Returns 0 if it was already."""
        if metadata.token is None:
            return 0
        done = await self.session.ask(p.Ack, p.Done, metadata.partition_ids[0], task_name, [metadata.token])
        return int(done.value)

    # ---- partitions and tasks ----

    async def async_create_partition(self, partition_id: str, num_samples: int | None = None) -> bool:
        """Make a partition ahead of its first put; False if it exists. It seals itself at ``num_samples``."""
        return bool((await self.session.ask(p.CreatePartition, p.Done, partition_id, num_samples)).value)

    async def async_seal_partition(self, partition_id: str) -> None:
        """Say that no more samples will be put: the honest end of the stream."""
        await self.cancel(partition_id, self._reservations.drop(partition_id))
        await self.session.ask(p.SealPartition, p.Done, partition_id)

    async def async_register_task(
        self,
        task_name: str,
        sampler: BaseSampler | str | Mapping[str, Any] | None = None,
        dp_size: int | None = None,
        tail: str | None = None,
    ) -> None:
        """How a task draws. Parts that are None stay as they are.

        Args:
            sampler: An instance, a built-in's name, or ``"module:Class"`` of an allowed module.
            dp_size: Number of data-parallel ranks: batches are then drawn for all of them or none.
            tail: What happens to samples that can't fill a last round: "drop", "pad" or "uneven_ok".
        """
        spec: Any = sampler.spec() if isinstance(sampler, BaseSampler) else sampler
        spec = dict(spec) if isinstance(spec, Mapping) else spec
        await self.session.ask(p.RegisterTask, p.Done, task_name, spec, dp_size, tail)

    async def async_clear_samples(self, metadata: BatchMeta) -> None:
        """Forget these samples, values and all; those already cleared are ignored."""
        for part in metadata.chunk_by_partition() if metadata.size else ():
            indexes = p.pack_indexes(part.global_indexes)
            cleared = await self.session.ask(p.ClearSamples, p.Cleared, part.partition_ids[0], indexes)
            await self._clear_values(cleared)

    async def async_clear_partition(self, partition_id: str) -> None:
        """Forget a partition and all it holds; unknown: nothing. Consumers that wait for it are told that it ended."""
        self._unlearn(partition_id)
        await self._clear_values(await self.session.ask(p.ClearPartition, p.Cleared, partition_id))

    async def _clear_values(self, cleared: p.Cleared) -> None:
        indexes = p.unpack_indexes(cleared.indexes).tolist()
        if indexes:
            await self.storage_manager.clear_rows(indexes)

    async def async_get_partition_list(self) -> list[str]:
        """Names of all partitions."""
        return [str(name) for name in (await self.session.ask(p.ListPartitions, p.Names)).names]

    async def async_get_stats(self) -> dict[str, Any]:
        """Numbers of the whole queue, partition by partition and task by task, and who waits for what."""
        return dict((await self.session.ask(p.GetStats, p.Done)).value)

    # ---- status ----

    async def async_get_consumption_status(self, task_name: str, partition_id: str) -> Status:
        """(indexes int64 [N], consumed int8 [N]) of the partition, pre-allocated samples included; (None, None) unknown."""
        return _status(await self.session.ask(p.ConsumptionStatus, p.Status, partition_id, task_name))

    async def async_get_production_status(self, data_fields: Sequence[str], partition_id: str) -> Status:
        """(indexes int64 [N], produced int8 [N, F]), columns as the fields were registered; (None, None) unknown."""
        fields = [data_fields] if isinstance(data_fields, str) else list(data_fields)
        return _status(await self.session.ask(p.ProductionStatus, p.Status, partition_id, fields), two_dim=True)

    async def async_check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Has the task consumed every sample? False for an empty or unknown partition."""
        _, status = await self.async_get_consumption_status(task_name, partition_id)
        return status is not None and status.numel() > 0 and bool((status == 1).all())

    async def async_check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        """Does every sample have all these fields? False for an unknown partition or field."""
        _, status = await self.async_get_production_status(data_fields, partition_id)
        return status is not None and bool((status == 1).all())

    async def async_reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Make consumed samples available again; batches already given keep their answer. False: no such partition."""
        return bool((await self.session.ask(p.ResetConsumption, p.Done, partition_id, task_name)).value)

    async def async_set_custom_meta(self, metadata: BatchMeta) -> None:
        """Replace the controller's tags of these samples by the metadata's."""
        tags: dict[str, dict[int, dict[str, Any]]] = {}
        rows = zip(metadata.partition_ids, metadata.global_indexes, metadata.custom_meta, strict=True)
        for partition, index, own in rows:
            tags.setdefault(partition, {})[index] = dict(own)
        if tags:
            await self.session.ask(p.SetTags, p.Done, tags)
            metadata.mark_custom_meta_clean()

    # ---- keys ----

    async def async_kv_retrieve_meta(
        self, keys: Sequence[str] | str, partition_id: str, create: bool = False
    ) -> BatchMeta:
        """Samples of keys. Unknown ones are left out, or made with ``create``, in the order given."""
        names = check_keys(keys)
        wait_s = await self._put_timeout_s()
        return to_meta(
            await self.session.ask(
                p.ResolveKeys, p.Batch, partition_id, names, create, False, {}, wait_s, wait_s=wait_s
            )
        )

    async def hold_keys(self, keys: Sequence[str], partition_id: str, specs: Mapping[str, p.FieldSpec]) -> p.Batch:
        """Samples of keys for a put; new ones stay invisible until ``publish``."""
        wait_s = await self._put_timeout_s()
        return await self.session.ask(
            p.ResolveKeys, p.Batch, partition_id, list(keys), True, True, dict(specs), wait_s, wait_s=wait_s
        )

    async def publish(
        self, meta: BatchMeta, specs: Mapping[str, p.FieldSpec], tags: Mapping[int, Mapping[str, Any]]
    ) -> p.Batch:
        """Make stored fields and tags of one partition's samples visible; returns what they have now."""
        indexes = p.pack_indexes(meta.global_indexes)
        return await self.session.ask(
            p.Publish, p.Batch, meta.partition_ids[0], indexes, dict(specs), dict(tags), 0, True
        )

    async def async_kv_retrieve_keys(self, global_indexes: Sequence[int] | int, partition_id: str) -> list[str | None]:
        """Keys of samples, None for one without."""
        indexes = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        if not isinstance(indexes, list) or not all(type(index) is int for index in indexes):
            raise TypeError(f"global_indexes must be an int or a list of int, got {global_indexes!r}.")
        if not indexes:
            raise InvalidRequestError("global_indexes is empty.")
        return (await self.session.ask(p.KeysOf, p.Names, partition_id, p.pack_indexes(indexes))).names

    async def async_kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """{partition: {key: tag}}, keys in order of insertion; unknown partition: {}."""
        return (await self.session.ask(p.ListKeys, p.KeyList, partition_id)).keys


class TransferQueueClient(AsyncTransferQueueClient):
    """The blocking client; each method waits in the calling thread. May be called inside a running event loop."""

    get_config = blocking(AsyncTransferQueueClient.async_get_config)
    put = blocking(AsyncTransferQueueClient.async_put)
    get_meta = blocking(AsyncTransferQueueClient.async_get_meta)
    fetch = blocking(AsyncTransferQueueClient.async_fetch)
    get_data = blocking(AsyncTransferQueueClient.async_get_data)
    ack = blocking(AsyncTransferQueueClient.async_ack)
    create_partition = blocking(AsyncTransferQueueClient.async_create_partition)
    seal_partition = blocking(AsyncTransferQueueClient.async_seal_partition)
    register_task = blocking(AsyncTransferQueueClient.async_register_task)
    clear_samples = blocking(AsyncTransferQueueClient.async_clear_samples)
    clear_partition = blocking(AsyncTransferQueueClient.async_clear_partition)
    get_partition_list = blocking(AsyncTransferQueueClient.async_get_partition_list)
    get_stats = blocking(AsyncTransferQueueClient.async_get_stats)
    get_consumption_status = blocking(AsyncTransferQueueClient.async_get_consumption_status)
    get_production_status = blocking(AsyncTransferQueueClient.async_get_production_status)
    check_consumption_status = blocking(AsyncTransferQueueClient.async_check_consumption_status)
    check_production_status = blocking(AsyncTransferQueueClient.async_check_production_status)
    reset_consumption = blocking(AsyncTransferQueueClient.async_reset_consumption)
    set_custom_meta = blocking(AsyncTransferQueueClient.async_set_custom_meta)
    kv_retrieve_meta = blocking(AsyncTransferQueueClient.async_kv_retrieve_meta)
    kv_retrieve_keys = blocking(AsyncTransferQueueClient.async_kv_retrieve_keys)
    kv_list = blocking(AsyncTransferQueueClient.async_kv_list)


def as_tensordict(data: Any) -> TensorDict:
    """Rows to put: a TensorDict with a batch dimension, or a mapping of columns with equally many rows."""
    if isinstance(data, Mapping) and not hasattr(data, "batch_size"):
        sizes = {len(column) for column in data.values()}
        if len(sizes) != 1:
            raise InvalidRequestError(f"columns of a put must have equally many rows, got {sorted(sizes)}.")
        return TensorDict(dict(data), batch_size=[sizes.pop()])
    if data is None or not hasattr(data, "batch_size"):
        raise InvalidRequestError(f"put takes a TensorDict or a dict of columns, got {type(data).__name__}.")
    if not len(data.batch_size):
        raise InvalidRequestError("put got a TensorDict without a batch dimension; make it with batch_size=[rows].")
    return data


def check_keys(keys: Sequence[str] | str) -> list[str]:
    """A list of key names; one string is one key."""
    names = [keys] if isinstance(keys, str) else keys
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"keys must be a string or a list of strings, got {keys!r}.")
    if not names:
        raise InvalidRequestError("the list of keys is empty.")
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


def _status(reply: p.Status, two_dim: bool = False) -> Status:
    if not reply.known:
        return None, None
    indexes = torch.from_numpy(p.unpack_indexes(reply.indexes).copy())
    status = torch.from_numpy(np.frombuffer(reply.status, dtype=np.int8).copy())
    return indexes, status.reshape(-1, reply.columns) if two_dim else status
