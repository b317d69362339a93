# SPDX-License-Identifier: Apache-2.0
"""BackgroundWorker: one item is in work, the newest waits, and every failure is raised once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from lightning_tq.callbacks.background_worker import BackgroundWorker

Make = Callable[[Callable[[str], None]], BackgroundWorker[str]]


@pytest.fixture
def worker() -> Iterator[Make]:
    made: list[BackgroundWorker[str]] = []

    def make(work: Callable[[str], None]) -> BackgroundWorker[str]:
        made.append(BackgroundWorker("test-background", work))
        return made[-1]

    yield make
    for each in made:
        each.stop(20.0)


class Gate:
    """Work that records its items and blocks until the gate is opened."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, item: str) -> None:
        self.done.append(item)
        self.reached.set()
        assert self.opened.wait(20)


def test_a_newer_item_replaces_the_waiting_one_which_is_returned(worker: Make) -> None:
    gate = Gate()
    work = worker(gate)
    assert work.submit("a", replace=True) is None
    assert gate.reached.wait(20)
    assert [work.submit(item, replace=True) for item in "bcd"] == [None, "b", "c"]
    gate.opened.set()
    work.flush()
    assert gate.done == ["a", "d"]


def test_without_replacing_a_third_item_waits_for_the_second_to_begin(worker: Make) -> None:
    gate = Gate()
    work = worker(gate)
    for item in "ab":
        work.submit(item, replace=False)
    third = threading.Thread(target=lambda: work.submit("c", replace=False))
    third.start()
    assert third.is_alive()
    gate.opened.set()
    third.join(20)
    work.flush()
    assert gate.done == ["a", "b", "c"]


def test_a_failure_is_raised_at_the_next_call_and_discards_the_waiting_item(worker: Make) -> None:
    gate = Gate()

    def fail(item: str) -> None:
        gate(item)
        if item == "a":
            raise ValueError("no room for a")

    work = worker(fail)
    work.submit("a", replace=True)
    assert gate.reached.wait(20)
    work.submit("b", replace=True)
    gate.opened.set()
    with pytest.raises(ValueError, match="no room for a"):
        work.flush()
    work.check()
    work.submit("c", replace=True)
    work.flush()
    assert gate.done == ["a", "c"]


def test_stop_discards_the_waiting_item_and_ends_the_thread(worker: Make) -> None:
    gate = Gate()
    work = worker(gate)
    work.submit("a", replace=True)
    assert gate.reached.wait(20)
    work.submit("b", replace=True)
    gate.opened.set()
    work.stop(20.0)
    work.stop(20.0)
    assert gate.done in (["a"], ["a", "b"])  # the work on "b" may have started before the stop
    assert "test-background" not in {thread.name for thread in threading.enumerate()}
