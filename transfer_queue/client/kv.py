# SPDX-License-Identifier: Apache-2.0
"""Samples by the user's own keys, with tags: put, get, list and clear."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, is_non_tensor, is_tensor_collection

from transfer_queue import protocol as p
from transfer_queue.client.base import check_meta, joined, parts_of, tags_by_row
from transfer_queue.client.get import Gets
from transfer_queue.client.given_rows import as_rows, check_names, parsed_by
from transfer_queue.client.key_watch import listed_after
from transfer_queue.client.put import Puts
from transfer_queue.errors import InvalidRequestError
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.storage.pack import GivenRows
from transfer_queue.storage.unpack import DataParser
from transfer_queue.utils.logging_utils import get_logger

_log = get_logger(__name__)
Tag = dict[str, Any]


class Keys(Gets, Puts):
    """Verbs that find samples by key."""

    async def async_kv_retrieve_meta(
        self, keys: Sequence[str] | str, partition_id: str, create: bool = False
    ) -> BatchMeta:
        """Samples of keys. Unknown ones are left out, or made with ``create``, in the order given.

        Raises:
            InvalidRequestError: no key is given.
            StorageFullError: there was no room in time for new samples.
        Examples:
            >>> meta = client.kv_retrieve_meta(["q1", "q2"], "train", create=True)
            >>> meta = client.put({"x": torch.arange(2)}, metadata=meta)
            >>> tq.kv_batch_get("q2", "train")["x"]
            tensor([1])
        """
        return joined(await self.resolve(check_keys(keys), partition_id, create))

    async def resolve(self, keys: list[str], partition_id: str, create: bool = False) -> list[p.Batch]:
        """What the samples of known keys have, or of all with ``create``; one reply for each part of the keys."""
        wait_s = await self.put_timeout_s()
        return [
            await self.session.ask(
                p.ResolveKeys, p.Batch, partition_id, keys[some], create, False, {}, wait_s, wait_s=wait_s
            )
            for some in parts_of(len(keys))
        ]

    async def async_kv_retrieve_keys(self, global_indexes: Sequence[int] | int, partition_id: str) -> list[str | None]:
        """Keys of samples, None for one without, or for one that was cleared.

        Raises:
            UnknownPartitionError: there is no such partition.
        Examples:
            >>> meta = client.kv_retrieve_meta(["q1", "q2"], "train", create=True)
            >>> client.kv_retrieve_keys(meta.global_indexes, "train")
            ['q1', 'q2']
        """
        indexes = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        if not isinstance(indexes, list) or not all(type(index) is int for index in indexes):
            raise TypeError(f"global_indexes must be an int or a list of int, got {global_indexes!r}.")
        if not indexes:
            raise InvalidRequestError("global_indexes is empty.")
        parts = [
            await self.session.ask(p.KeysOf, p.Names, partition_id, p.pack_indexes(indexes[some]))
            for some in parts_of(len(indexes))
        ]
        return [name for part in parts for name in part.names]

    async def async_kv_list(
        self, partition_id: str | None = None, where: str | None = None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """{partition: {key: tag}}, keys in order of insertion. An unknown partition gives {}.

        Args:
            where: Only keys whose tags match, such as ``"done == true"``; docs/semantics.md has the grammar.
        Raises:
            InvalidRequestError: ``where`` is no filter; says at which character.
        Examples:
            >>> meta = tq.kv_batch_put(["q1", "q2"], "train", tags=[{"done": True}, {"done": False}])
            >>> client.kv_list("train", where="done == true")
            {'train': {'q1': {'done': True}}}
        """
        names: list[Any] = [partition_id]
        if partition_id is None:
            names = (await self.session.ask(p.ListPartitions, p.Names)).names
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for name in names:
            page = await self.session.ask(p.ListKeys, p.KeyList, name, -1, where)
            found.update(page.keys)
            if page.last is not None:  # in pages, so that a long list holds up no other client
                found.setdefault(name, {}).update(await listed_after(self.session, name, page.last, where))
        return found

    async def async_clear_samples(self, metadata: BatchMeta) -> None:
        """Delete these samples and their values; those already cleared are ignored.

        Examples:
            >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
            >>> client.clear_samples(meta.select_samples([0, 1]))
            >>> client.get_meta(partition_id="train", mode="force_fetch").size
            2
        """
        check_meta("clear_samples", metadata)
        for part in metadata.chunk_by_partition() if metadata.size else ():
            indexes = part.global_indexes
            for some in parts_of(len(indexes)):
                await self.clear(p.ClearSamples, part.partition_ids[0], p.pack_indexes(indexes[some]))


def check_keys(keys: Sequence[str] | str) -> list[str]:
    """A list of key names; one string is one key."""
    names = [keys] if isinstance(keys, str) else keys
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"keys must be a string or a list of strings, got {keys!r}.")
    if not names:
        raise InvalidRequestError("keys is an empty list.")
    return names


def one_row(fields: Any) -> TensorDict | GivenRows | None:
    """The fields of one sample as a batch of one: tensors get a leading dimension, any other value is one object."""
    if fields is None:
        return None
    if isinstance(fields, TensorDict):
        if not len(fields.batch_size) or fields.batch_size[0] != 1:
            raise InvalidRequestError(f"kv_put takes one sample: batch_size [1], got {list(fields.batch_size)}.")
        return fields
    if not isinstance(fields, Mapping):
        raise InvalidRequestError(f"fields must be a dict or a TensorDict, got {type(fields).__name__}.")
    check_names(fields)
    columns: list[tuple[str, Any]] = []
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise InvalidRequestError(f"field {name!r} is a nested tensor: kv_put takes one sample, use kv_batch_put.")
        is_of_rows = isinstance(value, torch.Tensor) or (is_tensor_collection(value) and not is_non_tensor(value))
        columns.append((name, value.unsqueeze(0) if is_of_rows else [value]))  # the put refuses a collection
    return GivenRows(columns, [1], None)


async def rows_of(
    fields: TensorDict | Mapping[str, Any] | None, data_parser: DataParser | None = None
) -> GivenRows | None:
    """Fields as given to a put by key, through the parser."""
    return None if fields is None else await parsed_by(as_rows(fields), data_parser)


async def batch_put(
    client: Keys,
    keys: Sequence[str] | str,
    partition_id: str,
    rows: GivenRows | None,
    tags: Sequence[Tag | None] | None,
) -> KVBatchMeta:
    """Put rows by key. Everything is checked before a key is created; a failed put deletes its new keys."""
    names = check_keys(keys)
    _check_batch(names, rows, tags)
    batches = await client.put_by_key(names, partition_id, rows, tags_by_row(tags, len(names)))
    return KVBatchMeta(
        keys=list(names),
        tags=[tags for batch in batches for tags in p.unpack_tags(batch.tags) or [{}] * len(batch.status)],
        partition_id=partition_id,
        fields=sorted(set.intersection(*(set(batch.fields) for batch in batches))),
    )


def _check_batch(names: list[str], fields: GivenRows | None, tags: Sequence[Tag | None] | None) -> None:
    if fields is None and tags is None:
        raise InvalidRequestError("a put needs fields, tags, or both; got neither.")
    if len(set(names)) != len(names):
        twice, times = Counter(names).most_common(1)[0]
        raise InvalidRequestError(f"Got duplicated keys: {twice!r} is given {times} times.")
    if fields is not None and (not len(fields.batch_size) or fields.batch_size[0] != len(names)):
        raise InvalidRequestError(f"{len(names)} keys were given for fields of batch size {list(fields.batch_size)}.")


async def batch_get(
    client: Keys, keys: Sequence[str] | str, partition_id: str, select: Sequence[str] | str | None
) -> TensorDict:
    """Rows in the order of the keys, including repeats.

    A selected field is left out if a sample lacks it. A missing key is an error, and so is it if no field is left.
    """
    names = check_keys(keys)
    unique = list(dict.fromkeys(names))
    batches = await client.resolve(unique, partition_id)
    known = {key for batch in batches for key in batch.keys}
    if len(known) != len(unique):
        missing = [name for name in unique if name not in known]
        raise InvalidRequestError(
            f"{len(missing)} of {len(unique)} keys not found in partition {partition_id!r}, first: {missing[:5]}. "
            f"kv_list() shows the keys there are."
        )
    meta = joined(batches)
    wanted = sorted(meta.field_names if select is None else {select} if isinstance(select, str) else set(select))
    present = [name for name in wanted if name in meta.field_names]
    if not present:
        what = f"fields {wanted}" if wanted else "any field"
        raise InvalidRequestError(
            f"{what} not ready for all {len(unique)} keys; every one of them has: {meta.field_names}. "
            f"Wait for their producer, or select other fields."
        )
    partial = {name for batch in batches for name in (*batch.partial, *batch.fields)} - set(meta.field_names)
    for name in sorted(partial.intersection(wanted)):
        _warn_of(name)
    order = {name: position for position, name in enumerate(unique)}
    return await client.async_get_data(meta.select_fields(present).select_samples([order[name] for name in names]))


@functools.cache
def _warn_of(name: str) -> None:
    """One warning per field is enough."""
    _log.warning("field %r was selected, but only some of the samples have it: it is left out.", name)


async def batch_get_by_meta(client: Keys, meta: KVBatchMeta, select: Sequence[str] | str | None) -> TensorDict:
    """``batch_get`` with the keys and fields of the metadata; every selected field must be among these."""
    if meta.partition_id is None:
        raise InvalidRequestError("the KVBatchMeta has no partition_id; set it to the partition of its keys.")
    wanted = meta.fields if select is None else [select] if isinstance(select, str) else list(select)
    unknown = [name for name in wanted or () if name not in (meta.fields or [])]
    if unknown:
        raise InvalidRequestError(f"select_fields {unknown} not found in the metadata's fields {meta.fields}.")
    return await batch_get(client, meta.keys, meta.partition_id, wanted)


async def clear(client: Keys, keys: Sequence[str] | str, partition_id: str) -> None:
    """Delete samples by key; unknown keys or partitions are ignored."""
    batches = await client.resolve(list(dict.fromkeys(check_keys(keys))), partition_id)
    indexes = [index for batch in batches for index in p.unpack_indexes(batch.indexes).tolist()]
    if indexes:
        await client.async_clear_samples(BatchMeta(indexes, [partition_id] * len(indexes)))
