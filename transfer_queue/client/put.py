# SPDX-License-Identifier: Apache-2.0
"""Puts: one transaction that every writing verb uses. It reserves, stores and publishes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from transfer_queue import protocol as p
from transfer_queue.client.base import ClientBase, check_tags, to_specs
from transfer_queue.errors import InvalidRequestError, QueueUnreachableError, StorageFullError, UnitLostError
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.metadata.annotations import copy_tags
from transfer_queue.storage.base import InFront, StorageManager
from transfer_queue.storage.pack import named_columns, values_of
from transfer_queue.storage.unpack import DataParser, parsed_rows
from transfer_queue.transport.session import Session
from transfer_queue.utils.logging_utils import get_logger

RowTags = Mapping[int, Mapping[str, Any]]
_TRIES = 3
Begin = p.Reserve | p.CheckFields | p.ResolveKeys
_log = get_logger(__name__)
_warned: set[str] = set()
"""Fields of several dtypes that a warning has named."""


class WriteTransaction:
    """One write into one partition: to new samples, to given ones, or to those of keys.

    ``begin`` says which: it reserves, checks or resolves samples. Nothing is visible before the publish, and a write
    that fails or is cancelled leaves nothing behind.
    """

    def __init__(self, session: Session, begin: Begin, columns: Any, num_rows: int, tags: RowTags) -> None:
        """
        Args:
            columns: As the storage prepared them; None writes tags alone.
            num_rows: Rows of ``columns``.
            tags: Tags by row.
        """
        self._session = session
        self._begin = begin
        self._columns = columns
        self._num_rows = num_rows
        self._tags = {row: dict(own) for row, own in tags.items() if own}

    async def through(self, front: InFront, wait_s: float) -> p.Reply:
        """All in one message, where controller and storage share a process. It waits up to ``wait_s`` for room.

        Returns the answer to ``begin``, or for keys what their samples have now.
        """
        begin, columns, frames, lease = msgspec.structs.replace(self._begin, wait_s=wait_s), b"", list[Any](), 0
        try:
            if self._columns is not None:
                lease = self._session.number()
                replaced = p.unpack_indexes(begin.indexes).tolist() if isinstance(begin, p.CheckFields) else ()
                columns, frames = await front.encode_write(lease, self._columns, self._num_rows, replaced, wait_s)
            put = p.Put(begin.id, begin, self._tags, columns)
            return (await self._session.send_with_frames(put, p.Reply, begin.wait_s, frames))[0]
        except BaseException:
            if lease:  # the put may not even have been sent
                await front.release(lease)
            raise

    async def in_steps(self, storage: StorageManager) -> p.Reply:
        """The same steps one by one, where controller and storage are apart."""
        session, begin = self._session, self._begin
        indexes: list[int] = []
        publish: p.Publish | None = None
        units: p.UnitRuns | None = None
        stored = False
        try:
            answer = await session.send(begin, p.Reply, begin.wait_s, keep=True)
            packed = begin.indexes if isinstance(begin, p.CheckFields) else answer.indexes  # type: ignore[attr-defined]
            indexes = p.unpack_indexes(packed).tolist()
            if self._columns is not None:
                units = await storage.write(begin.id, indexes, self._columns, begin.partition)
                stored = True
            publish = self._publication(packed, indexes, units)
            published = await session.send(publish, p.Reply, keep=True)
            if self._columns is not None:
                await self._commit(storage, units)
        except BaseException as error:
            # Otherwise it may be published: the controller knows, and has the write ended accordingly.
            if stored and (publish is None or isinstance(error, UnitLostError)):
                await storage.abort(begin.id, units)
            await session.cancel(begin.id)
            if publish is not None:
                await session.cancel(publish.id)
            raise
        if isinstance(begin, p.Reserve):
            session.done(session.controller, publish.id, begin.id)
        else:  # a checkpoint may wait until the values are replaced
            await session.post_done(begin.id, publish.id)
        return published if isinstance(begin, p.ResolveKeys) else answer

    async def _commit(self, storage: StorageManager, units: p.UnitRuns | None) -> None:
        """Commit what is published. For new samples that a unit did not answer, the controller does it.

        If the unit has ended, its values are gone, as if it had ended a moment later. If it lives, it serves them.
        """
        try:
            await storage.commit(self._begin.id, units)
        except QueueUnreachableError:
            if not isinstance(self._begin, p.Reserve):
                raise  # it would still serve the values that this write replaces
            # Soon, because at the session's end the unit would store it over what replaces it.
            await self._session.cancel(self._begin.id)

    def _publication(self, packed: bytes, indexes: Sequence[int], units: p.UnitRuns | None) -> p.Publish:
        begin, fields = self._begin, self._begin.fields
        if units is not None:
            fields = {name: msgspec.structs.replace(spec, units=units) for name, spec in fields.items()}
        tags = {indexes[row]: own for row, own in self._tags.items()}
        by_key = isinstance(begin, p.ResolveKeys)
        number = self._session.number()
        return p.Publish(number, begin.partition, packed, fields, tags, by_key, begin.id, uncommitted=True)


class Puts(ClientBase):
    """``async_put``, and the transaction that other writing verbs share."""

    async def write(self, begin: Begin, rows: TensorDict | None, tags: RowTags) -> p.Reply:
        """Carry out one write; ``begin.fields`` describes ``rows``."""
        storage = self.storage_manager
        columns = None if rows is None or not len(rows.keys()) else storage.prepare(rows)
        count = 0 if rows is None else int(rows.batch_size[0])
        reply = await self._carried_out(begin, columns, count, tags)
        for field, dtypes in _of_several_dtypes(reply).items():
            _warn_once(field, begin.partition, ", ".join(str(dtype or "objects") for dtype in dtypes))
        return reply

    async def _carried_out(self, begin: Begin, columns: Any, count: int, tags: RowTags) -> p.Reply:
        """In one message to the controller's process, or in steps, to units that have room."""
        storage = self.storage_manager
        front = storage.front
        if front is not None and await front.takes_writes():
            transaction = WriteTransaction(self.session, begin, columns, count, tags)
            if not await storage.in_several_units():
                return await transaction.through(front, begin.wait_s)
            with contextlib.suppress(StorageFullError):
                return await transaction.through(front, 0.0)
            begin = msgspec.structs.replace(begin, id=self.session.number())
        tries = _TRIES
        while True:
            try:
                return await WriteTransaction(self.session, begin, columns, count, tags).in_steps(storage)
            except UnitLostError:  # it ended between the write and its publish
                if not tries:
                    raise
                tries -= 1
                begin = msgspec.structs.replace(begin, id=self.session.number())

    async def async_put(
        self,
        data: TensorDict | Mapping[str, Any],
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: DataParser | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> BatchMeta:
        """Store fields of samples and make them visible; they are when this returns.

        Args:
            data: ``{field: [N, ...]}``, or a TensorDict of batch size [N]: one row per sample. A column is a dense or
                nested tensor, or a list of plain objects.
            metadata: The samples to write to, which is then updated in place and returned. None: new samples.
                Rows that only fill a padded batch are skipped.
            partition_id: Where new samples go.
            data_parser: Called with {field: values} before the write; returns the same fields with the values to store.
            tags: One mapping per row, visible together with the values; merges into what a sample has.
        Returns:
            Metadata of the samples, [N], in the order of the rows.
        Raises:
            InvalidRequestError: rows and metadata disagree, no rows, or a sealed partition; it is a ValueError.
            SchemaConflictError: a dtype or shape that differs from the field's declaration; it is a ValueError.
            UnsupportedValueError: a value or a tag that can't be stored as configured.
            SampleClearedError: some of the samples were cleared.
            StorageFullError: there was no room in time.
        Examples:
            >>> meta = client.put({"prompt": torch.arange(8)}, partition_id="train", tags=[{"env": "math"}] * 8)
            >>> meta = client.put({"reward": torch.rand(8)}, metadata=meta)  # another field of the same samples
            >>> meta.field_names
            ['prompt', 'reward']
        """
        rows = as_tensordict(data)
        count = int(rows.batch_size[0])
        if tags is not None and len(tags) != count:
            raise InvalidRequestError(f"put got {count} rows of data with {len(tags)} tags.")
        check_tags(dict(enumerate(tags or ())))
        if metadata is None:
            if partition_id is None:
                raise InvalidRequestError("put of new samples needs a partition_id (or metadata of existing samples).")
            if not count:
                raise InvalidRequestError("put got 0 rows; there is nothing to store.")
            parsed = rows if data_parser is None else await parsed_rows(rows, data_parser)
            return await self._put_new(parsed, partition_id, tags)
        if not metadata.size:
            raise InvalidRequestError("put got metadata of 0 samples; fetch some first, or pass a partition_id.")
        if metadata.size != count:
            raise InvalidRequestError(
                f"put got {count} rows of data for {metadata.size} samples of metadata; nothing was "
                f"written. Select the same rows of both."
            )
        metadata.update_custom_meta(tags)
        return await self._put_existing(rows, metadata, data_parser)

    async def _put_new(self, rows: TensorDict, partition: str, tags: Sequence[Mapping[str, Any]] | None) -> BatchMeta:
        schema, count = extract_field_schema(rows), int(rows.batch_size[0])
        wait_s = await self.put_timeout_s()
        begin = p.Reserve(self.session.number(), partition, count, to_specs(schema), wait_s)
        reserved = await self.write(begin, rows, {row: copy_tags(own) for row, own in enumerate(tags or ()) if own})
        assert isinstance(reserved, p.Reserved)
        meta = BatchMeta(p.unpack_indexes(reserved.indexes).tolist(), [partition] * count)
        meta.add_described(schema)
        meta.update_custom_meta(tags)
        meta.mark_custom_meta_clean()
        return meta

    async def _put_existing(self, rows: TensorDict, meta: BatchMeta, parser: DataParser | None) -> BatchMeta:
        tags = meta.changed_custom_meta()
        check_tags(tags)
        data, target = rows, meta
        if any(meta.padding_mask):
            real = [position for position, filler in enumerate(meta.padding_mask) if not filler]
            data, target = rows_at(rows, real), meta.select_samples(real)
        stored = await parsed_rows(data, parser)
        bare = BatchMeta(target.global_indexes, target.partition_ids)
        bare.add_fields(stored)
        for partition in dict.fromkeys(target.partition_ids):
            await self._put_into(partition, stored, bare, tags)
        meta.add_fields(stored if stored.batch_size[0] == meta.size else rows)
        meta.mark_custom_meta_clean()
        return meta

    async def _put_into(self, partition: str, rows: TensorDict, meta: BatchMeta, tags: RowTags) -> None:
        """Put the rows of samples of this partition."""
        mine = [position for position, name in enumerate(meta.partition_ids) if name == partition]
        if len(mine) < meta.size:
            rows, meta = rows_at(rows, mine), meta.select_samples(mine)
        wait_s = await self.put_timeout_s()
        packed, specs = p.pack_indexes(meta.global_indexes), to_specs(meta.field_schema)
        begin = p.CheckFields(self.session.number(), partition, packed, specs, wait_s)
        by_row = {row: tags[index] for row, index in enumerate(meta.global_indexes) if index in tags}
        await self.write(begin, rows, by_row)


def _of_several_dtypes(reply: p.Reply) -> dict[str, list[str | None]]:
    if isinstance(reply, p.Reserved):
        return reply.dtypes
    if isinstance(reply, p.Batch):
        return {name: spec.dtypes for name, spec in reply.fields.items() if spec.dtypes}
    return reply.value or {} if isinstance(reply, p.Done) else {}


def _warn_once(field: str, partition: str, dtypes: str) -> None:
    """One warning per field and process: every partition of a run may have the same mix."""
    if field in _warned:
        return
    _warned.add(field)
    _log.warning(
        "samples of field %r in partition %r have several dtypes: %s. A batch that mixes them is cast as by "
        "torch.cat; create_partition(fields=...) refuses such puts.",
        field, partition, dtypes,
    )  # fmt: skip


def rows_at(rows: TensorDict, positions: list[int]) -> TensorDict:
    """These rows of a batch. A TensorDict can't pick rows of every nested tensor and of single objects itself."""
    columns = dict(named_columns(rows))
    nested = [name for name, column in columns.items() if isinstance(column, torch.Tensor) and column.is_nested]
    single = [name for name, column in columns.items() if isinstance(column, NonTensorData)]
    picked: TensorDict = rows.exclude(*nested, *single)[positions]
    for name in nested:
        parts, layout = columns[name].unbind(), columns[name].layout
        picked.set(name, torch.nested.as_nested_tensor([parts[at] for at in positions], layout=layout))
    for name in single:
        values = values_of(columns[name], len(rows))
        picked.set(name, NonTensorStack(*(values[at] for at in positions)))
    return picked


def as_tensordict(data: Any) -> TensorDict:
    """Rows to put: a TensorDict with a batch dimension, or a mapping of columns with equally many rows."""
    if isinstance(data, Mapping) and not hasattr(data, "batch_size"):
        sizes = {_length(name, column) for name, column in data.items()}
        if len(sizes) != 1:
            raise InvalidRequestError(f"columns of a put must have equally many rows, got {sorted(sizes)}.")
        return TensorDict(dict(data), batch_size=[sizes.pop()])
    if data is None or not hasattr(data, "batch_size"):
        raise InvalidRequestError(f"put takes a TensorDict or a dict of columns, got {type(data).__name__}.")
    if not len(data.batch_size):
        raise InvalidRequestError("put got a TensorDict without a batch dimension; make it with batch_size=[rows].")
    rows: TensorDict = data
    return rows


def _length(name: str, column: Any) -> int:
    try:
        return len(column)
    except TypeError as error:
        raise InvalidRequestError(
            f"field {name!r} of a put is a single {type(column).__name__}: a column needs one entry per row. "
            f"For one sample, put a list or a tensor of one."
        ) from error
