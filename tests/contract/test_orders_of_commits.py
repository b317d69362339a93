# SPDX-License-Identifier: Apache-2.0
"""Whatever the order in which writers store, publish, commit and end: what is read is what was published last."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.units_kit import ROOM, SmallQueue, async_key, async_put_key, pages
from transfer_queue import TransferQueueClient


@pytest.fixture
def queue() -> Iterator[SmallQueue]:
    made = SmallQueue(None, 0)
    yield made
    made.close()


class Writer:
    """A client whose puts stop before their publish and before their commit, each time until ``step``."""

    def __init__(self, client: TransferQueueClient) -> None:
        self.client, self.at, self.key, self.number = client, "", "", 0
        self._put: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        manager: Any = client.storage_manager
        write, commit = manager.write, manager.commit

        async def stored(*args: Any) -> Any:
            units = await write(*args)
            await self._stop("stored")
            return units

        async def committed(*args: Any) -> None:
            await self._stop("published")
            await commit(*args)

        manager.write, manager.commit = stored, committed

    async def _stop(self, at: str) -> None:
        self.at, self._go = at, asyncio.Event()
        self._stops.set()
        await self._go.wait()

    async def begin(self, key: str, number: int) -> None:
        self.key, self.number, self._stops = key, number, asyncio.Event()
        self._put = asyncio.ensure_future(async_put_key(self.client, number, key))
        await self._until_it_stops()

    async def step(self) -> None:
        self.at, self._stops = "", asyncio.Event()
        self._go.set()
        await self._until_it_stops()

    async def _until_it_stops(self) -> None:
        await asyncio.wait([self._put, asyncio.ensure_future(self._stops.wait())], return_when=asyncio.FIRST_COMPLETED)
        if self._put.done():
            self._put.result()

    async def end(self, with_session: bool) -> None:
        """Its put is given up, or its session ends without a word of it."""
        self.at = ""
        if with_session:
            self.client.session.cancel = nothing  # type: ignore[method-assign]
        self._put.cancel()
        await asyncio.wait([self._put])
        if with_session:
            self.client.close()


async def nothing(*args: Any) -> None: ...


class Story:
    """Three writers put two keys, and ``published`` is what was published last."""

    def __init__(self, seed: int, queue: SmallQueue) -> None:
        self._chance, self._queue, self._reader = random.Random(seed), queue, queue.client()
        self._writers = [Writer(queue.client()) for _ in range(3)]
        self.published: dict[str, int] = {}

    async def tell(self) -> None:
        await self._reader.async_put(pages(1), partition_id="p")
        for number in range(60):
            await self._turn(self._chance.randrange(3), number)
            if self._chance.random() < 0.5:  # a read has writes committed, so not after each turn
                await self._check()
        for writer in self._writers:
            while writer.at:
                await self._step(writer)
        await self._check()

    async def _turn(self, at: int, number: int) -> None:
        writer = self._writers[at]
        if not writer.at:
            await writer.begin(self._chance.choice(("a", "b")), number)
        elif self._chance.random() < 0.8:
            await self._step(writer)
        elif self._chance.random() < 0.5:
            await writer.end(with_session=False)
        else:
            await writer.end(with_session=True)
            self._writers[at] = Writer(self._queue.client())

    async def _step(self, writer: Writer) -> None:
        was_stored = writer.at == "stored"
        await writer.step()
        if was_stored and writer.at == "published":  # else its key has gone with who made it, and it stores again
            self.published[writer.key] = writer.number

    async def _check(self) -> None:
        for name, number in self.published.items():
            assert await async_key(self._reader, name) == (number, number)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_read_is_what_was_published_last(queue, seed):
    async def tell() -> None:
        await Story(seed, queue.start(*[ROOM] * (1 + seed % 3))).tell()

    asyncio.run(tell())
