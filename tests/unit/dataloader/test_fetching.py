# SPDX-License-Identifier: Apache-2.0
"""How a user's fetch function is called, and what a waiting stream says."""

from __future__ import annotations

import logging
from functools import partial

import pytest

import transfer_queue.dataloader.fetching as module
from transfer_queue import BatchMeta, default_fetch_batch_fn, protocol
from transfer_queue.dataloader.fetching import BatchFetcher, as_fetch
from transfer_queue.errors import BatchTimeoutError, EndOfPartitionError

VALUES = {
    "tq_client": "client", "data_fields": ["a"], "batch_size": 4, "partition_id": "p", "task_name": "task",
    "sampling_config": {"dp_rank": 0}, "batch_index": 7,
}  # fmt: skip


def by_keyword(tq_client, data_fields, batch_size, partition_id, task_name, sampling_config, batch_index):
    return tq_client, data_fields, batch_size, partition_id, task_name, sampling_config, batch_index


def any_order(*, batch_index, sampling_config, task_name, partition_id, batch_size, data_fields, tq_client):
    return tq_client, data_fields, batch_size, partition_id, task_name, sampling_config, batch_index


def any_name(**values):
    return tuple(values.values())


class Callable:
    def __call__(self, tq_client, data_fields, batch_size, partition_id, task_name, sampling_config, batch_index):
        return tq_client, data_fields, batch_size, partition_id, task_name, sampling_config, batch_index


@pytest.mark.parametrize("function", [by_keyword, any_order, any_name, Callable(), partial(any_name)])
def test_every_way_to_write_a_fetch_function_gets_the_same_values(function):
    assert as_fetch(function)(VALUES) == tuple(VALUES.values())


def test_a_function_may_take_only_what_it_needs():
    assert as_fetch(lambda batch_index, partition_id, extra=5: (partition_id, batch_index, extra))(VALUES) == (
        "p",
        7,
        5,
    )


@pytest.mark.parametrize(
    "function", [lambda: None, lambda one, two: None, lambda batch_index, unknown: None, lambda batch_index, /: None]
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_is_fetched(function):
    with pytest.raises(ValueError, match="is called by name"):
        as_fetch(function)


def test_the_default_function_is_not_called_as_a_users():
    assert as_fetch(default_fetch_batch_fn) is None


class Client:
    """Always answers the same; notes how long it might have parked each fetch. No queue is needed for this."""

    def __init__(self, answer=None, consumed=False):
        self.answer = answer
        self.asked = []
        self.waits = []
        self.consumed = consumed

    def start_fetch_batch(self, fetch):
        self.asked.append(fetch)
        self.waits.append(fetch.wait_s)
        return self

    def finish(self, look=None):
        return self.answer

    def check_consumption_status(self, task, partition):
        return self.consumed


def fetcher(client, fields=("a",), config=None, **more):
    return BatchFetcher(client, "p", list(fields), 4, "actor", config or {}, **more)


NOT_READY = protocol.NotReady(1, 4, 1, 3, {"reward": 2}, 41.0, ["a", "reward"])


def test_a_stream_that_times_out_says_what_is_missing():
    fetch = fetcher(Client(NOT_READY), ["reward"], {"dp_rank": 0}, timeout_s=0.0)
    with pytest.raises(BatchTimeoutError) as caught:
        fetch(5).receive()
    said = str(caught.value)
    assert "task 'actor' waited 0.0 s for 4 samples of 'p': 1 ready, 2 lack field 'reward'" in said
    assert "last published 41 s ago" in said


def test_one_request_is_parked_no_longer_than_the_stream_may_wait():
    client = Client(NOT_READY)
    with pytest.raises(BatchTimeoutError):
        fetcher(client, config={"dp_rank": 0, "own": 1}, timeout_s=0.1, finite=True)(5).receive()
    assert client.asked[0] == protocol.Fetch(
        0, "p", "actor", ["a"], 4, 0, 5, wait_s=client.waits[0], finite=True, sampler_args={"own": 1}
    )
    first, *others = client.waits  # asked before anybody waited: the stream's wait begins with the second one
    assert others == sorted(others, reverse=True)
    assert 0.0 <= others[-1] < min(first, others[0])
    assert max(first, others[0]) <= 0.1


def test_a_stream_that_is_told_to_stop_asks_for_nothing():
    client = Client(NOT_READY)
    assert fetcher(client, should_stop=lambda: True)(0) is None
    assert client.asked == []


def test_an_answer_from_before_anybody_waited_is_asked_for_again():
    # Asked with 0 s to wait, the queue's "not yet" is older than the wait for the batch: it may be there by now.
    client = Client(NOT_READY)
    asked = fetcher(client, timeout_s=0.0)(0)
    with pytest.raises(BatchTimeoutError):
        asked.receive()
    assert len(client.asked) == 2


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append((record.levelname, record.getMessage()))


def test_a_waiting_stream_reports_at_its_interval_what_it_waits_for():
    heard = Heard()
    module.logger.addHandler(heard)
    stop = iter([False, False, True])
    try:
        asked = fetcher(Client(NOT_READY), ["reward"], report_every_s=0.0, should_stop=lambda: next(stop))(0)
        assert asked.receive() is False
    finally:
        module.logger.removeHandler(heard)
    said = (
        "task 'actor' waited 0.0 s for 4 samples of 'p': 1 ready, 2 lack field 'reward', last published 41 s "
        "ago. Check the producers, lower batch_size, or wait longer (timeout_s)."
    )
    assert heard.said == [("WARNING", said), ("WARNING", said)]


def test_a_users_function_that_has_nothing_is_asked_again_after_a_pause():
    answers = [(None, BatchMeta.empty()), (None, None), ({"anything": 1}, "meta")]
    pauses = []
    fetch = fetcher(Client(), fetch_batch_fn=lambda batch_index: answers.pop(0))
    fetch.pause = lambda seconds: bool(seconds and pauses.append(seconds))
    asked = fetch(0)
    assert asked.receive()
    assert asked.open() == ({"anything": 1}, "meta")
    assert pauses == [0.05, 0.05]


def test_the_pause_is_configured_by_the_environment(monkeypatch):
    monkeypatch.setenv("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", "0.5")
    answers, pauses = [(None, None), (1, None)], []
    fetch = fetcher(Client(), fetch_batch_fn=lambda batch_index: answers.pop(0))
    fetch.pause = lambda seconds: bool(seconds and pauses.append(seconds))
    fetch(0).receive()
    assert pauses == [0.5]


def test_with_a_users_function_a_finite_stream_ends_when_all_is_consumed():
    with pytest.raises(EndOfPartitionError, match="every sample of 'p' is consumed by 'actor'"):
        fetcher(Client(consumed=True), finite=True, fetch_batch_fn=lambda batch_index: (None, None))(0).receive()


def test_a_users_function_that_never_has_anything_times_out_by_name():
    with pytest.raises(BatchTimeoutError, match="fetch_batch_fn has returned none so far"):
        fetcher(Client(), timeout_s=0.0, fetch_batch_fn=lambda batch_index: (None, None))(0).receive()
