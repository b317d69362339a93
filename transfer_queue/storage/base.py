# SPDX-License-Identifier: Apache-2.0
"""StorageManager: what a storage backend must offer to the client. It decides nothing about tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from transfer_queue.storage.pieces import Piece, Positions
from transfer_queue.transport.base import Caller

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


class OpenWrite(NamedTuple):
    """An update that its writer neither published nor took back before it ended."""

    number: int
    global_indexes: Sequence[int]
    field_names: Sequence[str]


class Update:
    """Values put over samples that others know already, until it is clear whether they get published."""

    def __init__(self, stored: TensorDict, absent: bool = False) -> None:
        """``stored``: what was put, or what a parser made of it. ``absent``: it replaced nothing."""
        self.stored = stored
        self.absent = absent
        self.said = b""
        """What the controller answered, if the storage told it; see ``put_and_tell``."""

    def settle(self) -> None:
        """They are published, or taken back."""

    async def take_back(self, indexes: Sequence[int]) -> None:
        """Forget them for these samples where nobody replaced them since. A backend that can't tell keeps them."""


class Wish:
    """Values of a batch that isn't known yet, asked for beside its fetch. This one of a backend that can't do that."""

    message = b""
    """What the controller is told beside the fetch; empty: nothing."""

    def answered(self, frames: Sequence[memoryview]) -> None:
        """This came beside the controller's answer; ``close`` without it takes everything for granted."""

    @property
    def came(self) -> bool:
        """Are there values?"""
        return False

    def values(self, indexes: Sequence[int], frames: Sequence[memoryview]) -> TensorDict | None:
        """The batch, from what came beside the controller's answer; once. None: read it.

        Raises:
            StorageKeyNotFoundError: a value was cleared meanwhile.
        """
        return None

    def close(self) -> None:
        """Whatever came has been used, or won't be."""


class StorageManager(ABC):
    """The client's side of one backend. Subclasses write ``put_data``, ``get_data`` and ``clear_data``."""

    def __init__(self, caller: Caller, config: Mapping[str, Any]) -> None:
        """``config`` is the backend's own section; its ``layout`` is what reads give: "jagged" (default) or "dense"."""
        self.caller = caller
        self.config = config

    @abstractmethod
    async def put_data(self, data: TensorDict, metadata: HasRows, data_parser: DataParser | None = None) -> TensorDict:
        """Store row i of ``data`` for ``metadata.global_indexes[i]``; a field that is there already is replaced.

        Returns:
            What was stored: ``data``, or what ``data_parser`` made of it.
        Raises:
            ValueError: another number of rows than indexes; nothing has been sent.
        """

    def prepared(self, data: TensorDict) -> Any:
        """What ``put_and_tell`` takes of this data; made while something else is awaited. Nothing is copied.

        Raises:
            ValueError: something that can't be stored.
        """
        return data

    async def put_and_tell(
        self, prepared: Any, indexes: Sequence[int], message: bytes, meanwhile: Callable[[], None]
    ) -> bytes:
        """``put_data``, then tell the controller this, where the storage has a way that is shorter than the client's.

        Args:
            meanwhile: Done once, best while an answer is awaited.
        Returns:
            What the controller answered; empty: it wasn't told, and all is stored.
        """
        await self.put_data(prepared, RowsOf(indexes))
        meanwhile()
        return b""

    async def update_data(
        self,
        data: TensorDict,
        metadata: HasRows,
        data_parser: DataParser | None = None,
        absent: bool = False,
        message: bytes = b"",
    ) -> Update | None:
        """``put_data`` onto samples that are published.

        With ``absent``, only where no sample has a value of these fields yet: None when one has, and a backend that
        can't tell always says so. ``message``: see ``put_and_tell``; the answer is in the update.
        """
        return None if absent else Update(await self.put_data(data, metadata, data_parser))

    @abstractmethod
    async def get_data(self, metadata: HasRows) -> TensorDict:
        """``metadata.field_names`` of ``metadata.global_indexes``, in this order. The memory is the caller's own.

        Raises:
            StorageKeyNotFoundError: a value was cleared or never put.
        """

    async def get_views(self, metadata: HasRows) -> TensorDict:
        """``get_data`` without a copy where the values lie together in memory that this process can map.

        Such values stay where they are as long as anything points at them. A backend that shares no memory copies.
        """
        return await self.get_data(metadata)

    async def wish(self, fields: Sequence[str], small: bool = False) -> Wish:
        """See ``Wish``; ``close`` it.

        Args:
            small: For values that are taken later, if at all: few bytes only, and none that changed meanwhile.
        """
        return Wish()

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

    async def forsake(self, client: str) -> list[OpenWrite]:
        """This client's process has ended: nothing that is still on its way from it counts. What it left open."""
        return []

    async def take_back(self, number: int, indexes: Sequence[int], client: str = "") -> None:
        """Forget what an open write of this client stored for these samples, where nobody replaced it since."""
        return

    async def stats(self) -> Sequence[msgspec.Struct]:
        """Numbers of each process that holds values; none where a backend has no such processes."""
        return []

    async def close(self) -> None:
        """Let go of what the manager opened; what is stored stays."""
        return
