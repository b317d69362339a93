# SPDX-License-Identifier: Apache-2.0
"""Background: one item is worked on, the newest waits, and the owner hears of every failure once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from lightning_tq.background import Background

Make = Callable[[Callable[[str], None]], Background[str]]


@pytest.fixture
def background() -> Iterator[Make]:
    made: list[Background[str]] = []

    def make(work: Callable[[str], None]) -> Background[str]:
        made.append(Background("test-background", work))
        return made[-1]

    yield make
    for each in made:
        each.stop(20.0)


class Gate:
    """Work that notes its items and stands still at the gate until it is opened."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, item: str) -> None:
        self.done.append(item)
        self.reached.set()
        assert self.opened.wait(20)


def test_what_waits_is_replaced_by_what_is_newer_and_handed_back(background: Make) -> None:
    gate = Gate()
    work = background(gate)
    assert work.submit("a", replace=True) is None
    assert gate.reached.wait(20)
    assert [work.submit(item, replace=True) for item in "bcd"] == [None, "b", "c"]
    gate.opened.set()
    work.flush()
    assert gate.done == ["a", "d"]


def test_without_replacing_a_third_item_waits_for_the_second_to_begin(background: Make) -> None:
    gate = Gate()
    work = background(gate)
    for item in "ab":
        work.submit(item, replace=False)
    third = threading.Thread(target=lambda: work.submit("c", replace=False))
    third.start()
    assert third.is_alive()
    gate.opened.set()
    third.join(20)
    work.flush()
    assert gate.done == ["a", "b", "c"]


def test_a_failure_is_raised_once_where_the_owner_calls_next_and_voids_what_waits(background: Make) -> None:
    gate = Gate()

    def fail(item: str) -> None:
        gate(item)
        if item == "a":
            raise ValueError("no room for a")

    work = background(fail)
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


def test_stopping_voids_what_waits_and_ends_the_thread(background: Make) -> None:
    gate = Gate()
    work = background(gate)
    work.submit("a", replace=True)
    assert gate.reached.wait(20)
    work.submit("b", replace=True)
    gate.opened.set()
    work.stop(20.0)
    work.stop(20.0)
    assert gate.done in (["a"], ["a", "b"])  # "b" may have been begun before the stop
    assert "test-background" not in {thread.name for thread in threading.enumerate()}
