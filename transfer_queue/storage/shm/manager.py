# SPDX-License-Identifier: Apache-2.0
"""Shared-memory storage, the client side: which unit holds which sample, and one message to each unit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.errors import ConfigError, InvalidRequestError, StorageFullError
from transfer_queue.protocol import LONGEST_WAIT_S, Cancel, Done, Request
from transfer_queue.storage.base import DataParser, HasRows, PlacedColumns, StorageManager
from transfer_queue.storage.copying import AT_ONCE
from transfer_queue.storage.shm.messages import (
    AskHeld,
    AskUnitStats,
    Columns,
    Commit,
    Delete,
    Deleted,
    EndSession,
    EndWrite,
    Expected,
    Held,
    Leased,
    Read,
    Release,
    Rows,
    UnitStats,
    Write,
    Written,
    decode_answer,
    encode_columns,
    pack_indexes,
    unpack_indexes,
)
from transfer_queue.storage.shm.unit import INLINE_NBYTES
from transfer_queue.storage.shm.unit_client import (
    MemoryColumns,
    ReadResult,
    SeenStats,
    Shares,
    UnitConnection,
    UnitWrite,
    decide_paths,
    shares_of,
)
from transfer_queue.storage.wire_columns import IntArray, WireColumn, as_run, count_of
from transfer_queue.transport.base import Peer
from transfer_queue.transport.session import Session
from transfer_queue.utils.zmq_utils import ZMQServerInfo

if TYPE_CHECKING:
    from tensordict import TensorDict


class SharedMemoryManager(StorageManager):
    """``config``: ``units`` [{name, address}] in the order that all processes share, ``allow_pickle``, ``layout``,
    ``put_timeout_s`` (longest wait for room), ``timeout_s`` (longest wait for an answer besides), ``arena``
    (False: don't map the units' memory, send frames), ``inline_nbytes`` (writes up to this size travel as frames).
    """

    clears_by_field = False

    def __init__(self, session: Session | ZMQServerInfo, config: Mapping[str, Any]) -> None:
        super().__init__(session, config)
        if not config.get("units"):
            raise ConfigError(
                "the storage section has no zmq_info, hence no storage units: take the configuration that init() "
                "returned."
            )
        shared = bool(config.get("arena", True))
        self._units = [UnitConnection(Peer(unit["name"], unit["address"]), shared) for unit in config["units"]]
        self._allow_pickle = bool(config.get("allow_pickle", False))
        self._layout = str(config.get("layout") or "jagged")
        self._put_timeout_s = min(float(config.get("put_timeout_s", 60.0)), LONGEST_WAIT_S)
        self._timeout_s = float(config.get("timeout_s", 30.0))
        self._inline_nbytes = int(config.get("inline_nbytes", INLINE_NBYTES))

    @property
    def is_in_front(self) -> bool:
        """Whether the only unit shares the controller's process: a put and a get are then one message each."""
        return len(self._units) == 1 and self._units[0].peer.address == self.session.controller.address

    # ---- one message to the front ----

    def prepare(self, data: TensorDict) -> MemoryColumns:
        """Return every column, ready to be written; nothing is copied yet. Raises ValueError for unsupported values."""
        from transfer_queue.storage import columns

        return columns.prepare(data, self._allow_pickle)

    async def encode_write(
        self, call: int, columns: MemoryColumns, count: int, replaced: Sequence[int]
    ) -> tuple[bytes, list[Any]]:
        """Wait for room, copy large columns into the arena, and return the write's encoded columns and frames.

        ``call`` leases that memory; if the write fails, ``release`` must follow. ``replaced``: samples with values that
        the write replaces.
        """
        await decide_paths(self._units, [0])
        write = UnitWrite(self._units[0], slice(0, count), count, columns, self._inline_nbytes)
        packed = pack_indexes(_as_indexes(replaced)) if len(replaced) else b""
        await self._lease([(call, write, packed)], self._put_timeout_s)
        packed_columns, frames = self._packed([write])[0]
        return encode_columns(packed_columns), frames

    async def decode_read(
        self, header: Any, frames: Sequence[memoryview], fields: Sequence[str], count: int
    ) -> TensorDict:
        """Return the values that arrived with a batch of ``count`` samples."""
        result = ReadResult(self.session, sorted(set(fields)))
        try:
            result.add(self._units[0], slice(0, count), decode_answer(header, Rows), frames)
            values = self._unpacked(result, count, self._layout)
            await result.close()
        except BaseException:
            await result.close()
            raise
        return values

    async def release(self, call: int) -> None:
        """Release the memory that this call pinned or leased."""
        await self.session.post(self._units[0].peer, Release(self.session.number(), [call]))

    async def decide_mapping(self) -> bool:
        """Return whether this process has mapped the arena, so answers may point into it. Decided once."""
        await decide_paths(self._units, [0])
        return self._units[0].arena is not None

    # ---- several steps ----

    async def write(self, call: int, indexes: Sequence[int], columns: MemoryColumns, partition: str = "") -> None:
        await self._write(call, _as_indexes(indexes), columns, commit=False)

    async def commit(self, call: int, indexes: Sequence[int]) -> None:
        await self._ask_shares(indexes, lambda unit, own: Commit(self.session.number(), [call]), Done)

    async def abort(self, call: int, indexes: Sequence[int]) -> None:
        for unit, _ in self._shares(_as_indexes(indexes)):
            await self.session.post(self._units[unit].peer, Cancel(self.session.number(), call))

    async def end_write(self, client: str, call: int, published: bool) -> None:
        await self._ask_all(lambda: EndWrite(self.session.number(), client, call, published), Done)

    async def end_session(self, client: str, published: Sequence[int]) -> None:
        await self._ask_all(lambda: EndSession(self.session.number(), client, list(published)), Done)

    async def put_data(self, data: TensorDict, metadata: HasRows, data_parser: DataParser | None = None) -> TensorDict:
        """See ``StorageManager.put_data``; readers see the values at once."""
        from transfer_queue.storage import columns

        data = await columns.parsed_rows(data, data_parser)
        indexes = _as_indexes(metadata.global_indexes)
        rows = columns.num_rows(data)
        if rows != len(indexes):
            raise InvalidRequestError(
                f"put of {rows} rows for {len(indexes)} samples: data and metadata must have the same number of rows. "
                f"Nothing was stored."
            )
        await self._write(self.session.number(), indexes, self.prepare(data), commit=True)
        return data

    async def get_data(self, metadata: HasRows) -> TensorDict:
        return await self.get_rows(metadata.global_indexes, metadata.field_names)

    async def clear_data(self, metadata: HasRows) -> None:
        await self.clear_rows(metadata.global_indexes)

    async def get_rows(self, indexes: Sequence[int], fields: Iterable[str], layout: str | None = None) -> TensorDict:
        from transfer_queue.storage import batches

        layout = layout or self._layout
        batches.check_layout(layout)
        wanted, names = _as_indexes(indexes), sorted(set(fields))
        if not len(wanted) or not names:
            return batches.unpack({}, len(wanted), layout, self._allow_pickle)
        result = ReadResult(self.session, names)
        try:
            await self._read(wanted, names, result)
            values = self._unpacked(result, len(wanted), layout)
            await result.close()
        except BaseException:  # not "finally", which a Ctrl-C would end before its work is done
            await result.close()
            raise
        return values

    def _unpacked(self, result: ReadResult, count: int, layout: str) -> TensorDict:
        from transfer_queue.storage import batches

        with self.session.using_memory():
            return batches.unpack(result.columns, count, layout, self._allow_pickle)

    @asynccontextmanager
    async def stored(self, indexes: Sequence[int], fields: Sequence[str]) -> AsyncIterator[Mapping[str, PlacedColumns]]:
        names = sorted(set(fields))
        result = ReadResult(self.session, names)
        try:
            await self._read(_as_indexes(indexes), names, result)
            yield result.columns
        finally:
            await result.close()

    async def store(self, indexes: Sequence[int], columns: Mapping[str, WireColumn]) -> None:
        from transfer_queue.storage.columns import BytesColumn

        prepared = {name: BytesColumn(column) for name, column in columns.items()}
        await self._write(self.session.number(), _as_indexes(indexes), prepared, commit=True)

    async def clear_rows(self, indexes: Sequence[int], fields: Iterable[str] | None = None) -> None:
        names = None if fields is None else sorted(set(fields))
        await self._ask_shares(indexes, lambda unit, own: Delete(self.session.number(), own, names), Deleted)

    async def held(self, indexes: Sequence[int]) -> dict[str, IntArray]:
        """Return by field which of these samples have a value. Fields that none of them has are left out."""
        wanted, found = _as_indexes(indexes), dict[str, list[IntArray]]()
        asks = [
            (self._units[unit].peer, AskHeld(self.session.number(), pack_indexes(wanted[at])), ())
            for unit, at in self._shares(wanted)
        ]
        for answer in await self.session.call_many(asks, self._timeout_s) if asks else ():
            for name, packed in decode_answer(answer.header, Held).fields.items():
                found.setdefault(name, []).append(unpack_indexes(packed))
        return {name: np.concatenate(some) for name, some in sorted(found.items())}

    async def stats(self) -> list[SeenStats]:
        """Statistics of every unit, in the order of the configuration, with the ``path`` of this client's values."""
        answers = await self._ask_all(lambda: AskUnitStats(self.session.number()), UnitStats)
        return [unit.stats(stats) for unit, stats in zip(self._units, answers, strict=True)]

    async def close(self) -> None:
        for unit in self._units:
            unit.close()

    # ---- how a batch is spread ----

    def _shares(self, indexes: IntArray) -> Shares:
        return shares_of(indexes, len(self._units))

    async def _ask_all(self, request: Callable[[], Request], kind: type[Expected]) -> list[Expected]:
        """Send a request to every unit. Returns the answers in their order."""
        asks = [(unit.peer, request(), ()) for unit in self._units]
        return [decode_answer(answer.header, kind) for answer in await self.session.call_many(asks, self._timeout_s)]

    async def _ask_shares(self, indexes: Sequence[int], request: Any, kind: Any) -> None:
        """Send a request to every unit that holds some of these samples. ``request`` is called with the unit and its
        packed share.
        """
        wanted = _as_indexes(indexes)
        calls: list[tuple[Any, Request, Sequence[Any]]] = [
            (self._units[unit].peer, request(unit, pack_indexes(wanted[at])), ()) for unit, at in self._shares(wanted)
        ]
        for answer in await self.session.call_many(calls, self._timeout_s) if calls else ():
            decode_answer(answer.header, kind)

    async def _read(self, wanted: IntArray, names: list[str], result: ReadResult) -> None:
        shares = self._shares(wanted)
        await decide_paths(self._units, [unit for unit, _ in shares])
        calls = []
        for unit, at in shares:
            mapped = self._units[unit].arena is not None
            read = Read(self.session.number(), pack_indexes(wanted[at]), names, mapped)
            calls.append((self._units[unit].peer, read, ()))
        try:
            answers = await self.session.call_many(calls, self._timeout_s)
            for (unit, at), answer in zip(shares, answers, strict=True):
                result.add(self._units[unit], at, decode_answer(answer.header, Rows), answer.frames)
        except BaseException:  # unread answers may have pinned memory, too
            for peer, read, _ in calls:
                await self.session.post(peer, Release(self.session.number(), [read.id]))
            raise

    async def _write(self, call: int, indexes: IntArray, columns: MemoryColumns, commit: bool) -> None:
        if not columns or not len(indexes):
            return
        shares = self._shares(indexes)
        await decide_paths(self._units, [unit for unit, _ in shares])
        if len(shares) == 1:
            await self._write_shares(call, indexes, shares, columns, self._put_timeout_s, commit)
            return
        try:
            await self._write_to_several(call, indexes, shares, columns)
        except BaseException:
            if commit:  # else the caller aborts
                await self.abort(call, indexes.tolist())
            raise
        if commit:
            await self.commit(call, indexes.tolist())

    async def _write_to_several(self, call: int, indexes: IntArray, shares: Shares, columns: MemoryColumns) -> None:
        try:
            await self._write_shares(call, indexes, shares, columns, 0.0, commit=False)
        except StorageFullError:
            # One after the other, in the order that all clients share, and from the beginning: else two writes could
            # each hold what the other waits for.
            await self._ask_shares(indexes.tolist(), lambda unit, own: Cancel(self.session.number(), call), Done)
            for share in shares:
                await self._write_shares(call, indexes, [share], columns, self._put_timeout_s, commit=False)

    async def _write_shares(
        self, call: int, indexes: IntArray, shares: Shares, columns: MemoryColumns, wait_s: float, commit: bool
    ) -> None:
        """``wait_s``: for room, at each of the units."""
        writes = [
            UnitWrite(self._units[unit], as_run(at), count_of(at), columns, self._inline_nbytes) for unit, at in shares
        ]
        packed = [pack_indexes(indexes[at]) for _, at in shares]
        try:
            numbers = [self.session.number() for _ in writes]
            await self._lease(list(zip(numbers, writes, packed, strict=True)), wait_s)
            messages = [
                (write.connection.peer, Write(call, own, to_store, wait_s, commit), frames)
                for write, own, (to_store, frames) in zip(writes, packed, self._packed(writes), strict=True)
            ]
            for answer in await self.session.call_many(messages, self._timeout_s + wait_s):
                decode_answer(answer.header, Written)
        except BaseException:
            await self._release(writes)
            raise

    async def _lease(self, wanted: Sequence[tuple[int, UnitWrite, bytes]], wait_s: float) -> None:
        """Memory for those of the writes that need some. ``wanted``: number of the call, write, what it replaces."""
        leases = [
            (write, lease) for call, write, own in wanted if (lease := write.lease(call, wait_s, own)) is not None
        ]
        if not leases:
            return
        asks = [(write.connection.peer, lease, ()) for write, lease in leases]
        answers = await self.session.call_many(asks, self._timeout_s + wait_s)
        for (write, _), answer in zip(leases, answers, strict=True):
            write.leased(decode_answer(answer.header, Leased).offset)

    async def _release(self, writes: Sequence[UnitWrite]) -> None:
        for write in writes:
            if write.lease_call:
                await self.session.post(write.connection.peer, Release(self.session.number(), [write.lease_call]))

    def _packed(self, writes: Sequence[UnitWrite]) -> list[tuple[Columns, list[Any]]]:
        """Copies into the arenas the columns that lie there; of all units together, which takes less time."""
        whole: dict[str, WireColumn] = {}
        if not any(write.lease_call for write in writes):
            return [write.packed(whole, AT_ONCE) for write in writes]
        from transfer_queue.storage.copying import Copies

        with self.session.using_memory():
            copies = Copies(into_mapped=True)
            made = [write.packed(whole, copies) for write in writes]
            copies.finish()
        return made


def _as_indexes(indexes: Sequence[int]) -> IntArray:
    return np.asarray(indexes, np.int64).reshape(-1)
