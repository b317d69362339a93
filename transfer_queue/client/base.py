# SPDX-License-Identifier: Apache-2.0
"""What all verbs share: a session with the servers, the storage's client side, metadata to and from messages."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError, UnsupportedValueError
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.annotations import copy_tags
from transfer_queue.metadata.field_schema import with_dtypes
from transfer_queue.protocol import MOST_ROWS, Batch, Done, FieldSpec, SetTags, encode, unpack_indexes, unpack_tags
from transfer_queue.storage.backends import StorageManagerFactory, storage_settings
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.session import Session
from transfer_queue.utils.zmq_utils import ZMQServerInfo

if TYPE_CHECKING:
    from transfer_queue.storage.base import StorageManager

Page = TypeVar("Page", p.Batch, p.Status)
_PLAIN = (str, int, float, bytes, type(None))
"""What a tag may hold, in lists and dicts; bools and enumerations of these values are among them."""


class ClientBase:
    """Any thread and any event loop may use it. After a fork the child has a session of its own."""

    def __init__(
        self,
        client_id: str,
        controller_info: ZMQServerInfo,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
    ) -> None:
        """``zmq_io_threads`` and ``zmq_max_sockets`` change nothing."""
        if controller_info is None:
            raise InvalidRequestError("controller_info is None: pass conf.controller.zmq_info of a running queue.")
        if not isinstance(controller_info, ZMQServerInfo):
            raise TypeError(f"controller_info must be a ZMQServerInfo, got {type(controller_info).__name__}.")
        self.client_id = client_id
        self.session = Session(client_id, controller_info.peer(), controller_info.key_file)
        self._storage: StorageManager | None = None
        self._storage_args: tuple[str, dict[str, Any]] | None = None
        self._caller: Any = None

    def initialize_storage_manager(self, manager_type: str, config: Mapping[str, Any], **settings: Any) -> None:
        """Choose the backend; ``config`` is its section of a running queue's configuration."""
        self._storage_args = (manager_type, storage_settings(config, **settings))
        self._make_storage()

    def _make_storage(self) -> None:
        assert self._storage_args is not None
        self._storage = StorageManagerFactory.create(self._storage_args[0], self.session, self._storage_args[1])
        self._caller = self.session.caller
        self._with_values: set[int] = set()
        """Fetches of this session whose values came along and wait to be read."""

    @property
    def storage_manager(self) -> StorageManager:
        """Raises RuntimeError before ``initialize_storage_manager``."""
        if self._storage is None:
            raise InvalidRequestError("this client has no storage yet: call initialize_storage_manager() first.")
        self.session.follow_fork()
        if self._caller is not self.session.caller:
            self._make_storage()
        return self._storage

    async def async_get_config(self) -> dict[str, Any]:
        """The running queue's configuration.

        Examples:
            >>> client.get_config()["backend"]["storage_backend"]
            'SimpleStorage'
        """
        return await self.session.plain_config()

    async def put_timeout_s(self) -> float:
        """How long a put may wait for room."""
        configured = (await self.session.config()).backend.SimpleStorage.put_timeout_s
        return min(configured, p.LONGEST_WAIT_S)

    async def clear(self, request: type[p.Request], *args: Any) -> p.Cleared:
        """Ask the controller to delete samples, and the storage their values."""
        session = self.session
        message = request(session.number(), *args)
        storage = self.storage_manager
        if storage.front is not None:
            return await session.send(message, p.Cleared)
        by_field = storage.clears_by_field and request in (p.ClearSamples, p.ClearConsumed, p.ClearPartition)
        fields = await self._fields_of(args[0]) if by_field else {}
        cleared = await session.send(message, p.Cleared, keep=True)
        try:
            indexes = p.unpack_indexes(cleared.indexes).tolist()
            if indexes:
                await (_clear_by_field(storage, args[0], indexes, fields) if by_field else storage.clear_rows(indexes))
        except BaseException:
            await session.cancel(message.id)  # the controller has these values deleted
            raise
        session.done(session.controller, message.id)
        return cleared

    async def set_tags(self, partition: str, tags: Mapping[int, Mapping[str, Any]]) -> None:
        """Set the tags of these samples, a part of them per request."""
        rows = list(tags.items())
        for some in parts_of(len(rows)):
            own = {index: dict(each) for index, each in rows[some]}
            await self.session.ask(SetTags, Done, {partition: own})

    async def _fields_of(self, partition: str) -> dict[int, tuple[str, ...]]:
        """The fields of each sample of a partition, by index."""
        stats = (await self.session.stats())["partitions"].get(partition)
        fields: list[str] = [] if stats is None else stats["fields"]
        found: dict[int, tuple[str, ...]] = {}
        for page in await self.pages(p.FieldStatus, p.Status, partition, fields, False) if fields else ():
            indexes = p.unpack_indexes(page.indexes).tolist()
            has = np.frombuffer(page.status, np.int8).reshape(len(indexes), len(fields))
            for index, own in zip(indexes, has.tolist(), strict=True):
                found[index] = tuple(name for name, here in zip(fields, own, strict=True) if here)
        return found

    async def pages(self, request: type[p.Request], expected: type[Page], *args: Any) -> list[Page]:
        """The pages about all samples of a partition: one request each, so that many hold up no other client."""
        pages = [await self.session.ask(request, expected, *args)]
        while pages[-1].more:
            last = int(unpack_indexes(pages[-1].indexes)[-1])
            pages.append(await self.session.ask(request, expected, *args, last))
        return pages

    def close(self) -> None:
        """End the session; what was put stays, and so do values that were read. Idempotent.

        Examples:
            >>> from transfer_queue.client import connect
            >>> other = connect("evaluation", tq.init())  # another client of the same queue
            >>> other.get_partition_list()
            []
            >>> other.close()
        """
        self.end_threads()
        if self._storage is not None:
            run_blocking(self._storage.close())
        self.session.close()

    def end_threads(self) -> None:
        """What verbs have started ends. Idempotent."""


async def _clear_by_field(
    storage: StorageManager, partition: str, indexes: Sequence[int], fields: Mapping[int, tuple[str, ...]]
) -> None:
    """Delete the values of samples from a backend that doesn't know which fields they have."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for index in indexes:
        alike.setdefault(fields.get(index, ()), []).append(index)
    for names, some in alike.items():
        await storage.clear_data(BatchMeta(some, [partition] * len(some), {name: {} for name in names}))


def check_meta(verb: str, metadata: Any) -> None:
    """Raise InvalidRequestError for anything but metadata of samples."""
    if not isinstance(metadata, BatchMeta):
        raise InvalidRequestError(
            f"{verb} takes a BatchMeta, as put and get_meta return it, got {type(metadata).__name__}."
        )


def tags_by_row(tags: Any, count: int) -> dict[int, dict[str, Any]]:
    """Tags by row, for rows that have some. Raises an error unless each row has a mapping that can be sent, or None."""
    if tags is None:
        return {}
    if isinstance(tags, (str, Mapping)) or not hasattr(tags, "__len__"):
        raise InvalidRequestError(f"tags are a list with one mapping per row, got {type(tags).__name__}.")
    if len(tags) != count:
        raise InvalidRequestError(f"{count} rows were given with {len(tags)} tags. Give one mapping, or None, per row.")
    for row, own in enumerate(tags):
        if own is not None and not isinstance(own, Mapping):
            raise InvalidRequestError(
                f"tags of row {row} are a {type(own).__name__}, {own!r:.50}: give a mapping of names to plain data, or "
                f"None."
            )
    found = {row: own for row, own in enumerate(tags) if own}
    check_tags(found)
    try:
        return {row: copy_tags(own) for row, own in found.items()}
    except RecursionError:
        raise UnsupportedValueError(p.too_deep("a tag")) from None


def as_names(given: Sequence[str] | str, what: str = "data_fields") -> list[str]:
    """A list of names; one string is one name. Raises TypeError for anything else."""
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{what} must be a string or a list of strings, got {given!r}.")
    return names


def checked_wait(verb: str, timeout_s: float) -> float:
    """The wait as it may be sent. Raises InvalidRequestError for what is no number."""
    if not isinstance(timeout_s, numbers.Real) or isinstance(timeout_s, bool) or timeout_s != timeout_s:
        raise InvalidRequestError(f"timeout_s of {verb} must be a number of seconds, got {timeout_s!r}.")
    return min(max(timeout_s, 0.0), p.LONGEST_WAIT_S)


def to_specs(schema: Mapping[str, Mapping[str, Any]]) -> dict[str, FieldSpec]:
    """A schema as ``extract_field_schema`` makes it, for the wire."""
    return {name: _to_spec(entry) for name, entry in schema.items()}


def _to_spec(entry: Mapping[str, Any]) -> FieldSpec:
    dtype, shape, rows = entry["dtype"], entry["shape"], entry.get("per_sample_shapes")
    packed = None
    if rows and len({len(row) for row in rows}) == 1:
        packed = np.asarray(rows, dtype="<i4").tobytes()
    return FieldSpec(
        None if dtype is None else str(dtype).removeprefix("torch."),
        None if shape is None else tuple(shape),
        bool(entry.get("is_nested")),
        bool(entry.get("is_non_tensor")),
        packed,
    )


def _to_entry(spec: FieldSpec, count: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "dtype": None if spec.dtype is None else getattr(torch, spec.dtype),
        "shape": spec.shape,
        "is_nested": spec.is_nested,
        "is_non_tensor": spec.is_non_tensor,
    }
    if spec.row_shapes is not None and count:
        rows = np.frombuffer(spec.row_shapes, dtype="<i4").reshape(count, -1)
        entry["per_sample_shapes"] = [tuple(row) for row in rows.tolist()]
    if spec.row_dtypes is not None and count:
        dtypes = [None if name is None else getattr(torch, name) for name in spec.dtypes]
        return with_dtypes(entry, [dtypes[number] for number in spec.row_dtypes])
    return entry


def to_meta(batch: Batch) -> BatchMeta:
    """The metadata that a reply describes."""
    indexes = unpack_indexes(batch.indexes).tolist()
    count = len(indexes)
    padding = None if batch.padding is None else np.frombuffer(batch.padding, dtype=np.uint8).astype(bool).tolist()
    meta = BatchMeta(
        indexes,
        [batch.partition] * count,
        None,
        np.frombuffer(batch.status, dtype=np.int8),
        None,
        unpack_tags(batch.tags) or None,
        padding_mask=padding,
        token=batch.token,
        batch_index=batch.batch_index,
    )
    if batch.heads is not None and count:
        meta.heads, meta.group_versions = unpack_indexes(batch.heads).tolist(), batch.versions
        meta.most_rows, meta.cut = batch.most_rows, batch.cut
    if batch.remains is not None:
        meta.remains = np.frombuffer(batch.remains, dtype=np.uint8).astype(bool).tolist()
    if count:  # set directly, because these entries are new and already normalized
        meta.field_schema = {name: _to_entry(spec, count) for name, spec in batch.fields.items()}
    return meta


def joined(pages: Sequence[Batch]) -> BatchMeta:
    """The metadata of several replies about one partition, with the fields that all of them have."""
    return to_meta(pages[0]) if len(pages) == 1 else BatchMeta.concat(map(to_meta, pages), validate=False)


def parts_of(count: int) -> list[slice]:
    """So many rows in parts that one request may name; one empty part if there are none."""
    return [slice(start, min(start + MOST_ROWS, count)) for start in range(0, count or 1, MOST_ROWS)]


def check_tags(tags: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise UnsupportedValueError for tags that can't be sent, before anything is written for their samples."""
    if not tags:
        return
    names = [name for own in tags.values() for name in own if not isinstance(name, str)]
    if names:
        raise UnsupportedValueError(f"tags are named by strings, got {names[0]!r}; use {str(names[0])!r}.")
    encode(SetTags(0, {"": {index: dict(own) for index, own in tags.items()}}))
    for own in tags.values():
        _check_plain(own)


def _check_plain(tags: Mapping[str, Any]) -> None:
    """The encoder makes lists of tuples and sets, texts of dates and UUIDs, dicts of dataclasses."""
    inside: list[Any] = list(tags.values())
    while inside:
        value = inside.pop()
        if isinstance(value, dict):  # a key that is a tuple stays one
            inside.extend([key for key in value if not isinstance(key, tuple)])
            inside.extend(value.values())
        elif isinstance(value, list):
            inside.extend(value)
        elif not isinstance(value.item() if getattr(value, "ndim", None) == 0 else value, _PLAIN):
            would = "come back as a list" if isinstance(value, (tuple, set, frozenset)) else "not come back as one"
            raise UnsupportedValueError(
                f"a tag holds a {type(value).__name__}, {value!r:.50}, which would {would}. Make it plain data (str, "
                f"int, float, bool, None, lists and dicts of them), or store it as a field."
            )
