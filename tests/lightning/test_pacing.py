# SPDX-License-Identifier: Apache-2.0
"""Leave to generate: given once, to whoever asks first, with the version it is good for; nothing of it stays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from producing import rows

import transfer_queue as tq
from lightning_tq import Pacer, TQDataModule, pacing
from lightning_tq.pacing import PARTITION, TASK, Grants
from transfer_queue import BatchMeta, BatchTimeoutError, EndOfPartitionError, StorageFullError, TransferQueueClient
from transfer_queue.errors import InvalidRequestError

Make = Callable[..., TQDataModule]


@pytest.fixture
def client(data: Make) -> TransferQueueClient:
    return data().client


@pytest.fixture
def grants(client: TransferQueueClient) -> Grants:
    made = Grants(client)
    made.begin()
    return made


def test_leave_says_the_newest_version_that_any_of_its_samples_needs(
    client: TransferQueueClient, grants: Grants
) -> None:
    pacer = Pacer(client)
    grants.give(up_to=6, version=0)
    grants.give(up_to=8, version=1)
    grants.give(up_to=8, version=2)  # no more than before: nothing
    assert [pacer.admit(4), pacer.admit(4)] == [0, 1]
    with pytest.raises(BatchTimeoutError, match="leave for 1 samples"):
        pacer.admit(1, timeout_s=0.1)


def test_who_waits_is_let_on_by_the_next_leave_in_order_of_arrival(client: TransferQueueClient, grants: Grants) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Pacer(client).admit, 4, 20.0)
        grants.give(up_to=2, version=0)
        assert not first.done()
        grants.give(up_to=4, version=3)
        assert first.result(20) == 3
        second = pool.submit(Pacer(client).admit, 1, 20.0)
        grants.give(up_to=5, version=4)
        assert second.result(20) == 4


def test_puts_take_turns_in_the_order_of_their_leave(client: TransferQueueClient, grants: Grants) -> None:
    grants.give(up_to=6, version=0)
    slow, fast = Pacer(client), Pacer(client)
    slow.admit(2)
    fast.admit(3)
    with pytest.raises(BatchTimeoutError, match="the leave before number 2 hasn't put its samples yet"), fast.turn(0.1):
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
    assert sorted(client.get_partition_list()) == ["grants", "grants@6"]
    with pytest.raises(InvalidRequestError, match="nothing of that is left"), slow.turn():
        pass


def test_a_put_that_failed_is_made_up_for_in_the_same_turn_and_the_others_go_on_behind_it(
    client: TransferQueueClient, grants: Grants
) -> None:
    grants.give(up_to=8, version=0)
    first, second = Pacer(client), Pacer(client)
    first.admit(4)
    second.admit(4)
    with pytest.raises(StorageFullError, match="no room"), first.turn(timeout_s=20):
        raise StorageFullError("no room in time")
    with pytest.raises(BatchTimeoutError, match="the leave before number 4"), second.turn(timeout_s=0.1):
        raise AssertionError("not its turn")
    order = []
    for name, pacer in {"first": first, "second": second}.items():
        with pacer.turn(timeout_s=20):
            order.append(name)
    assert order == ["first", "second"]
    assert sorted(client.get_partition_list()) == ["grants", "grants@8"]


def test_turns_need_no_room_in_the_queue() -> None:
    storage = {"num_data_storage_units": 1, "total_storage_size": 2, "put_timeout_s": 0.1}
    tq.init({"backend": {"SimpleStorage": storage}})
    client = tq.get_client()
    grants, pacer = Grants(client), Pacer(client)
    grants.begin()
    grants.give(up_to=2, version=0)
    pacer.admit(2)
    with pacer.turn(timeout_s=20):
        client.put(rows(2), partition_id="train")
    grants.end()
    assert client.get_stats()["partitions"]["train"]["samples"] == 2


def test_the_end_of_training_reaches_who_waits_and_voids_what_nobody_took(
    client: TransferQueueClient, grants: Grants
) -> None:
    grants.give(up_to=3, version=0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Pacer(client).admit, 4, 20.0)
        grants.end()
        with pytest.raises(EndOfPartitionError):
            waiting.result(20)
    with pytest.raises(EndOfPartitionError):
        Pacer(client).admit(1)
    assert client.get_stats()["partitions"][PARTITION]["samples"] == 0


@pytest.mark.parametrize("taken", [1, 3, 6, 8])
def test_the_end_of_training_takes_no_leave_back_that_was_taken_and_not_read_yet(
    client: TransferQueueClient, grants: Grants, taken: int
) -> None:
    grants.give(up_to=8, version=3)
    meta = client.get_meta(["version", "number"], taken, PARTITION, task_name=TASK)
    grants.end()
    assert client.get_data(meta)["number"].tolist() == list(range(taken))
    assert client.get_stats()["partitions"][PARTITION]["samples"] == taken
    with pytest.raises(EndOfPartitionError):
        Pacer(client).admit(1)


def test_leave_of_a_training_that_has_ended_is_void_even_where_it_was_just_taken(
    client: TransferQueueClient, grants: Grants
) -> None:
    grants.give(up_to=2, version=0)

    class Slow(Pacer):
        def _take(self, count: int, wait_s: float) -> BatchMeta | None:
            taken = super()._take(count, wait_s)
            grants.end()
            Grants(client).begin()  # the next trainer, which clears what is left of the one before
            return taken

    with pytest.raises(EndOfPartitionError, match="leave for 2 samples is void"):
        Slow(client).admit(2)


def test_the_next_trainer_starts_anew_after_an_end_and_goes_on_after_a_crash(
    client: TransferQueueClient, grants: Grants
) -> None:
    grants.give(up_to=5, version=2)
    assert Pacer(client).admit(4) == 2
    after_crash = Grants(client)
    after_crash.begin()
    assert after_crash.given == 5
    after_crash.give(up_to=6, version=7)
    assert Pacer(client).admit(2) == 7
    after_crash.end()
    after_end = Grants(client)
    after_end.begin()
    assert after_end.given == 0
    after_end.give(up_to=1, version=0)
    again = Pacer(client)
    assert again.admit(1) == 0
    with again.turn(timeout_s=20):
        pass
    assert client.get_partition_list() == ["grants", "grants@1"]


def test_a_long_training_leaves_nothing_in_the_queue(client: TransferQueueClient, grants: Grants) -> None:
    pacer = Pacer(client)
    for step in range(200):
        grants.give(up_to=4 * step + 4, version=step)
        assert pacer.admit(4) == step
        with pacer.turn():
            pass
    assert sorted(client.get_partition_list()) == ["grants", "grants@800"]
    partition = client.get_stats()["partitions"][PARTITION]
    assert (partition["samples"], partition["tasks"][TASK]["in_flight"]) == (0, 0)


def test_a_long_wait_is_reported(
    client: TransferQueueClient, grants: Grants, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "_REPORT_EVERY_S", 0.05)
    with caplog.at_level(logging.WARNING), pytest.raises(BatchTimeoutError):
        Pacer(client).admit(9, timeout_s=0.2)
    assert "waiting for leave for 9 samples: the trainer is behind, or grants fewer at once" in caplog.text


def test_leave_for_no_sample_is_refused(client: TransferQueueClient) -> None:
    with pytest.raises(InvalidRequestError, match="at least 1, got 0"):
        Pacer(client).admit(0)
