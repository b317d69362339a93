# SPDX-License-Identifier: Apache-2.0
"""A stream over fetchers made by hand: how far ahead, how it ends, what it leaves behind."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Any

import pytest

from transfer_queue.dataloader.batch_stream import BatchStream
from transfer_queue.errors import ClosedError, EndOfPartitionError
from transfer_queue.transport.modes import cancel_descriptor

WAIT_S = 10.0


def never() -> bool:
    return False


class Batch:
    """A number; counts those that are neither opened nor closed."""

    waiting = 0

    def __init__(self, index: int, fail: Exception | None = None) -> None:
        self.index = index
        self.fail = fail
        self.waits = True
        Batch.waiting += 1

    def open(self) -> Any:
        assert self.waits
        if self.fail is not None:
            raise self.fail
        return self.index * 10, f"meta {self.index}"

    def close(self) -> None:
        Batch.waiting -= self.waits
        self.waits = False


class Source:
    """Batches as numbers; ``asked`` grows by the fetches, ``reached`` tells that so many were asked for."""

    def __init__(self, last: int = 1 << 30, park_at: int | None = None, fail: Exception | None = None) -> None:
        self.asked: list[int] = []
        self.last = last
        self.park_at = park_at
        self.fail = fail
        self.parked = threading.Event()
        self.descriptors = os.listdir("/proc/self/fd")

    def __call__(self, pause: Callable[[float], bool]) -> Callable[[int], Any]:
        self.pause = pause
        return self.fetch

    def fetch(self, index: int, meanwhile: Callable[[], None]) -> Any:
        self.asked.append(index)
        if index > self.last:
            raise EndOfPartitionError("over")
        if index == self.park_at:
            meanwhile()
            self.parked.set()
            return self.park()
        return Batch(index, self.fail if index == self.last else None)

    def park(self) -> None:
        descriptor = cancel_descriptor()
        if descriptor is None:
            while not (self.pause(0.01) or self.pause(0.0)):
                pass
            return
        assert select.select([descriptor], [], [], WAIT_S)[0], "nobody woke this fetch"
        raise ClosedError("given up")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "transfer-queue-prefetch"]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_come_in_order_and_end_with_the_partition(ahead):
    stream = BatchStream(Source(last=10), 1, 3, ahead, never)
    assert list(stream) == [(index, index * 10, f"meta {index}") for index in (1, 4, 7, 10)]
    assert (threads(), stream.ahead()) == ([], [])


def test_no_more_than_the_promised_number_is_fetched_ahead():
    source = Source(park_at=6)
    stream = BatchStream(source, 0, 1, 3, never)
    batches = iter(stream)
    assert [next(batches)[0] for _ in range(3)] == [0, 1, 2]
    assert source.asked[-1] <= 5, "3 taken, 3 ahead"
    assert next(batches)[0] == 3
    assert source.parked.wait(WAIT_S)
    assert stream.ahead() == [(40, "meta 4"), (50, "meta 5")]
    batches.close()


def test_without_a_thread_a_batch_is_fetched_when_it_is_asked_for():
    source = Source()
    batches = iter(BatchStream(source, 0, 1, 0, never))
    assert (next(batches)[0], source.asked, threads()) == (0, [0], [])


def test_closing_wakes_a_fetch_that_waits_and_leaves_nothing():
    source = Source(park_at=1)
    batches = iter(BatchStream(source, 0, 1, 2, never))
    assert next(batches)[0] == 0
    assert source.parked.wait(WAIT_S)
    batches.close()
    assert threads() == []
    assert os.listdir("/proc/self/fd") == source.descriptors
    assert Batch.waiting == 0


def test_a_batch_is_handed_over_while_the_next_one_is_awaited():
    source = Source(park_at=3)
    batches = iter(BatchStream(source, 0, 1, 8, never))
    assert [next(batches)[0] for _ in range(3)] == [0, 1, 2]
    assert source.parked.wait(WAIT_S)
    assert Batch.waiting == 0
    batches.close()


def test_a_fetch_that_has_no_time_to_hand_over_the_batch_before_it_hands_it_over_all_the_same():
    def make(pause):
        return lambda index, meanwhile: Batch(index) if index < 3 else None

    assert [item[0] for item in BatchStream(make, 0, 1, 8, never)] == [0, 1, 2]
    assert Batch.waiting == 0


def test_a_batch_that_cannot_be_opened_is_an_error_after_those_before_it():
    batches = iter(BatchStream(Source(last=2, fail=KeyError("cleared")), 0, 1, 8, never))
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    with pytest.raises(KeyError, match="cleared"):
        next(batches)
    assert (threads(), Batch.waiting) == ([], 0)


def test_an_iterator_that_is_dropped_closes_its_stream():
    source = Source(park_at=1)
    batches = iter(BatchStream(source, 0, 1, 2, never))
    next(batches)
    assert source.parked.wait(WAIT_S)
    del batches
    assert threads() == []


def failing(at: int, error: Exception) -> Any:
    def fetch(index: int, meanwhile: Callable[[], None]) -> Any:
        if index == at:
            raise error
        return Batch(index)

    return lambda pause: fetch


def test_an_error_comes_after_the_batches_fetched_before_it():
    batches = iter(BatchStream(failing(2, RuntimeError("disk on fire")), 0, 1, 5, never))
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    with pytest.raises(RuntimeError, match="disk on fire"):
        next(batches)
    assert threads() == []


def test_a_client_closed_by_somebody_else_is_an_error():
    batches = iter(BatchStream(failing(1, ClosedError("this client was closed")), 0, 1, 2, never))
    next(batches)
    with pytest.raises(ClosedError):
        next(batches)


@pytest.mark.parametrize("ahead", [0, 2])
def test_giving_up_ends_a_stream_that_waits(ahead):
    source, given_up = Source(park_at=1), threading.Event()
    batches = iter(BatchStream(source, 0, 1, ahead, given_up.is_set))
    assert next(batches)[0] == 0
    given_up.set()
    assert list(batches) == []
    assert threads() == []


def test_a_batch_is_not_held_once_it_was_handed_out():
    class Values:
        alive = 0

        def __init__(self) -> None:
            Values.alive += 1

        def __del__(self) -> None:
            Values.alive -= 1

    class Full(Batch):
        def open(self) -> Any:
            return Values(), None

    def make(pause):
        return lambda index, meanwhile: Full(index) if index < 3 else None

    for ahead in (0, 1):
        batches = iter(BatchStream(make, 0, 1, ahead, never))
        for _ in range(3):
            next(batches)
        assert list(batches) == []
        assert Values.alive == 0
