# SPDX-License-Identifier: Apache-2.0
"""Many sessions on one server: small puts and gets of 256 against 4, and a step of 1 000 ranks beside a bystander.

``waited_for_a_core``: the share of the slowest hundredth of the calls' time in which their threads could have run,
but had no core; and the same for the server, of all its time. Linux counts it (/proc/PID/schedstat).
``calls_per_session``: the fewest and the most calls that one of 1 000 sessions of a process made in the same seconds,
each as soon as its last one was answered. They are equal where the server takes turns.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

import transfer_queue as tq
from benchmarks.common import DEADLINE_S, arguments, end, in_fresh_process, joined_client, received, report
from benchmarks.small_ops import one_sample
from transfer_queue import protocol as p
from transfer_queue.transport.base import Peer, PeerCall
from transfer_queue.transport.caller import SocketCaller

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier

THREADS = 4
CROWDS = {"4_sessions": (4, 1), "256_sessions": (64, THREADS)}  # processes, threads in each
SECONDS = 8.0
RANKS, STEPS, BATCH, TURNS_S = 1000, 10, 8, 8.0
FIELDS = {"x": p.FieldSpec("int64", (1024,))}


def percentile(values: list[float], percent: int) -> float:
    return float(np.percentile(values, percent))


# ---- puts and gets of many sessions ----


def get_one(client: tq.TransferQueueClient, partition: str) -> None:
    """Dense, because torch takes 0.1 ms to sum a nested tensor, which here would be a fifth of all clients' work."""
    client.get_data(client.get_meta(["x"], 1, partition, task_name="read"), layout="dense")["x"].sum()


def waited_ms(schedstat: int) -> float:
    """How long a thread or process has waited for a core since its start."""
    return int(os.pread(schedstat, 100, 0).split()[1]) / 1e6


def put_and_get(
    conf: Any, number: int, barrier: Barrier, seconds: float, took_ms: list[tuple[float, float]], cpu_s: list[float]
) -> None:
    """One session in one thread: for each of its puts, and each fetch with get, the milliseconds and how many of them
    it waited for a core; its CPU seconds."""
    client, data, partition = joined_client(conf), one_sample(), f"small-{number}"
    client.put(data, partition_id=partition)
    get_one(client, partition)
    barrier.wait(DEADLINE_S)
    own = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def timed(act: Callable[[], object]) -> None:
        began, before = time.perf_counter(), waited_ms(own)
        act()
        took_ms.append(((time.perf_counter() - began) * 1e3, waited_ms(own) - before))

    ends, cpu = time.perf_counter() + seconds, time.thread_time()
    while time.perf_counter() < ends:
        timed(lambda: client.put(data, partition_id=partition))
        timed(lambda: get_one(client, partition))
    cpu_s.append(time.thread_time() - cpu)
    os.close(own)
    client.close()


def one_process(conf: Any, first: int, threads: int, barrier: Barrier, seconds: float, line: Connection) -> None:
    took_ms: list[list[tuple[float, float]]] = [[] for _ in range(threads)]
    cpu_s: list[float] = []
    running = [
        threading.Thread(target=put_and_get, args=(conf, first + n, barrier, seconds, took_ms[n], cpu_s))
        for n in range(threads)
    ]
    for thread in running:
        thread.start()
    barrier.wait(DEADLINE_S)
    line.send("ready")
    for thread in running:
        thread.join()
    line.send((list(itertools.chain(*took_ms)), sum(cpu_s)))


def crowd(conf: Any, processes: int, threads: int, seconds: float) -> dict[str, float]:
    """Puts and gets per second of so many sessions, each in a partition of its own."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")  # this process is fresh, and 64 imports of torch take minutes
    barrier = context.Barrier(processes * (threads + 1))
    lines, running, server = [], [], psutil.Process(conf.controller.zmq_info.pid)
    waiting = os.open(f"/proc/{server.pid}/schedstat", os.O_RDONLY)
    for number in range(processes):
        line, other = context.Pipe(duplex=False)
        args = (conf, number * threads, threads, barrier, seconds, other)
        running.append(context.Process(target=one_process, args=args))
        running[-1].start()
        lines.append(line)
    try:
        for line in lines:
            received(line)  # it is ready
        cpu_s, server_waited_ms, began = sum(server.cpu_times()[:2]), waited_ms(waiting), time.perf_counter()
        told = [received(line) for line in lines]
    finally:
        for process in running:
            end(process)
    cpu_s, server_s = sum(server.cpu_times()[:2]) - cpu_s, time.perf_counter() - began
    server_waited_ms = waited_ms(waiting) - server_waited_ms
    os.close(waiting)
    calls = sorted(itertools.chain(*(took for took, _ in told)))
    took_ms, slowest = [took for took, _ in calls], calls[len(calls) * 99 // 100 :]
    return {
        "operations_per_s": len(took_ms) / seconds,
        "server_cpu_us_per_operation": cpu_s / len(took_ms) * 1e6,
        "client_cpu_us_per_operation": sum(cpu for _, cpu in told) / len(took_ms) * 1e6,
        "p50_ms": statistics.median(took_ms),
        "p99_ms": percentile(took_ms, 99),
        "longest_ms": max(took_ms),
        "slowest_waited_for_a_core": sum(waited for _, waited in slowest) / sum(took for took, _ in slowest),
        "server_waited_for_a_core": server_waited_ms / 1e3 / server_s,
    }


# ---- a step of many ranks ----


class Ranks:
    """Sessions of one process with a connection each, which speak the protocol: no tensor, no value."""

    def __init__(self, address: str, count: int) -> None:
        self.peer = Peer("controller", address)
        self.callers = [SocketCaller(f"rank-{number}") for number in range(count)]
        self._calls = itertools.count(1)
        self._received: dict[int, list[int]] = {}

    async def ask(self, rank: int, verb: Any, *args: Any, **kwargs: Any) -> Any:
        request = verb(next(self._calls), *args, **kwargs)
        call = PeerCall(self.peer, p.encode_request(request, self._received.pop(rank, [])), number=request.id)
        (raw,) = await self.callers[rank].call_many([call], DEADLINE_S)
        reply = p.decode_reply(raw.header)
        assert not isinstance(reply, p.Failed), reply
        self._received[rank] = [request.id]
        return reply

    async def all(self, ask: Callable[[int], Any]) -> list[Any]:
        return await asyncio.gather(*(ask(rank) for rank in range(len(self.callers))))

    async def put(self, partition: str, count: int) -> None:
        reserved = await self.ask(0, p.Reserve, partition, count, FIELDS)
        await self.ask(0, p.Publish, partition, reserved.indexes, FIELDS, completes=reserved.id)

    async def steps(self, count: int) -> None:
        """Each rank waits for its batch; one put wakes all; each acknowledges before its next fetch."""
        tokens = [""] * len(self.callers)
        for step in range(count):
            waiting = asyncio.gather(*(self._fetch(rank, step, token) for rank, token in enumerate(tokens)))
            await asyncio.sleep(0)
            await self.put("steps", BATCH * len(tokens))
            tokens = [batch.token for batch in await waiting]

    async def turns(self, seconds: float) -> list[int]:
        """How often each rank was answered, if it asks again at once."""
        counts, ends = [0] * len(self.callers), time.perf_counter() + seconds

        async def ask(rank: int) -> None:
            while time.perf_counter() < ends:
                await self.ask(rank, p.ListPartitions)
                counts[rank] += 1

        await self.all(ask)
        return counts

    async def _fetch(self, rank: int, step: int, token: str) -> Any:
        if token:
            await self.ask(rank, p.Ack, "steps", "train", [token])
        return await self.ask(rank, p.Fetch, "steps", "train", list(FIELDS), BATCH, rank, step, len(self.callers), 60.0)

    def close(self) -> None:
        for caller in self.callers:
            caller.close()


def bystander(conf: Any, begin: Any, stop: Any, line: Connection) -> None:
    """Milliseconds of small puts and gets until it is told to stop."""
    client, data = joined_client(conf), one_sample()
    took_ms: list[float] = []
    client.put(data, partition_id="bystander")
    begin.set()
    while not (took_ms and stop.is_set()):
        began = time.perf_counter()
        get_one(client, "bystander")
        client.put(data, partition_id="bystander")
        took_ms.append((time.perf_counter() - began) * 1e3 / 2)
        time.sleep(2e-3)
    client.close()
    line.send(took_ms)


def many_ranks(conf: Any, address: str, ranks: int, steps: int) -> dict[str, Any]:
    """What so many sessions cost the server, idle and in a step."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    (line, other), begin, stop = context.Pipe(duplex=False), context.Event(), context.Event()
    watcher = context.Process(target=bystander, args=(conf, begin, stop, other))
    watcher.start()
    begin.wait(DEADLINE_S)
    try:
        found = asyncio.run(_many_ranks(psutil.Process(conf.controller.zmq_info.pid), address, ranks, steps))
        stop.set()
        took_ms = received(line)
    finally:
        stop.set()
        end(watcher)
    return {**found, "bystander_p99_ms": percentile(took_ms, 99), "bystander_longest_ms": max(took_ms)}


async def _many_ranks(server: psutil.Process, address: str, ranks: int, steps: int) -> dict[str, Any]:
    def held() -> tuple[float, int, int]:
        return server.memory_info().rss / 1024, server.num_fds(), server.num_threads()

    before = held()
    crowd = Ranks(address, ranks)
    await crowd.all(lambda rank: crowd.ask(rank, p.Hello, 0, p.PROTOCOL_VERSION))
    idle = held()
    await crowd.ask(0, p.RegisterTask, "train", "RankAwareSampler", ranks)
    cpu, began = sum(server.cpu_times()[:2]), time.perf_counter()
    await crowd.steps(steps)
    took_s, cpu_s = time.perf_counter() - began, sum(server.cpu_times()[:2]) - cpu
    busy = held()
    began = time.perf_counter()
    await crowd.all(lambda rank: crowd.ask(rank, p.ListPartitions))
    listed_s = time.perf_counter() - began
    counts = await crowd.turns(TURNS_S * ranks / RANKS)
    crowd.close()
    return {
        "step_ms": took_s / steps * 1e3,
        "server_cpu_us_per_rank_and_step": cpu_s / steps / ranks * 1e6,
        "requests_per_s_of_one_client_process": ranks / listed_s,
        "calls_per_session": f"{min(counts)} to {max(counts)}",
        "server_kib_per_session": (idle[0] - before[0]) / ranks,
        "server_kib_per_session_in_steps": (busy[0] - before[0]) / ranks,
        "server_descriptors_per_session": (idle[1] - before[1]) / ranks,
        "server_threads": busy[2],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--processes", type=int, help="of the crowd, four sessions each; 64 are 256 sessions")
    args = parser.parse_args(argv)
    crowds, seconds, ranks, steps = CROWDS, SECONDS, RANKS, STEPS
    if args.quick:
        crowds, seconds, ranks, steps = {"2_sessions": (1, 2)}, 0.2, 20, 2
    if args.processes is not None:
        crowds = {"4_sessions": (4, 1), f"{args.processes * THREADS}_sessions": (args.processes, THREADS)}
    figures: dict[str, Any] = {}
    conf = tq.init()
    for name, (processes, threads) in crowds.items():
        figures[name] = in_fresh_process(crowd, conf, processes, threads, seconds)
    address = conf.controller.zmq_info.peer().address
    figures[f"{ranks}_ranks"] = in_fresh_process(many_ranks, conf, address, ranks, steps)
    tq.close()
    few, many = (figures[name]["operations_per_s"] for name in (next(iter(crowds)), list(crowds)[-1]))
    report("many sessions on one server", **figures, operations_ratio=many / few, steps=steps, batch=BATCH)


if __name__ == "__main__":
    main()
