# SPDX-License-Identifier: Apache-2.0
"""Token capture: 8 processes put 200 000 samples of 8 KB, one by one, as proxies of a model's server do.

Ours plainly and as rows of a leased episode; Redis takes them by XADD to one stream. Server CPU is the controller's or
Redis' alone. Ray's store and the peer get a tenth, and the CPU of all their processes but the putting ones counts.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks import small_puts
from benchmarks.loads.common import (
    OURS,
    PEER,
    RAY_STORE,
    REDIS,
    ROOT,
    Figures,
    Team,
    Usage,
    client_of,
    load,
    queue,
    ray_cluster,
)

PUTS, PROCESSES = 200_000, 8
SLOW_SHARE = 10
LEASED = "ours, leased"


def by_turn(system: str, scale: float, folder: str) -> Figures:
    """Ours and Redis, as ``benchmarks.small_puts`` measures them."""
    each = max(20, int(PUTS * scale) // PROCESSES)
    with queue(OURS, folder) as conf, small_puts.redis_server() as redis:
        if system == small_puts.REDIS and redis is None:
            return {"not measured": small_puts.INSTALL}
        servers = {small_puts.REDIS: redis and redis[1]}
        server = servers.get(system) or conf.controller.zmq_info.pid
        with small_puts.workers(PROCESSES, conf, redis and redis[0]) as lines:
            found = small_puts.one_turn(lines, system, each, server)
    return {"puts": each * PROCESSES, "seconds": each * PROCESSES / found["puts_per_s"], **found, "load": load()}


def put(conf: Any, count: int) -> tuple[float, float, float]:
    client, data = client_of(conf), TensorDict({"x": torch.ones(1, small_puts.FLOATS)}, batch_size=[1])
    return timed(lambda: client.put(data, partition_id="capture"), count)


def timed(act: Any, count: int) -> tuple[float, float, float]:
    """(began, ended, CPU seconds) of so many, on the clock that all processes share."""
    began, cpu = time.monotonic(), time.process_time()
    for _ in range(count):
        act()
    return began, time.monotonic(), time.process_time() - cpu


def peer(scale: float, folder: str) -> Figures:
    each = max(20, int(PUTS * scale) // PROCESSES // SLOW_SHARE)
    with queue(PEER, folder) as conf, Team() as team:
        usage = Usage(folder)
        for _ in range(PROCESSES):
            team.start(put, conf, each)
        return figures(team.ended(), usage, each)


def by_ray(scale: float, folder: str) -> Figures:
    each = max(20, int(PUTS * scale) // PROCESSES // SLOW_SHARE)
    with ray_cluster(folder, ROOT, num_cpus=PROCESSES) as ray:
        workers = [ray.remote(Worker).remote() for _ in range(PROCESSES)]
        ray.get([worker.ready.remote() for worker in workers])
        usage = Usage(folder)
        return figures(ray.get([worker.put.remote(each) for worker in workers]), usage, each)


class Worker:
    def ready(self) -> None:
        self._kept: list[Any] = []

    def put(self, count: int) -> tuple[float, float, float]:
        import ray

        values = np.ones(small_puts.FLOATS, np.float32)
        return timed(lambda: self._kept.append(ray.put(values)), count)


def figures(turns: list[tuple[float, float, float]], usage: Usage, each: int) -> Figures:
    seconds = max(turn[1] for turn in turns) - min(turn[0] for turn in turns)
    count, clients = each * len(turns), sum(turn[2] for turn in turns)
    return {
        "puts": count, "seconds": seconds, "puts_per_s": count / seconds,
        "server_cpu_us": (usage.figures()["cpu_s"] - clients) / count * 1e6,
        "client_cpu_us": clients / count * 1e6, "load": load(),
    }  # fmt: skip


SYSTEMS = {
    OURS: partial(by_turn, small_puts.OURS), LEASED: partial(by_turn, small_puts.LEASED),
    REDIS: partial(by_turn, small_puts.REDIS), PEER: peer, RAY_STORE: by_ray,
}  # fmt: skip
