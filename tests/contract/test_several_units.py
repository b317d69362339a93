# SPDX-License-Identifier: Apache-2.0
"""Several storage units: a put goes to one that has room, is read where it lies, and leaves nothing if it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.contract.storage_kit import blocking, get_rows, put_and_clear_in_threads
from tests.contract.units_kit import PAGE, ROOM, SmallQueue, held, pages, read, write, writers_wait_less
from transfer_queue.errors import QueueUnreachableError, StorageFullError, UnitLostError
from transfer_queue.storage.base import Places

KINDS: dict[str, Callable[[Path], SmallQueue]] = {
    "frames": lambda path: SmallQueue(None, 0),
    "arena": lambda path: SmallQueue(path, 0),
    "frames over sockets": lambda path: SmallQueue(path, 64 * PAGE, shared=False),
}
MIB = 1 << 20


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallQueue]:
    made = request.param(tmp_path)
    yield made
    made.close()


def numbers(units: Any) -> list[int]:
    return [number for number, _ in units]


def counts(units: Any) -> list[int]:
    return [count for _, count in units]


# ---- which unit ----


def test_a_put_of_half_a_unit_goes_to_one_and_a_larger_one_is_cut(queue):
    manager = queue.start(ROOM, ROOM, ROOM).manager()
    assert counts(write(manager, range(50))) == [50]
    larger = write(manager, range(50, 101))
    assert (counts(larger), len(set(numbers(larger)))) == ([25, 26], 2)
    assert read(manager, range(50, 101), larger).equal(pages(51)["x"])


def test_small_puts_of_new_samples_take_turns(queue):
    manager = queue.start(ROOM, ROOM, ROOM).manager()
    units = [number for n in range(6) for number, _ in write(manager, range(n, n + 1), fresh=True)]
    assert (sorted(units[:3]), units[3:]) == ([1, 2, 3], units[:3])


@pytest.mark.parametrize("step", [1, 8])
def test_puts_of_samples_that_exist_are_spread_and_each_goes_where_it_went_before(queue, step):
    manager = queue.start(ROOM, ROOM, ROOM).manager()
    once, again = ([numbers(write(manager, range(n, n + 1))) for n in range(0, 30 * step, step)] for _ in range(2))
    assert once == again
    assert min(once.count([unit]) for unit in (1, 2, 3)) >= 5


def test_a_put_larger_than_any_unit_is_cut_over_several(queue):
    manager = queue.start(ROOM, ROOM, ROOM, ROOM).manager()
    units = write(manager, range(150))
    assert (counts(units), len(set(numbers(units)))) == ([50, 50, 50], 3)
    assert read(manager, range(150), units).equal(pages(150)["x"])
    shuffled = [149, 0, 75, 75, 149]
    where = [(numbers(units)[n // 50], 1) for n in shuffled]
    column = blocking(get_rows(manager, shuffled, ["x"], Places({"x": where}), "dense"))["x"]
    assert column.equal(pages(150)["x"][shuffled])


def test_many_large_rows_fit_into_several_units(queue):
    manager = queue.start(*[32 * MIB] * 8).manager()
    data = TensorDict({"x": torch.arange(8 * MIB).view(64, -1)}, batch_size=[64])
    units = write(manager, range(64), data)
    assert (counts(units), sorted(numbers(units))) == ([16] * 4, sorted(set(numbers(units))))
    assert read(manager, range(64), units).equal(data["x"])


def test_units_without_a_bound_take_whole_puts(queue):
    manager = queue.start(None, None).manager()
    assert counts(write(manager, range(300))) == [300]


def test_a_full_unit_is_left_out_while_another_has_room(queue):
    manager = queue.start(ROOM, ROOM).manager()
    _, (other, _) = write(manager, range(200))
    blocking(manager.clear_rows(range(100, 200)))
    assert [numbers(write(manager, range(n, n + 10))) for n in range(200, 300, 10)] == 10 * [[other]]


def test_a_put_of_more_than_half_a_unit_is_not_cut_where_a_single_unit_has_room(queue):
    manager = queue.start(ROOM, ROOM).manager()
    (first, _), (second, _) = write(manager, range(200))
    blocking(manager.clear_rows(range(100, 200)))
    assert [count for count, _ in held(manager)][first - 1] == 100
    assert write(manager, range(200, 260)) == [(second, 60)]


def test_a_unit_that_joins_gets_puts_and_metadata_of_before_are_read_as_before(queue):
    manager = queue.start(ROOM, ROOM).manager()
    before = write(manager, range(60))
    write(manager, range(60, 200))
    assert queue.join(ROOM) == 3
    assert numbers(write(queue.manager(), range(200, 250))) == [3]
    assert read(manager, range(60), before).equal(pages(60)["x"])


def test_a_row_larger_than_every_unit_is_refused_at_once(queue):
    manager = queue.start(ROOM, ROOM).manager(put_timeout_s=1e9)
    data = TensorDict({"x": torch.zeros(1, 101 * PAGE // 8, dtype=torch.int64)}, batch_size=[1])
    with pytest.raises(StorageFullError, match="can never fit storage unit"):
        write(manager, range(1), data)
    assert held(manager) == [(0, 0), (0, 0)]


def test_a_row_larger_than_one_unit_goes_to_a_larger_one(queue):
    manager = queue.start(ROOM, 3 * ROOM).manager(put_timeout_s=1e9)
    data = TensorDict({"x": torch.zeros(1, 101 * PAGE // 8, dtype=torch.int64)}, batch_size=[1])
    assert [write(manager, range(n, n + 1), data) for n in range(2)] == [[(2, 1)], [(2, 1)]]


# ---- waiting for room ----


def full(queue: SmallQueue, manager: Any) -> None:
    """Two units, each filled by a put of 200 pages in two pieces."""
    assert sorted(write(manager, range(200))) == [(1, 100), (2, 100)]


async def seen(manager: Any, wanted: int) -> None:
    """Wait until this many requests wait in the units."""
    while True:
        if sum(unit.parked for unit in await manager.stats()) == wanted:
            return
        await asyncio.sleep(0)  # units in this process answer without giving way to the put


@pytest.mark.parametrize("count", [10, 60, 200])
def test_a_put_that_nobody_can_take_waits_and_is_carried_out_when_room_comes(queue, count):
    manager, other = queue.start(ROOM, ROOM).manager(), queue.manager()
    full(queue, manager)

    async def story() -> Any:
        waiting = asyncio.ensure_future(manager.write(7000, range(200, 200 + count), manager.prepare(pages(count))))
        await seen(other, 1)
        assert not waiting.done()
        await other.clear_rows(range(200))
        units = await waiting
        await manager.commit(7000, units)
        return units

    units = asyncio.run(asyncio.wait_for(story(), 30.0))
    assert read(manager, range(200, 200 + count), units).equal(pages(count)["x"])
    assert sum(values for values, _ in held(manager)) == count


def test_a_put_that_waits_at_one_unit_looks_at_the_others_from_time_to_time(queue, monkeypatch):
    writers_wait_less(monkeypatch, 0.05)
    manager, other = queue.start(ROOM, ROOM).manager(), queue.manager()
    units = write(manager, range(200))

    async def story() -> Any:
        waiting = asyncio.ensure_future(manager.write(7000, range(200, 210), manager.prepare(pages(10))))
        await seen(other, 1)
        (at,) = [n for n, unit in enumerate(await other.stats()) if unit.parked]
        first = numbers(units)[0] == at + 1
        await other.clear_rows(range(100, 200) if first else range(100))  # the other unit's
        return at + 1, await waiting

    at, landed = asyncio.run(asyncio.wait_for(story(), 30.0))
    assert landed == [(3 - at, 10)]


def test_a_put_that_finds_no_room_in_time_fails_and_leaves_nothing(queue):
    hasty = queue.start(ROOM, ROOM).manager(put_timeout_s=0.02)
    write(hasty, range(150))
    with pytest.raises(StorageFullError, match="waited"):
        write(hasty, range(200, 300))
    assert sum(values for values, _ in held(hasty)) == 150
    assert sum(parked for _, parked in held(hasty)) == 0


def test_a_put_that_is_cancelled_while_it_waits_leaves_nothing_and_holds_up_nobody(queue):
    manager, other = queue.start(ROOM, ROOM).manager(), queue.manager()
    full(queue, manager)
    blocking(other.clear_rows(range(0, 200, 2)))

    async def story() -> None:
        waiting = asyncio.ensure_future(manager.write(7000, range(200, 400), manager.prepare(pages(200))))
        await seen(other, 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        await seen(other, 0)

    asyncio.run(asyncio.wait_for(story(), 30.0))
    assert sorted(held(manager)) == [(50, 0), (50, 0)]
    write(other, range(400, 450))


def test_puts_over_all_units_wait_for_consumers_and_never_for_each_other(queue):
    queue.start(ROOM, ROOM, ROOM)
    assert put_and_clear_in_threads(queue.manager, write, 200) == list(range(40))
    assert held(queue.manager()) == [(0, 0)] * 3


def test_replaced_values_stay_readable_until_the_commit_and_an_aborted_write_leaves_them(queue):
    manager = queue.start(ROOM, ROOM).manager()
    units = write(manager, range(10))
    for call, end in ((7000, manager.abort), (7001, manager.commit)):
        written = blocking(manager.write(call, range(10), manager.prepare(-pages(10))))
        assert read(manager, range(10), units).equal(pages(10)["x"])
        blocking(end(call, written))
    assert read(manager, range(10), written).equal(-pages(10)["x"])


# ---- units that end ----


def test_a_unit_that_has_ended_is_left_out_and_its_values_are_lost_by_its_number(queue):
    manager = queue.start(ROOM, ROOM).manager()
    units = write(manager, range(10))
    (number,) = numbers(units)
    queue.end(number)
    with pytest.raises(UnitLostError, match=r"field 'x' of 10 samples, first \[0, 1, 2, 3, 4\]"):
        read(queue.manager(), range(10), units)
    assert [numbers(write(manager, range(n, n + 1))) for n in range(10, 14)] == [[3 - number]] * 4
    with pytest.raises(UnitLostError, match=r"field 'x' of 10 samples, first \[0, 1, 2, 3, 4\]"):
        read(manager, range(10), units)


def test_a_unit_that_does_not_answer_is_left_out_before_its_controller_knows(queue):
    manager = queue.start(ROOM, ROOM).manager()
    assert sorted(numbers(write(manager, range(n, n + 1)))[0] for n in range(2)) == [1, 2]
    queue.stop(1)
    assert [numbers(write(manager, range(n, n + 1))) for n in range(10, 14)] == [[2]] * 4
    with pytest.raises(QueueUnreachableError):
        read(manager, range(1), [(1, 1)])


def test_a_write_in_pieces_goes_to_the_other_units_when_one_does_not_answer(queue):
    manager = queue.start(ROOM, ROOM, ROOM).manager()
    queue.stop(2)
    units = write(manager, range(150))
    assert (sorted(numbers(units)), counts(units)) == ([1, 3], [75, 75])
    assert read(manager, range(150), units).equal(pages(150)["x"])


def test_a_queue_whose_units_have_all_ended_refuses_puts(queue):
    manager = queue.start(ROOM, ROOM).manager()
    queue.end(1)
    queue.stop(2)
    with pytest.raises(UnitLostError, match="no storage unit of the queue can be reached"):
        write(manager, range(10))
    queue.end(2)
    with pytest.raises(UnitLostError, match="no storage unit of the queue can be reached"):
        write(manager, range(10))
