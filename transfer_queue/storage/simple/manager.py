# SPDX-License-Identifier: Apache-2.0
"""SimpleStorage, client side: which unit holds which sample, and one message to every unit that a batch touches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.errors import ConfigError, InvalidRequestError, ProtocolError, from_wire
from transfer_queue.storage.base import DataParser, HasRows, StorageManager
from transfer_queue.storage.pieces import IntArray, Piece, Positions, as_run, groups, pick
from transfer_queue.storage.simple.messages import (
    Answer,
    Drop,
    Failed,
    FieldParts,
    Read,
    Request,
    Rows,
    Stats,
    UnitStats,
    Write,
    decode_answer,
    encode,
    pack_indexes,
    pack_parts,
    unpack_parts,
)
from transfer_queue.transport.base import Call, Caller, Peer, Reply
from transfer_queue.transport.modes import is_blocking

if TYPE_CHECKING:
    from tensordict import TensorDict

ROUTING_RUN = 64
"""Neighbouring indexes share a unit in runs of this many: a put is cut into few slices, yet spreads over all units."""


def unit_of(indexes: IntArray, num_units: int) -> IntArray:
    """Which unit holds each index. Every process must answer the same, so it depends on nothing else."""
    return (indexes // ROUTING_RUN) % num_units


class SimpleStorageManager(StorageManager):
    """``config``: ``units`` [{name, address, pid, pid_namespace}] in the order all processes share, ``allow_pickle``,
    ``layout``, ``put_timeout_s`` (longest wait for room), ``timeout_s`` (longest wait for an answer besides).
    """

    def __init__(self, caller: Caller, config: Mapping[str, Any]) -> None:
        super().__init__(caller, config)
        self._units = [
            Peer(unit["name"], unit["address"], unit.get("pid"), unit.get("pid_namespace")) for unit in config["units"]
        ]
        if not self._units:
            raise ConfigError("SimpleStorage has no storage units: start at least one")
        self._allow_pickle = bool(config.get("allow_pickle", False))
        self._layout = str(config.get("layout") or "jagged")
        self._put_timeout_s = float(config.get("put_timeout_s", 60.0))
        self._timeout_s = float(config.get("timeout_s", 30.0))

    async def put_data(self, data: TensorDict, metadata: HasRows, data_parser: DataParser | None = None) -> TensorDict:
        """See ``StorageManager.put_data``.

        When a unit refuses, what the others took stays there until it is cleared: only the caller knows whether the
        samples are new (``clear_rows`` gives it back) or hold values that others may be reading.
        """
        from transfer_queue.storage import columns

        indexes = _as_indexes(metadata.global_indexes)
        self._check_rows(columns.num_rows(data), len(indexes))
        if data_parser is not None:
            from transfer_queue.storage.parsing import parsed

            # It may take long (fetching from a URL): on an event loop it must not hold up everything else.
            data = parsed(data, data_parser) if is_blocking() else await asyncio.to_thread(parsed, data, data_parser)
        pieces = columns.pack(data, self._allow_pickle)
        if pieces and len(indexes):
            await self._write(indexes, pieces)
        return data

    async def get_data(self, metadata: HasRows) -> TensorDict:
        return await self.get_rows(metadata.global_indexes, metadata.field_names)

    async def clear_data(self, metadata: HasRows) -> None:
        await self.clear_rows(metadata.global_indexes)

    async def get_rows(self, indexes: Sequence[int], fields: Iterable[str], layout: str | None = None) -> TensorDict:
        from transfer_queue.storage import columns

        layout = layout or self._layout
        columns.check_layout(layout)
        wanted, names = _as_indexes(indexes), sorted(set(fields))
        parts: dict[str, list[tuple[Positions, Piece]]] = {}
        if len(wanted):
            parts = {name: [] for name in names}
        if parts:
            for name, positions, piece in await self._read(wanted, names):
                parts[name].append((positions, piece))
        return columns.unpack(parts, len(wanted), layout, self._allow_pickle)

    async def clear_rows(self, indexes: Sequence[int], fields: Iterable[str] | None = None) -> None:
        dropped, names = _as_indexes(indexes), None if fields is None else sorted(set(fields))
        shares = self._shares(dropped)
        await self._ask([(unit, Drop(pack_indexes(dropped[at]), names), ()) for unit, at in shares], self._timeout_s)

    async def stats(self) -> list[UnitStats]:
        """What every unit holds, in the order of the configuration."""
        answers = await self._ask([(unit, Stats(), ()) for unit in range(len(self._units))], self._timeout_s)
        return [_expect(UnitStats, answer) for answer, _ in answers]

    async def _write(self, indexes: IntArray, pieces: Mapping[str, Piece]) -> None:
        asks = []
        for unit, at in self._shares(indexes):
            which = np.zeros(len(at), np.int64)
            parts = [(name, pos, part) for name, piece in pieces.items() for pos, part in pick([piece], which, at)]
            headers, frames = pack_parts(parts)
            asks.append((unit, Write(pack_indexes(indexes[at]), headers, self._put_timeout_s), frames))
        await self._ask(asks, self._put_timeout_s + self._timeout_s)

    async def _read(self, indexes: IntArray, fields: list[str]) -> FieldParts:
        shares = self._shares(indexes)
        asks = [(unit, Read(pack_indexes(indexes[at]), fields), ()) for unit, at in shares]
        parts: FieldParts = []
        for (_, at), (answer, frames) in zip(shares, await self._ask(asks, self._timeout_s), strict=True):
            for name, positions, piece in unpack_parts(_expect(Rows, answer).parts, frames, len(at)):
                parts.append((name, as_run(at[positions]), piece))
        return parts

    def _shares(self, indexes: IntArray) -> list[tuple[int, IntArray]]:
        """(unit, positions in ``indexes`` that are its own), units without any left out."""
        return groups(unit_of(indexes, len(self._units)))

    async def _ask(
        self, asks: Sequence[tuple[int, Request, Sequence[Any]]], timeout_s: float
    ) -> list[tuple[Answer, list[memoryview]]]:
        calls = [Call(self._units[unit], encode(request), frames) for unit, request, frames in asks]
        replies = await self.caller.call_many(calls, timeout_s) if calls else []
        return [_accepted(reply) for reply in replies]

    def _check_rows(self, rows: int, expected: int) -> None:
        if rows != expected:
            raise InvalidRequestError(
                f"put of {rows} rows for {expected} samples: data and metadata must have the same number of rows. "
                f"Nothing was stored."
            )


def _as_indexes(indexes: Sequence[int]) -> IntArray:
    return np.asarray(indexes, np.int64).reshape(-1)


def _accepted(reply: Reply) -> tuple[Answer, list[memoryview]]:
    answer = decode_answer(reply.header)
    if isinstance(answer, Failed):
        raise from_wire(answer.code, answer.text)
    return answer, reply.frames


def _expect(kind: Any, answer: Answer) -> Any:
    if not isinstance(answer, kind):
        raise ProtocolError(f"a storage unit answered {type(answer).__name__}, expected {kind.__name__}")
    return answer
