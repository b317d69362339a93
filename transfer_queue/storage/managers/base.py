# SPDX-License-Identifier: Apache-2.0
"""KVStorageManager, in the client: values lie in a key-value store, and the queue's units say which there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from transfer_queue.errors import ConfigError, InvalidRequestError, StorageKeyNotFoundError
from transfer_queue.protocol import WriteName
from transfer_queue.storage.backends import StorageClientFactory, StorageManagerFactory
from transfer_queue.storage.base import HasRows, StorageManager
from transfer_queue.storage.shm.shared_memory import SharedMemoryManager
from transfer_queue.storage.wire import IntArray
from transfer_queue.transport.blocking import off_loop

if TYPE_CHECKING:
    import msgspec
    import torch
    from tensordict import TensorDict

    from transfer_queue.storage.unpack import DataParser

__all__ = ["KVStorageManager", "StorageManager", "StorageManagerFactory"]


class _Reference(NamedTuple):
    """What a unit holds in place of a value. ``dtype`` and ``shape`` are None for objects."""

    dtype: str | None
    shape: list[int] | None
    backend_meta: Any = None


class KVStorageManager(StorageManager):
    """A store that a ``StorageKVClient`` reaches. The value of a sample's field has the key ``<index>@<field>``.

    The units hold a reference for each value, with its shape, its dtype and what the client's ``put`` returned for it.
    So a missing value is an error before the store is asked, and what is cleared is exactly what was put.
    A put that replaces values replaces them at once, before it is published.
    """

    clears_by_field = False
    client_name: ClassVar[str | None] = None
    """The client that a subclass uses. None: the section names one."""

    def __init__(self, controller_info: Any, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        """``config``: the backend's section, with ``client_name`` and the ``units`` of a running queue.

        Raises:
            ConfigError: there is no ``client_name``, or no unit.
        """
        config = {**config, "client_name": self.client_name or config.get("client_name")}
        super().__init__(controller_info, config, zmq_context)
        if not config["client_name"]:
            raise ConfigError(
                "Missing client_name: the backend's section must name a client that StorageClientFactory knows."
            )
        self.storage_client = StorageClientFactory.create(str(config["client_name"]), config)
        self._references = SharedMemoryManager(self.session, config)

    async def put_data(self, data: TensorDict, metadata: HasRows, data_parser: DataParser | None = None) -> TensorDict:
        """See ``StorageManager.put_data``."""
        from transfer_queue.storage.pack import check_rows
        from transfer_queue.storage.unpack import parsed_rows

        if data_parser is not None:
            data = await parsed_rows(data, data_parser)
        indexes = list(metadata.global_indexes)
        check_rows(data, indexes)
        by_field = _rows_by_field(data)
        if not indexes or not by_field:
            return data
        references = {name: [_reference(value) for value in values] for name, values in by_field.items()}
        # First of all, so that a put that is interrupted from here on is cleared with its samples.
        await self._refer(indexes, references)
        keys = [key for name in by_field for key in _keys(indexes, name)]
        metas = await off_loop(self.storage_client.put, keys, [value for own in by_field.values() for value in own])
        if metas is not None and any(meta is not None for meta in metas):
            await self._refer(indexes, _with_metas(references, metas))
        return data

    async def get_data(self, metadata: HasRows) -> TensorDict:
        from transfer_queue.storage.pack import dtype_of
        from transfer_queue.storage.unpack import check_layout, from_rows, unpack

        indexes, layout = metadata.global_indexes, self.layout
        check_layout(layout)
        names, count = sorted(set(metadata.field_names)), len(indexes)
        if not names or not count:
            return unpack({}, count, layout)
        found = await self._referred(indexes, names)
        references = [reference for name in names for reference in found[name]]
        keys = [key for name in names for key in _keys(indexes, name)]
        dtypes = [None if each.dtype is None else dtype_of(each.dtype) for each in references]
        shapes = [None if each.shape is None else tuple(each.shape) for each in references]
        metas = [each.backend_meta for each in references]
        values = await off_loop(self.storage_client.get, keys, shapes=shapes, dtypes=dtypes, custom_backend_meta=metas)
        _check_found(keys, values, dtypes)
        return from_rows({name: values[at * count : (at + 1) * count] for at, name in enumerate(names)}, count, layout)

    async def clear_data(self, metadata: HasRows) -> None:
        indexes = metadata.global_indexes
        keys, metas = list[str](), list[Any]()
        for name, own in (await self._references.held(indexes)).items():
            keys += _keys(own.tolist(), name)
            metas += [each.backend_meta for each in (await self._referred(own, [name]))[name]]
        if keys:
            await off_loop(self.storage_client.clear, keys, custom_backend_meta=metas)
        await self._references.clear_rows(indexes)

    async def end_session(self, client: str, published: Sequence[WriteName]) -> None:
        """References that the client had not committed are dropped; it had put no values for them yet."""
        await self._references.end_session(client, published)

    async def stats(self) -> Sequence[msgspec.Struct]:
        """Of the units, which hold references."""
        return await self._references.stats()

    async def close(self) -> None:
        """Close the client, if it has a ``close``."""
        await self._references.close()
        close = getattr(self.storage_client, "close", None)
        if close is not None:
            await off_loop(close)

    # ---- references ----

    async def _refer(self, indexes: Sequence[int], references: Mapping[str, Sequence[_Reference]]) -> None:
        from transfer_queue.storage.pack import encode_rows

        columns = {name: encode_rows([list(each) for each in own], name) for name, own in references.items()}
        await self._references.store(indexes, columns)

    async def _referred(self, indexes: Sequence[int] | IntArray, names: Sequence[str]) -> dict[str, list[_Reference]]:
        """Raises StorageKeyNotFoundError for a value that was cleared or never put."""
        from transfer_queue.storage.unpack import values_in

        async with self._references.stored(indexes, names) as stored:  # type: ignore[arg-type]
            return {
                name: [_Reference(*each) for each in values_in(placed, len(indexes), name)]
                for name, placed in stored.items()
            }


def _keys(indexes: Sequence[int], field: str) -> list[str]:
    return [f"{index}@{field}" for index in indexes]


def _rows_by_field(data: Any) -> dict[str, list[Any]]:
    """One value per row of every field, sorted by field. Raises UnsupportedValueError for a nested TensorDict."""
    import torch

    from transfer_queue.storage.pack import named_columns, num_rows, objects_of

    count, found = num_rows(data), dict[str, list[Any]]()
    for name, column in sorted(named_columns(data)):
        is_tensor = isinstance(column, torch.Tensor)
        found[name] = list(column.detach().unbind()) if is_tensor else objects_of(name, column, count)
    return found


def _reference(value: torch.Tensor | Any) -> _Reference:
    import torch

    from transfer_queue.storage.pack import dtype_name

    if not isinstance(value, torch.Tensor) or value.is_nested:
        return _Reference(None, None)
    return _Reference(dtype_name(value.dtype), list(value.shape))


def _with_metas(references: Mapping[str, Sequence[_Reference]], metas: Sequence[Any]) -> dict[str, list[_Reference]]:
    total = sum(map(len, references.values()))
    if len(metas) != total:
        raise InvalidRequestError(f"the storage client's put returned {len(metas)} entries for {total} keys.")
    rest = iter(metas)
    return {name: [each._replace(backend_meta=next(rest)) for each in own] for name, own in references.items()}


def _check_found(keys: Sequence[str], values: Sequence[Any], dtypes: Sequence[Any]) -> None:
    if len(values) != len(keys):
        raise InvalidRequestError(f"the storage client's get returned {len(values)} values for {len(keys)} keys.")
    lost = [key for key, value, dtype in zip(keys, values, dtypes, strict=True) if value is None and dtype is not None]
    if lost:
        raise StorageKeyNotFoundError(
            f"the store has lost {len(lost)} of {len(keys)} values, first: key {lost[0]!r}. It may have evicted "
            f"them, or the process that held them has ended."
        )
