# SPDX-License-Identifier: Apache-2.0
"""Full storage units: puts over several of them wait in turn, and never for each other."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.contract.storage_kit import Backend, hosted, meta, simple, until
from transfer_queue.errors import StorageFullError
from transfer_queue.transport.modes import run_blocking

PAGE = 4096
ROOM = 100 * PAGE
"""Of each of two units: for one share of 64 rows, not for two."""

BOTH = {
    "frames": lambda path: nullcontext(simple(2, capacity_bytes=ROOM)),
    "arena": lambda path: hosted(2, path, 0, capacity_bytes=ROOM),
    "frames over sockets": lambda path: hosted(2, path, 64 * PAGE, capacity_bytes=ROOM),
}


@pytest.fixture(params=BOTH.values(), ids=BOTH)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with request.param(tmp_path) as backend:
        yield backend


def pages(count: int, field: str = "x") -> TensorDict:
    """Rows of a page each."""
    return TensorDict({field: torch.arange(count * PAGE // 8).view(count, PAGE // 8)}, batch_size=[count])


def held(stats: list) -> list[tuple[int, int, int]]:
    """(values, leased bytes, requests that wait) of each unit."""
    return [(unit.values, unit.leased_nbytes, unit.parked) for unit in stats]


async def seen(manager: Any, wanted: list[tuple[int, int, int]]) -> None:
    while True:
        if held(await manager.stats()) == wanted:
            return
        await asyncio.sleep(0)  # units in this process answer without giving way to the put


def test_a_put_that_waits_for_one_unit_holds_nothing_in_later_ones(storage):
    first, other = storage.manager, storage.another()

    async def story() -> None:
        await first.put_data(pages(64), meta(range(64)))
        waiting = asyncio.ensure_future(first.put_data(pages(128), meta(range(128, 256))))
        await seen(other, [(64, 0, 1), (0, 0, 0)])
        await other.put_data(pages(64), meta(range(64, 128)))
        await other.clear_rows(range(128))
        await waiting

    asyncio.run(asyncio.wait_for(story(), 20.0))
    assert storage.column(range(128, 256), "x", "dense").equal(pages(128)["x"])
    assert held(run_blocking(first.stats())) == [(64, 0, 0), (64, 0, 0)]


def test_a_put_that_found_room_too_late_in_one_unit_leaves_nothing_in_the_other_until_it_is_cleared(storage):
    hasty = storage.another(put_timeout_s=0.02)
    storage.put(pages(64), range(64, 128))
    with pytest.raises(StorageFullError, match="unit 'u1'"):
        run_blocking(hasty.put_data(pages(128), meta(range(128, 256))))
    run_blocking(hasty.clear_rows(range(128, 256)))
    assert held(until(hasty, lambda stats: not stats[0].leased_nbytes)) == [(0, 0, 0), (64, 0, 0)]


def test_a_write_in_steps_that_found_no_room_in_one_unit_leaves_nothing_once_it_is_aborted(storage):
    hasty = storage.another(put_timeout_s=0.02)
    storage.put(pages(64), range(64, 128))
    call = hasty.session.number()
    with pytest.raises(StorageFullError, match="unit 'u1'"):
        run_blocking(hasty.write(call, range(128), hasty.prepare(pages(128, "y"))))
    run_blocking(hasty.abort(call, range(128)))
    stats = until(hasty, lambda stats: not stats[0].leased_nbytes and not stats[0].uncommitted_nbytes)
    assert held(stats) == [(0, 0, 0), (64, 0, 0)]


def test_puts_over_all_units_wait_for_consumers_and_never_for_each_other(storage):
    turns, puts = itertools.count(), []

    def produce() -> None:
        manager = storage.another()
        for turn in itertools.islice(turns, 10):
            rows = range(128 * turn, 128 * turn + 128)
            run_blocking(manager.put_data(pages(128), meta(rows)))
            puts.append(turn)
            run_blocking(manager.clear_rows(rows))

    threads = [threading.Thread(target=produce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(puts) == list(range(40))


def test_replaced_values_stay_readable_while_their_write_waits_and_until_its_commit(storage):
    manager, other = storage.manager, storage.another()
    storage.put(pages(1), [64])
    storage.put(pages(64), range(64))
    rows, call = range(64, 192), manager.session.number()  # the second unit's, then the first one's

    async def story() -> None:
        waiting = asyncio.ensure_future(manager.write(call, rows, manager.prepare(-pages(128))))
        await seen(other, [(64, 0, 1), (1, 0, 0)])
        assert (await other.get_rows([64], ["x"]))["x"].numel() == PAGE // 8
        await other.clear_rows(range(64))
        await waiting
        assert (await other.get_rows([64], ["x"]))["x"].sum() == pages(1)["x"].sum()
        await manager.commit(call, rows)

    asyncio.run(asyncio.wait_for(story(), 20.0))
    assert storage.column(rows, "x", "dense").equal(-pages(128)["x"])
