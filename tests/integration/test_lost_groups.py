# SPDX-License-Identifier: Apache-2.0
"""Groups whose rows are lost with a storage unit: they begin anew, unless somebody has trained them or has gone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch

import transfer_queue as tq
from tests.integration.noticing import until
from tests.own_processes import SLOW

CONF = {"server_processes": "each", "backend": {"SimpleStorage": {"num_data_storage_units": 12}}}
"""Each test ends one of them."""
WAIT_S = 60.0 * SLOW
AT = {"dp_rank": 0, "batch_index": 0}


def rows_in_units(client: Any) -> dict[str, int]:
    return {each["unit"]: each["samples"] for each in client.get_storage_stats()}


def lose(client: Any, unit: str) -> None:
    (name,) = [name for name in client.get_stats()["clients"] if name.startswith(f"unit {unit}.")]
    client.evict_client(name, unit=True)


def records(client: Any, name: str) -> dict[str, tuple[str, list[str]]]:
    """By key, the state of its group and the reasons."""
    found = client.kv_list(name)[name].items()
    return {key: (tags["group.state"], tags.get("group.reason", [])) for key, tags in found}


def work(client: Any, name: str, count: int) -> None:
    for lease in client.lease(name, count, timeout_s=WAIT_S):
        lease.close({"answer": lease.head["number"].repeat(2)})


@pytest.fixture
def closed(client, name) -> Callable[..., Any]:
    """``closed(sampler)``: 8 groups that are closed. Returns what ends a unit with rows of some, and no heads."""

    def make(sampler: tq.GroupSampler, *others: str) -> Callable[[], None]:
        tasks = [f"train {name}", *others]
        for task in tasks:
            client.register_task(task, sampler=sampler)
        before = rows_in_units(client)
        client.add_groups({"number": torch.arange(8)}, name, tasks=tasks, keys=list("abcdefgh"))
        with_heads = rows_in_units(client)
        (heads,) = [unit for unit in before if with_heads[unit] > before[unit]]
        work(client, name, 8)
        after = rows_in_units(client)
        victim = next(unit for unit in after if unit != heads and after[unit] > with_heads[unit])
        return lambda: lose(client, victim)

    return make


def trained(client: Any, name: str, count: int) -> list[int]:
    """The answers of the task's next batches, until it has so many rows."""
    found: list[int] = []
    while len(found) < count:
        meta = client.get_meta(["answer"], partition_id=name, task_name=f"train {name}", timeout_s=WAIT_S)
        found += client.get_data(meta)["answer"].tolist()
    return sorted(found)


def test_they_are_worked_on_again_and_each_is_trained_once(client, name, closed):
    lose_rows = closed(tq.GroupSampler(groups=8))
    lose_rows()
    assert client.get_lost_samples(name) == {}, "what is made again does not lack"
    lost = [reasons for state, reasons in records(client, name).values() if state == "waiting"]
    assert 0 < len(lost) < 8
    assert all("its rows were lost with storage unit 'unit" in text for (text,) in lost)
    work(client, name, len(lost))
    assert trained(client, name, 16) == sorted([*range(8)] * 2)


def test_rows_that_a_released_lease_has_left_are_made_again_too_and_other_partitions_hear_of_the_loss(client, name):
    """The whole group begins anew: what it has left elsewhere goes as well."""
    client.add_groups({"number": torch.arange(1)}, name)
    (first,) = client.lease(name)
    before = rows_in_units(client)
    first.put({"answer": torch.tensor([5])})
    (victim,) = [unit for unit, count in rows_in_units(client).items() if count > before[unit]]
    first.release("for another")
    others = [client.put({"x": torch.arange(4)}, partition_id=f"{name} later") for _ in before]
    lose(client, victim)
    (second,) = client.lease(name, keep="all", timeout_s=WAIT_S)
    assert (second.attempt, second.members.size) == (2, 0), "only the release counts: nobody was at work"
    lost = client.get_lost_samples(f"{name} later")["x"]
    assert len(lost) == 4
    assert lost in [meta.global_indexes for meta in others], "those of one put"


def test_what_a_task_was_given_stays_also_when_it_has_moved_on(client, name, closed):
    lose_rows = closed(tq.GroupSampler(groups=8))
    task = f"train {name}"
    client.seal_partition(name)
    batch = client.get_meta(["answer"], partition_id=name, task_name=task, sampling_config=AT, timeout_s=WAIT_S)
    client.move_on(f"{name} next", task, left=[name])
    lose_rows()
    assert {state for state, _ in records(client, name).values()} == {"trained"}
    with pytest.raises(tq.EndOfPartitionError):
        client.lease(name)
    assert client.ack(batch, task) == 1
    assert name not in client.get_partition_list() or records(client, name) == {}


def test_a_task_that_has_gone_on_without_them_does_not_keep_them(client, name, closed):
    lose_rows = closed(tq.GroupSampler(groups=8), f"gone {name}")
    client.move_on(f"{name} next", f"gone {name}", left=[name])
    lose_rows()
    waiting = [state for state, _ in records(client, name).values()].count("waiting")
    assert waiting > 0
    work(client, name, waiting)
    assert trained(client, name, 16) == sorted([*range(8)] * 2)


@pytest.mark.parametrize("who", ["worker", "reward"])
def test_they_fail_where_a_worker_or_a_task_was_told_that_nothing_more_comes(client, name, closed, who):
    lose_rows = closed(tq.GroupSampler(groups=1, ahead=7))
    client.seal_partition(name)
    asks = {
        "worker": lambda: client.lease(name),
        "reward": lambda: client.get_meta(["answer"], 16, name, task_name="reward", timeout_s=WAIT_S),
    }
    if who == "reward":
        asks[who]()
    with pytest.raises(tq.EndOfPartitionError):
        asks[who]()
    lose_rows()
    states = [state for state, _ in records(client, name).values()]
    assert set(states) == {"failed", "closed"}
    assert len(trained(client, name, 2 * states.count("closed"))) == 2 * states.count("closed")
    with pytest.raises(tq.EndOfPartitionError):
        client.get_meta(["answer"], partition_id=name, task_name=f"train {name}", timeout_s=WAIT_S)


@pytest.mark.parametrize("timeout_s", [None, 0.1])
def test_a_stream_waits_until_the_heads_of_its_next_batch_are_put_again(client, name, timeout_s):
    client.register_task("learn", sampler=tq.GroupSampler(groups=1))
    before = rows_in_units(client)
    client.add_groups({"number": torch.tensor([7])}, name, keys=["a"], tasks=["learn"])
    (victim,) = [unit for unit, count in rows_in_units(client).items() if count > before[unit]]
    (lease,) = client.lease(name, timeout_s=WAIT_S)
    lose(client, victim)
    lease.close({"answer": torch.arange(2)})
    dataset = tq.StreamingDataset(None, None, None, ["answer"], name, "learn", 0, head_fields=["number"])
    dataset.timeout_s = timeout_s
    with ThreadPoolExecutor(1) as pool, closing(dataset):
        reading = pool.submit(next, iter(dataset))
        if timeout_s is not None:
            with pytest.raises(tq.errors.UnitLostError, match="'number'"):
                reading.result(WAIT_S)
            return
        assert until(lambda: client.get_stats()["partitions"][name]["tasks"].get("learn", {}).get("drawn"))
        tq.kv_put("a", name, fields={"number": torch.tensor(8)})
        _, _, heads = reading.result(WAIT_S)
    assert heads["number"].tolist() == [8]


def test_a_saved_queue_knows_which_heads_were_lost(client, name, tmp_path):
    before = rows_in_units(client)
    client.add_groups({"number": torch.arange(1)}, name, keys=["a"])
    (victim,) = [unit for unit, count in rows_in_units(client).items() if count > before[unit]]
    lose(client, victim)
    client.add_groups({"number": torch.arange(1, 4)}, name, keys=list("bcd"))
    client.save_checkpoint(tmp_path / "c")
    client.load_checkpoint(tmp_path / "c")
    assert len(client.get_lost_samples(name)["number"]) == 1
    leases = client.lease(name, 4, timeout_s=WAIT_S)
    assert [(lease.key, lease.head["number"].item()) for lease in leases] == [("b", 1), ("c", 2), ("d", 3)]
    with pytest.raises(tq.errors.UnitLostError, match="'number'"):
        client.lease(name, timeout_s=WAIT_S)
