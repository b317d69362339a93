# SPDX-License-Identifier: Apache-2.0
"""What a storage backend must offer to the client: StorageManager, or StorageKVClient if it is a store of keys."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec

from transfer_queue.protocol import UnitRuns, WriteName
from transfer_queue.storage.wire import PlacedColumns, WireColumn
from transfer_queue.transport.session import Session
from transfer_queue.utils.zmq_utils import ZMQServerInfo

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.storage.pack import GivenRows
    from transfer_queue.storage.unpack import DataParser


class Places(NamedTuple):
    """Where the values of rows lie, for backends that keep them in storage units."""

    units: Mapping[str, UnitRuns | None]
    """By field; None: in unit 0."""
    committing: Sequence[WriteName] = ()
    """Published writes that the units commit first, in this order."""


class HasRows(Protocol):
    """The part of the metadata that a backend reads. A ``BatchMeta`` satisfies it."""

    @property
    def global_indexes(self) -> Sequence[int]: ...

    @property
    def field_names(self) -> Sequence[str]: ...


class RowsOf(NamedTuple):
    """These fields of these samples, for callers without metadata."""

    global_indexes: Sequence[int]
    field_names: Sequence[str] = ()


class InFront(Protocol):
    """The storage, where a unit shares the controller's process: a put there and a get are one message each."""

    async def takes_writes(self) -> bool:
        """Whether this client's values are best stored there."""

    async def encode_write(
        self, call: int, columns: Any, count: int, replaced: Sequence[int], wait_s: float
    ) -> tuple[bytes, list[Any]]:
        """Wait up to ``wait_s`` for room, copy large columns into the arena.

        Returns the write's encoded columns and frames.

        ``call`` leases that memory; if the write fails, ``release`` must follow. ``replaced``: samples with values that
        the write replaces.
        """

    async def decode_read(
        self, header: Any, frames: Sequence[memoryview], fields: Sequence[str], count: int
    ) -> TensorDict:
        """Return the values that arrived with a batch of ``count`` samples."""

    def decode_small(
        self, header: Any, frames: Sequence[memoryview], metadata: HasRows, layout: str | None
    ) -> TensorDict | None:
        """Return the small values that arrived with this metadata; None if they may not be those of its rows now."""

    async def release(self, call: int) -> None:
        """Release the memory that this call pinned or leased."""

    async def decide_mapping(self) -> bool:
        """Return whether this process has mapped the arena, so answers may point into it. Decided once.

        If so, it also sees whether values have changed, so small ones may come before they are read.
        """


class StorageManager(ABC):
    """The client side of one storage backend. Subclasses write ``put_data``, ``get_data`` and ``clear_data``."""

    front: InFront | None = None
    """The way through the controller's process; None: there is none, and puts and gets go in several steps."""

    servers_delete: ClassVar[bool] = False
    """Whether servers delete values by themselves. Others lie where only clients can."""
    clears_by_field: ClassVar[bool] = True
    """``clear_data`` reads ``field_names``. A backend that knows which fields a sample has sets it to False."""

    def __init__(
        self, controller_info: Session | ZMQServerInfo, config: Mapping[str, Any], zmq_context: Any = None
    ) -> None:
        """
        Args:
            controller_info: The client's session, or the address of a controller, for a session of its own.
            config: The backend's own section. Its ``layout`` is the layout of reads: "jagged" (default) or "dense".
            zmq_context: Changes nothing.
        """
        self.storage_manager_id = f"{type(self).__name__}_{uuid.uuid4().hex[:8]}"
        self.controller_info = controller_info
        self.config = config
        self.layout = str(config.get("layout") or "jagged")
        self.session: Session = (
            Session(self.storage_manager_id, controller_info.peer(), controller_info.key_file)
            if isinstance(controller_info, ZMQServerInfo)
            else controller_info
        )

    @abstractmethod
    async def put_data(self, data: TensorDict, metadata: HasRows, data_parser: DataParser | None = None) -> TensorDict:
        """Store row i of ``data`` for ``metadata.global_indexes[i]``, replacing existing fields.

        Returns:
            What was stored: ``data``, or the result of ``data_parser``.
        Raises:
            ValueError: the number of rows is not the number of indexes; nothing was sent.
        """

    # A put in several steps: ``write``, the controller publishes, then ``commit``; on failure ``abort``.

    def prepare(self, data: TensorDict | GivenRows) -> Any:
        """Prepare the columns of this data for ``write``. Raises ValueError for unsupported values."""
        return data.as_tensordict() if isinstance(data, dict) else data

    async def write(
        self, call: int, indexes: Sequence[int], columns: Any, partition: str = "", fresh: bool = False
    ) -> UnitRuns | None:
        """Store row i for ``indexes[i]`` of this partition. ``call`` names the write until it is committed or aborted.

        ``fresh``: new samples without keys, whose indexes nobody knows yet. They may be stored at once, and need no
        ``commit``.
        A backend that can't keep uncommitted writes separate stores all of them at once.

        Returns:
            Where the rows lie, for backends that keep them in storage units. If it fails, nothing is stored.
        """
        await self.put_data(columns, _metadata_of(indexes, columns, partition))
        return None

    async def notify_data_update(
        self,
        partition_id: str,
        global_indexes: Sequence[int],
        field_schema: Mapping[str, Any],
        custom_backend_meta: Any = None,
    ) -> None:
        """Called by ``put_data`` of backends written for TransferQueue 0.1; the client publishes when it returns.

        Raises:
            NotImplementedError: there is backend metadata, which only a ``KVStorageManager`` keeps.
        """
        if custom_backend_meta:
            raise NotImplementedError(
                f"{type(self).__name__} passes custom_backend_meta to notify_data_update(), which keeps none. Store it "
                f"with the values, or derive the backend from KVStorageManager, which keeps what its client's put() "
                f"returns."
            )

    async def commit(self, call: int, units: UnitRuns | None, earlier: Sequence[WriteName] = ()) -> None:
        """The write was published: it replaces the old values. ``units``: what ``write`` returned.

        ``earlier``: published writes that are committed before it, in this order.
        """
        return

    def written(self, call: int, units: UnitRuns | None) -> None:
        """The write of new samples was published. Nothing is sent for it."""
        return

    async def abort(self, call: int, units: UnitRuns | None) -> None:
        """The write was not published. A backend that can't tell keeps it until its samples are cleared."""
        return

    async def commit_everywhere(self, writes: Sequence[WriteName]) -> None:
        """Commit these published writes in every unit, in this order."""
        return

    async def end_write(self, write: WriteName, published: Sequence[WriteName]) -> None:
        """The controller reports that its client cancelled this write without knowing whether it was published.

        ``published``: to be committed, in this order. The write is dropped if it is none of them.
        """
        return

    async def end_session(self, client: str, published: Sequence[WriteName]) -> None:
        """The controller reports that this client has ended. ``published``: as above, for all of its writes."""
        return

    @abstractmethod
    async def get_data(self, metadata: HasRows) -> TensorDict:
        """Return ``metadata.field_names`` of ``metadata.global_indexes``, in this order, in the caller's own memory.

        Raises:
            StorageKeyNotFoundError: a value was cleared or never put.
        """

    @abstractmethod
    async def clear_data(self, metadata: HasRows) -> None:
        """Delete all fields of these samples. Unknown samples are no error."""

    async def in_several_units(self, fresh: bool = False) -> bool:
        """Whether the values may lie in several storage units, or did, so that a read has to say in which ones.

        ``fresh``: ask, although it was asked a moment ago.
        """
        return False

    async def read(self, metadata: HasRows, places: Places | None, layout: str | None) -> TensorDict:
        """``get_data`` in the given layout (None: as it comes)."""
        from transfer_queue.storage.unpack import relaid

        data = await self.get_data(metadata)
        return data if layout is None else relaid(data, layout, {})

    async def clear_rows(self, indexes: Sequence[int]) -> None:
        """``clear_data`` without metadata."""
        await self.clear_data(RowsOf(indexes))

    @asynccontextmanager
    async def stored(
        self, indexes: Sequence[int], fields: Sequence[str], places: Places | None = None
    ) -> AsyncIterator[Mapping[str, PlacedColumns]]:
        """Yield the values as stored, as wire columns by field. They are valid inside the context."""
        from transfer_queue.storage.pack import pack

        data = await self.get_data(RowsOf(indexes, fields))
        packed = pack(data, bool(self.config.get("allow_pickle", False)))
        yield {name: [(slice(0, len(indexes)), column)] for name, column in packed.items()}

    async def store(
        self, indexes: Sequence[int], columns: Mapping[str, WireColumn], wait: bool = True
    ) -> UnitRuns | None:
        """Store whole wire columns as ``stored`` yielded them; row i is the value of ``indexes[i]``.

        Args:
            wait: For room. False is only asked of storage in several units.
        Returns:
            Where the rows lie, as ``write`` does.
        """
        from transfer_queue.storage.unpack import unpack

        placed = {name: [(slice(0, len(indexes)), column)] for name, column in columns.items()}
        data = unpack(placed, len(indexes), "dense", bool(self.config.get("allow_pickle", False)))
        await self.put_data(data, _metadata_of(indexes, data))
        return None

    async def stats(self) -> Sequence[msgspec.Struct]:
        """Return statistics of each process that holds values, or none if there are no such processes."""
        return []

    async def numbers(self) -> list[dict[str, Any]]:
        """The same as plain data."""
        return [
            {name: value for name, value in msgspec.structs.asdict(unit).items() if name != "id"}
            for unit in await self.stats()
        ]

    async def close(self) -> None:
        """Release what the manager opened; stored values stay."""
        return


class StorageKVClient(ABC):
    """A flat store of values by key. Its methods block; they may be called from several threads.

    Values are tensors without a batch dimension, or plain objects.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config`` is the backend's section of the configuration."""
        self.config = config

    @abstractmethod
    def put(self, keys: list[str], values: list[Any]) -> list[Any] | None:
        """Store these values, replacing existing ones.

        Returns:
            None, or something plain for each key that ``get`` and ``clear`` need besides the key.
        """

    @abstractmethod
    def get(
        self,
        keys: list[str],
        shapes: list[Any] | None = None,
        dtypes: list[Any] | None = None,
        custom_backend_meta: list[Any] | None = None,
    ) -> list[Any]:
        """Return the values of these keys, in their order; None for a tensor that is not there.

        Args:
            shapes: Shape of each tensor; None for an object.
            dtypes: ``torch.dtype`` of each tensor; None for an object.
            custom_backend_meta: What ``put`` returned for each key.
        """

    @abstractmethod
    def clear(self, keys: list[str], custom_backend_meta: list[Any] | None = None) -> None:
        """Delete these keys. Some may not be there: their put was interrupted."""

    def close(self) -> None:
        """Release what the client opened; stored values stay."""
        return


def _metadata_of(indexes: Sequence[int], data: TensorDict, partition: str = "") -> HasRows:
    """Whole metadata, because a backend written elsewhere may read any of it."""
    from transfer_queue.metadata import BatchMeta

    return BatchMeta(list(indexes), [partition] * len(indexes)).add_fields(data, set_all_ready=False)
