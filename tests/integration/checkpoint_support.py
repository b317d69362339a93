# SPDX-License-Identifier: Apache-2.0
"""Queues of their own for tests of checkpoints, batches of every kind of value, and what a queue holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq

ROWS = 150


@contextmanager
def started(units: int = 2, **settings: Any) -> Iterator[tq.TransferQueueClient]:
    """A queue with so many storage units, over which every 64 samples are spread; ended on the way out.

    One unit shares the controller's process; several have a process each.
    """
    processes = "one" if units == 1 else "each"
    tq.init(
        {
            "server_processes": processes,
            "backend": {"SimpleStorage": {"num_data_storage_units": units, **settings}},
        }
    )
    try:
        yield tq.get_client()
    finally:
        tq.close()


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def every_kind(start: int = 0, stop: int = ROWS) -> TensorDict:
    """Columns that stand for every way in which values are stored; row i is the same whichever rows are asked for."""
    numbers = range(start, stop)
    at = torch.arange(start, stop)
    waves = torch.sin(at[:, None] * torch.arange(1, 2049))
    objects = [{"i": i, "t": (i, None), "s": {i}, "x": "é" * i, "a": np.arange(i)} for i in numbers]
    return TensorDict(
        {
            "dense": at[:, None] * torch.arange(1, 7),
            "number": at.float() / 3,
            "flag": at % 3 == 0,
            "complex": torch.complex(at.double(), -at.double()),
            "bfloat": waves[:, :6].reshape(-1, 3, 2).bfloat16(),
            "float8": waves[:, :4].to(torch.float8_e4m3fn),
            "empty": torch.zeros(len(at), 0),
            "large": waves,
            "ragged": jagged([torch.arange(i % 7) + i for i in numbers]),
            "ragged2": torch.nested.as_nested_tensor([torch.full((i % 3 + 1, i % 2 + 1), i) for i in numbers]),
            "text": NonTensorStack(*[f"sample {i}" for i in numbers]),
            "object": NonTensorStack(*objects),
        },
        batch_size=[len(at)],
    )


def rows_of(column: Any) -> list[Any]:
    """The column's rows as plain data that can be compared."""
    if isinstance(column, torch.Tensor):
        parts = column.unbind()
        return [(str(part.dtype), list(part.shape), part.reshape(-1).view(torch.uint8).tolist()) for part in parts]
    return [_plain(value) for value in (column.tolist() if hasattr(column, "tolist") else column)]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return (str(value.dtype), value.tolist()) if isinstance(value, np.ndarray) else value


def held(client: tq.TransferQueueClient) -> tuple[int, int]:
    """(samples, values) in all units. A sample counts in every unit that has some of its fields."""
    stats = asyncio.run(client.storage_manager.stats())
    return sum(unit.samples for unit in stats), sum(unit.values for unit in stats)


def values_held(client: tq.TransferQueueClient) -> int:
    """In all units."""
    return held(client)[1]


def samples_of_units(client: tq.TransferQueueClient) -> list[int]:
    return [unit.samples for unit in asyncio.run(client.storage_manager.stats())]


def wait_until(condition: Callable[[], Any]) -> None:
    turn = threading.Event()
    while not condition():
        turn.wait(0.01)


class Busy(threading.Thread):
    """Does something again and again until told to stop; what it raises is raised by ``stop``."""

    def __init__(self, step: Callable[[int], None]) -> None:
        super().__init__()
        self._step, self._over = step, threading.Event()
        self.rounds = 0
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while not self._over.is_set():
                self._step(self.rounds)
                self.rounds += 1
        except BaseException as error:
            self._error = error

    def stop(self) -> None:
        self._over.set()
        self.join()
        if self._error is not None:
            raise self._error


def numbers(count: int, first: int = 0) -> TensorDict:
    return TensorDict({"x": torch.arange(first, first + count)}, batch_size=[count])


def fetch(client: tq.TransferQueueClient, size: int, batch_index: int, partition: str = "p", **kwargs: Any) -> Any:
    config = {"dp_rank": 0, "batch_index": batch_index}
    return client.get_meta(["x"], size, partition, task_name="train", sampling_config=config, **kwargs)


def values(client: tq.TransferQueueClient, meta: Any) -> list[int]:
    return client.get_data(meta.select_fields(["x"]))["x"].tolist()
