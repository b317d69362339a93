# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: timing a call many times, the time of one memcpy, other processes, printing the line."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch

import transfer_queue as tq

DEADLINE_S = 120.0
END_S = 10.0


class Memcpy(NamedTuple):
    """Median time of one copy of so many bytes into memory that was touched before."""

    torch_ms: float
    """torch's ``copy_``, with all of torch's threads."""
    numpy_ms: float
    """numpy's ``copyto``, on one thread."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark understands."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few repeats: does it run at all?")
    return parser


def bounded(repeats: int, budget_s: float) -> Iterator[int]:
    """0, 1, 2, ... up to ``repeats``, fewer once the time is spent; at least one."""
    ends = time.perf_counter() + budget_s
    for number in range(repeats):
        if number and time.perf_counter() > ends:
            return
        yield number


def timed_ms(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def median_ms(call: Callable[[], Any], repeats: int, warmup: int = 3, budget_s: float = 30.0) -> float:
    """Median wall time of one call in milliseconds."""
    for _ in range(warmup):
        call()
    return statistics.median([timed_ms(call) for _ in bounded(repeats, budget_s)])


def memcpy(nbytes: int, repeats: int = 9) -> Memcpy:
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    with_torch = median_ms(lambda: target.copy_(source), repeats)
    return Memcpy(with_torch, median_ms(lambda: np.copyto(target.numpy(), source.numpy()), repeats))


def joined_client(conf: Any) -> tq.TransferQueueClient:
    """A client of its own for a process that was handed the running queue's configuration."""
    name = conf.backend.storage_backend
    client = tq.TransferQueueClient(f"benchmark-{os.getpid()}", conf.controller.zmq_info)
    client.initialize_storage_manager(name, conf.backend[name])
    return client


def in_fresh_process(function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> Any:
    """What the function returned in a process of its own. Raises TimeoutError; the process is ended either way."""
    context = multiprocessing.get_context("spawn")
    line, other = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(other, function, args))
    process.start()
    other.close()
    try:
        return received(line, deadline_s)
    finally:
        end(process)
        line.close()


def _answer(line: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    line.send(function(*args))


def received(line: Connection, deadline_s: float = DEADLINE_S) -> Any:
    """The next object on the line. Raises TimeoutError, or EOFError when the other side is gone."""
    if not line.poll(deadline_s):
        raise TimeoutError(f"the other process said nothing for {deadline_s:.0f} s; its stderr may tell why.")
    return line.recv()


def end(process: BaseProcess) -> None:
    """Wait for the process to end; one that doesn't is killed."""
    process.join(END_S)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def report(question: str, **figures: Any) -> None:
    """Print the line; floats rounded to three digits."""
    print(json.dumps({"question": question, **{name: rounded(value) for name, value in figures.items()}}), flush=True)


def rounded(value: Any) -> Any:
    """Floats, however deep, with three digits."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    return value
