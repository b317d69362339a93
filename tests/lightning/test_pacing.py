# SPDX-License-Identifier: Apache-2.0
"""Permits are given once, in order of arrival, with their policy version; none stay in the queue."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from producing import rows

import transfer_queue as tq
from lightning_tq import Pacer, TQDataModule, producers
from lightning_tq.producers import pacing
from lightning_tq.producers.pacing import PACER_TASK, PERMITS_PARTITION, Permits
from transfer_queue import BatchMeta, BatchTimeoutError, EndOfPartitionError, StorageFullError, TransferQueueClient
from transfer_queue.errors import InvalidRequestError

Make = Callable[..., TQDataModule]


@pytest.fixture
def client(data: Make) -> TransferQueueClient:
    return data().client


@pytest.fixture
def permits(client: TransferQueueClient) -> Permits:
    made = Permits(client)
    made.begin()
    return made


def test_admit_returns_the_newest_version_among_its_permits(client: TransferQueueClient, permits: Permits) -> None:
    pacer = Pacer(client)
    permits.issue(up_to=6, version=0)
    permits.issue(up_to=8, version=1)
    permits.issue(up_to=8, version=2)  # no more than before
    assert [pacer.admit(4), pacer.admit(4)] == [0, 1]
    with pytest.raises(BatchTimeoutError, match="permits for 1 samples"):
        pacer.admit(1, timeout_s=0.1)


def test_waiting_producers_get_the_next_permits_in_order_of_arrival(
    client: TransferQueueClient, permits: Permits
) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Pacer(client).admit, 4, 20.0)
        permits.issue(up_to=2, version=0)
        assert not first.done()
        permits.issue(up_to=4, version=3)
        assert first.result(20) == 3
        second = pool.submit(Pacer(client).admit, 1, 20.0)
        permits.issue(up_to=5, version=4)
        assert second.result(20) == 4


def test_puts_take_turns_in_the_order_of_their_permits(client: TransferQueueClient, permits: Permits) -> None:
    permits.issue(up_to=6, version=0)
    slow, fast = Pacer(client), Pacer(client)
    slow.admit(2)
    fast.admit(3)
    with (
        pytest.raises(BatchTimeoutError, match="the samples of the permits before number 2 were not put yet"),
        fast.turn(0.1),
    ):
        raise AssertionError("not its turn")
    order = []

    def put() -> None:
        with fast.turn(timeout_s=20):
            order.append("fast")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(put)
        with slow.turn(timeout_s=20):
            order.append("slow")
        waiting.result(20)
    slow.admit(1)
    with slow.turn(timeout_s=20):
        order.append("slow again")
    assert order == ["slow", "fast", "slow again"]
    assert sorted(client.get_partition_list()) == ["permits", "permits@6"]
    with pytest.raises(InvalidRequestError, match="all of them are used"), slow.turn():
        pass


def test_a_failed_put_is_repeated_in_the_same_turn_and_the_others_follow(
    client: TransferQueueClient, permits: Permits
) -> None:
    permits.issue(up_to=8, version=0)
    first, second = Pacer(client), Pacer(client)
    first.admit(4)
    second.admit(4)
    with pytest.raises(StorageFullError, match="no room"), first.turn(timeout_s=20):
        raise StorageFullError("no room in time")
    with pytest.raises(BatchTimeoutError, match="the permits before number 4"), second.turn(timeout_s=0.1):
        raise AssertionError("not its turn")
    order = []
    for name, pacer in {"first": first, "second": second}.items():
        with pacer.turn(timeout_s=20):
            order.append(name)
    assert order == ["first", "second"]
    assert sorted(client.get_partition_list()) == ["permits", "permits@8"]


def test_turns_need_no_space_in_the_queue() -> None:
    storage = {"num_data_storage_units": 1, "total_storage_size": 2, "put_timeout_s": 0.1}
    tq.init({"backend": {"SimpleStorage": storage}})
    client = tq.get_client()
    permits, pacer = Permits(client), Pacer(client)
    permits.begin()
    permits.issue(up_to=2, version=0)
    pacer.admit(2)
    with pacer.turn(timeout_s=20):
        client.put(rows(2), partition_id="train")
    permits.end()
    assert client.get_stats()["partitions"]["train"]["samples"] == 2


def test_the_end_of_training_ends_waits_and_voids_unused_permits(client: TransferQueueClient, permits: Permits) -> None:
    permits.issue(up_to=3, version=0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Pacer(client).admit, 4, 20.0)
        permits.end()
        with pytest.raises(EndOfPartitionError):
            waiting.result(20)
    with pytest.raises(EndOfPartitionError):
        Pacer(client).admit(1)
    assert client.get_stats()["partitions"][PERMITS_PARTITION]["samples"] == 0


@pytest.mark.parametrize("taken", [1, 3, 6, 8])
def test_the_end_of_training_keeps_permits_that_were_taken_and_not_read_yet(
    client: TransferQueueClient, permits: Permits, taken: int
) -> None:
    permits.issue(up_to=8, version=3)
    meta = client.get_meta(["version", "number"], taken, PERMITS_PARTITION, task_name=PACER_TASK)
    permits.end()
    assert client.get_data(meta)["number"].tolist() == list(range(taken))
    assert client.get_stats()["partitions"][PERMITS_PARTITION]["samples"] == taken
    with pytest.raises(EndOfPartitionError):
        Pacer(client).admit(1)


def test_permits_of_an_ended_training_are_void_even_if_just_taken(
    client: TransferQueueClient, permits: Permits, monkeypatch: pytest.MonkeyPatch
) -> None:
    permits.issue(up_to=2, version=0)

    def take_slowly(*args: Any) -> BatchMeta | None:
        taken = producers.next_samples(*args)
        permits.end()
        Permits(client).begin()  # the next trainer clears what is left
        return taken

    monkeypatch.setattr(pacing, "next_samples", take_slowly)
    with pytest.raises(EndOfPartitionError, match="the permits for 2 samples are void"):
        Pacer(client).admit(2)


def test_the_next_trainer_starts_again_after_an_end_and_continues_after_a_crash(
    client: TransferQueueClient, permits: Permits
) -> None:
    permits.issue(up_to=5, version=2)
    assert Pacer(client).admit(4) == 2
    after_crash = Permits(client)
    after_crash.begin()
    assert after_crash.issued == 5
    after_crash.issue(up_to=6, version=7)
    assert Pacer(client).admit(2) == 7
    after_crash.end()
    after_end = Permits(client)
    after_end.begin()
    assert after_end.issued == 0
    after_end.issue(up_to=1, version=0)
    again = Pacer(client)
    assert again.admit(1) == 0
    with again.turn(timeout_s=20):
        pass
    assert client.get_partition_list() == ["permits", "permits@1"]


def test_a_long_training_leaves_nothing_in_the_queue(client: TransferQueueClient, permits: Permits) -> None:
    pacer = Pacer(client)
    for step in range(200):
        permits.issue(up_to=4 * step + 4, version=step)
        assert pacer.admit(4) == step
        with pacer.turn():
            pass
    assert sorted(client.get_partition_list()) == ["permits", "permits@800"]
    partition = client.get_stats()["partitions"][PERMITS_PARTITION]
    assert (partition["samples"], partition["tasks"][PACER_TASK]["in_flight"]) == (0, 0)


def test_a_long_wait_is_reported(
    client: TransferQueueClient, permits: Permits, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producers, "REPORT_EVERY_S", 0.05)
    with caplog.at_level(logging.WARNING), pytest.raises(BatchTimeoutError):
        Pacer(client).admit(9, timeout_s=0.2)
    assert "waiting for permits for 9 samples: the trainer is behind, or issues fewer at once" in caplog.text


def test_a_request_for_no_permits_is_refused(client: TransferQueueClient) -> None:
    with pytest.raises(InvalidRequestError, match="at least 1, got 0"):
        Pacer(client).admit(0)
