# SPDX-License-Identifier: Apache-2.0
"""Puts: one transaction that every writing verb uses. It reserves, stores and publishes."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_queue import protocol as p
from transfer_queue.client.base import ClientBase, check_meta, check_tags, parts_of, tags_by_row, to_specs
from transfer_queue.client.given_rows import as_rows, given_at, parsed_by
from transfer_queue.errors import (
    CheckpointError,
    InvalidRequestError,
    SampleClearedError,
    SessionEndedError,
    StorageFullError,
    UnitLostError,
    UnknownPartitionError,
)
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.field_schema import described_rows
from transfer_queue.storage.base import InFront, StorageManager
from transfer_queue.storage.pack import GivenRows
from transfer_queue.storage.unpack import DataParser
from transfer_queue.transport.session import Session
from transfer_queue.utils.logging_utils import get_logger

if TYPE_CHECKING:
    from tensordict import TensorDict

RowTags = Mapping[int, Mapping[str, Any]]
_TRIES = 3
_TRIES_BY_KEY = 5
Begin = p.Reserve | p.CheckFields | p.ResolveKeys
_log = get_logger(__name__)
_warned: set[str] = set()
"""Fields of several dtypes that a warning has named."""


class WriteTransaction:
    """One write into one partition: to new samples, to given ones, or to those of keys.

    ``begin`` says which: it reserves, checks or resolves samples. Nothing is visible before the publish, and a write
    that fails or is cancelled leaves nothing behind. So it may be tried again; each attempt is a call of its own.
    """

    def __init__(self, session: Session, begin: Begin, columns: Any, num_rows: int, tags: RowTags) -> None:
        """
        Args:
            columns: As the storage prepared them; None writes tags alone.
            num_rows: Rows of ``columns``.
            tags: Tags by row.
        """
        self._session = session
        self._caller = session.caller  # while it is kept, so is what it leases, whatever other threads do
        self._begin = begin
        self._columns = columns
        self._num_rows = num_rows
        self._tags = {row: dict(own) for row, own in tags.items() if own}

    async def through(self, front: InFront, wait_s: float) -> p.Reply:
        """All in one message, where controller and storage share a process. It waits up to ``wait_s`` for room.

        Returns the answer to ``begin``, or for keys what their samples have now.
        """
        begin, deadline = self._begin, time.monotonic() + wait_s
        columns, frames, lease = b"", list[Any](), 0
        try:
            if self._columns is not None:
                lease = self._session.number()
                replaced = p.unpack_indexes(begin.indexes).tolist() if isinstance(begin, p.CheckFields) else ()
                columns, frames = await front.encode_write(lease, self._columns, self._num_rows, replaced, wait_s)
            self._check_session()
            left_s = max(0.0, deadline - time.monotonic())  # it may have waited for memory
            begin = msgspec.structs.replace(begin, id=self._session.number(), wait_s=left_s)
            put = p.Put(begin.id, begin, self._tags, columns)
            return (await self._session.send_with_frames(put, p.Reply, begin.wait_s, frames))[0]
        except BaseException:
            if lease:  # the put may not even have been sent
                await front.release(lease)
            raise

    async def in_steps(self, storage: StorageManager) -> p.Reply:
        """The same steps one by one, where controller and storage are apart."""
        session = self._session
        begin = msgspec.structs.replace(self._begin, id=session.number())
        publish: p.Publish | None = None
        units: p.UnitRuns | None = None
        stored = False
        try:
            answer = await session.send(begin, p.Reply, begin.wait_s, keep=True)
            fresh = isinstance(answer, p.Reserved)
            packed = begin.indexes if isinstance(begin, p.CheckFields) else answer.indexes  # type: ignore[attr-defined]
            indexes = p.unpack_indexes(packed).tolist()
            if self._columns is not None:
                units = await storage.write(begin.id, indexes, self._columns, begin.partition, fresh)
                stored = True
            publish = await self._publication(begin, packed, indexes, units)
            self._check_session()
            published = await session.send(publish, p.Reply, keep=True)
            if self._columns is not None and not fresh:
                await storage.commit(begin.id, units, published.committing)  # type: ignore[attr-defined]
        except BaseException as error:
            # Otherwise it may be published: the controller knows, and has the write ended accordingly.
            if stored and (publish is None or isinstance(error, UnitLostError)):
                await storage.abort(begin.id, units)
            await session.cancel(begin.id)
            if publish is not None:
                await session.cancel(publish.id)
            raise
        if fresh:
            session.done(session.controller, publish.id, begin.id)
            storage.written(begin.id, units)
        else:  # a checkpoint may wait until the values are replaced
            await session.post_done(begin.id, publish.id)
        return published if isinstance(begin, p.ResolveKeys) else answer

    def _check_session(self) -> None:
        if self._session.caller is not self._caller:  # another thread has begun a new one
            raise SessionEndedError("the session of this put has ended, and nothing of it was stored. Put again.")

    async def _publication(
        self, begin: Begin, packed: bytes, indexes: Sequence[int], units: p.UnitRuns | None
    ) -> p.Publish:
        fields = begin.fields
        if units is not None:
            fields = {name: msgspec.structs.replace(spec, units=units) for name, spec in fields.items()}
        tags = {indexes[row]: own for row, own in self._tags.items()}
        if len(tags) > p.MOST_ROWS:  # of new samples, which nobody sees before their publish
            for some in parts_of(len(tags)):
                part = dict(itertools.islice(tags.items(), some.start, some.stop))
                await self._session.ask(p.SetTags, p.Done, {begin.partition: part}, True)
            tags = {}
        by_key = isinstance(begin, p.ResolveKeys)
        number = self._session.number()
        role = None if isinstance(begin, p.CheckFields) else begin.role
        return p.Publish(number, begin.partition, packed, fields, tags, by_key, begin.id, uncommitted=True, role=role)


class Puts(ClientBase):
    """``async_put``, and the transaction that other writing verbs share."""

    async def write(self, begin: Begin, rows: GivenRows | None, tags: RowTags) -> p.Reply:
        """Carry out one write, in this session, or in a new one if the servers have ended it.

        ``begin.fields`` describes ``rows``, and its number is not used.
        """
        storage = self.storage_manager
        columns = None if rows is None or not len(rows.keys()) else storage.prepare(rows)
        count = 0 if rows is None else int(rows.batch_size[0])
        caller = self.session.caller
        try:
            reply = await self._in_session(begin, columns, count, tags)
        except SessionEndedError as error:
            _log.warning("%s The put is repeated in a new one.", str(error))
            self.session.renew(caller)
            reply = await self._in_session(begin, columns, count, tags)
        for field, dtypes in _of_several_dtypes(reply).items():
            _warn_once(field, begin.partition, ", ".join(str(dtype or "objects") for dtype in dtypes))
        return reply

    async def _in_session(self, begin: Begin, columns: Any, count: int, tags: RowTags) -> p.Reply:
        """In one message to the controller's process if it may have so many tags, or in steps, to units with room."""
        storage = self.storage_manager
        front = storage.front
        transaction = WriteTransaction(self.session, begin, columns, count, tags)
        if front is not None and len(tags) <= p.MOST_ROWS and await front.takes_writes():
            if not await storage.in_several_units():
                return await transaction.through(front, begin.wait_s)
            with contextlib.suppress(StorageFullError, CheckpointError):  # it has to wait, for room or for a save
                return await transaction.through(front, 0.0)
        tries = _TRIES
        while True:
            try:
                return await transaction.in_steps(storage)
            except UnitLostError:  # it ended between the write and its publish
                if not tries:
                    raise
                tries -= 1

    async def async_put(
        self,
        data: TensorDict | Mapping[str, Any],
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: DataParser | None = None,
        tags: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> BatchMeta:
        """Store fields of samples and make them visible; they are when this returns.

        Args:
            data: ``{field: [N, ...]}``, or a TensorDict of batch size [N]: one row per sample. A column is a dense or
                nested tensor, an array, or a list or tuple. Lists of numbers in it become one tensor, as by
                ``tq.ragged``; anything else is plain objects, and so are lists in a NonTensorStack.
            metadata: The samples to write to, which is then updated in place and returned. None: new samples.
                Rows that only fill a padded batch are skipped.
            partition_id: Where new samples go. With ``metadata``, it must be the partition of these samples.
            data_parser: Called with {field: values} before the write; returns the same fields with the values to store.
            tags: One mapping or None per row, visible together with the values; merges into what a sample has. With
                ``metadata`` and tags for more than 2048 samples it is several puts, each of them whole or not there.
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
        rows = as_rows(data)
        count = int(rows.batch_size[0])
        by_row = tags_by_row(tags, count)
        if metadata is None:
            if partition_id is None:
                raise InvalidRequestError("put of new samples needs a partition_id (or metadata of existing samples).")
            if not count:
                raise InvalidRequestError("put got 0 rows; there is nothing to store.")
            return await self.put_new(await parsed_by(rows, data_parser), partition_id, by_row)
        check_meta("put", metadata)
        if not metadata.size:
            raise InvalidRequestError("put got metadata of 0 samples; fetch some first, or pass a partition_id.")
        if metadata.size != count:
            raise InvalidRequestError(
                f"put got {count} rows of data for {metadata.size} samples of metadata; nothing was "
                f"written. Select the same rows of both."
            )
        others = set(metadata.partition_ids) - {partition_id}
        if partition_id is not None and others:
            raise InvalidRequestError(
                f"put got partition_id {partition_id!r} with metadata of samples in {sorted(others)}; nothing was "
                f"written. Samples stay in their partition: leave partition_id out, or put without metadata."
            )
        metadata.update_custom_meta(tags)
        return await self._put_existing(rows, metadata, data_parser)

    async def put_new(self, rows: GivenRows, partition: str, tags: RowTags, role: p.Members | None = None) -> BatchMeta:
        """New samples, which may become members of a leased group."""
        schema, count = described_rows(rows)
        wait_s = await self.put_timeout_s()
        begin = p.Reserve(0, partition, count, to_specs(schema), wait_s, role)
        reserved = await self.write(begin, rows, tags)
        assert isinstance(reserved, p.Reserved)
        meta = BatchMeta(p.unpack_indexes(reserved.indexes).tolist(), [partition] * count, None, [1] * count)
        meta.field_schema = schema
        if tags:
            meta.update_custom_meta([tags.get(row) for row in range(count)])
            meta.mark_custom_meta_clean()
        return meta

    async def put_by_key(
        self, keys: list[str], partition: str, rows: GivenRows | None, tags: RowTags, role: p.Terms | None = None
    ) -> list[p.Batch]:
        """Write rows and tags of keys, of which unknown ones get new samples. Returns what the samples have then.

        ``role``: they become heads of new groups. More than ``MOST_ROWS`` keys are several puts, one after the other,
        with a reply each. Each of them is whole or not there.
        """
        replies, wait_s = [], await self.put_timeout_s()
        parts = parts_of(len(keys))
        columns = [rows] * len(parts) if rows is None or len(parts) == 1 else given_at(rows, parts)
        for some, part in zip(parts, columns, strict=True):
            specs = {} if part is None else to_specs(described_rows(part)[0])
            own = {row - some.start: tags[row] for row in range(some.start, some.stop) if row in tags}
            begin = p.ResolveKeys(0, partition, keys[some], True, True, specs, wait_s, sorted(specs), role)
            replies.append(await self._resolved(begin, part, own))
        return replies

    async def _resolved(self, begin: p.ResolveKeys, rows: GivenRows | None, tags: RowTags) -> p.Batch:
        """A key that another client clears meanwhile is a new one, so the put begins again."""
        tries = _TRIES_BY_KEY
        while True:
            tries -= 1
            try:
                reply = await self.write(begin, rows, tags)
            except (SampleClearedError, UnknownPartitionError):
                if not tries:
                    raise
            else:
                assert isinstance(reply, p.Batch)
                return reply

    async def _put_existing(self, rows: GivenRows, meta: BatchMeta, parser: DataParser | None) -> BatchMeta:
        tags = meta.changed_custom_meta()
        check_tags(tags)
        data, target = rows, meta
        if any(meta.padding_mask):
            real = [position for position, filler in enumerate(meta.padding_mask) if not filler]
            (data,), target = given_at(rows, [real]), meta.select_samples(real)
        stored = await parsed_by(data, parser)
        bare = BatchMeta(target.global_indexes, target.partition_ids)
        schema = described_rows(stored)[0]
        bare.add_described(schema)
        for partition in dict.fromkeys(target.partition_ids):
            await self._put_into(partition, stored, bare, tags)
        meta.add_described(schema if target is meta else described_rows(rows)[0])
        meta.mark_custom_meta_clean()
        return meta

    async def _put_into(self, partition: str, rows: GivenRows, meta: BatchMeta, tags: RowTags) -> None:
        """Put the rows of samples of this partition."""
        mine = [position for position, name in enumerate(meta.partition_ids) if name == partition]
        if len(mine) < meta.size:
            (rows,), meta = given_at(rows, [mine]), meta.select_samples(mine)
        if len(mine) > p.MOST_ROWS and len(tags) > p.MOST_ROWS:
            parts = parts_of(len(mine))
            for part, some in zip(given_at(rows, parts), parts, strict=True):
                await self._put_into(partition, part, meta.select_samples(list(range(meta.size))[some]), tags)
            return
        wait_s = await self.put_timeout_s()
        packed, specs = p.pack_indexes(meta.global_indexes), to_specs(meta.field_schema)
        begin = p.CheckFields(0, partition, packed, specs, wait_s)
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
