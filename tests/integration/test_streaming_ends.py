# SPDX-License-Identifier: Apache-2.0
"""Streams through a real queue: how they end, what a reader that leaves leaves behind, the user's own functions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from noticing import until_parked
from streaming_support import (
    TASK,
    InThread,
    cut,
    dataset,
    loader,
    numbers,
    own_threads,
    produce,
    read,
    rows,
    rss_mib,
    take,
    worker_pids,
)
from tensordict import TensorDict

from transfer_queue import (
    BatchMeta,
    EndOfPartitionError,
    StreamingDataLoader,
    StreamingDataset,
    chunk_batch_fn,
    default_fetch_batch_fn,
    token_budget_batch_fn,
)
from transfer_queue.errors import BatchTimeoutError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture(autouse=True)
def no_prefetch_left() -> Iterator[None]:
    yield
    assert own_threads() == []


# ---- ends ----


@WORKERS
def test_a_finite_stream_ends_when_all_there_is_was_consumed(queue, client, name, workers):
    produce(client, name, [16], seal=False)
    started = time.monotonic()
    assert read(loader(queue, name, workers, should_check_consumption_status=True)) == cut(16, 4)
    assert time.monotonic() - started < 2.0 + workers, "nothing to wait for"


def test_a_finite_stream_gives_out_a_short_tail_that_nobody_adds_to(queue, client, name):
    produce(client, name, [10], seal=False)
    for _ in ("first", "replay"):
        assert read(loader(queue, name, should_check_consumption_status=True)) == cut(10, 4)


@WORKERS
def test_clearing_the_partition_ends_a_stream_that_waits_for_it(queue, client, name, workers):
    produce(client, name, [6], seal=False)
    reader = InThread(lambda: read(loader(queue, name, workers, task=name)))
    until_parked(client, max(1, workers), task=name)
    client.clear_partition(name)
    assert reader.result() == [[0, 1, 2, 3]]


@WORKERS
def test_a_seal_ends_a_stream_that_waits(queue, client, name, workers):
    produce(client, name, [4], seal=False)
    reader = InThread(lambda: read(loader(queue, name, workers, task=name)))
    until_parked(client, max(1, workers), task=name)
    client.seal_partition(name)
    assert reader.result() == [[0, 1, 2, 3]]


@WORKERS
def test_a_stream_may_have_a_deadline_and_says_what_it_waited_for(queue, client, name, workers):
    client.put(rows(0, 3), partition_id=name)
    client.put(TensorDict({"other": torch.zeros(2)}, batch_size=[2]), partition_id=name)
    made = loader(queue, name, workers, timeout_s=0.3)
    with pytest.raises(BatchTimeoutError, match=rf"for 4 samples of '{_escaped(name)}': 3 ready, 2 lack field 'x'"):
        next(iter(made))


def _escaped(name: str) -> str:
    return name.replace("[", r"\[").replace("]", r"\]")


@WORKERS
def test_should_stop_ends_a_stream_that_waits(queue, client, name, workers):
    stopped: list[int] = []
    made = loader(queue, name, workers, should_stop=lambda: bool(stopped), task=name)
    reader = InThread(lambda: read(made))
    until_parked(client, task=name)
    stopped.append(1)
    assert reader.result() == []


# ---- leaving ----


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("begun", [False, True])
def test_an_iterator_dropped_while_it_waits_is_gone_at_once(queue, client, name, workers, persistent, begun):
    before = worker_pids()
    produce(client, name, [4], seal=False)
    made = loader(queue, name, workers, persistent_workers=persistent, task=name)
    items = iter(made)
    if begun:
        assert take(items, 1) == [[0, 1, 2, 3]]
        until_parked(client, task=name)
    started = time.monotonic()
    del items
    if persistent:
        produce(client, name, [8], seal=False, first=4)
        assert take(iter(made), 1) == ([[4, 5, 6, 7]] if begun else [[0, 1, 2, 3]]), "the workers are of use still"
    del made
    assert time.monotonic() - started < 2.0
    assert (worker_pids(), own_threads()) == (before, [])


@WORKERS
def test_an_error_in_the_consumer_leaves_nothing(queue, client, name, workers):
    before = worker_pids()
    produce(client, name, [12])

    def consume() -> None:
        for _ in loader(queue, name, workers):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        consume()
    del caught
    assert (worker_pids(), own_threads()) == (before, [])


# ---- the user's functions ----


def _doubled(data: TensorDict, meta: BatchMeta, micro_batch_size: int) -> Iterator[Any]:
    for part, part_meta in chunk_batch_fn(data, meta, micro_batch_size):
        part["double"] = 2 * torch.stack([row[0] for row in part["x"].unbind()])
        yield part, part_meta


def _fetch(batch_index: Any, tq_client: Any, data_fields: Any, batch_size: Any, partition_id: Any, **more: Any) -> Any:
    return default_fetch_batch_fn(tq_client, data_fields, batch_size, partition_id, batch_index=batch_index, **more)


def _summed(item: Any) -> int:
    return int(item[0]["double"].sum())


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork")])
def test_users_fetch_process_and_collate_functions_are_used(queue, client, name, workers, method):
    produce(client, name, [8])
    made = loader(
        queue, name, workers, method, micro=2, fetch_batch_fn=_fetch, process_batch_fn=_doubled, collate_fn=_summed
    )
    assert list(made) == [2 * (first + first + 1) for first in (0, 2, 4, 6)]


def test_micro_batches_by_token_budget(queue, client, name):
    produce(client, name, [8])
    process = partial(token_budget_batch_fn, max_tokens=12, lengths="y")
    made = loader(queue, name, batch_size=8, process_batch_fn=process)
    assert read(made) == [[0, 1, 2, 3], [4, 5], [6], [7]]


def _broken(data: Any, meta: Any, micro_batch_size: int) -> Any:
    if meta.global_indexes and numbers((data, meta))[0] >= 4:
        raise ValueError("row 4 is no good")
    return [(data, meta)]


@WORKERS
def test_an_error_of_the_users_function_surfaces_with_its_text(queue, client, name, workers):
    produce(client, name, [12])
    items = iter(loader(queue, name, workers, process_batch_fn=_broken))
    assert take(items, 1) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="row 4 is no good"):
        next(items)


def _no_such_field(data_fields: Any, **_: Any) -> Any:
    raise LookupError(f"nothing known of {data_fields}")


@WORKERS
def test_an_error_of_the_fetch_surfaces_with_its_text(queue, name, workers):
    made = loader(queue, name, workers, fetch_batch_fn=_no_such_field, fields=["zz"])
    with pytest.raises(LookupError, match="nothing known of \\['zz'\\]"):
        next(iter(made))


@WORKERS
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
def test_pinning_without_an_accelerator_does_nothing(queue, client, name, workers):
    produce(client, name, [8])
    assert read(loader(queue, name, workers, pin_memory=True)) == cut(8, 4)


@pytest.mark.parametrize(("layout", "nested"), [(None, True), ("jagged", True), ("dense", False)])
def test_the_layout_of_values_is_the_streams_own(queue, client, name, layout, nested):
    produce(client, name, [4])
    for workers in (0, 1):
        ((data, _),) = loader(queue, f"{name}", workers, layout=layout, task=f"{TASK}{workers}")
        assert (data["x"].is_nested, data["y"].is_nested) == (nested, True)
        assert torch.nested.to_padded_tensor(data["y"], -1).shape == (4, 4)


# ---- what upstream's users write ----


def test_a_program_written_for_upstream(queue, client, name):
    for start in range(0, 24, 8):
        client.put(
            TensorDict({"input_ids": torch.arange(start, start + 8).repeat(4, 1).t()}, batch_size=[8]),
            partition_id=name,
        )
    made = StreamingDataset(
        config=queue,
        batch_size=8,
        micro_batch_size=2,
        data_fields=["input_ids"],
        partition_id=name,
        task_name="actor_train",
        dp_rank=0,
        should_check_consumption_status=True,
        fetch_batch_fn=default_fetch_batch_fn,
        process_batch_fn=chunk_batch_fn,
    )
    assert (made.buffer, made.batch_index, made.sampling_config) == ([], 0, {"dp_rank": 0, "task_name": "actor_train"})
    loaded = StreamingDataLoader(dataset=made, num_workers=2, prefetch_factor=1, multiprocessing_context="fork")
    for _ in range(2):
        seen = [int(row[0]) for batch, _ in loaded for row in batch["input_ids"].unbind()]
        assert seen == list(range(24))
        loaded.reset()
    assert client.check_consumption_status("actor_train", name)


def test_a_stream_is_configured_by_what_the_controller_tells_too(queue, client, name):
    produce(client, name, [4])
    assert read(dataset(None, name)) == cut(4, 4)


def test_the_older_form_of_the_rank_aware_sampler(queue, client, name):
    client.register_task(name, sampler="RankAwareSampler")
    produce(client, name, [2400])
    replicas = [{"data_replica_group": 1, "data_replica_rank": rank, "data_replica_world_size": 2} for rank in (0, 1)]
    made = [loader(queue, name, task=name, fields=["x"], batch_size=2, sampling_config=each) for each in replicas]
    ahead, behind = read(made[0]), read(made[1])
    assert ahead == behind == cut(2400, 2), "one may run ahead of the other by any number"
    with pytest.raises(ValueError, match="rank from 0 to world size - 1"):
        dataset(queue, name, sampling_config={**replicas[0], "data_replica_rank": 2})


def test_groups_of_a_prompt_come_whole(queue, client, name):
    client.register_task(name, sampler={"class": "GRPOGroupNSampler", "kwargs": {"n_samples_per_prompt": 3}})
    produce(client, name, [2, 3, 6, 1, 3])
    made = loader(queue, name, 2, task=name, batch_size=6)
    got = read(made)
    assert got[0] == [2, 3, 4, 5, 6, 7]
    assert all(len(batch) <= 6 for batch in got)


def test_balanced_shares_of_two_ranks(queue, client, name):
    client.register_task(name, sampler={"class": "SeqlenBalancedSampler", "kwargs": {"dp_size": 2}})
    lengths = [9, 1, 5, 5, 2, 8, 3, 7]
    meta = client.put(rows(0, 8), partition_id=name)
    meta.update_custom_meta([{"total_lengths": length} for length in lengths])
    client.set_custom_meta(meta)
    client.seal_partition(name)
    shares = []
    for rank in (0, 1):
        ((data, _),) = loader(queue, name, rank=rank, dp_size=2, task=name, fields=["x"])
        shares.append([int(row[0]) for row in data["x"].unbind()])
    assert sorted(shares[0] + shares[1]) == list(range(8))
    assert [sum(lengths[number] for number in share) for share in shares] == [20, 20]


# ---- bad input, before anything is consumed ----


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"micro": 5}, "micro_batch_size 5 is larger than batch_size 4"),
        ({"micro": -1}, "micro_batch_size must be at least 1, got -1"),
        ({"fields": []}, "at least one field"),
        ({"rank": -1}, "dp_rank must be at least 0"),
        ({"rank": 2, "dp_size": 2}, "dp_rank 2 with dp_size 2"),
        ({"fetch_batch_fn": lambda: None}, "is called by name"),
        ({"layout": "square"}, "layout"),
    ],
)
def test_a_stream_that_cannot_be_is_refused_when_it_is_made(queue, name, options, text):
    with pytest.raises(ValueError, match=text):
        dataset(queue, name, **options)


# ---- memory ----


@WORKERS
def test_memory_does_not_grow_with_the_length_of_the_stream(queue, client, name, workers):
    batches, size, width = 200, 32, 14336  # 1.75 MiB
    values = torch.zeros(size, width, dtype=torch.float32)

    def put() -> None:
        for _ in range(batches):
            client.put(TensorDict({"x": values}, batch_size=[size]), partition_id=name)
        client.seal_partition(name)

    writer = InThread(put)
    seen: list[int] = []
    for position, (data, meta) in enumerate(loader(queue, name, workers, batch_size=size, micro=8, fields=["x"])):
        seen += meta.global_indexes
        assert data.batch_size == (8,)
        if position % 4 == 3:
            client.clear_samples(_whole(meta, size))
        if position == 4 * 20:
            early = rss_mib()
        if position == 4 * batches - 5:
            late = rss_mib()
    writer.result()
    assert seen == list(range(seen[0], seen[0] + batches * size))
    assert late - early < 50


def _whole(meta: BatchMeta, size: int) -> BatchMeta:
    """The batch whose last micro-batch this is."""
    last = meta.global_indexes[-1]
    return BatchMeta(list(range(last + 1 - size, last + 1)), [meta.partition_ids[0]] * size)


def test_an_ended_fetch_is_an_error_for_who_asks_by_hand(queue, client, name):
    produce(client, name, [4])
    fetch = partial(default_fetch_batch_fn, client, ["x"], 4, name, TASK, {"dp_rank": 0})
    assert numbers(fetch(batch_index=0)) == [0, 1, 2, 3]
    with pytest.raises(EndOfPartitionError):
        fetch(batch_index=1)


def test_samples_that_come_when_one_worker_has_seen_the_end_are_left_to_the_next_pass(queue, client, name):
    produce(client, name, [24], seal=False)
    made = loader(queue, name, 2, should_check_consumption_status=True)
    items = iter(made)
    while not client.check_consumption_status(TASK, name):  # each worker has fetched two batches and requested a third
        pass
    first = take(items, 1)
    for _ in range(100):  # and one of them asks for more
        client.check_consumption_status(TASK, name)
    produce(client, name, [24], seal=False, first=24)
    assert [*first, *read(items), *read(made), *read(made)] == cut(48, 4)
