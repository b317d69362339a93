# SPDX-License-Identifier: Apache-2.0
"""StorageManager: what a storage backend must offer to the client. It decides nothing about tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from transfer_queue.storage.pieces import Piece, Positions
from transfer_queue.transport.session import Session

if TYPE_CHECKING:
    import msgspec
    from tensordict import TensorDict

DataParser: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]

Parts: TypeAlias = Sequence[tuple[Positions, Piece]]
"""Rows of a batch and where they are; each row once."""


class HasRows(Protocol):
    """What a backend reads of metadata; a ``BatchMeta`` is one."""

    @property
    def global_indexes(self) -> Sequence[int]: ...

    @property
    def field_names(self) -> Sequence[str]: ...


class RowsOf(NamedTuple):
    """These fields of these samples, where there is no metadata at hand."""

    global_indexes: Sequence[int]
    field_names: Sequence[str] = ()


class Staged(NamedTuple):
    """A write's values, ready to travel: encoded columns, and the frames beside them."""

    columns: bytes
    frames: Sequence[Any]


class InFront(ABC):
    """A backend whose values may lie in the controller's own process: a put and a get are then one message each."""

    @property
    @abstractmethod
    def is_in_front(self) -> bool:
        """Do they?"""

    @abstractmethod
    def sources(self, data: TensorDict) -> Mapping[str, Any]:
        """Every column, ready to be written; nothing is copied yet. Raises ValueError for what can't be stored."""

    @abstractmethod
    async def staged(self, call: int, sources: Mapping[str, Any], count: int, replaced: Sequence[int]) -> Staged:
        """Copy large columns to where they will lie, after a wait for room.

        ``call`` leases that memory; if the write fails, ``closed`` must follow. ``replaced``: samples whose values the
        write replaces.
        """

    @abstractmethod
    async def decide_mapping(self) -> bool:
        """May values be answered as places in memory that this process has mapped? Decided once, by trying."""

    @abstractmethod
    async def opened(self, header: Any, frames: Sequence[memoryview], fields: Sequence[str], count: int) -> TensorDict:
        """The values that came beside a batch of ``count`` samples."""

    @abstractmethod
    async def closed(self, call: int) -> None:
        """The memory that this call pinned, or leased, is not needed any more."""


class StorageManager(ABC):
    """The client's side of one backend. Subclasses write ``put_data``, ``get_data`` and ``clear_data``."""

    def __init__(self, session: Session, config: Mapping[str, Any]) -> None:
        """``config`` is the backend's own section; its ``layout`` is what reads give: "jagged" (default) or "dense"."""
        self.session = session
        self.config = config

    @abstractmethod
    async def put_data(self, data: TensorDict, metadata: HasRows, data_parser: DataParser | None = None) -> TensorDict:
        """Store row i of ``data`` for ``metadata.global_indexes[i]``; a field that is there already is replaced.

        Returns:
            What was stored: ``data``, or what ``data_parser`` made of it.
        Raises:
            ValueError: another number of rows than indexes; nothing has been sent.
        """

    # A put of several steps: ``write``, then the controller publishes, then ``commit``. Else ``abort``.

    def sources(self, data: TensorDict) -> Any:
        """What ``write`` takes of this data. Raises ValueError for something that can't be stored."""
        return data

    async def write(self, call: int, indexes: Sequence[int], sources: Any) -> None:
        """Store row i for ``indexes[i]``. ``call`` names the write until it is committed or aborted.

        A backend that can't keep uncommitted writes apart stores them at once.
        """
        await self.put_data(sources, RowsOf(indexes))

    async def commit(self, call: int, indexes: Sequence[int]) -> None:
        """The write is published: it replaces what was there."""
        return

    async def abort(self, call: int, indexes: Sequence[int]) -> None:
        """The write was not published. A backend that can't tell keeps it until its samples are cleared."""
        return

    async def end_write(self, client: str, call: int, published: bool) -> None:
        """The controller's word: this client has given up this write, and doesn't know whether it was published."""
        return

    async def end_session(self, client: str, published: Sequence[int]) -> None:
        """The controller's word: this client has ended, and of its uncommitted writes these were published."""
        return

    @abstractmethod
    async def get_data(self, metadata: HasRows) -> TensorDict:
        """``metadata.field_names`` of ``metadata.global_indexes``, in this order. The memory is the caller's own.

        Raises:
            StorageKeyNotFoundError: a value was cleared or never put.
        """

    @abstractmethod
    async def clear_data(self, metadata: HasRows) -> None:
        """Forget all fields of these samples. Unknown ones are no error."""

    async def get_rows(self, indexes: Sequence[int], fields: Iterable[str], layout: str | None = None) -> TensorDict:
        """``get_data`` without metadata, in the layout asked for (None: the configured one)."""
        from transfer_queue.storage import columns

        data = await self.get_data(RowsOf(indexes, sorted(set(fields))))
        return columns.relaid(data, layout or self.config.get("layout", "jagged"))

    async def clear_rows(self, indexes: Sequence[int], fields: Iterable[str] | None = None) -> None:
        """Forget these fields (None: all) of these samples.

        A backend that can't forget single fields keeps them until the samples are cleared.
        """
        if fields is None:
            await self.clear_data(RowsOf(indexes))

    @asynccontextmanager
    async def stored(self, indexes: Sequence[int], fields: Sequence[str]) -> AsyncIterator[Mapping[str, Parts]]:
        """Values as they are stored, objects encoded: per field the pieces that hold it. Valid inside the context."""
        from transfer_queue.storage import columns

        data = await self.get_data(RowsOf(indexes, fields))
        pieces = columns.pack(data, bool(self.config.get("allow_pickle", False)))
        yield {name: [(slice(0, len(indexes)), piece)] for name, piece in pieces.items()}

    async def store(self, indexes: Sequence[int], pieces: Mapping[str, Piece]) -> None:
        """Store whole columns as ``stored`` gave them; row i is the value of ``indexes[i]``."""
        from transfer_queue.storage import columns

        parts = {name: [(slice(0, len(indexes)), piece)] for name, piece in pieces.items()}
        data = columns.unpack(parts, len(indexes), "dense", bool(self.config.get("allow_pickle", False)))
        await self.put_data(data, RowsOf(indexes, sorted(pieces)))

    async def stats(self) -> Sequence[msgspec.Struct]:
        """Numbers of each process that holds values; none where a backend has no such processes."""
        return []

    async def close(self) -> None:
        """Let go of what the manager opened; what is stored stays."""
        return
