# SPDX-License-Identifier: Apache-2.0
"""Shared-memory storage, the client side: which unit gets or holds which rows, and one message to each unit."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from transfer_queue.errors import ConfigError, InvalidRequestError, QueueUnreachableError, SessionEndedError
from transfer_queue.protocol import (
    LONGEST_WAIT_S,
    Done,
    Request,
    UnitRuns,
    WriteName,
    as_indexes,
    pack_indexes,
    unpack_indexes,
)
from transfer_queue.storage.base import HasRows, Places, StorageManager
from transfer_queue.storage.messages import (
    INLINE_NBYTES,
    AskHeld,
    AskUnitStats,
    Commit,
    Delete,
    EndSession,
    EndWrite,
    Expected,
    Held,
    Release,
    Rows,
    UnitStats,
    decode_answer,
    encode_columns,
)
from transfer_queue.storage.shm.choose import UnitDirectory
from transfer_queue.storage.shm.connect import UnitConnection, decide_paths
from transfer_queue.storage.shm.read import ReadResult
from transfer_queue.storage.shm.write import MemoryColumns, UnitWrite, UnitWriter, abort
from transfer_queue.storage.wire import IntArray, PlacedColumns, WireColumn
from transfer_queue.transport.base import Peer
from transfer_queue.transport.session import Session
from transfer_queue.utils.zmq_utils import ZMQServerInfo

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.storage.pack import GivenRows
    from transfer_queue.storage.unpack import DataParser


class SharedMemoryManager(StorageManager):
    """The client side of storage units.

    ``config`` has ``units`` [{name, address}] (several are listed by the controller), ``allow_pickle`` and ``layout``.
    ``put_timeout_s`` is the longest wait for room, ``timeout_s`` that for an answer besides. ``arena``: False sends
    frames instead of mapping the units' memory. ``inline_nbytes``: writes up to this size travel as frames.
    """

    clears_by_field = False
    servers_delete = True

    def __init__(self, session: Session | ZMQServerInfo, config: Mapping[str, Any]) -> None:
        super().__init__(session, config)
        if not config.get("units"):
            raise ConfigError(
                "the storage section has no zmq_info, hence no storage units: take the configuration that init() "
                "returned."
            )
        peers = [Peer(unit["name"], unit["address"]) for unit in config["units"]]
        self._units = UnitDirectory(self.session, peers, bool(config.get("arena", True)))
        self._allow_pickle = bool(config.get("allow_pickle", False))
        self._put_timeout_s = min(float(config.get("put_timeout_s", 60.0)), LONGEST_WAIT_S)
        self._timeout_s = float(config.get("timeout_s", 30.0))
        self._inline_nbytes = int(config.get("inline_nbytes", INLINE_NBYTES))
        self._writer = partial(UnitWriter, self.session, self._units, self._timeout_s, self._inline_nbytes)
        if self._units.own is not None:
            self._own, self.front = self._units.own, self

    async def in_several_units(self, fresh: bool = False) -> bool:
        if self.front is None or self._units.had_others:
            return True
        if not fresh and (await self.session.config()).listen is None:  # no other host's unit can join
            return False
        await self._units.all(fresh)
        return self._units.had_others

    def prepare(self, data: TensorDict | GivenRows) -> MemoryColumns:
        """Return every column, ready to be written; nothing is copied yet. Raises ValueError for unsupported values."""
        from transfer_queue.storage.pack import prepare

        return prepare(data, self._allow_pickle)

    # ---- one message to the front ----

    async def takes_writes(self) -> bool:
        return self.session.controller.address.startswith("ipc://") or not await self._units.has_near()

    async def encode_write(
        self, call: int, columns: MemoryColumns, count: int, replaced: Sequence[int], wait_s: float
    ) -> tuple[bytes, list[Any]]:
        await decide_paths([self._own])
        write = UnitWrite(self._own, slice(0, count), columns, self._inline_nbytes)
        packed_indexes = pack_indexes(as_indexes(replaced)) if len(replaced) else b""
        await write.lease(self.session, call, packed_indexes, wait_s, self._timeout_s)
        packed, frames = write.packed(self.session)
        return encode_columns(packed), frames

    async def decode_read(
        self, header: Any, frames: Sequence[memoryview], fields: Sequence[str], count: int
    ) -> TensorDict:
        result = ReadResult(self.session, sorted(set(fields)))
        try:
            result.add(self._own, slice(0, count), decode_answer(header, Rows), frames)
            values = self._unpacked(result, count, self.layout)
            await result.close()
        except BaseException:
            await result.close()
            raise
        return values

    def decode_small(
        self, header: Any, frames: Sequence[memoryview], metadata: HasRows, layout: str | None
    ) -> TensorDict | None:
        rows, changes, indexes = decode_answer(header, Rows), self._own.changes, metadata.global_indexes
        if changes is None or changes.stamp(as_indexes(indexes)) != rows.stamp:
            return None
        result = ReadResult(self.session, sorted(set(metadata.field_names)))
        result.add(self._own, slice(0, len(indexes)), rows, frames)
        return self._unpacked(result, len(indexes), layout or self.layout)

    async def release(self, call: int) -> None:
        await self.session.post(self._own.peer, Release(self.session.number(), [call]))

    async def decide_mapping(self) -> bool:
        await decide_paths([self._own])
        return self._own.arena is not None

    # ---- several steps ----

    async def write(
        self, call: int, indexes: Sequence[int], columns: MemoryColumns, partition: str = "", fresh: bool = False
    ) -> UnitRuns | None:
        wanted = as_indexes(indexes)
        if not columns or not len(wanted):
            return None
        deadline = time.monotonic() + self._put_timeout_s
        return await self._writer(call, wanted, columns, deadline, fresh, not fresh).write()

    def written(self, call: int, units: UnitRuns | None) -> None:
        for unit in filter(None, (self._units.known(number) for number, _ in units or [(0, 0)])):
            self.session.done(unit.peer, call)

    async def commit(self, call: int, units: UnitRuns | None, earlier: Sequence[WriteName] = ()) -> None:
        written = [unit for unit, _ in units or [(0, 0)]]
        writes = [*earlier, (self.session.caller.client, call)]
        await self._ask_units(written, lambda: Commit(self.session.number(), writes), Done)

    async def commit_everywhere(self, writes: Sequence[WriteName]) -> None:
        if writes:
            await self._ask_all(lambda: Commit(self.session.number(), list(writes)), Done)

    async def abort(self, call: int, units: UnitRuns | None) -> None:
        self._units.outdate()  # the next try must not choose one that has ended
        await abort(self.session, self._units, call, [unit for unit, _ in units or [(0, 0)]])

    async def end_write(self, write: WriteName, published: Sequence[WriteName]) -> None:
        await self._ask_all(lambda: EndWrite(self.session.number(), write, list(published)), Done)

    async def end_session(self, client: str, published: Sequence[WriteName]) -> None:
        await self._ask_all(lambda: EndSession(self.session.number(), client, list(published)), Done)

    async def put_data(self, data: TensorDict, metadata: HasRows, data_parser: DataParser | None = None) -> TensorDict:
        """See ``StorageManager.put_data``; readers see the values at once. The queue must have a single unit."""
        from transfer_queue.storage.pack import check_rows
        from transfer_queue.storage.unpack import parsed_rows

        if data_parser is not None:
            data = await parsed_rows(data, data_parser)
        check_rows(data, metadata.global_indexes)
        if await self._store(metadata.global_indexes, self.prepare(data)) is not None:
            raise InvalidRequestError(
                "put_data stores values where no reader finds them if a queue has several storage units: use put()."
            )
        return data

    async def get_data(self, metadata: HasRows) -> TensorDict:
        if self.front is None and not self._units.is_fixed:
            raise InvalidRequestError(
                "the queue has several storage units, and this metadata does not say which of them hold the values: "
                "use the client's get_data()."
            )
        return await self.read(metadata, None, None)

    async def clear_data(self, metadata: HasRows) -> None:
        """In every unit, because values that were put again may lie in several."""
        wanted = as_indexes(metadata.global_indexes)
        if len(wanted):
            await self._ask_all(lambda: Delete(self.session.number(), pack_indexes(wanted)), Done)

    async def read(self, metadata: HasRows, places: Places | None, layout: str | None) -> TensorDict:
        """``places`` None: all rows lie in unit 0."""
        from transfer_queue.storage.unpack import check_layout, unpack

        layout = layout or self.layout
        check_layout(layout)
        wanted, names = as_indexes(metadata.global_indexes), sorted(set(metadata.field_names))
        if not len(wanted) or not names:
            return unpack({}, len(wanted), layout, self._allow_pickle)
        result = ReadResult(self.session, names)
        try:
            await result.read(self._units, wanted, places, self._timeout_s)
            values = self._unpacked(result, len(wanted), layout)
            await result.close()
        except BaseException:  # not "finally", which a Ctrl-C would end before its work is done
            await result.close()
            raise
        return values

    def _unpacked(self, result: ReadResult, count: int, layout: str) -> TensorDict:
        from transfer_queue.storage.unpack import unpack

        with self.session.using_memory():
            return unpack(result.columns, count, layout, self._allow_pickle)

    @asynccontextmanager
    async def stored(
        self, indexes: Sequence[int], fields: Sequence[str], places: Places | None = None
    ) -> AsyncIterator[Mapping[str, PlacedColumns]]:
        result = ReadResult(self.session, sorted(set(fields)))
        try:
            await result.read(self._units, as_indexes(indexes), places or Places({}), self._timeout_s)
            yield result.columns
        finally:
            await result.close()

    async def store(
        self, indexes: Sequence[int], columns: Mapping[str, WireColumn], wait: bool = True
    ) -> UnitRuns | None:
        from transfer_queue.storage.pack import BytesColumn

        return await self._store(indexes, {name: BytesColumn(column) for name, column in columns.items()}, wait)

    async def _store(self, indexes: Sequence[int], columns: MemoryColumns, wait: bool = True) -> UnitRuns | None:
        if not columns or not len(indexes):
            return None
        call, caller = self.session.number(), self.session.caller
        try:
            deadline = time.monotonic() + (self._put_timeout_s if wait else 0.0)
            # Values of a checkpoint go to all units by turns.
            units = await self._writer(call, as_indexes(indexes), columns, deadline, False, False).write()
        except SessionEndedError:
            self.session.renew(caller)
            raise
        try:
            await self.commit(call, units)
        except BaseException:
            await self.abort(call, units)
            raise
        return units

    async def held(self, indexes: Sequence[int]) -> dict[str, IntArray]:
        """Return by field which of these samples have a value. Fields that none of them has are left out."""
        wanted, found = as_indexes(indexes), dict[str, list[IntArray]]()
        for held in await self._ask_all(lambda: AskHeld(self.session.number(), pack_indexes(wanted)), Held):
            for name, packed in held.fields.items():
                found.setdefault(name, []).append(unpack_indexes(packed))
        return {name: np.unique(np.concatenate(some)) for name, some in sorted(found.items())}

    async def stats(self) -> list[UnitStats]:
        """Statistics of every unit, by their numbers, with the ``path`` of this client's values.

        A unit that does not answer, such as one that is dying, is left out.
        """
        found, failed = list[UnitStats](), None
        for _, unit in await self._units.all():
            try:
                (own,) = await self._ask([unit], lambda: AskUnitStats(self.session.number()), UnitStats)
                found.append(msgspec.structs.replace(own, path=unit.path))
            except QueueUnreachableError as error:
                failed = error
        if failed is not None and not found:
            raise failed
        return found

    async def close(self) -> None:
        self._units.close()

    # ---- one message to each unit ----

    async def _ask_all(self, request: Callable[[], Request], kind: type[Expected]) -> list[Expected]:
        """Send a request to every unit. Returns the answers in their order."""
        return await self._ask_units([number for number, _ in await self._units.all()], request, kind)

    async def _ask_units(
        self, numbers: Sequence[int], request: Callable[[], Request], kind: type[Expected]
    ) -> list[Expected]:
        """Send a request to these units; to several once or twice. Those that have ended are left out."""
        units = [unit for number in numbers if (unit := self._units.known(number)) is not None]
        try:
            return await self._ask(units, request, kind)
        except QueueUnreachableError:
            if len(numbers) == 1:
                if await self._units.lost_among(numbers):
                    return []
                raise
        answers, failed = list[Expected](), None
        for number in numbers:  # one after the other, so that one that does not answer keeps the request from no other
            try:
                answers += await self._ask_units([number], request, kind)
            except QueueUnreachableError as error:
                failed = error
        if failed is not None:
            raise failed
        return answers

    async def _ask(
        self, units: Iterable[UnitConnection], request: Callable[[], Request], kind: type[Expected]
    ) -> list[Expected]:
        asks = [(unit.peer, request(), ()) for unit in units]
        answers = await self.session.call_many(asks, self._timeout_s) if asks else []
        return [decode_answer(answer.header, kind) for answer in answers]
