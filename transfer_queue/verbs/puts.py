# SPDX-License-Identifier: Apache-2.0
"""Puts: reserve indexes, write values to the storage, publish them at the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDict

from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError, SampleClearedError, UnknownPartitionError
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.metadata_wire import check_tags, to_specs
from transfer_queue.reservations import Ahead, Reservations
from transfer_queue.storage.base import Update
from transfer_queue.verbs.line import Line
from transfer_queue.verbs.new_samples import Aside, NewSamples

DataParser = Callable[[dict[str, Any]], dict[str, Any]]
_NOTHING_AHEAD = Ahead(0, [])


class Puts(Line):
    """``async_put``, and the steps that other writing verbs share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reservations = Reservations()

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
            data: One row per sample.
            metadata: The samples to write to, which is then updated in place and returned. None: new samples.
                Rows that only fill a padded batch are skipped.
            partition_id: Where new samples go.
            data_parser: Called with {field: values} before the write; returns the same fields with the values to store.
            tags: One mapping per row, visible together with the values; merges into what a sample has.
        Raises:
            ValueError: rows and metadata disagree, no rows, or a dtype that differs from what the field holds.
            SampleClearedError: some of the samples were cleared.
            StorageFullError: there was no room in time.
        """
        rows = as_tensordict(data)
        if tags is not None and len(tags) != rows.batch_size[0]:
            raise InvalidRequestError(f"put got {rows.batch_size[0]} rows of data with {len(tags)} tags.")
        check_tags(dict(enumerate(tags or ())))
        if metadata is None:
            if partition_id is None:
                raise InvalidRequestError("put of new samples needs a partition_id (or metadata of existing samples).")
            return await self._put_new(rows, partition_id, data_parser, tags)
        if not metadata.size:
            raise InvalidRequestError("put got metadata of 0 samples; fetch some first, or pass a partition_id.")
        if metadata.size != rows.batch_size[0]:
            raise InvalidRequestError(
                f"put got {rows.batch_size[0]} rows of data for {metadata.size} samples of metadata; nothing was "
                f"written. Select the same rows of both."
            )
        metadata.update_custom_meta(tags)
        return await self._put_existing(rows, metadata, data_parser)

    # ---- new samples ----

    async def _put_new(
        self,
        rows: TensorDict,
        partition: str,
        parser: DataParser | None,
        tags: Sequence[Mapping[str, Any]] | None,
    ) -> BatchMeta:
        count = rows.batch_size[0]
        if not count:
            raise InvalidRequestError("put got 0 rows; there is nothing to store.")
        if parser is not None:  # which runs once: its put must not be tried with a reservation that may be void
            return await self._put_parsed(rows, partition, parser, tags)
        schema = extract_field_schema(rows)
        specs = to_specs(schema)
        new = NewSamples(partition, rows, specs, schema, tags)
        prepare = partial(self.storage_manager.prepared, rows)
        ahead = self._reservations.take(partition, count)
        if ahead is not None:
            try:
                return await self._put_reserved(new, ahead, Aside(prepare))
            except (SampleClearedError, UnknownPartitionError):
                # The partition was cleared or sealed since, and all that was reserved with it.
                await self.cancel(partition, self._reservations.drop(partition))
        prepared = Aside(prepare)
        indexes = await self._reserve(partition, count, specs, prepared)
        return await self._put_reserved(new, indexes, prepared)

    async def _reserve(
        self, partition: str, count: int, specs: dict[str, p.FieldSpec], meanwhile: Callable[[], None] | None = None
    ) -> list[int]:
        wait_s = await self.put_timeout_s()
        request = self.session.message(p.Reserve, partition, count, specs, wait_s)
        reserved = await self.session.send(request, p.Reserved, wait_s, meanwhile)
        indexes: list[int] = p.unpack_indexes(reserved.indexes).tolist()
        return indexes

    async def _put_reserved(self, new: NewSamples, indexes: list[int], prepared: Aside[Any]) -> BatchMeta:
        ahead = self._reservations.wish(new.partition, len(indexes))
        message = self._publication(new.partition, indexes, new.specs, new.tags_of(indexes), ahead)
        described = Aside(lambda: new.described(indexes))
        try:
            telling = p.encode(message)
            said = await self.storage_manager.put_and_tell(prepared.result(), indexes, telling, described)
            await self._publish(message, said)
        except BaseException as error:
            await self.cancel(new.partition, [*indexes, *ahead.unused])
            if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
                # Only now it is sure that nobody publishes it later, and is given a reservation for the next put.
                await self.session.withdraw(message)
            raise
        return described.result()

    async def _put_parsed(
        self, rows: TensorDict, partition: str, parser: DataParser, tags: Sequence[Mapping[str, Any]] | None
    ) -> BatchMeta:
        await self.cancel(partition, self._reservations.drop(partition))  # the indexes of later puts are higher
        indexes = await self._reserve(partition, rows.batch_size[0], {})
        meta = BatchMeta(indexes, [partition] * len(indexes))
        meta.update_custom_meta(tags)
        try:
            meta.add_fields(await self.storage_manager.put_data(rows, meta, parser))
            await self._publish(self._publication_of(meta, meta.changed_custom_meta()))
            meta.mark_custom_meta_clean()
        except BaseException:
            await self.cancel(partition, indexes)
            raise
        return meta

    # ---- samples that are there ----

    async def _put_existing(self, rows: TensorDict, meta: BatchMeta, parser: DataParser | None) -> BatchMeta:
        tags = meta.changed_custom_meta()
        check_tags(tags)
        await self.session.config()  # a controller that hears of it from the storage must know this client already
        data, target = rows, meta
        if any(meta.padding_mask):
            real = [position for position, filler in enumerate(meta.padding_mask) if not filler]
            data, target = rows[real], meta.select_samples(real)
        bare = BatchMeta(target.global_indexes, target.partition_ids)
        bare.add_fields(data)
        messages = self._publications(bare, tags)
        try:
            update = await self._update(data, target, bare, parser, messages)
            try:
                if parser is not None:
                    bare.add_fields(update.stored)
                    messages = self._publications(bare, tags)
                for message in messages:
                    await self._publish_update(update, message)
            finally:
                update.settle()
        except BaseException:
            await self._end_leave(bare)
            raise
        meta.add_fields(update.stored if update.stored.batch_size[0] == meta.size else rows)
        meta.mark_custom_meta_clean()
        return meta

    async def _update(
        self,
        data: TensorDict,
        target: BatchMeta,
        bare: BatchMeta,
        parser: DataParser | None,
        messages: Sequence[p.Publish],
    ) -> Update:
        """Write the values; they are visible once published."""
        storage = self.storage_manager
        if parser is None and not set(bare.field_names) & set(target.field_names):
            # Fields that nobody has put so far replace nothing, so a refusal can wait for the publish.
            told = p.encode(messages[0]) if len(messages) == 1 else b""
            update = await storage.update_data(data, target, absent=True, message=told)
            if update is not None:
                return update
        for part in bare.chunk_by_partition():
            await self._check(part)
        update = await storage.update_data(data, target, parser)
        assert update is not None
        return update

    async def _publish_update(self, update: Update, message: p.Publish) -> None:
        try:
            await self._publish(message, update.said)
        except (InvalidRequestError, SampleClearedError):
            if update.absent:  # else what it replaced is gone, and values of the wrong kind are better than none
                await update.take_back(p.unpack_indexes(message.indexes).tolist())
            raise

    async def _check(self, part: BatchMeta) -> None:
        """Refuse cleared samples and dtypes that change before the storage replaces anything."""
        indexes = p.pack_indexes(part.global_indexes)
        specs, wait_s = to_specs(part.field_schema), await self.put_timeout_s()
        await self.session.ask(p.CheckFields, p.Done, part.partition_ids[0], indexes, specs, wait_s, wait_s=wait_s)

    async def _end_leave(self, bare: BatchMeta) -> None:
        """Nothing more will be replaced: whoever saves these samples needn't wait for it."""
        for part in bare.chunk_by_partition():
            await self.cancel(part.partition_ids[0], part.global_indexes)

    # ---- publish ----

    def _publications(self, bare: BatchMeta, tags: Mapping[int, Mapping[str, Any]]) -> list[p.Publish]:
        """One per partition."""
        return [
            self._publication_of(part, {index: tags[index] for index in part.global_indexes if index in tags})
            for part in bare.chunk_by_partition()
        ]

    def _publication_of(self, part: BatchMeta, tags: Mapping[int, Mapping[str, Any]]) -> p.Publish:
        """Of the fields in ``part``'s schema; all of its samples are of one partition."""
        return self._publication(part.partition_ids[0], part.global_indexes, to_specs(part.field_schema), tags)

    def _publication(
        self,
        partition: str,
        indexes: Sequence[int],
        specs: Mapping[str, p.FieldSpec],
        tags: Mapping[int, Mapping[str, Any]],
        ahead: Ahead = _NOTHING_AHEAD,
    ) -> p.Publish:
        """Makes these fields of these samples visible."""
        unused = p.pack_indexes(ahead.unused) if ahead.unused else b""
        return self.session.message(
            p.Publish, partition, p.pack_indexes(indexes), specs, tags, ahead.reserve, False, unused
        )

    async def _publish(self, message: p.Publish, said: bytes = b"") -> None:
        """``said``: what the controller answered already, if it was told."""
        try:
            if said:
                published = self.session.read(said, message, p.Published)
            else:
                published = await self.session.send(message, p.Published)
        except (SampleClearedError, UnknownPartitionError, asyncio.CancelledError):
            await self.cancel(message.partition, p.unpack_indexes(message.indexes).tolist())
            raise
        old = self._reservations.keep(message.partition, p.unpack_indexes(published.indexes).tolist())
        for name, given_up in old.items():
            await self.cancel(name, given_up)


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
