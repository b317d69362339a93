# SPDX-License-Identifier: Apache-2.0
"""How fast are puts of one 8 KiB sample by several processes, beside XADD of the same bytes to a Redis stream?

They put plainly, and as rows of leased episodes, 100 to a lease.

Both servers run on this machine. The same processes ask them over Unix sockets, by turns. All put into one partition,
or add to one stream, and each waits for every answer. Figures are medians over the rounds. CPU times are user and
system time of the server, and of all clients, divided by the puts. Ours includes what it spends on polling.

Redis needs ``apt-get install redis-server`` and ``pip install redis``. Without them its row says so.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.common import DEADLINE_S, arguments, end, joined_client, received, report, timed_ms

FLOATS = 2048  # 8 KiB
PROCESSES, PUTS, ROUNDS = (1, 4, 8), 1000, 5
WARMUP = 20
NAME = "puts"
"""Of the partition, and of the stream."""
OURS, LEASED, REDIS = "ours", "leased", "redis"
TURNS = 100
"""Rows of an episode, whose lease a worker then gives back for the next one."""
INSTALL = "not measured: apt-get install redis-server and pip install redis, then run this again."
GOALS = {"server_cpu_ratio": "<= 4", "puts_per_s_ratio": ">= 0.5", "puts_per_s of 4 processes on 2 cores": ">= 4500"}


class Turn(NamedTuple):
    """What one process did: latencies, its CPU time, and when, on the clock that all processes share."""

    latencies_ms: list[float]
    cpu_s: float
    began: float
    ended: float


# ---- the processes that put ----


def worker(line: Connection, conf: Any, socket: str | None) -> None:
    """For each (system, puts) that the line says: warm up, say so, wait for the signal, put, and send the ``Turn``."""
    torch.set_num_threads(1)
    client, data = joined_client(conf), TensorDict({"x": torch.ones(1, FLOATS)}, batch_size=[1])
    makers = {
        OURS: lambda: lambda: client.put(data, partition_id=NAME),
        LEASED: lambda: put_of_lease(client, data),
        REDIS: lambda: put_of_redis(socket),
    }
    while (order := line.recv()) is not None:
        system, count = order
        put = makers[system]()
        for _ in range(WARMUP):
            put()
        line.send(None)
        line.recv()
        began, cpu_s = time.monotonic(), time.process_time()
        latencies = [timed_ms(put) for _ in range(count)]
        line.send(Turn(latencies, time.process_time() - cpu_s, began, time.monotonic()))


def put_of_lease(client: Any, data: TensorDict) -> Callable[[], Any]:
    """Rows of a leased episode. Every so many rows begin another one."""
    turns = itertools.count()
    lease: Any = None

    def put() -> None:
        nonlocal lease
        if next(turns) % TURNS:
            lease.put(data)
            return
        if lease is not None:
            lease.close()
        client.add_groups({"prompt": torch.zeros(1)}, NAME)
        (lease,) = client.lease(NAME)
        lease.put(data)

    return put


def put_of_redis(socket: str | None) -> Callable[[], Any]:
    import redis

    assert socket is not None

    stream, values = redis.Redis(unix_socket_path=socket), torch.ones(1, FLOATS).numpy()
    return lambda: stream.xadd(NAME, {"x": values.tobytes()})


@contextlib.contextmanager
def workers(count: int, conf: Any, socket: str | None) -> Iterator[list[Connection]]:
    """So many processes, by their lines. They live as long as the benchmark; in a turn some of them put."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tensordict", "transfer_queue.client"])  # imported once for all
    lines, processes = [], []
    for _ in range(count):
        line, other = context.Pipe()
        processes.append(context.Process(target=worker, args=(other, conf, socket)))
        processes[-1].start()
        other.close()
        lines.append(line)
    try:
        yield lines
    finally:
        for line in lines:
            with contextlib.suppress(OSError):  # it has failed, and its stderr says why
                line.send(None)
        for process in processes:
            end(process)


# ---- Redis ----


@contextlib.contextmanager
def redis_server() -> Iterator[tuple[str, int] | None]:
    """The path of its socket and its pid; None: it, or redis-py, is not installed. It writes nothing to disk."""
    program = shutil.which("redis-server")
    if program is None or find_spec("redis") is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        path = str(Path(folder, "socket"))
        options = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", folder]
        server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not os.path.exists(path):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"redis-server did not start: exit code {server.returncode}")
                time.sleep(0.01)
            yield path, server.pid
        finally:
            server.terminate()
            server.wait()


def clear_redis(socket: str) -> None:
    import redis

    with redis.Redis(unix_socket_path=socket) as stream:
        stream.delete(NAME)


# ---- measuring ----


def cpu_s(pid: int) -> float:
    """CPU time of another process. Linux numbers its clock so; what psutil reads counts hundredths of a second."""
    return time.clock_gettime(~pid << 3 | 2)


def one_turn(lines: Sequence[Connection], system: str, puts: int, server: int) -> dict[str, float]:
    """The figures of the processes on these lines, putting at the same time."""
    for line in lines:
        line.send((system, puts))
    for line in lines:
        received(line)
    before_s = cpu_s(server)
    for line in lines:
        line.send(None)
    turns: list[Turn] = [received(line) for line in lines]
    server_s = cpu_s(server) - before_s
    total = puts * len(lines)
    return {
        "p50_ms": statistics.median(latency for turn in turns for latency in turn.latencies_ms),
        "puts_per_s": total / (max(turn.ended for turn in turns) - min(turn.began for turn in turns)),
        "server_cpu_us": server_s / total * 1e6,
        "client_cpu_us": sum(turn.cpu_s for turn in turns) / total * 1e6,
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def ratios(ours: dict[str, float], redis: dict[str, float]) -> dict[str, float]:
    """Ours divided by Redis'."""
    return {f"{name}_ratio".replace("_us_", "_"): ours[name] / redis[name] for name in ours}


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=PROCESSES, help="how many put at once")
    parser.add_argument("--puts", type=int, default=PUTS, help="of each process in a turn")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args(argv)
    counts, puts, rounds = ((1,), 20, 1) if args.quick else (args.processes, args.puts, args.rounds)
    conf = tq.init()
    client = tq.get_client()
    found: dict[str, dict[int, list[dict[str, float]]]] = {
        system: defaultdict(list) for system in (OURS, LEASED, REDIS)
    }
    load = os.getloadavg()[0]
    with redis_server() as other, workers(max(counts), conf, other and other[0]) as lines:
        servers = dict.fromkeys((OURS, LEASED), conf.controller.zmq_info.pid)
        if other is not None:
            servers[REDIS] = other[1]
        for number in range(rounds):
            for count in counts:
                for system in servers if number % 2 == 0 else reversed(servers):  # who goes first changes
                    found[system][count].append(one_turn(lines[:count], system, puts, servers[system]))
                    client.clear_partition(NAME)
                    if other is not None:
                        clear_redis(other[0])
    ours, leased, redis = ({count: medians(turns) for count, turns in own.items()} for own in found.values())
    report(
        "puts of 8 KiB beside Redis",
        processes=[*counts], puts_of_each=puts, rounds=rounds, cores=os.cpu_count(), load=load,
        ours=ours, leased=leased, redis=redis or INSTALL,
        ratios={count: ratios(ours[count], redis[count]) for count in redis},
        goals=GOALS,
    )  # fmt: skip
    tq.close()


if __name__ == "__main__":
    main()
