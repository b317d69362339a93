# SPDX-License-Identifier: Apache-2.0
"""SimpleStorage, client side: which unit holds which sample, and one message to every unit that a batch touches."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.errors import ConfigError, InvalidRequestError
from transfer_queue.storage.base import DataParser, HasRows, OpenWrite, Parts, StorageManager, Update, Wish
from transfer_queue.storage.pieces import IntArray, Piece
from transfer_queue.storage.simple.link import LinkStats, News, UnitLink
from transfer_queue.storage.simple.messages import (
    Answer,
    Drop,
    Forsake,
    Forsaken,
    Request,
    Stats,
    TakeBack,
    UnitStats,
    accepted,
    decode_answer,
    encode,
    expect,
    pack_indexes,
    unpack_indexes,
)
from transfer_queue.storage.simple.reading import Reading, UnitWish
from transfer_queue.storage.simple.routing import Shares, peers_of, routing_run, shares_of
from transfer_queue.storage.simple.spreading import SpreadPut
from transfer_queue.storage.simple.unit import INLINE_NBYTES
from transfer_queue.storage.simple.updates import UnitUpdate
from transfer_queue.storage.simple.writing import Sources, Terms
from transfer_queue.transport.base import Call, Caller, Reply
from transfer_queue.transport.modes import is_blocking

if TYPE_CHECKING:
    from tensordict import TensorDict


def _nothing() -> None:
    """To do while an answer is awaited."""


class SimpleStorageManager(StorageManager):
    """``config``: ``units`` [{name, address, pid, pid_namespace}] in the order all processes share, ``allow_pickle``,
    ``layout``, ``put_timeout_s`` (longest wait for room), ``timeout_s`` (longest wait for an answer besides), ``arena``
    (False: don't map the units' memory, send frames), ``inline_nbytes`` (writes up to this size travel as frames).
    """

    def __init__(self, caller: Caller, config: Mapping[str, Any]) -> None:
        super().__init__(caller, config)
        units = peers_of(config)
        self._links = [UnitLink(unit, bool(config.get("arena", True))) for unit in units]
        if not self._links:
            raise ConfigError("SimpleStorage has no storage units: start at least one")
        self._run = routing_run(config)
        self._allow_pickle = bool(config.get("allow_pickle", False))
        self._layout = str(config.get("layout") or "jagged")
        self._put_timeout_s = float(config.get("put_timeout_s", 60.0))
        self._timeout_s = float(config.get("timeout_s", 30.0))
        self._numbers = itertools.count(1)
        self._inline_nbytes = int(config.get("inline_nbytes", INLINE_NBYTES))

    async def put_data(self, data: TensorDict, metadata: HasRows, data_parser: DataParser | None = None) -> TensorDict:
        """See ``StorageManager.put_data``.

        For new samples: while a put over several units waits for room, none of its values is stored in those that come
        later. When a unit refuses, what the others took stays there until it is cleared (``clear_rows``).
        """
        data, indexes, sources = await self._prepared(data, metadata, data_parser)
        await self._write(indexes, sources, self._terms())
        return data

    def prepared(self, data: TensorDict) -> Any:
        from transfer_queue.storage import columns

        return columns.num_rows(data), columns.sources(data, self._allow_pickle)

    async def put_and_tell(
        self, prepared: Any, indexes: Sequence[int], message: bytes, meanwhile: Callable[[], None]
    ) -> bytes:
        rows, sources = prepared
        self._check_rows(rows, len(indexes))
        _, said = await self._write(_as_indexes(indexes), sources, self._terms(then=message), meanwhile)
        return said

    async def update_data(
        self,
        data: TensorDict,
        metadata: HasRows,
        data_parser: DataParser | None = None,
        absent: bool = False,
        message: bytes = b"",
    ) -> Update | None:
        data, indexes, sources = await self._prepared(data, metadata, data_parser)
        units = [unit for unit, _ in self._shares(indexes)]
        update = UnitUpdate(data, absent, next(self._numbers), units, self)
        try:
            written, update.said = await self._write(indexes, sources, self._terms(update.number, absent, message))
            if written:
                return update
        except BaseException:
            await update.abandon(metadata.global_indexes)
            raise
        await update.take_back(metadata.global_indexes)  # other units may have had no value
        update.settle()
        return None

    async def _prepared(
        self, data: TensorDict, metadata: HasRows, parser: DataParser | None
    ) -> tuple[TensorDict, IntArray, Sources]:
        from transfer_queue.storage import columns

        indexes = _as_indexes(metadata.global_indexes)
        self._check_rows(columns.num_rows(data), len(indexes))
        if parser is not None:
            from transfer_queue.storage.parsing import parsed

            # It may take long (fetching from a URL): on an event loop it must not hold up everything else.
            data = parsed(data, parser) if is_blocking() else await asyncio.to_thread(parsed, data, parser)
        return data, indexes, columns.sources(data, self._allow_pickle)

    async def get_data(self, metadata: HasRows) -> TensorDict:
        return await self.get_rows(metadata.global_indexes, metadata.field_names)

    async def clear_data(self, metadata: HasRows) -> None:
        await self.clear_rows(metadata.global_indexes)

    async def get_views(self, metadata: HasRows) -> TensorDict:
        return await self._get(metadata.global_indexes, metadata.field_names, None, copy=False)

    async def get_rows(self, indexes: Sequence[int], fields: Iterable[str], layout: str | None = None) -> TensorDict:
        return await self._get(indexes, fields, layout)

    async def _get(
        self, indexes: Sequence[int], fields: Iterable[str], layout: str | None, copy: bool = True
    ) -> TensorDict:
        from transfer_queue.storage import columns

        layout = layout or self._layout
        columns.check_layout(layout)
        wanted, names = _as_indexes(indexes), sorted(set(fields))
        if not len(wanted) or not names:
            return columns.unpack({}, len(wanted), layout, self._allow_pickle)
        reading = Reading(self._links, names)
        try:
            parts = await self._read(wanted, reading)
            return columns.unpack(parts, len(wanted), layout, self._allow_pickle, None if copy else reading.pins.lay)
        finally:
            reading.close()

    async def _read(self, wanted: IntArray, reading: Reading) -> Mapping[str, Parts]:
        shares = self._shares(wanted)
        await self._decide(unit for unit, _ in shares)
        return reading.parts(shares, await self._ask(reading.requests(wanted, shares)))

    async def wish(self, fields: Sequence[str], small: bool = False) -> Wish:
        from transfer_queue.storage import columns

        def unpack(parts: Mapping[str, Parts], count: int) -> TensorDict:
            return columns.unpack(parts, count, self._layout, self._allow_pickle)

        columns.check_layout(self._layout)
        if not small:
            await self._decide(range(len(self._links)))
        reading = Reading(self._links, sorted(set(fields)))
        return UnitWish(reading, self._shares, unpack, len(self._links), small)

    @asynccontextmanager
    async def stored(self, indexes: Sequence[int], fields: Sequence[str]) -> AsyncIterator[Mapping[str, Parts]]:
        reading = Reading(self._links, sorted(set(fields)))
        try:
            yield await self._read(_as_indexes(indexes), reading)
        finally:
            reading.close()

    async def store(self, indexes: Sequence[int], pieces: Mapping[str, Piece]) -> None:
        from transfer_queue.storage.sources import BytesSource

        sources = {name: BytesSource(piece) for name, piece in pieces.items()}
        await self._write(_as_indexes(indexes), sources, self._terms())

    async def clear_rows(self, indexes: Sequence[int], fields: Iterable[str] | None = None) -> None:
        names = None if fields is None else sorted(set(fields))
        await self._forget(indexes, lambda packed, given_up: Drop(packed, names, given_up))

    async def stats(self) -> list[LinkStats]:
        """What every unit holds, in the order of the configuration, and which way this client's values go there."""
        answers = await self._ask([(unit, Stats()) for unit in range(len(self._links))])
        return [link.stats(expect(answer, UnitStats)) for link, (answer, _) in zip(self._links, answers, strict=True)]

    async def close(self) -> None:
        for link in self._links:
            link.close()

    def _terms(self, number: int = 0, absent: bool = False, then: bytes = b"") -> Terms:
        return Terms(self._put_timeout_s, self._inline_nbytes, number, absent, then)

    async def _write(
        self, indexes: IntArray, sources: Sources, terms: Terms, meanwhile: Callable[[], None] = _nothing
    ) -> tuple[bool, bytes]:
        """(written, what the controller said). False: see ``SpreadPut.carry_out``."""
        if not sources or not len(indexes):
            meanwhile()
            return True, b""
        touched = self._shares(indexes)
        await self._decide(unit for unit, _ in touched)
        shares = [(self._links[unit], at) for unit, at in touched]
        if len(shares) > 1:
            terms = terms._replace(then=b"")
        put = SpreadPut(self.caller, shares, indexes, sources, terms, self._timeout_s, meanwhile)
        return await put.carry_out(), put.said

    async def _decide(self, units: Iterable[int]) -> None:
        """Which way values go there. A unit may be slow to say: a thread waits for it then, and never an event loop."""
        if is_blocking():
            return
        undecided = [self._links[unit] for unit in units if self._links[unit].path == "undecided"]
        if undecided:
            await asyncio.gather(*(asyncio.to_thread(link.decide) for link in undecided))

    def settle(self, number: int, units: Iterable[int]) -> None:
        """An open write of this number, to these units, needs to be remembered no more."""
        for unit in units:
            self._links[unit].settle(number)

    async def take_back(self, number: int, indexes: Sequence[int], client: str = "") -> None:
        """Forget what an open write of this client ("": this one) added to these samples and nobody replaced."""
        await self._forget(indexes, lambda packed, given_up: TakeBack(client, number, packed, given_up))

    async def _forget(self, indexes: Sequence[int], request: Callable[[bytes, list[int]], Drop | TakeBack]) -> None:
        """``request``: of a unit's share of the indexes, and of what of this client must not come after it."""
        forgotten = _as_indexes(indexes)
        shares = [(unit, forgotten[at], self._links[unit].news().given_up) for unit, at in self._shares(forgotten)]
        await self._ask([(unit, request(pack_indexes(mine), given_up)) for unit, mine, given_up in shares])
        for unit, _, given_up in shares:
            if given_up:
                self._links[unit].told(News([], given_up))

    async def forsake(self, client: str) -> list[OpenWrite]:
        answers = await self._ask([(unit, Forsake(client)) for unit in range(len(self._links))])
        writes = [write for answer, _ in answers for write in expect(answer, Forsaken).writes]
        return [OpenWrite(write.number, unpack_indexes(write.indexes).tolist(), write.fields) for write in writes]

    def _shares(self, indexes: Sequence[int] | IntArray) -> Shares:
        return shares_of(indexes, len(self._links), self._run)

    async def _ask(self, asks: Iterable[tuple[int, Request]]) -> list[tuple[Answer, list[memoryview]]]:
        calls = [Call(self._links[unit].peer, encode(request)) for unit, request in asks]
        return [_accepted(reply) for reply in await self.caller.call_many(calls, self._timeout_s)] if calls else []

    def _check_rows(self, rows: int, expected: int) -> None:
        if rows != expected:
            raise InvalidRequestError(
                f"put of {rows} rows for {expected} samples: data and metadata must have the same number of rows. "
                f"Nothing was stored."
            )


def _as_indexes(indexes: Sequence[int]) -> IntArray:
    return np.asarray(indexes, np.int64).reshape(-1)


def _accepted(reply: Reply) -> tuple[Answer, list[memoryview]]:
    return accepted(decode_answer(reply.header)), reply.frames
