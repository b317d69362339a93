# SPDX-License-Identifier: Apache-2.0
"""A full storage unit: puts wait in turn for room, and replaced values stay until then."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.contract.storage_kit import (
    Backend,
    blocking,
    get_rows,
    hosted,
    meta,
    put_and_clear_in_threads,
    simple,
    until,
)
from tests.contract.units_kit import PAGE, ROOM, pages
from transfer_queue.errors import StorageFullError

KINDS = {
    "frames": lambda path: nullcontext(simple(capacity_bytes=ROOM)),
    "arena": lambda path: hosted(path, 0, capacity_bytes=ROOM),
    "frames over sockets": lambda path: hosted(path, 64 * PAGE, capacity_bytes=ROOM),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with request.param(tmp_path) as backend:
        yield backend


async def seen(manager: Any, values: int, parked: int) -> None:
    while True:
        (unit,) = await manager.stats()
        if (unit.values, unit.parked) == (values, parked):
            return
        await asyncio.sleep(0)  # a unit in this process answers without giving way to the put


def left(manager: Any) -> tuple[int, int]:
    """(values, requests that wait) once no write is left."""
    (unit,) = until(manager, lambda stats: not stats[0].leased_nbytes and not stats[0].uncommitted_nbytes)
    return unit.values, unit.parked


def test_a_put_that_found_no_room_in_time_leaves_nothing(storage):
    hasty = storage.another(put_timeout_s=0.02)
    storage.put(pages(64), range(64))
    with pytest.raises(StorageFullError, match=r"waited .* of storage unit 'u0'"):
        blocking(hasty.put_data(pages(64), meta(range(64, 128))))
    assert left(hasty) == (64, 0)


def test_a_put_that_can_never_fit_does_not_wait(storage):
    patient = storage.another(put_timeout_s=1e9)
    with pytest.raises(StorageFullError, match="can never fit storage unit 'u0'"):
        blocking(patient.put_data(pages(101), meta(range(101))))
    assert left(patient) == (0, 0)


def test_puts_that_fill_the_unit_wait_for_consumers_and_never_for_each_other(storage):
    def put(manager: Any, rows: range) -> None:
        blocking(manager.put_data(pages(100), meta(rows)))

    assert put_and_clear_in_threads(storage.another, put, 100) == list(range(40))


def test_replaced_values_stay_readable_while_their_write_waits_and_until_its_commit(storage):
    manager, other = storage.manager, storage.another()
    storage.put(pages(1), [64])
    storage.put(pages(64), range(64))
    rows, call = range(64, 128), manager.session.number()

    async def story() -> None:
        waiting = asyncio.ensure_future(manager.write(call, rows, manager.prepare(-pages(64))))
        await seen(other, 65, 1)
        assert (await get_rows(other, [64], ["x"]))["x"].numel() == PAGE // 8
        await other.clear_rows(range(64))
        units = await waiting
        assert (await get_rows(other, [64], ["x"]))["x"].sum() == pages(1)["x"].sum()
        await manager.commit(call, units)

    asyncio.run(asyncio.wait_for(story(), 20.0))
    assert storage.column(rows, "x", "dense").equal(-pages(64)["x"])
