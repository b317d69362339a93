# SPDX-License-Identifier: Apache-2.0
"""Streams whose queue is configured, killed, or left together with the process that reads."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from noticing import until, until_parked
from streaming_support import (
    TASK,
    WAIT_S,
    InThread,
    cut,
    loader,
    numbers,
    own_threads,
    produce,
    read,
    rows,
    worker_pids,
)

import transfer_queue as tq
from tests.own_processes import own_processes
from transfer_queue.errors import QueueUnreachableError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

WORKERS = pytest.mark.parametrize("workers", [0, 2])

READER = """
import sys, tempfile, warnings
warnings.simplefilter("ignore")
sys.path[:0] = [sys.argv[1], str(__import__("pathlib").Path(sys.argv[1]).parents[1])]
import transfer_queue as tq
from streaming_support import loader, produce, numbers

if __name__ == "__main__":
    conf = tq.init({"server_processes": sys.argv[3]})
    produce(tq.get_client(), "p", [4], seal=False)
    workers = int(sys.argv[2])
    made = loader(conf, "p", workers, report_every_s=0.3, persistent_workers=workers > 0)
    for item in made:
        print(numbers(item), flush=True)
"""


def test_a_declared_number_of_samples_ends_a_finite_stream_with_its_short_tail(start, monkeypatch):
    monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "10")
    conf = start()
    reader = InThread(lambda: read(loader(conf, "p", 2, should_check_consumption_status=True)))
    for first in (0, 3, 6):
        produce(tq.get_client(), "p", [3], seal=False, first=first)
    until_parked(tq.get_client(), task=TASK)
    assert reader.is_alive(), "one of ten is still to come"
    produce(tq.get_client(), "p", [1], seal=False, first=9)
    put_at = time.monotonic()
    assert reader.result() == cut(10, 4)
    assert reader.ended_at - put_at < 1.5, "nobody has to wait whether more will come"


@pytest.mark.parametrize("processes", ["one", "each"])
@WORKERS
def test_a_controller_killed_while_a_stream_waits_is_told_at_once(start, workers, processes):
    conf = start({"server_processes": processes})
    before = worker_pids()
    made = loader(conf, "p", workers)
    reader = InThread(lambda: read(made))
    until_parked(tq.get_client(), max(1, workers), task=TASK)
    killed_at = time.monotonic()
    psutil.Process(conf.controller.zmq_info.pid).kill()
    with pytest.raises(QueueUnreachableError, match="has ended"):
        reader.result()
    assert reader.ended_at - killed_at < 2.0
    assert (own_threads(), worker_pids()) == ([], before)


def test_an_iterator_left_halfway_leaves_nothing_and_the_next_one_goes_on(start):
    conf = start()
    client = tq.get_client()
    client.put(rows(0, 24, large=torch.ones(24, 20_000)), partition_id="p")  # read in place: 80 kB each
    client.seal_partition("p")
    made = loader(conf, "p", fields=["x", "y", "large"])
    items = iter(made)
    taken = [numbers(next(items)) for _ in range(3)]
    items.close()
    assert until(lambda: not any(unit["pins"] for unit in client.get_storage_stats()))
    assert own_threads() == []
    assert taken + read(made) == cut(24, 4)


def _begun(script: Any, workers: int, processes: str = "one") -> tuple[Any, list[psutil.Process], Path]:
    """A reader that has its first batch and waits for the second, its descendants, the directory of its queue."""
    process = script(READER, str(Path(__file__).parent), str(workers), processes)
    assert process.stdout.readline() == "[0, 1, 2, 3]\n", process.communicate()
    family = own_processes(process.pid)
    assert len(family) == {"one": 1, "each": 3}[processes] + workers
    commands = [child.cmdline() for child in family]
    (server,) = {command[-1] for command in commands if "transfer_queue.server.main" in command}
    return process, family, Path(server)


@pytest.mark.programs
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_ctrl_c_ends_a_reader_that_waits_and_nothing_is_left(script, workers):
    process, family, directory = _begun(script, workers)
    while " waited " not in (line := process.stderr.readline()):  # it waits, and says so
        assert line, process.communicate()
    assert "for 4 samples of 'p': 0 ready, last published" in line
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=WAIT_S)  # it would wait for longer than that
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode
    _, alive = psutil.wait_procs(family, WAIT_S)
    assert (alive, directory.exists()) == ([], False)


@pytest.mark.programs
@pytest.mark.parametrize(
    ("sent", "processes"),
    [
        pytest.param(signal.SIGTERM, "one", marks=pytest.mark.slow),
        (signal.SIGKILL, "one"),
        pytest.param(signal.SIGKILL, "each", marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_is_killed_takes_its_workers_and_its_queue_along(script, sent, processes):
    process, family, directory = _begun(script, 2, processes)
    process.send_signal(sent)
    process.communicate(timeout=WAIT_S)
    _, alive = psutil.wait_procs(family, WAIT_S)
    assert (alive, directory.exists()) == ([], False)


ORPHAN = """
import multiprocessing, sys
import transfer_queue as tq

if __name__ == "__main__":
    tq.init()
    dataset = tq.StreamingDataset(None, 4, 4, ["x"], "p", "train", 0)
    items = iter(tq.StreamingDataLoader(dataset, 1, worker_init_fn=lambda _: multiprocessing.parent_process().join()))
    print("started", flush=True)
    next(items)
"""


@pytest.mark.programs
def test_a_worker_whose_reader_is_killed_before_it_reads_ends(script):
    process = script(ORPHAN)
    assert process.stdout.readline() == "started\n", process.communicate()
    family = own_processes(process.pid)
    assert len(family) == 2
    process.kill()
    process.communicate(timeout=WAIT_S)
    assert psutil.wait_procs(family, WAIT_S)[1] == []


KEPT_WORKER = """
import multiprocessing, sys, torch
import transfer_queue as tq
from tensordict import TensorDict

if __name__ == "__main__":
    tq.init()
    tq.get_client().put(TensorDict({"x": torch.rand(4)}, batch_size=4), partition_id="train")
    dataset = tq.StreamingDataset(None, 4, 4, ["x"], "train", "learn", 0)
    options = {"persistent_workers": True, "multiprocessing_context": "forkserver"}
    items = iter(tq.StreamingDataLoader(dataset, 1, prefetch_factor=1, **options))
    next(items)
    if sys.argv[1] == "idle":
        tq.get_client().seal_partition("train")
        next(items, None)
    print(*(each.pid for each in multiprocessing.active_children()), flush=True)
    sys.stdin.read()
"""


@pytest.mark.programs
@pytest.mark.parametrize("state", [pytest.param("idle", marks=pytest.mark.slow), "waiting"])
def test_a_worker_whose_parent_is_not_its_reader_ends_with_it(script, state):
    process = script(KEPT_WORKER, state)
    pids = process.stdout.readline().split()
    assert len(pids) == 1, process.communicate()
    worker = psutil.Process(int(pids[0]))
    process.kill()
    process.communicate(timeout=WAIT_S)
    worker.wait(WAIT_S)
