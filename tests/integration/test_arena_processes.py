# SPDX-License-Identifier: Apache-2.0
"""Shared memory among real processes: what a dead one held is released, one that can't map it gets frames."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clients import units
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.noticing import WAIT_S, ended, until
from transfer_queue.storage.copying import Copies

ROWS, WIDTH = 2048, 256  # 2 MiB of int32


def batch(first: int = 0) -> TensorDict:
    numbers = np.arange(first, first + ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH)
    return TensorDict({"x": torch.from_numpy(numbers)}, batch_size=[ROWS])  # torch.arange may hang in a fork


def holds(data: TensorDict, first: int) -> bool:
    """Is this ``batch(first)`` as it comes back? By NumPy: torch may hang in a fork."""
    return bool(np.array_equal(data["x"].values().numpy().reshape(ROWS, WIDTH), batch(first)["x"].numpy()))


def paths(client: tq.TransferQueueClient) -> list[str]:
    return [unit["path"] for unit in client.get_storage_stats()]


def summed(field: str) -> int:
    return sum(getattr(unit, field) for unit in units())


def nothing_held() -> bool:
    return (summed("pins"), summed("leased_nbytes"), summed("arena_nbytes"), summed("values")) == (0, 0, 0, 0)


@pytest.fixture(scope="module", params=["one", "each"])
def queue(request: pytest.FixtureRequest) -> Iterator[Any]:
    """How many processes the servers have: one with one unit, or a controller and two units."""
    yield tq.init({"server_processes": request.param, "backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
    tq.close()


@pytest.fixture(autouse=True)
def nothing_held_before_and_after(client):
    assert until(nothing_held), units()
    yield
    for partition in client.get_partition_list():
        client.clear_partition(partition)
    assert until(nothing_held), units()


def read_and_wait(meta: Any, pipe: Any) -> None:
    client = tq.get_client()

    def wait_for_ever(*_: Any) -> None:
        pipe.send("reading")
        pipe.recv()

    client.storage_manager._unpacked = wait_for_ever
    client.get_data(meta)


def test_what_a_killed_process_was_reading_is_recycled_when_its_samples_are_cleared(client, name, fork):
    meta = client.put(batch(), partition_id=name)
    here, there = multiprocessing.get_context("fork").Pipe()
    reader = fork(read_and_wait, meta, there)
    assert here.poll(WAIT_S)
    here.recv()
    client.clear_samples(meta)
    assert summed("pins") == 1
    assert summed("arena_nbytes") >= ROWS * WIDTH * 4
    reader.kill()
    assert ended(reader) == -signal.SIGKILL
    assert until(nothing_held), units()


def put_and_die_while_it_is_copied(partition: str) -> None:
    def die(self: Copies) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Copies.finish = die  # type: ignore[method-assign]
    tq.get_client().put(batch(), partition_id=partition)


def test_memory_that_a_killed_writer_leased_is_given_back_and_nothing_of_its_put_is_seen(client, name, fork):
    client.create_partition(name)
    assert ended(fork(put_and_die_while_it_is_copied, name)) == -signal.SIGKILL
    assert until(nothing_held), units()
    assert client.get_stats()["partitions"][name]["samples"] == 0


@pytest.mark.programs
@pytest.mark.parametrize("queue", ["each"], indirect=True)
def test_memory_that_a_thread_writes_into_is_not_given_away_while_its_process_ends(client, queue, script):
    process = script(
        "import atexit, contextlib, sys, threading, torch, transfer_queue as tq\n"
        "from transfer_queue.storage.copying import Copies\n"
        "copying = threading.Event()\n"
        "finish = Copies.finish\n"
        "def slow_finish(copies):\n"
        "    copying.set()\n"
        "    sys.stdin.readline()\n"
        "    finish(copies)\n"
        "Copies.finish = slow_finish\n"
        f"tq.init({queue.address!r})\n"
        f"data = {{'x': torch.ones({ROWS}, {WIDTH}, dtype=torch.int32)}}\n"
        "def put():\n"
        "    with contextlib.suppress(tq.TransferQueueError):\n"
        "        tq.get_client().put(data, partition_id='ending')\n"
        "threading.Thread(target=put, daemon=True).start()\n"
        "assert copying.wait(80)\n"
        "atexit.register(print, 'ending', flush=True)  # before the client's own\n",
    )
    assert process.stdout.readline() == "ending\n"
    for _ in range(20):
        assert summed("leased_nbytes") == ROWS * WIDTH * 4
    _, errors = process.communicate("go on\n", timeout=6 * WAIT_S)
    assert (process.returncode, errors) == (0, "")
    assert until(lambda: summed("leased_nbytes") == 0), units()


def work_with_little_address_space(partition: str, nbytes: int, pipe: Any) -> None:
    client = tq.get_client()
    client.get_config()
    assert client.storage_manager  # its own: what its parent mapped takes no room any more
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, used + nbytes))
    meta = client.put(batch(7), partition_id=partition)
    pipe.send((holds(client.get_data(meta), 7), paths(client), meta.global_indexes))


def test_a_process_without_room_for_the_mapping_puts_and_gets_in_frames(client, name, fork):
    here, there = multiprocessing.get_context("fork").Pipe()
    assert ended(fork(work_with_little_address_space, name, 256 << 20, there)) == 0
    same, ways, indexes = here.recv()
    assert same
    assert "frames" in ways
    assert set(ways) <= {"frames", "undecided"}, "a unit that it did not use"
    data = client.get_data(tq.BatchMeta(indexes, [name] * ROWS, {"x": {"dtype": torch.int32, "shape": (WIDTH,)}}))
    assert holds(data, 7)
    assert "arena" in paths(client)


def read_in_a_fork(meta: Any, pipe: Any) -> None:
    client = tq.get_client()
    pipe.send((holds(client.get_data(meta), 0), paths(client)))


def test_a_fork_maps_the_arena_for_itself_and_leaves_its_parents_alone(client, name, fork):
    meta = client.put(batch(), partition_id=name)
    client.get_data(meta)
    here, there = multiprocessing.get_context("fork").Pipe()
    assert ended(fork(read_in_a_fork, meta, there)) == 0
    same, ways = here.recv()
    assert (same, set(ways) <= {"arena", "undecided"}, "arena" in ways) == (True, True, True)
    assert holds(client.get_data(meta), 0)


def test_workers_of_a_loader_read_from_the_arena_and_keep_nothing_pinned(client, queue, name):
    for number in range(4):
        client.put(batch(number), partition_id=name)
    client.seal_partition(name)
    dataset = tq.StreamingDataset(queue, ROWS, ROWS, ["x"], name, "train", 0)
    firsts = [
        int(data["x"].values()[0])
        for data, _ in tq.StreamingDataLoader(dataset, num_workers=2, multiprocessing_context="fork")
    ]
    assert firsts == [0, 1, 2, 3]
    assert until(lambda: summed("pins") == 0), units()


@pytest.mark.programs
@pytest.mark.parametrize("queue", ["one"], indirect=True)  # it isn't used
def test_what_is_mapped_where_the_configuration_says_so_and_after_close(queue, script):
    process = script(
        "import gc, torch, transfer_queue as tq\n"
        "from pathlib import Path\n"
        "from tensordict import TensorDict\n"
        "maps = lambda: 'transfer-queue-arena' in Path('/proc/self/maps').read_text()\n"
        "data = TensorDict({'x': torch.arange(1 << 20).view(2048, -1)}, batch_size=[2048])\n"
        "for processes in ('one', 'each'):\n"
        "    for arena in (False, True):\n"
        "        tq.init({'server_processes': processes, 'backend': {'SimpleStorage': {'arena': arena}}})\n"
        "        client = tq.get_client()\n"
        "        values = client.get_data(client.put(data, partition_id='p'))['x'].values()\n"
        "        stats = client.get_storage_stats()\n"
        "        assert {unit['path'] for unit in stats} - {'undecided'} == {'arena' if arena else 'frames'}, stats\n"
        "        assert (sum(unit['arena_nbytes'] for unit in stats) > 0, maps()) == (arena, arena), stats\n"
        "        tq.close()\n"
        "        assert torch.equal(values.view(2048, -1), data['x'])\n"
        "        del client\n"
        "        gc.collect()\n"
        "        assert not maps(), processes\n",
        env={"TQ_ADDRESS": ""},
    )
    output = process.communicate(timeout=8 * WAIT_S)
    assert process.returncode == 0, output
