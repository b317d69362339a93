# SPDX-License-Identifier: Apache-2.0
"""A stream over fetchers made by hand: how far ahead, how it ends, what it leaves behind."""

from __future__ import annotations

import gc
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


class Asked:
    """A batch that was asked for; counts those that are neither received nor closed."""

    open = 0

    def __init__(self, receive: Callable[[], Any], near: Callable[[], bool]) -> None:
        self._receive = receive
        self.is_near = near
        self.is_open = True
        Asked.open += 1

    def receive(self) -> Any:
        assert self.is_open
        return self._receive()

    def close(self) -> None:
        Asked.open -= self.is_open
        self.is_open = False


class Source:
    """Batches as numbers; ``asked`` grows by the fetches, ``parked`` tells that ``park_at`` is waited for."""

    def __init__(
        self,
        last: int = 1 << 30,
        park_at: int | None = None,
        fail: Exception | None = None,
        near: Callable[[], bool] = lambda: True,
    ) -> None:
        self.asked: list[int] = []
        self.last = last
        self.park_at = park_at
        self.fail = fail
        self.near = near
        self.parked = threading.Event()
        self.descriptors = os.listdir("/proc/self/fd")

    def __call__(self, pause: Callable[[float], bool]) -> Callable[[int], Any]:
        self.pause = pause
        return self.ask

    def ask(self, index: int) -> Any:
        self.asked.append(index)
        near = never if index == self.park_at else self.near
        return None if self.pause(0.0) else Asked(lambda: self.receive(index), near)

    def receive(self, index: int) -> Any:
        if index > self.last:
            raise EndOfPartitionError("over")
        if index == self.park_at:
            self.parked.set()
            return self.park()
        return self.make(index)

    def make(self, index: int) -> Any:
        return Batch(index, self.fail if index == self.last else None)

    def park(self) -> None:
        descriptor = cancel_descriptor()
        if descriptor is None:
            while not (self.pause(0.01) or self.pause(0.0)):
                pass
            return
        assert select.select([descriptor], [], [], WAIT_S)[0], "nobody woke this fetch"
        raise ClosedError("cancelled")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert (threads(), Batch.waiting, Asked.open) == ([], 0, 0)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "transfer-queue-prefetch"]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_come_in_order_and_end_with_the_partition(ahead):
    stream = BatchStream(Source(last=10), 1, 3, ahead, never)
    assert list(stream) == [(index, index * 10, f"meta {index}") for index in (1, 4, 7, 10)]
    assert (threads(), stream.ahead()) == ([], [])


def test_no_more_than_the_promised_number_is_fetched_ahead():
    source = Source(park_at=6)
    stream = BatchStream(source, 0, 1, 3, never, Decided(is_readers=False))
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
    gc.collect()  # else what other tests left might be closed meanwhile
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


class Failing(Source):
    """One batch can't be asked for, or received."""

    def __init__(self, at: int, error: BaseException, asking: bool = False) -> None:
        super().__init__()
        self.at, self.error, self.asking = at, error, asking

    def ask(self, index: int) -> Any:
        if self.asking and index == self.at:
            raise self.error
        return super().ask(index)

    def receive(self, index: int) -> Any:
        if index == self.at:
            raise self.error
        return super().receive(index)


@pytest.mark.parametrize("asking", [False, True])
def test_an_error_comes_after_the_batches_fetched_before_it(asking):
    batches = iter(BatchStream(Failing(2, RuntimeError("disk on fire"), asking), 0, 1, 5, never))
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    with pytest.raises(RuntimeError, match="disk on fire"):
        next(batches)
    assert threads() == []


def test_a_client_closed_by_somebody_else_is_an_error():
    batches = iter(BatchStream(Failing(1, ClosedError("this client was closed")), 0, 1, 2, never))
    next(batches)
    with pytest.raises(ClosedError):
        next(batches)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_stop_ends_a_stream_that_waits(ahead):
    source, stopped = Source(park_at=1), threading.Event()
    batches = iter(BatchStream(source, 0, 1, ahead, stopped.is_set))
    assert next(batches)[0] == 0
    stopped.set()
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

    class Few(Source):
        def make(self, index: int) -> Any:
            return Full(index)

    for ahead in (0, 1):
        batches = iter(BatchStream(Few(last=2), 0, 1, ahead, never))
        for _ in range(3):
            next(batches)
        assert list(batches) == []
        assert Values.alive == 0


# ---- a reader that fetches itself ----


class Noting(Source):
    """Notes in which thread each batch was opened. The thread that fetches ahead gets no batch before it is wanted."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(**kw)
        self.opened_by: list[str] = []
        self.wanted = threading.Semaphore(0)

    def receive(self, index: int) -> Any:
        mine = threading.current_thread().name == ME
        while not self.wanted.acquire(blocking=not mine, timeout=None if mine else 0.01) and not mine:
            if self.pause(0.0):
                return None
        return super().receive(index)

    def make(self, index: int) -> Any:
        opened_by = self.opened_by

        class Noted(Batch):
            def open(self) -> Any:
                opened_by.append(threading.current_thread().name)
                return super().open()

        return Noted(index, self.fail if index == self.last else None)

    def waits_for(self, name: str, batches: Iterator[Any]) -> None:
        """Read on until this thread opened a batch."""
        deadline = time.monotonic() + WAIT_S
        while self.opened_by[-1:] != [name]:
            assert time.monotonic() < deadline, self.opened_by[-20:]
            self.read(batches)

    def read(self, batches: Iterator[Any]) -> Any:
        self.wanted.release()
        return next(batches)


ME = threading.current_thread().name
PREFETCH = "transfer-queue-prefetch"


class Decided:
    """It is the reader's turn, or it is not."""

    def __init__(self, is_readers: bool = True) -> None:
        self.is_readers = is_readers

    def asked(self, now: float) -> None:
        """Whatever."""

    taken = asked


def test_a_reader_whose_turn_it_is_does_the_work_himself_until_a_batch_is_not_there():
    source = Noting(last=10_000)
    batches = iter(BatchStream(source, 0, 1, 2, never, Decided()))
    source.waits_for(ME, batches)
    assert len(source.asked) == len(source.opened_by) + 1, "the next one is asked for before this one is opened"
    source.near = never
    source.waits_for(PREFETCH, batches)
    source.near = lambda: True
    source.waits_for(ME, batches)
    batches.close()


def test_when_it_is_not_the_readers_turn_any_more_the_thread_goes_on():
    source, turns = Noting(last=10_000), Decided()
    batches = iter(BatchStream(source, 0, 1, 2, never, turns))
    source.waits_for(ME, batches)
    turns.is_readers = False
    last = len(source.opened_by)
    for _ in range(20):
        source.read(batches)
    assert set(source.opened_by[last:]) == {PREFETCH}
    batches.close()


def test_while_the_reader_fetches_itself_no_more_than_one_batch_is_ahead():
    source = Noting(last=10_000)
    stream = BatchStream(source, 0, 1, 5, never, Decided())
    batches = iter(stream)
    source.waits_for(ME, batches)
    assert (len(source.asked) - len(source.opened_by), stream.ahead()) == (1, [])
    batches.close()


@pytest.mark.parametrize("near", [True, False])
def test_a_stop_ends_a_stream_whose_reader_fetches_itself(near):
    source, stopped = Noting(park_at=60), threading.Event()
    batches = iter(BatchStream(source, 0, 1, 2, stopped.is_set, Decided()))
    source.waits_for(ME, batches)
    source.near = lambda: near
    stopped.set()
    assert len(list(batches)) <= 3, "what was asked for before"


@pytest.mark.parametrize("error", [RuntimeError("disk on fire"), KeyboardInterrupt()])
def test_what_goes_wrong_in_the_readers_hands_ends_the_stream(error):
    class Breaking(Noting):
        def receive(self, index: int) -> Any:
            if threading.current_thread().name == ME:
                raise error
            return super().receive(index)

    source = Breaking(last=10_000)
    batches = iter(BatchStream(source, 0, 1, 2, never, Decided()))
    with pytest.raises(type(error)):
        source.waits_for(ME, batches)
    assert list(batches) == []


class Whims:
    """Says yes and no as it was told, again and again, to every caller; also whose turn it is."""

    def __init__(self, answers: list[bool]) -> None:
        self._answers = itertools.cycle(answers)

    def __call__(self, now: float = 0.0) -> bool:
        return next(self._answers)

    is_readers = property(__call__)
    asked = taken = __call__


@settings(max_examples=150, deadline=None)
@given(
    ahead=st.integers(1, 4),
    stride=st.integers(1, 3),
    count=st.integers(0, 40),
    near=st.lists(st.booleans(), min_size=1, max_size=8),
    turns=st.lists(st.booleans(), min_size=1, max_size=8),
    end=st.sampled_from(["over", "unreadable", "broken", "left"]),
)
def test_whoever_does_it_every_batch_comes_once_in_order(ahead, stride, count, near, turns, end):
    """Turns change whenever anybody looks whose turn it is, and when a batch is not there."""
    last = (count - 1) * stride
    source: Source = Source(last=last, near=Whims(near))
    if end == "unreadable":
        source = Source(last=last, near=Whims(near), fail=KeyError("cleared"))
    if end == "broken":
        source = Failing(count * stride, RuntimeError("disk on fire"), asking=count % 2 == 0)
        source.near = Whims(near)
    stream, taken = BatchStream(source, 0, stride, ahead, never, Whims(turns)), list[Any]()
    batches = iter(stream)

    def read() -> None:
        for batch in batches:
            taken.append(batch)
            assert len(source.asked) - len(taken) <= ahead, "fetched ahead, and nobody waits for one more"
            if end == "left" and len(taken) == count // 2:
                break

    wrong = {"unreadable": KeyError, "broken": RuntimeError}.get(end) if count or end == "broken" else None
    with pytest.raises(wrong) if wrong else nullcontext():
        read()
    batches.close()
    wanted = {"left": count // 2 or count, "unreadable": max(0, count - 1)}.get(end, count)
    assert [item[0] for item in taken] == list(range(0, wanted * stride, stride))
    assert (threads(), stream.ahead() if end == "over" else [], Batch.waiting, Asked.open) == ([], [], 0, 0)
