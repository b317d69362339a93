# SPDX-License-Identifier: Apache-2.0
"""Puts, gets and fetches leave no cycles of objects: a collection of them stops the whole process, and holds memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import fetch_of
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq

SAMPLES = 8
KINDS: dict[str, Callable[[], Any]] = {
    "small": lambda: torch.ones(SAMPLES, 4),
    "large": lambda: torch.ones(SAMPLES, 65536),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(n + 1) for n in range(SAMPLES)], layout=torch.jagged),
    "objects": lambda: NonTensorStack(*[{"text": "x" * n, "pair": (n, n)} for n in range(SAMPLES)]),
}


@pytest.fixture
def uncollected() -> Iterator[Callable[[], list[str]]]:
    """What only the collector would find, since the test began or since the last call."""
    gc.collect()
    gc.disable()

    def found() -> list[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            return [type(one).__name__ for one in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.collect()  # else they would be found again

    yield found
    gc.enable()


def test_a_cycle_would_be_found(uncollected: Callable[[], list[str]]) -> None:
    """The rule of this file can fail."""
    uncollected()
    cycle: list[Any] = []
    cycle.append(cycle)
    del cycle
    assert uncollected() == ["list"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_leaves_nothing_to_collect(
    kind: str, client: tq.TransferQueueClient, name: str, uncollected: Callable[[], list[str]]
) -> None:
    data = TensorDict({"x": KINDS[kind]()}, batch_size=[SAMPLES])

    def everything() -> None:
        meta = client.put(data, partition_id=name)
        client.get_data(meta)
        batch = client.fetch_batch(fetch_of(["x"], SAMPLES, name, "takes"))
        client.take(batch)
        client.get_data(client.get_meta(["x"], SAMPLES, name, task_name="reads"))
        client.clear_samples(meta)

    everything()  # what is made once and kept may do as it likes
    everything()
    uncollected()
    everything()
    assert uncollected() == []
