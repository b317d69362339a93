# SPDX-License-Identifier: Apache-2.0
"""How many exchanges a verb costs: each is a round trip between processes, whatever it carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq

SIZES = {"inline": 16, "in the arena": 256 * 1024}
"""float32 per row."""


@pytest.fixture(scope="module", params=["one", "each"])
def queue(request: pytest.FixtureRequest) -> Iterator[Any]:
    """How many processes the servers have."""
    yield tq.init({"server_processes": request.param})
    tq.close()


@pytest.fixture
def writing(queue: Any) -> int:
    """Exchanges of a write: a unit that shares the controller's process publishes it on the way."""
    return {"one": 1, "each": 2}[queue.server_processes]


class Counter:
    """Turns of a caller: the calls of one turn are under way together."""

    def __init__(self, client: tq.TransferQueueClient) -> None:
        self._caller = client.session.caller
        self.turns = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        ask = self._caller.call_many

        async def counted(calls, timeout_s):
            self.turns += 1
            return await ask(calls, timeout_s)

        self._caller.call_many = counted
        try:
            yield
        finally:
            del self._caller.call_many


def turns(client: tq.TransferQueueClient, verb: Callable[[], object]) -> int:
    counter = Counter(client)
    with counter.counting():
        verb()
    return counter.turns


def rows(count: int, numbers: int, name: str = "x") -> TensorDict:
    return TensorDict({name: torch.ones(count, numbers)}, batch_size=[count])


@pytest.mark.parametrize("numbers", SIZES.values(), ids=SIZES.keys())
def test_a_put_in_a_steady_stream_takes_two_exchanges_at_most(client, name, numbers, writing):
    data = rows(2, numbers)
    for _ in range(4):
        client.put(data, partition_id=name)
    assert [turns(client, lambda: client.put(data, partition_id=name)) for _ in range(3)] == 3 * [writing]


@pytest.mark.parametrize("numbers", SIZES.values(), ids=SIZES.keys())
def test_a_fetch_with_its_values_takes_two_exchanges_and_one_where_they_are_small(client, name, numbers, queue):
    client.put(rows(8, numbers), partition_id=name)

    def get() -> None:
        client.get_data(client.get_meta(["x"], 2, name, task_name="t"))

    get()
    one = queue.server_processes == "one" and numbers == SIZES["inline"]
    assert [turns(client, get) for _ in range(3)] == 3 * [1 if one else 2]


@pytest.mark.parametrize("numbers", SIZES.values(), ids=SIZES.keys())
def test_a_batch_of_a_stream_takes_one_exchange_more_only_where_its_values_are_elsewhere(client, name, numbers, queue):
    client.put(rows(8, numbers), partition_id=name)

    def next_batch() -> None:
        batch = client.fetch_batch(["x"], 2, name, "t")
        assert (batch.meta.size, client.take(batch)["x"].values().sum()) == (2, 2 * numbers)

    next_batch()
    assert [turns(client, next_batch) for _ in range(3)] == 3 * [1 if queue.server_processes == "one" else 2]


@pytest.mark.parametrize("numbers", SIZES.values(), ids=SIZES.keys())
def test_a_new_field_of_known_samples_takes_two_exchanges_at_most(client, name, numbers, writing):
    metas = [client.put(rows(2, 4), partition_id=name) for _ in range(6)]
    for meta in metas[:3]:
        client.put(rows(2, numbers, "y"), metadata=meta)
    found = [turns(client, lambda m=m: client.put(rows(2, numbers, "y"), metadata=m)) for m in metas[3:]]
    assert found == 3 * [writing]


def test_a_field_that_is_there_is_replaced_only_after_a_look_at_its_samples(client, name):
    meta = client.put(rows(2, 4), partition_id=name)
    assert turns(client, lambda: client.put(rows(2, 4) * 2, metadata=meta)) == 3
    assert client.get_data(meta)["x"].values().sum() == 16
