# SPDX-License-Identifier: Apache-2.0
"""Storage units whose arena their clients map: values take that path, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.contract.storage_kit import ARENAS, BACKENDS, Backend, hosted, meta, until
from tests.contract.transport_kit import held
from transfer_queue.storage.base import RowsOf
from transfer_queue.storage.pack import prepare
from transfer_queue.storage.shm.connect import UnitConnection
from transfer_queue.storage.shm.shared_memory import SharedMemoryManager
from transfer_queue.storage.shm.write import UnitWrite
from transfer_queue.storage.unit.lend import lend_arena
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.transport.base import Peer
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.server import SocketServer
from transfer_queue.transport.session import Session

PAGE = 4096


@pytest.fixture(params=ARENAS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with BACKENDS[request.param](tmp_path) as backend:
        yield backend


def large(count: int, first: int = 0) -> torch.Tensor:
    """Rows of a page each."""
    return torch.arange(first, first + count * PAGE // 8).view(count, PAGE // 8)


def idle(stats: list) -> bool:
    """Nothing is leased, pinned, or waits."""
    return all((unit.leased_nbytes, unit.pins, unit.parked) == (0, 0, 0) for unit in stats)


def paths(stats: list) -> set:
    return {unit.path for unit in stats}


def test_values_lie_in_the_arena_and_clients_find_them_there(storage):
    data = large(192)
    storage.put({"x": data}, range(192))
    stats = run_blocking(storage.manager.stats())
    assert paths(stats) == {"arena"}
    assert sum(unit.arena_nbytes for unit in stats) == data.nbytes
    assert torch.equal(storage.column(range(192), "x", "dense"), data)


def test_a_client_that_wants_no_arena_gets_and_puts_the_same_in_frames(storage):
    frames, data = storage.another(arena=False), large(192)
    storage.put({"x": data}, range(192))
    assert torch.equal(run_blocking(frames.read(RowsOf(range(192), ["x"]), None, "dense"))["x"], data)
    run_blocking(frames.put_data(TensorDict({"x": -data}, batch_size=[192]), meta(range(192), ["x"])))
    assert torch.equal(storage.column(range(192), "x", "dense"), -data)
    assert paths(run_blocking(frames.stats())) == {"frames"}


def test_which_way_values_go_is_decided_by_the_first_put_or_get(storage):
    told = [paths(run_blocking(storage.manager.stats()))]
    storage.put({"x": large(64)}, range(64))
    told.append(paths(run_blocking(storage.manager.stats())))
    reader = storage.another()
    run_blocking(reader.read(RowsOf([3], ["x"]), None, None))
    told.append(paths(run_blocking(reader.stats())))
    assert told == [{"undecided"}, {"arena"}, {"arena"}]


def test_asking_for_numbers_maps_nothing(storage):
    asking = storage.another()
    assert paths([*run_blocking(asking.stats()), *run_blocking(asking.stats())]) == {"undecided"}


def test_it_is_frames_before_the_first_put_where_there_is_nothing_to_try(storage):
    assert paths(run_blocking(storage.another(arena=False).stats())) == {"frames"}


def test_a_unit_that_lends_no_arena_is_found_out_by_trying(tmp_path):
    with hosted(tmp_path, 0, shared=False) as storage:
        before = paths(run_blocking(storage.manager.stats()))
        storage.put({"x": large(64)}, range(64))
        assert (before, paths(run_blocking(storage.manager.stats()))) == ({"undecided"}, {"frames"})


def test_what_was_got_is_pinned_by_nobody_any_more(storage):
    data = large(192)
    storage.put({"x": data, "o": ["text" * 10_000] * 192}, range(192))
    kept = [storage.get(range(192), "x", "o"), storage.get(range(191, -1, -1), "x", "o")]
    assert until(storage.manager, idle)
    assert len(kept) == 2


def test_pages_are_recycled_from_put_to_put_and_all_come_back(storage):
    footprints = []
    for n in range(12):
        storage.put({"x": large(192, n)}, range(192 * n, 192 * n + 192))
        assert storage.column([192 * n], "x", "dense")[0, 0] == n
        run_blocking(storage.manager.clear_rows(range(192 * n, 192 * n + 192)))
        stats = run_blocking(storage.manager.stats())
        footprints.append(sum(unit.arena_nbytes + unit.recyclable_nbytes for unit in stats))
    assert footprints[6:] == 6 * footprints[6:7], "no more than before"
    assert max(footprints) <= 2 * 192 * PAGE
    run_blocking(storage.manager.close())
    assert until(storage.manager, lambda stats: not any(unit.arena_nbytes for unit in stats))


def test_a_put_that_is_cancelled_while_it_waits_holds_up_nobody_and_leaves_nothing(tmp_path):
    with hosted(tmp_path, 0, capacity_bytes=10 * PAGE) as storage:
        manager, other = storage.manager, storage.another()

        async def put(count: int, first: int, by: object = manager) -> None:
            await by.put_data(TensorDict({"x": large(count)}, batch_size=[count]), meta(range(first, first + count)))

        async def parked(count: int) -> None:
            while (await manager.stats())[0].parked != count:
                pass

        async def story() -> None:
            await put(8, 0)
            waiting = asyncio.ensure_future(put(9, 100))
            await parked(1)
            behind = asyncio.ensure_future(put(5, 200, other))
            await parked(2)
            waiting.cancel()
            await asyncio.wait([waiting])
            await parked(1)
            await manager.clear_rows(range(4))
            await behind
            await manager.clear_rows(range(300))

        asyncio.run(asyncio.wait_for(story(), 20.0))
        (unit,) = until(manager, idle)
        assert (unit.values, unit.arena_nbytes) == (0, 0)


def test_a_write_that_has_leased_memory_goes_on_when_its_connection_is_closed_and_later_ones_are_frames(tmp_path):
    with hosted(tmp_path, 0):
        connection, columns = (
            UnitConnection(Peer("u0", f"ipc://{tmp_path}/u0")),
            prepare(TensorDict({"x": large(4)}, batch_size=[4])),
        )
        write = UnitWrite(connection, slice(0, 4), columns, 0)
        session = Session("writer", connection.peer)
        run_blocking(write.lease(session, 7, b"", 1.0, 30.0))
        connection.close()
        packed, frames = write.packed(session)
        assert ([header.offset for header in packed.headers], packed.lease, frames) == ([0], 7, [])
        late = UnitWrite(connection, slice(0, 4), columns, 0)
        run_blocking(late.lease(session, 8, b"", 1.0, 30.0))
        assert (late.lease_call, connection.path) == (0, "frames")
        session.close()


def test_a_client_that_is_dropped_unclosed_leaves_no_descriptor(tmp_path):
    with hosted(tmp_path, 0) as storage:
        units = [{"name": "u0", "address": f"ipc://{tmp_path}/u0"}]
        storage.put({"x": large(64)}, range(64))
        gc.collect()  # what the tests before this one dropped
        before = held()
        dropped = SharedMemoryManager(Session("dropped", Peer("controller", units[0]["address"])), {"units": units})
        assert len(run_blocking(dropped.get_data(meta(range(64), ["x"])))) == 64
        del dropped
        gc.collect()
        until(storage.manager, lambda stats: (stats[0].pins, held()) == (0, before))


def test_a_unit_whose_arena_can_have_no_address_sends_frames(tmp_path):
    path = tmp_path / ("d" * (100 - len(str(tmp_path))))
    path.mkdir()
    server = SocketServer(f"ipc://{path}/u")
    unit = StorageUnit("u", None, lend_arena(server))
    server.close()
    assert (unit.next_trim(), unit.stats().arena_nbytes) == (None, 0)
    assert [file.name for file in path.iterdir() if file.suffix == ".arena"] == []


# ---- many at once ----


def batch(number: int) -> TensorDict:
    rng = np.random.default_rng(number)
    count = int(rng.integers(1, 80))
    lengths = rng.integers(0, 3000, count)
    values = torch.from_numpy(rng.integers(0, 1 << 40, int(lengths.sum())))
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, *lengths]).cumsum(0))
    dense = torch.from_numpy(rng.integers(0, 256, (count, 5000), np.uint8))
    return TensorDict({"j": nested, "d": dense, "o": [f"{number} {n}" for n in range(count)]}, batch_size=[count])


def checksums(data: TensorDict) -> list[tuple[int, int, object]]:
    texts = data.get("o").tolist() if hasattr(data.get("o"), "tolist") else list(data.get("o"))
    return [
        (zlib.crc32(j.contiguous().numpy()), zlib.crc32(d.contiguous().numpy()), o)
        for j, d, o in zip(data.get("j").unbind(), data.get("d").unbind(), texts, strict=True)
    ]


async def one_round(manager, number: int) -> list[str]:
    """Put, overwrite, read in several orders, clear; what came back wrong."""
    first, wrong = 100 * number, []
    for turn in range(3):
        data = batch(1000 * number + turn)
        expected, indexes = checksums(data), list(range(first, first + len(data)))
        await manager.put_data(data, meta(indexes, ["j", "d", "o"]))
        for order in (range(len(data)), range(len(data) - 1, -1, -1), [0, len(data) - 1, 0]):
            got = await manager.get_data(meta([indexes[n] for n in order], ["j", "d", "o"]))
            if checksums(got) != [expected[n] for n in order]:
                wrong.append(f"batch {number}, turn {turn}, {order}")
        if turn != 0:
            await manager.clear_rows(indexes)
    return wrong


def test_threads_and_tasks_put_get_and_clear_at_once_and_each_gets_its_own(storage):
    wrong: list[str] = []
    deadline = time.monotonic() + 20.0

    def work(first: int, manager) -> None:
        for number in range(first, first + 3):
            assert time.monotonic() < deadline
            wrong.extend(run_blocking(one_round(manager, number)))

    async def tasks() -> None:
        for found in await asyncio.gather(*(one_round(storage.manager, number) for number in range(100, 105))):
            wrong.extend(found)

    managers = [storage.manager, storage.manager, storage.another()]
    threads = [threading.Thread(target=work, args=(10 * n, manager)) for n, manager in enumerate(managers, 1)]
    for thread in threads:
        thread.start()
    asyncio.run(tasks())
    for thread in threads:
        thread.join()
    assert wrong == []
    run_blocking(storage.manager.clear_rows(range(20_000)))
    stats = until(storage.manager, lambda stats: all(not unit.pins for unit in stats))
    assert sum(unit.values for unit in stats) == 0
    until(storage.manager, lambda stats: sum(unit.arena_nbytes for unit in stats) == 0)
