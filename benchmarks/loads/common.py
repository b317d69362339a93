# SPDX-License-Identifier: Apache-2.0
"""What the workloads share: a queue of either package, processes that work on it, their CPU time and memory."""

# Runs in the peer's environment, too: it uses what both packages have in common.

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import transfer_queue as tq
from benchmarks.common import joined_client
from benchmarks.versus.package import each, naming
from benchmarks.versus.worker import RAY

Figures = dict[str, Any]
OURS, PEER, RAY_STORE, REDIS = "ours", "peer", "ray", "redis"
ROOT = str(Path(__file__).resolve().parents[2])
LOOK_AGAIN_S = 0.005  # the peer answers a fetch of nothing at once
MIB = 1 << 20
LOOK_SHARE = 20
"""A look at the memory walks all pages of all processes, so it may take one second in so many."""


@contextlib.contextmanager
def queue(system: str, folder: str, conf: dict[str, Any] | None = None) -> Iterator[Any]:
    """The configuration of a queue that runs meanwhile."""
    if system == PEER:
        with ray_cluster(folder):
            yield tq.init({"controller": {"polling_mode": True}})
            tq.close()
        return
    yield tq.init(conf)
    tq.close()


@contextlib.contextmanager
def ray_cluster(folder: str, path: str = "", **settings: Any) -> Iterator[Any]:
    """Ray, with actors that find modules at ``path`` first. For the peer that is nothing, or ours would be imported."""
    import ray

    found = {"runtime_env": {"env_vars": {"PYTHONPATH": path}}} if path else {}
    ray.init(_temp_dir=folder, **{**RAY, **found, **settings})
    try:
        yield ray
    finally:
        ray.shutdown()


class Team:
    """Processes that do one function each, until they have said their figures and are let go."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "tensordict", "transfer_queue.client"])
        self.started: list[tuple[Any, Any]] = []

    def start(self, function: Callable[..., Any], *args: Any) -> Any:
        """Begin ``function(*args)`` in a process, which is returned."""
        line, other = self._context.Pipe()
        process = self._context.Process(target=_member, args=(other, function, args), daemon=True)
        process.start()
        other.close()
        self.started.append((process, line))
        return process

    def ended(self) -> list[Any]:
        """What each has returned, in the order of their starts; they are still there."""
        return [line.recv() for _, line in self.started]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for process, line in self.started:
            line.close()
            process.join(10)
            process.kill()
            process.join()


def _member(line: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    line.send(function(*args))
    with contextlib.suppress(EOFError):
        line.recv()


class Usage:
    """CPU time and memory of this process and all that it started, or that name its folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._first_cpu_s, self._first_mib, self._most_mib = self._cpu_s(), self._mib(), 0.0
        self._began = self._look_from = time.perf_counter()

    def look(self) -> None:
        """Note the memory, if it is time to; each shared page counts once."""
        if (began := time.perf_counter()) >= self._look_from:
            self._most_mib = max(self._most_mib, self._mib())
            ended = time.perf_counter()
            self._look_from = ended + (LOOK_SHARE - 1) * (ended - began)

    def figures(self) -> Figures:
        found = {"seconds": time.perf_counter() - self._began, "cpu_s": self._cpu_s() - self._first_cpu_s}
        return {**found, "most_mib": self._most_mib - self._first_mib} if self._most_mib else found

    def _processes(self) -> set[psutil.Process]:
        me = psutil.Process()
        return {me, *me.children(recursive=True), *naming(self._folder)}

    def _cpu_s(self) -> float:
        found: list[float] = []
        each(self._processes(), lambda process: found.append(sum(process.cpu_times())))
        return sum(found)

    def _mib(self) -> float:
        found: list[int] = []

        def add(process: psutil.Process) -> None:
            with contextlib.suppress(psutil.AccessDenied):
                found.append(process.memory_full_info().pss)

        each(self._processes(), add)
        return sum(found) / MIB


def client_of(conf: Any) -> Any:
    return joined_client(conf)


def fetched(client: Any, fields: list[str], count: int, partition: str, task: str) -> Any:
    """Metadata of the next batch; ours waits in the controller, and the peer's is asked again."""
    while not (meta := client.get_meta(fields, count, partition, "fetch", task)).size:
        time.sleep(LOOK_AGAIN_S)
    return meta


def jagged(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def total(data: Any) -> float:
    """The sum of every value of a batch, so that a lazy get can't look fast."""
    return sum(float((column.values() if column.is_nested else column).sum()) for column in data.values())


def load() -> float:
    return os.getloadavg()[0]
