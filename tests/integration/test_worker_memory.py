# SPDX-License-Identifier: Apache-2.0
"""What workers lend to their loader: batches stay as they are while anything of them is held; nothing stays after."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from streaming_support import loader
from tensordict import TensorDict

WIDTH = 50_000  # 200 kB a row: never in the message
ROWS = 4
BATCHES = 24


def produce(client: Any, partition: str, batches: int = BATCHES) -> None:
    """Rows of their own number, and of twice that."""
    for batch in range(batches):
        numbers = torch.arange(batch * ROWS, (batch + 1) * ROWS, dtype=torch.float32)
        data = {"x": numbers[:, None].expand(ROWS, WIDTH), "y": 2 * numbers[:, None].expand(ROWS, WIDTH)}
        client.put(TensorDict(data, batch_size=[ROWS]), partition_id=partition)
    client.seal_partition(partition)


def segments() -> int:
    """How many are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:transfer-queue-batches" in line for line in lines)


def told(data: TensorDict) -> list[float]:
    """The rows' numbers, when every element tells the same."""
    x, y = data["x"], data["y"]
    assert bool((x == x[:, :1]).all())
    assert bool((y == 2 * x).all())
    return x[:, 0].tolist()


@pytest.mark.programs
@pytest.mark.parametrize(
    ("method", "persistent"), [("fork", False), ("fork", True), pytest.param("spawn", False, marks=pytest.mark.slow)]
)
def test_batches_that_are_held_stay_as_they_are_while_others_are_dropped(queue, client, name, method, persistent):
    produce(client, name)
    made = loader(queue, name, 2, method, micro=2, layout="dense", persistent_workers=persistent)
    held, numbers = [], []
    for _ in range(2 if persistent else 1):
        for position, (data, _) in enumerate(made):
            numbers += told(data)
            if position % 3 == 0:
                held.append((data, told(data)))
            if persistent and len(numbers) == BATCHES * ROWS // 2:
                break
    assert numbers == list(range(BATCHES * ROWS))
    assert [told(data) for data, _ in held] == [was for _, was in held]


def test_dropped_batches_are_read_into_the_same_memory_again(queue, client, name):
    produce(client, name)
    most = max(segments() for _ in loader(queue, name, 2, layout="dense"))
    assert 0 < most < BATCHES  # 48 columns came


def test_nothing_is_mapped_when_loader_and_batches_are_gone(queue, client, name):
    produce(client, name, 8)
    made = loader(queue, name, 2, layout="dense")
    last = [data for data, _ in made][-1]
    del made
    gc.collect()
    assert segments() == 2
    assert told(last) == [28, 29, 30, 31]
    del last
    gc.collect()
    assert segments() == 0


def _with_weights(data: TensorDict, meta: Any, micro_batch_size: int) -> Iterator[Any]:
    if not hasattr(_with_weights, "kept"):
        _with_weights.kept = data["x"].clone().copy_(data["x"])  # type: ignore[attr-defined]
        _with_weights.lent = data["x"]  # type: ignore[attr-defined]
    yield {"x": data["x"][0, 0], "own": _with_weights.kept, "lent": _with_weights.lent}  # type: ignore[attr-defined]


def test_what_a_worker_keeps_and_hands_out_again_is_never_overwritten(queue, client, name):
    produce(client, name)
    made = loader(queue, name, 2, layout="dense", process_batch_fn=_with_weights)
    held = list(made)
    for worker in range(2):
        rows = [[float(number)] for number in range(worker * ROWS, (worker + 1) * ROWS)]
        for item in held[worker::2]:
            assert item["own"][:, :1].tolist() == item["lent"][:, 1:2].tolist() == rows
            assert bool((item["lent"] == item["own"]).all())
    assert [item["x"].item() for item in held] == list(range(0, BATCHES * ROWS, ROWS))


def _with_a_function(data: TensorDict, meta: Any, micro_batch_size: int) -> Iterator[Any]:
    yield data, lambda: meta


def test_what_cannot_travel_from_a_worker_is_an_error_in_the_loader(queue, client, name):
    produce(client, name, 2)
    made = loader(queue, name, 1, layout="dense", process_batch_fn=_with_a_function)
    with pytest.raises(AttributeError, match="_with_a_function"):
        list(made)
