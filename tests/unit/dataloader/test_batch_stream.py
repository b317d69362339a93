# SPDX-License-Identifier: Apache-2.0
"""A stream over fetchers made by hand: when it requests, how it ends, what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.dataloader.batch_stream import batch_stream
from transfer_queue.errors import EndOfPartitionError


class Batch:
    """A requested batch, which is a number; counts those that aren't closed."""

    waiting = 0

    def __init__(self, index: int, receive: Callable[[], bool], fail: Exception | None = None) -> None:
        self.index = index
        self.receive = receive
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
    """Batches as numbers. ``events`` are the requests and the opened batches in their order."""

    def __init__(
        self,
        last: int = 1 << 30,
        unreadable: int | None = None,
        broken: tuple[int, Exception, bool] | None = None,
    ) -> None:
        """``broken``: (index, error, whether it is the request that fails, rather than the wait)."""
        self.events: list[str] = []
        self.last = last
        self.unreadable = unreadable
        self.broken = broken

    @property
    def num_requested(self) -> int:
        return sum(event.startswith("request") for event in self.events)

    def __call__(self, index: int) -> Any:
        self.events.append(f"request {index}")
        if self.broken is not None and self.broken[2] and index == self.broken[0]:
            raise self.broken[1]
        return self.make(index)

    def receive(self, index: int) -> bool:
        if index > self.last:
            raise EndOfPartitionError("over")
        if self.broken is not None and index == self.broken[0]:
            raise self.broken[1]
        return True

    def make(self, index: int) -> Any:
        events = self.events

        class Noted(Batch):
            def open(self) -> Any:
                events.append(f"open {index}")
                return super().open()

        return Noted(index, lambda: self.receive(index), KeyError("cleared") if index == self.unreadable else None)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert Batch.waiting == 0


def test_without_prefetching_a_batch_is_requested_when_the_reader_asks_for_it():
    source = Source()
    batches = iter(batch_stream(source, 0, 1, False))
    assert (next(batches)[0], next(batches)[0]) == (0, 1)
    assert source.events == ["request 0", "open 0", "request 1", "open 1"]


def test_the_next_batch_is_requested_before_a_batch_is_copied():
    source = Source()
    batches = iter(batch_stream(source, 0, 1, True))
    assert (next(batches)[0], next(batches)[0]) == (0, 1)
    assert source.events == ["request 0", "request 1", "open 0", "request 2", "open 1"]
    batches.close()


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_batch_is_not_held_once_it_was_handed_out(prefetch):
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
            return Full(index, lambda: self.receive(index))

    batches = iter(batch_stream(Few(last=2), 0, 1, prefetch))
    for _ in range(3):
        next(batches)
    assert list(batches) == []
    assert Values.alive == 0


@settings(max_examples=80, deadline=None)
@given(
    prefetch=st.booleans(),
    stride=st.integers(1, 3),
    count=st.integers(0, 40),
    end=st.sampled_from(["over", "unreadable", "broken", "left"]),
)
def test_every_batch_comes_once_in_order_and_at_most_one_is_requested_ahead(prefetch, stride, count, end):
    source = Source(
        last=(count - 1) * stride,
        unreadable=(count - 1) * stride if end == "unreadable" else None,
        broken=(count * stride, RuntimeError("disk on fire"), count % 2 == 0) if end == "broken" else None,
    )
    if end == "broken":
        source.last = 1 << 30
    stream, taken = batch_stream(source, 0, stride, prefetch), list[Any]()
    batches = iter(stream)

    def read() -> None:
        for batch in batches:
            taken.append(batch)
            assert source.num_requested - len(taken) == prefetch
            if end == "left" and len(taken) == count // 2:
                break

    wrong = {"unreadable": KeyError, "broken": RuntimeError}.get(end) if count or end == "broken" else None
    with pytest.raises(wrong) if wrong else nullcontext():
        read()
    batches.close()
    wanted = {"left": count // 2 or count, "unreadable": max(0, count - 1)}.get(end, count)
    assert [item[0] for item in taken] == list(range(0, wanted * stride, stride))
    assert Batch.waiting == 0
