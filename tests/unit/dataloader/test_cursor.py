# SPDX-License-Identifier: Apache-2.0
"""The memory that a loader shares with its workers: where an iteration starts, and when it is over."""

from __future__ import annotations

import multiprocessing

import pytest

from transfer_queue.dataloader.cursor import Cursor, Start


def test_a_worker_that_joins_reads_where_the_iteration_starts():
    cursor = Cursor()
    for number, start in enumerate([Start("train@0"), Start("Übung", 7, 2), Start("", 3)], start=1):
        assert cursor.open(start) == number
        assert cursor.start_of(cursor.join()) == start


def test_a_worker_that_comes_late_is_told_that_its_iteration_is_over():
    cursor = Cursor()
    cursor.open(Start("first"))
    cursor.open(Start("second"))
    assert cursor.start_of(cursor.join()) is None
    assert cursor.start_of(cursor.join()) == Start("second")


def test_an_iteration_is_over_when_given_up_or_when_the_next_is_opened():
    cursor = Cursor()
    first = cursor.open(Start("p"))
    assert not cursor.is_over(first)
    second = cursor.open(Start("p"))
    assert (cursor.is_over(first), cursor.is_over(second)) == (True, False)
    cursor.cancel(second)
    cursor.cancel(first)  # the older iterator is collected after the newer one
    assert cursor.is_over(second)


def _told(cursor: Cursor, go, answers) -> None:
    go.get()
    answers.put((cursor.start_of(cursor.join()), cursor.is_over(1)))


def test_other_processes_see_what_the_loader_writes_later():
    context = multiprocessing.get_context("fork")
    cursor, go, answers = Cursor(), context.SimpleQueue(), context.SimpleQueue()
    cursor.open(Start("early"))
    cursor._joined = 1  # as in a worker that has served the first iteration
    process = context.Process(target=_told, args=(cursor, go, answers))
    process.start()
    cursor.open(Start("late", 4, 1))
    go.put(None)
    told = answers.get()
    process.join()
    process.close()
    go.close()
    answers.close()
    assert told == (Start("late", 4, 1), True)


@pytest.mark.parametrize(
    ("place", "text"),
    [(("é" * 513,), "1024 bytes, got 1026"), (("p", -1), "batch -1"), (("p", 0, -2), "micro-batch -2")],
)
def test_a_place_that_cannot_be_is_refused(place, text):
    with pytest.raises(ValueError, match=text):
        Start(*place)
