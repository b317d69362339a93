# SPDX-License-Identifier: Apache-2.0
"""Streams through a real queue: who gets what, in which order, and what a reader remembers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from noticing import until, until_parked
from streaming_support import (
    WAIT_S,
    InThread,
    cut,
    dataset,
    loader,
    numbers,
    own_threads,
    produce,
    read,
    rows,
    take,
)
from torch.utils.data import DataLoader

from transfer_queue import StreamingDataLoader, default_fetch_batch_fn

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture(autouse=True)
def no_prefetch_left() -> Iterator[None]:
    yield
    assert own_threads() == []


# ---- each sample once, in order; the same again when asked to ----


@pytest.mark.programs
@pytest.mark.parametrize(
    ("workers", "method", "prefetch"),
    [(0, None, True), (0, None, False), (1, "fork", True), (2, "fork", True), (3, "fork", False), (2, "spawn", True)],
)
def test_one_loader_reads_each_sample_once_and_follows_reset_step_and_state(
    queue, client, name, workers, method, prefetch
):
    produce(client, name, [5, 1, 30, 11])  # 47 samples: eleven batches of four and a short one
    produce(client, f"{name}/next", [9], first=500)
    made = loader(queue, name, workers, method, micro=3, prefetch=prefetch, persistent_workers=workers > 0)
    whole = cut(47, 4, 3)
    assert read(made) == whole
    assert read(made) == [], "the stream has ended"
    made.reset()
    assert read(made) == whole, "a replay gives the same batches"
    made.step(f"{name}/next")
    assert read(made) == cut(9, 4, 3, first=500)
    made.load_state_dict({"partition_id": name, "batch_index": 10, "micro_batch": 1})
    assert read(made) == cut(47, 4, 3)[21:]


def longest_wait(client: Any, task: str) -> float:
    return max((each["waited_s"] for each in client.get_stats()["waiting"] if each["task"] == task), default=0.0)


def itself(batch: Any) -> Any:
    return batch


@WORKERS
def test_a_starved_reader_is_seen_to_have_waited_since_its_wait_began(queue, client, name, workers):
    reading = InThread(take, iter(loader(queue, name, workers, task=name, timeout_s=WAIT_S)), 1)
    assert until(lambda: longest_wait(client, name) > 1.5)
    produce(client, name, [4])
    assert reading.result() == cut(4, 4)


def num_requests(client: Any) -> dict[str, int]:
    """By kind, the requests that the server has answered, without those that this question makes."""
    verbs = client.get_stats()["metrics"]["requests"]
    return {kind: sum(each["seconds"]["counts"]) for kind, each in verbs.items() if kind != "GET_STATS"}


def test_readers_that_wait_make_no_requests(queue, client, name):
    readers = [InThread(take, iter(loader(queue, name, 0, task=f"{name} {n}", timeout_s=WAIT_S)), 1) for n in range(8)]
    assert until(lambda: len([each for each in client.get_stats()["waiting"] if each["task"].startswith(name)]) == 8)
    before = num_requests(client)
    assert until(lambda: longest_wait(client, f"{name} 0") > 1.5)
    assert num_requests(client) == before
    produce(client, name, [4])
    assert [reader.result() for reader in readers] == [cut(4, 4)] * 8


def test_a_finite_stream_that_waits_makes_no_request(queue, client, name):
    """Its end is known, and the last rewards are missing."""
    meta = client.put(rows(0, 4).select("x"), partition_id=name)
    client.seal_partition(name)
    reader = InThread(lambda: read(loader(queue, name, task=name, should_check_consumption_status=True)))
    until_parked(client, task=name)
    before = num_requests(client)
    assert until(lambda: longest_wait(client, name) > 3.0)
    assert num_requests(client) == before
    client.put(rows(0, 4).select("y"), meta)
    assert reader.result() == cut(4, 4)


def test_a_finite_stream_asks_once_for_each_batch_and_for_its_end(queue, client, name):
    produce(client, name, [6], seal=False)
    before = num_requests(client)["GET_META"]
    assert read(loader(queue, name, should_check_consumption_status=True)) == [[0, 1, 2, 3], [4, 5]]
    assert num_requests(client)["GET_META"] - before == 3, "it waits two seconds for the tail"


@WORKERS
def test_a_reader_ahead_takes_no_samples_of_a_batch_that_another_waits_for(queue, client, name, workers):
    made = loader(queue, name, workers, timeout_s=WAIT_S)
    items = iter(made)
    for turn in range(6):  # as on-policy producers do: just enough for the next two batches
        produce(client, name, [8], seal=False, first=8 * turn)
        assert take(items, 2) == cut(8, 4, first=8 * turn)


def test_the_same_holds_for_a_fetch_function_of_the_users(queue, client, name):
    made = loader(queue, name, 3, fetch_batch_fn=partial(default_fetch_batch_fn), timeout_s=WAIT_S)
    produce(client, name, [24], seal=False)
    assert take(iter(made), 6) == cut(24, 4)


@WORKERS
def test_another_iterator_goes_on_where_the_one_before_was_left(queue, client, name, workers):
    produce(client, name, [40])
    made = loader(queue, name, workers, micro=2, persistent_workers=workers > 0)
    assert take(iter(made), 3) == cut(40, 2)[:3]
    assert take(iter(made), 2) == cut(40, 2)[3:5]
    again = StreamingDataLoader(made.stream, num_workers=workers)
    assert read(again) == cut(40, 2)[5:]


@WORKERS
def test_a_pass_of_known_length_ends_there_and_the_next_goes_on(queue, client, name, workers):
    produce(client, name, [24], seal=False)
    made = loader(queue, name, workers, num_batches=3, persistent_workers=workers > 0)
    assert len(made) == 3
    assert [read(made), read(made)] == [cut(24, 4)[:3], cut(24, 4)[3:]]
    with pytest.raises(TypeError, match="no known length"):
        len(loader(queue, name))


def test_a_live_iterator_keeps_its_partition_and_its_place_when_the_dataset_is_moved(queue, client, name):
    produce(client, name, [12])
    produce(client, f"{name}/next", [8], first=100)
    for workers in (0, 2):
        made = loader(queue, name, workers)
        live = iter(made)
        assert take(live, 1) == [[0, 1, 2, 3]]
        made.step(f"{name}/next")
        assert read(live) == cut(12, 4)[1:]
        assert made.state_dict() == {"partition_id": f"{name}/next", "batch_index": 0, "micro_batch": 0}
        assert read(made) == cut(8, 4, first=100)


def test_an_older_iterator_of_persistent_workers_is_over_when_a_new_one_begins(queue, client, name):
    produce(client, name, [24])
    made = loader(queue, name, 2, persistent_workers=True)
    old = iter(made)
    assert take(old, 2) == cut(24, 4)[:2]
    new = iter(made)
    assert take(new, 1) == cut(24, 4)[2:3]
    assert list(old) == []
    assert read(new) == cut(24, 4)[3:]


def test_two_iterators_of_one_loader_have_workers_of_their_own(queue, client, name):
    produce(client, name, [24])
    made = loader(queue, name, 2)
    one = iter(made)
    two = iter(made)
    assert (read(two), read(one)) == (cut(24, 4), cut(24, 4))


def test_a_dataset_without_a_loader_yields_the_same_and_resolves_its_start_when_iterated(queue, client, name):
    produce(client, name, [8])
    made = dataset(queue, name, micro=2)
    items = iter(made)
    made.step(f"{name}/elsewhere")
    assert read(items) == cut(8, 4, 2)
    made.close()


def test_a_plain_dataloader_with_workers_duplicates_nothing(queue, client, name):
    produce(client, name, [24])
    plain = DataLoader(
        dataset(queue, name), batch_size=None, num_workers=2, multiprocessing_context="fork", collate_fn=itself
    )
    assert read(plain) == cut(24, 4)


# ---- positions ----


@WORKERS
def test_the_state_is_what_was_taken_and_not_what_was_fetched_ahead(queue, client, name, workers):
    produce(client, name, [40])
    first = loader(queue, name, workers, micro=2)
    items = iter(first)
    assert take(items, 5) == cut(40, 2)[:5]
    state = first.state_dict()
    assert state == {"partition_id": name, "batch_index": 2, "micro_batch": 1}
    if not workers:
        assert len(first.get_buffer()) <= 3
    del items
    second = loader(queue, name, workers, micro=2)
    second.load_state_dict(state)
    assert read(second) == cut(40, 2)[5:], "goes on in the middle of a batch"


@pytest.mark.parametrize(
    "state", [{}, {"partition_id": "p"}, {"partition_id": "p", "batch_index": -1, "micro_batch": 0}]
)
def test_a_state_that_is_none_is_refused(queue, name, state):
    with pytest.raises(ValueError, match=r"no state of a stream|batch 0 or later"):
        dataset(queue, name).load_state_dict(state)


# ---- several ranks ----


def _read_slowly(conf: Any, partition: str, pauses: list[float], told: Any, **options: Any) -> None:
    from threading import Event

    made = loader(conf, partition, **options)
    for position, item in enumerate(made):
        Event().wait(pauses[position % len(pauses)])
        told.put(numbers(item))
    told.put(None)


def _collect(told: Any) -> list[list[int]]:
    return list(iter(told.get, None))


def test_two_ranks_of_one_group_see_the_same_batches_at_different_speeds(queue, client, name, fork):
    import multiprocessing

    queues = [multiprocessing.get_context("fork").SimpleQueue() for _ in range(2)]
    for told, pauses in zip(queues, ([0.0], [0.02, 0.0, 0.0]), strict=True):
        fork(_read_slowly, queue, name, pauses, told)
    produce(client, name, [3] * 20)
    assert [_collect(told) for told in queues] == [cut(60, 4), cut(60, 4)]
    for told in queues:
        told.close()


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("drop", [cut(16, 4)[0::2], cut(16, 4)[1::2]]),
        ("pad", [[*cut(16, 4)[0::2], [16, 17, 18, 19]], [*cut(16, 4)[1::2], [20, 21, 16, 17]]]),
        ("uneven_ok", [[*cut(16, 4)[0::2], [16, 17, 18, 19]], [*cut(16, 4)[1::2], [20, 21]]]),
    ],
)
def test_ranks_in_lockstep_end_together_as_the_tail_policy_says(queue, client, name, tail, expected):
    client.register_task(name, dp_size=2, tail=tail)
    made = [loader(queue, name, rank=rank, dp_size=2, task=name, fields=["x"]) for rank in (0, 1)]
    readers = [InThread(lambda each=each: [(item[0]["x"], item[1]) for item in each]) for each in made]
    produce(client, name, [7, 7, 8])  # 22 samples: two rounds of eight, six left over
    results = [reader.result() for reader in readers]
    assert [[[int(row[0]) for row in x.unbind()] for x, _ in result] for result in results] == expected
    if tail == "pad":
        assert results[1][-1][1].padding_mask == [False, False, True, True]


@pytest.mark.programs
def test_ranks_in_lockstep_share_rounds_also_with_workers(queue, client, name):
    client.register_task(name, dp_size=2)
    produce(client, name, [50])
    made = [loader(queue, name, 2, rank=rank, dp_size=2, task=name) for rank in (0, 1)]
    slow, fast = iter(made[0]), iter(made[1])
    assert read(fast) == cut(48, 4)[1::2]
    assert read(slow) == cut(48, 4)[0::2]


# ---- layouts ----


@pytest.mark.parametrize(("layout", "jagged"), [("dense", [True, False, True]), ("jagged", [True, True, True])])
def test_a_field_that_is_jagged_in_some_batches_only_is_warned_of_once(queue, client, name, caplog, layout, jagged):
    for lengths in ([2, 3], [2, 2], [1, 4]):
        client.put({"x": [[length] * length for length in lengths]}, partition_id=name)
    client.seal_partition(name)
    made = dataset(queue, name, 2, fields=["x"], layout=layout)
    assert [data["x"].is_nested for data, _ in StreamingDataLoader(made)] == jagged
    assert caplog.text.count("layout='jagged' makes it jagged in all of them") == (layout == "dense")
