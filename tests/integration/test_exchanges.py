# SPDX-License-Identifier: Apache-2.0
"""How many exchanges a verb costs: each is a round trip between processes, whatever it carries."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, cycle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transfer_queue.storage.simple.routing import ROUTING_RUN

import transfer_queue as tq

SIZES = {"inline": 16, "in the arena": 256 * 1024}
"""float32 per row."""
ROOMY = {"SimpleStorage": {"capacity_bytes": 4 << 30}}
"""A limit that no test comes near. It makes the units take turns every 64 samples, so that some puts touch both."""
QUEUES = {
    "one": {"server_processes": "one"},
    "each": {"server_processes": "each"},
    "one, with a capacity": {"server_processes": "one", "backend": ROOMY},
    "each, with a capacity": {"server_processes": "each", "backend": ROOMY},
}
also_with_a_capacity = pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES.keys(), indirect=True)


@pytest.fixture(scope="module", params=[QUEUES["one"], QUEUES["each"]], ids=["one", "each"])
def queue(request: pytest.FixtureRequest) -> Iterator[Any]:
    """How many processes the servers have."""
    yield tq.init(request.param)
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


def to_the_next_run(client: tq.TransferQueueClient, name: str) -> None:
    """So that the next few puts are for one unit: memory leased ahead lies where the last one was written."""
    while client.put(rows(1, 1), partition_id=f"{name}.skipped").global_indexes[0] % ROUTING_RUN < ROUTING_RUN - 1:
        pass


@pytest.mark.parametrize("numbers", SIZES.values(), ids=SIZES.keys())
def test_a_put_in_a_steady_stream_takes_two_exchanges_at_most(client, name, numbers, writing):
    data = rows(2, numbers)
    to_the_next_run(client, name)
    for _ in range(4):
        client.put(data, partition_id=name)
    assert [turns(client, lambda: client.put(data, partition_id=name)) for _ in range(3)] == 3 * [writing]


COUNTS = [*range(4, 33, 4)]
"""Rows per put."""
TOKENS = [*range(2_000, 34_000, 4_000)]
"""float32 of the longest row of a put."""
ROUNDS = 8


def shuffled(sizes: list[int]) -> Iterator[int]:
    """Each once in each round: for how long a stream may go without its largest isn't left to chance."""
    chance = random.Random(0)
    for _ in range(2 * ROUNDS):
        yield from chance.sample(sizes, len(sizes))


def most_turns(client: tq.TransferQueueClient, puts: Iterator[Callable[[], object]]) -> int:
    """Of any put in a steady stream: after some rounds."""
    for _ in range(ROUNDS * len(COUNTS)):
        next(puts)()
    return max(turns(client, put) for put in puts)


@also_with_a_capacity
@pytest.mark.parametrize("numbers", [16, 8 * 1024], ids=SIZES.keys())
@pytest.mark.parametrize("partitions", [1, 3])
def test_puts_of_varying_row_counts_into_partitions_by_turns_take_two_exchanges_at_most(
    client, name, numbers, partitions
):
    names = cycle(f"{name}.{number}" for number in range(partitions))
    batches = {size: rows(size, numbers) for size in COUNTS}
    puts = (lambda n=size: client.put(batches[n], partition_id=next(names)) for size in shuffled(COUNTS))
    assert most_turns(client, puts) <= 2


@also_with_a_capacity
def test_puts_of_jagged_rows_with_varying_tokens_take_two_exchanges_at_most(client, name):
    def batch(longest: int) -> TensorDict:
        tokens = [torch.ones(longest - 100 * row) for row in range(8)]
        return TensorDict({"x": torch.nested.nested_tensor(tokens, layout=torch.jagged)}, batch_size=[8])

    batches = {longest: batch(longest) for longest in TOKENS}
    puts = (lambda n=longest: client.put(batches[n], partition_id=name) for longest in shuffled(TOKENS))
    assert most_turns(client, puts) <= 2


@pytest.mark.parametrize("numbers", SIZES.values(), ids=SIZES.keys())
def test_puts_of_one_size_into_two_partitions_by_turns_are_as_cheap_as_into_one(client, name, numbers, writing):
    data, names = rows(2, numbers), cycle([f"{name}.a", f"{name}.b"])
    to_the_next_run(client, name)
    for _ in range(8):
        client.put(data, partition_id=next(names))
    assert [turns(client, lambda: client.put(data, partition_id=next(names))) for _ in range(4)] == 4 * [writing]


@also_with_a_capacity
@pytest.mark.parametrize("numbers", SIZES.values(), ids=SIZES.keys())
def test_a_put_by_key_takes_one_exchange_more_than_a_put_whose_indexes_are_known(client, name, numbers, writing):
    """It must hear first which samples its keys are."""
    keys, value = count(), torch.ones(numbers)
    for _ in range(70):
        tq.kv_put(f"k{next(keys)}", name, {"x": value})
    found = [turns(client, lambda: tq.kv_put(f"k{next(keys)}", name, {"x": value}, {"n": 1})) for _ in range(3)]
    found += [turns(client, lambda n=n: tq.kv_put(f"k{n}", name, {"y": value})) for n in range(65, 68)]
    found += [turns(client, lambda n=n: tq.kv_put(f"k{n}", name, {"x": value})) for n in range(65, 68)]
    assert found == 9 * [1 + writing]


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
    to_the_next_run(client, name)
    metas = [client.put(rows(2, 4), partition_id=name) for _ in range(6)]
    for meta in metas[:3]:
        client.put(rows(2, numbers, "y"), metadata=meta)
    found = [turns(client, lambda m=m: client.put(rows(2, numbers, "y"), metadata=m)) for m in metas[3:]]
    assert found == 3 * [writing]


def test_a_field_that_is_there_is_replaced_only_after_a_look_at_its_samples(client, name):
    meta = client.put(rows(2, 4), partition_id=name)
    assert turns(client, lambda: client.put(rows(2, 4) * 2, metadata=meta)) == 3
    assert client.get_data(meta)["x"].values().sum() == 16
