# SPDX-License-Identifier: Apache-2.0
"""Filters over tags through a real queue: fetches, streams with workers, lists of keys."""

from __future__ import annotations

from typing import Any

import pytest
from streaming_support import WAIT_S, InThread, dataset, loader, read, rows

import transfer_queue as tq
from tests.integration.noticing import ended, until_parked

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
ENVS = ("math", "code", "chat")
MATH = "env == 'math' and version >= 1"


def produce_tagged(partition: str, count: int, first: int = 0) -> None:
    """Sample i has key "i", an environment of three, and version i // 6."""
    numbers = range(first, first + count)
    tags = [{"env": ENVS[i % 3], "version": i // 6} for i in numbers]
    tq.kv_batch_put([str(i) for i in numbers], partition, rows(first, count), tags)


def told(data: Any) -> list[int]:
    """The numbers of the samples."""
    return [int(row[0]) for row in data["x"].unbind()]


def math_of(count: int) -> list[int]:
    return [i for i in range(count) if i % 3 == 0 and i >= 6]


def test_get_meta_draws_what_matches_and_the_rest_stays(client, name):
    produce_tagged(name, 24)
    meta = client.get_meta(["x"], 3, name, task_name="t", where=MATH)
    assert [tags["env"] for tags in meta.custom_meta] == ["math"] * 3
    assert told(client.get_data(meta)) == [6, 9, 12]
    also = client.get_meta(["x"], 3, name, task_name="t", sampling_config={"where": MATH})
    assert told(client.get_data(also)) == [15, 18, 21]
    client.seal_partition(name)
    with pytest.raises(tq.EndOfPartitionError, match="sealed; 0 samples were left over"):
        client.get_meta(["x"], 1, name, task_name="t", where=MATH)
    assert client.get_meta(["x"], 18, name, task_name="t").size == 18


def test_a_waiting_fetch_is_answered_by_the_tags_of_another_process(client, fork, name):
    produce_tagged(name, 6)
    waiting = InThread(lambda: client.get_meta(["x"], 1, name, task_name="t", where="good == true", timeout_s=WAIT_S))
    until_parked(client, partition=name)
    other = fork(tq.kv_put, "4", name, tag={"good": True})
    assert waiting.result().custom_meta == [{"env": "code", "version": 0, "good": True}]
    assert ended(other) == 0


def test_a_mistake_and_a_lack_are_told(client, name):
    produce_tagged(name, 6)
    with pytest.raises(tq.errors.InvalidRequestError, match=r"at character 5: .* found \"= 'math'\""):
        client.get_meta(["x"], 1, name, task_name="t", where="env = 'math'")
    with pytest.raises(tq.BatchTimeoutError, match="0 ready, 6 don't match the filter"):
        client.get_meta(["x"], 1, name, task_name="t", where="env == 'none'", timeout_s=0.01)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_with_a_filter_ends_when_nothing_more_can_match(queue, client, name, workers):
    produce_tagged(name, 60)
    client.seal_partition(name)
    made = loader(queue, name, workers, where=MATH, timeout_s=WAIT_S)
    expected = math_of(60)
    assert read_first(made) == [expected[at : at + 4] for at in range(0, len(expected), 4)]
    others = read_first(loader(queue, name, workers, where="env == 'code'", task="other", timeout_s=WAIT_S))
    assert sorted(i for batch in others for i in batch) == list(range(1, 60, 3))


def read_first(items: Any) -> list[list[int]]:
    return [told(data) for data, _ in items]


def test_ranks_get_equally_many_batches_of_what_matches(queue, client, name):
    client.register_task("ranks", "RankAwareSampler", 2)
    produce_tagged(name, 60)
    client.seal_partition(name)
    both = [read_first(dataset(queue, name, rank=rank, task="ranks", dp_size=2, where=MATH)) for rank in (0, 1)]
    assert [len(batches) for batches in both] == [2, 2]
    drawn = sorted(i for batches in both for batch in batches for i in batch)
    assert drawn == math_of(60)[:16], "whole rounds, each sample once"


def test_a_fetch_function_of_the_users_gets_the_filter(queue, client, name):
    produce_tagged(name, 12)
    client.seal_partition(name)

    def fetch(**arguments: Any) -> Any:
        return tq.default_fetch_batch_fn(**arguments)

    stream = dataset(queue, name, where=MATH, fetch_batch_fn=fetch)
    assert read_first(stream) == [[6, 9]]


def test_kv_list_shows_the_keys_that_match(client, name):
    produce_tagged(name, 30)
    assert list(tq.kv_list(name, where="env == 'code' and version in [0, 2]")[name]) == ["1", "4", "13", "16"]
    assert client.kv_list(where="version == 99")[name] == {}
    with pytest.raises(tq.errors.InvalidRequestError, match="at character 1"):
        tq.kv_list(name, where="")


def test_a_read_of_everything_is_not_filtered(queue, name):
    produce_tagged(name, 10)
    tq.get_client().seal_partition(name)
    assert sum(map(len, read(dataset(queue, name)))) == 10
