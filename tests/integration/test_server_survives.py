# SPDX-License-Identifier: Apache-2.0
"""No number, argument or sampler ends the server or keeps others from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import transfer_queue as tq
from tests.integration.calls import fetch_of
from tests.integration.faults import SERVED_S, check_served, client_of, comes_true
from tests.integration.hostile_samplers import DEEDS
from tests.integration.noticing import until_parked
from transfer_queue.errors import UnsupportedValueError

HOSTILE = "tests.integration.hostile_samplers"
CONF = {"controller": {"sampler_modules": [HOSTILE]}, "backend": {"SimpleStorage": {"put_timeout_s": 2.0}}}
NUMBERS = [2**64 - 1, 2**63, 2**62, 2**53 + 1, -1, -(2**62), 2**70]
METHODS = ["__init__", "check", "samples_needed", "has_cached_result", "sample", "forget", "tail", "clear_cache"]
TELLING = {"sys.exit", "interrupt", "own base exception", "unprintable error", "text", "huge numbers"}
"""Deeds of every method by default; in ``sample`` all of them."""
MISDEEDS = [
    pytest.param(deed, where, marks=[] if where == "sample" or deed in TELLING else [pytest.mark.slow])
    for where in METHODS
    for deed in DEEDS
    if deed != "very many"
]


@pytest.fixture(autouse=True)
def served_in_the_end(queue: Any) -> Iterator[None]:
    """Whatever the test did, another client's put and get work."""
    yield
    check_served(queue)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"leaf": 1}
    for _ in range(depth):
        value = {"level": value}
    return value


def hostile(deed: str, where: str) -> dict[str, Any]:
    return {"class": f"{HOSTILE}:HostileSampler", "args": [deed, where], "kwargs": {}}


# ---- numbers ----


def test_statistics_are_given_after_the_largest_batch_index_there_is(client, name):
    client.put({"x": torch.arange(4)}, partition_id=name)
    for batch_index in (2**64 - 1, 2**63 - 1, 2**53):
        config = {"dp_rank": 0, "batch_index": batch_index}
        with contextlib.suppress(tq.TransferQueueError):
            meta = client.get_meta(["x"], 1, name, task_name="t", sampling_config=config, timeout_s=0.0)
            client.ack(meta, "t", earlier=True)
    assert client.get_stats()["partitions"][name]["samples"] == 4


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("key", ["dp_rank", "batch_index", "dp_size", "first_index", "skip", "pass_start"])
def test_a_number_out_of_range_is_refused_at_once(client, name, key, number):
    client.put({"x": torch.arange(4)}, partition_id=name)
    with pytest.raises((ValueError, tq.BatchTimeoutError)):
        client.get_meta(["x"], 1, name, task_name="t", sampling_config={"dp_rank": 0, key: number}, timeout_s=0.0)
    client.get_stats()


@pytest.mark.parametrize("dp_size", [int(2e7), 2**31, 2**64 - 1])
def test_a_dp_size_that_no_job_has_is_refused_at_once(client, queue, name, dp_size):
    client.put({"x": torch.arange(4)}, partition_id=name)
    with pytest.raises(ValueError, match="dp_size"):
        client.register_task("many", dp_size=dp_size)
    check_served(queue)
    config = {"dp_rank": 0, "dp_size": dp_size}
    with pytest.raises(ValueError, match="dp_size"):
        client.get_meta(["x"], 1, name, task_name="t", sampling_config=config, timeout_s=0.0)


def test_the_largest_dp_size_allowed_holds_nobody_up(client, queue, name):
    client.put({"x": torch.arange(4)}, partition_id=name)
    client.register_task("most", dp_size=2**16)
    with pytest.raises(tq.BatchTimeoutError):
        client.get_meta(["x"], 1, name, task_name="most", sampling_config={"dp_rank": 0}, timeout_s=0.5)


@pytest.mark.parametrize("count", [2**62, 2**31 - 1, 2**24 + 1, 0, -1, -(2**62)])
def test_an_insert_of_an_impossible_number_leaves_puts_as_they_were(client, name, count):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"count|at most|at least"):
            client.get_meta(["x"], count, name, mode="insert")
    meta = client.put({"x": torch.arange(2)}, partition_id=name)
    assert client.get_data(meta)["x"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="batch_size"):
        client.get_meta(["x"], count if count < 1 else -count, name, task_name="t")


@pytest.mark.parametrize("number", [2**53 + 1, 2**64 - 1, 0, -1])
def test_a_partition_of_an_impossible_number_of_samples_is_refused(client, name, number):
    with pytest.raises(ValueError, match="num_samples"):
        client.create_partition(name, num_samples=number)


@pytest.mark.parametrize("timeout_s", [-1.0, -1e300, -float("inf")])
def test_a_timeout_below_0_waits_for_nothing(client, name, timeout_s):
    client.put({"x": torch.arange(2)}, partition_id=name)
    assert client.get_meta(["x"], 2, name, task_name="t", timeout_s=timeout_s).size == 2
    with pytest.raises(tq.BatchTimeoutError):
        client.get_meta(["x"], 2, name, task_name="t", timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", [1e300, float("inf")])
def test_a_timeout_may_be_infinitely_long(client, queue, name, timeout_s):
    reader = client_of(queue, "patient")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(reader.get_meta, ["x"], 2, name, task_name="t", timeout_s=timeout_s)
        until_parked(client, partition=name)
        check_served(queue)
        client.put({"x": torch.arange(2)}, partition_id=name)
        assert waits.result(SERVED_S).size == 2
    reader.close()


def test_a_timeout_that_is_no_number_is_refused(client, name):
    with pytest.raises(ValueError, match="timeout_s"):
        client.get_meta(["x"], 2, name, task_name="t", timeout_s=float("nan"))


def test_batches_before_the_first_are_never_drawn(client, name):
    """Samples drawn for a batch that nobody can ask for would be gone."""
    client.put({"x": torch.arange(2)}, partition_id=name)
    config = {"dp_rank": 0, "batch_index": 0, "first_index": -1}
    with pytest.raises(ValueError, match="first_index"):
        client.get_meta(["x"], 1, name, task_name="t", sampling_config=config, timeout_s=0.0)
    config = {"dp_rank": 0, "batch_index": 2**53, "first_index": 2**53 - 1}
    assert client.get_meta(["x"], 1, name, task_name="t", sampling_config=config, timeout_s=0.0).size == 1


# ---- nesting ----


@pytest.mark.parametrize("depth", [65, 990, 100_000])
def test_arguments_nested_deep_are_refused(client, queue, name, depth):
    client.put({"x": torch.arange(2)}, partition_id=name)
    with pytest.raises(UnsupportedValueError, match="nested"):
        client.get_meta(["x"], 2, name, task_name="t", sampling_config=nested(depth), timeout_s=0.0)
    with pytest.raises(UnsupportedValueError, match="nested"):
        client.put({"x": torch.arange(1)}, partition_id=name, tags=[nested(depth)])
    with pytest.raises(UnsupportedValueError, match="nested"):
        tq.kv_put("key", name, {"x": torch.tensor(1)}, tag=nested(depth))
    with pytest.raises((UnsupportedValueError, ValueError)):
        client.register_task("t", sampler={"class": "SequentialSampler", "args": [], "kwargs": nested(depth)})
    assert client.get_stats()["partitions"][name]["samples"] == 2


@pytest.mark.parametrize("depth", [1, 30, 63])
def test_what_is_nested_less_deep_goes_there_and_back(client, name, depth):
    tag = nested(depth - 1)
    tq.kv_put("key", name, {"x": torch.tensor(1)}, tag=tag)
    assert tq.kv_list(name) == {name: {"key": tag}}
    client.get_meta(["x"], 1, name, task_name="t", sampling_config=tag, timeout_s=SERVED_S)


# ---- samplers ----


@pytest.mark.parametrize(("deed", "where"), MISDEEDS)
def test_a_sampler_harms_nobody_but_those_who_chose_it(client, queue, name, deed, where):
    with contextlib.suppress(tq.TransferQueueError):
        client.register_task(f"of {name}", sampler=hostile(deed, where), tail="uneven_ok")
    client.put({"x": torch.arange(3)}, partition_id=name)
    with contextlib.suppress(tq.TransferQueueError):
        client.get_meta(["x"], 2, name, task_name=f"of {name}", timeout_s=0.0)
    client.seal_partition(name)
    with contextlib.suppress(tq.TransferQueueError):
        client.get_meta(["x"], 2, name, task_name=f"of {name}", timeout_s=0.0)
    assert client.get_stats()["partitions"][name]["samples"] == 3
    with contextlib.suppress(tq.TransferQueueError):
        client.clear_partition(name)
    client.register_task(f"of {name}", sampler="SequentialSampler")


@pytest.mark.parametrize("deed", DEEDS)
def test_a_put_succeeds_though_the_sampler_of_one_that_waits_misbehaves(client, queue, name, deed):
    """The publish wakes the fetch, whose sampler then fails; the producer is told nothing of that."""
    client.register_task(f"of {name}", sampler=hostile(deed, "sample"))
    reader, other = client_of(queue, "reader"), client_of(queue, "another reader")
    pending = reader.start_fetch_batch(fetch_of(["x"], 2, name, f"of {name}", 3.0))
    innocent = other.start_fetch_batch(fetch_of(["x"], 2, name, "innocent", 3.0))
    until_parked(client, 2, partition=name)
    meta = client.put({"x": torch.arange(3)}, partition_id=name)
    assert client.get_data(meta)["x"].tolist() == [0, 1, 2]
    assert innocent.finish().meta.global_indexes == meta.global_indexes[:2]
    with contextlib.suppress(tq.TransferQueueError):
        pending.finish()
    client.put({"x": torch.arange(3)}, partition_id=name)
    assert comes_true(lambda: not client.get_stats()["waiting"])
    for one in (reader, other):
        one.close()


def test_the_sampler_that_held_the_server_is_named_in_its_statistics(client, name):
    client.register_task(f"of {name}", sampler=hostile("hold", "sample"))
    client.put({"x": torch.arange(3)}, partition_id=name)
    with contextlib.suppress(tq.TransferQueueError):
        client.get_meta(["x"], 2, name, task_name=f"of {name}", timeout_s=0.0)
    (alarm,) = client.get_stats()["alarms"]
    assert f"HostileSampler of task 'of {name}'" in alarm["what"]
    assert alarm["held_s"] >= 2.0
