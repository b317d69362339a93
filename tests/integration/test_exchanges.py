# SPDX-License-Identifier: Apache-2.0
"""How many exchanges a verb costs: each is a round trip between processes, whatever it carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.calls import exchanges, fetch_of
from tests.integration.faults import client_of

SIZES = {"inline": 16, "in the arena": 256 * 1024}
"""float32 per row."""
any_size = pytest.mark.parametrize("numbers", SIZES.values(), ids=SIZES.keys())


@pytest.fixture(scope="module", params=["one", "each"])
def queue(request: pytest.FixtureRequest) -> Iterator[Any]:
    """How many processes the servers have."""
    conf = tq.init({"server_processes": request.param})
    tq.get_client().get_config()  # says hello
    yield conf
    tq.close()


def costs(client: tq.TransferQueueClient, verb: Callable[[], object]) -> list[list[str]]:
    """The exchanges, without those that list the units: see the last test."""
    return [kinds for kinds in exchanges(client, verb) if kinds != ["ListUnits"]]


@pytest.fixture
def together(queue: Any) -> bool:
    """Do the controller and the storage share a process?"""
    return bool(queue.server_processes == "one")


def rows(count: int, numbers: int, name: str = "x") -> TensorDict:
    return TensorDict({name: torch.ones(count, numbers)}, batch_size=[count])


def write(together: bool, numbers: int, begin: str = "Reserve") -> list[list[str]]:
    """What a put of one row asks for."""
    lease = [["LeaseMemory"]] if numbers > SIZES["inline"] else []
    if together:
        return [*lease, ["Put"]]
    commit = [] if begin == "Reserve" else [["Commit"]]  # nobody knows the indexes of new samples, but keys are known
    return [[begin], *lease, ["Write"], ["Publish"], *commit]


# ---- puts ----


@any_size
def test_the_first_put_of_a_partition_costs_what_every_other_one_costs(client, name, numbers, together):
    data = rows(1, numbers)
    found = [costs(client, lambda: client.put(data, partition_id=name)) for _ in range(100)]
    assert found == 100 * [write(together, numbers)]
    client.clear_partition(name)


@any_size
def test_puts_into_partitions_by_turns_cost_what_those_into_one_cost(client, name, numbers, together):
    data, names = rows(1, numbers), cycle(f"{name}.{number}" for number in range(3))
    found = [costs(client, lambda: client.put(data, partition_id=next(names))) for _ in range(6)]
    assert found == 6 * [write(together, numbers)]


@pytest.mark.parametrize("tokens", [10, 20_000], ids=["inline", "in the arena"])
def test_puts_of_varying_rows_and_tokens_cost_what_those_of_one_size_cost(client, name, tokens, together):
    def put(count: int) -> None:
        column = torch.nested.nested_tensor(
            [torch.ones(tokens + 100 * row) for row in range(count)], layout=torch.jagged
        )
        client.put(TensorDict({"x": column}, batch_size=[count]), partition_id=name)

    lease = [] if tokens == 10 else ["LeaseMemory"]
    steps = [*lease, "Put"] if together else ["Reserve", *lease, "Write", "Publish"]
    for count in (1, 8, 3, 16, 5, 2):
        asked = [sorted(set(kinds)) for kinds in costs(client, lambda n=count: put(n))]
        assert asked == [[step] for step in steps]


@any_size
def test_a_field_of_known_samples_costs_the_same_whether_it_is_new_or_replaced(client, name, numbers, together):
    meta = client.put(rows(1, 4), partition_id=name)
    found = [costs(client, lambda: client.put(rows(1, numbers, "y"), metadata=meta)) for _ in range(3)]
    assert found == 3 * [write(together, numbers, "CheckFields")]


@any_size
def test_a_put_by_key_costs_the_same_for_new_keys_and_known_ones(client, name, numbers, together):
    value = torch.ones(numbers)
    found = [costs(client, lambda n=n: tq.kv_put(f"k{n}", name, {"x": value}, {"n": n})) for n in range(3)]
    found += [costs(client, lambda n=n: tq.kv_put(f"k{n}", name, {"y": value})) for n in range(3)]
    found += [costs(client, lambda n=n: tq.kv_put(f"k{n}", name, {"x": value})) for n in range(3)]
    assert found == 9 * [write(together, numbers, "ResolveKeys")]


def test_tags_alone_need_no_storage(client, name, together):
    found = costs(client, lambda: tq.kv_put("k", name, tag={"n": 1}))
    assert found == ([["Put"]] if together else [["ResolveKeys"], ["Publish"]])


# ---- gets ----


@any_size
def test_small_values_come_with_their_metadata_and_others_cost_one_exchange_or_two_where_they_are_elsewhere(
    client, name, numbers, together
):
    client.put(rows(8, numbers), partition_id=name)
    metas: list[tq.BatchMeta] = []
    for _ in range(4):
        assert costs(client, lambda: metas.append(client.get_meta(["x"], 2, name, task_name="t"))) == [["Fetch"]]
    for meta in metas:
        elsewhere = [["Read"]] if together else [["Describe"], ["Read"]]
        came_along = together and numbers == SIZES["inline"]
        assert costs(client, lambda meta=meta: client.get_data(meta)) == ([] if came_along else elsewhere)
        assert costs(client, lambda meta=meta: client.get_data(meta)) == elsewhere


@any_size
def test_a_batch_of_a_stream_costs_one_exchange_more_only_where_its_values_are_elsewhere(
    client, name, numbers, together
):
    client.put(rows(8, numbers), partition_id=name)

    def next_batch() -> None:
        batch = client.fetch_batch(fetch_of(["x"], 2, name, "t"))
        assert (batch.meta.size, client.take(batch)["x"].values().sum()) == (2, 2 * numbers)

    for _ in range(4):
        asked = [set(kinds) for kinds in costs(client, next_batch)]
        assert asked == ([{"Fetch"}] if together else [{"Fetch"}, {"Read"}])


# ---- clears ----


def test_a_clear_costs_one_exchange_more_only_where_the_values_are_elsewhere(client, name, together):
    meta = client.put(rows(1, 4), partition_id=name)
    steps = [] if together else [["Delete", "Delete"]]  # all units at a time
    assert costs(client, lambda: client.clear_samples(meta)) == [["ClearSamples"], *steps]
    client.put(rows(1, 4), partition_id=name)
    assert costs(client, lambda: client.clear_partition(name)) == [["ClearPartition"], *steps]


# ---- which units there are ----


def test_a_client_lists_the_units_before_its_first_put_and_not_before_every_one(queue, name, together):
    client = client_of(queue, "puts")

    def put_many() -> None:
        for _ in range(10):
            client.put(rows(1, 4), partition_id=name)

    listed = exchanges(client, put_many).count(["ListUnits"])
    assert listed == 0 if together else listed < 5
    client.close()
