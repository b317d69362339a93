# SPDX-License-Identifier: Apache-2.0
"""What a sample costs the controller: bytes of the plane's own memory, counted, and how they are freed."""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from control_kit import (
    ACTOR,
    ROLLOUT,
    SAVER,
    ack,
    ask,
    batch,
    fetch,
    indexes,
    load,
    new_plane,
    publish,
    put,
    register,
    save,
    short_turns,
)

from transfer_queue import protocol as p

SAMPLES = 60_000
PER_PUT = 1000
PER_BATCH = 100
PROMISED = 200
"""Bytes per sample that 1e6 samples may take."""
SLIM = 60
"""What samples without key and tags may take: columns only. One Python object each, be it an int in a list, is more."""
TASK = 20
"""What a task adds per sample of the partition."""


@pytest.fixture
def grown() -> Iterator[Callable[[], float]]:
    """Bytes per sample that were taken since this was called last."""
    last = 0

    def since() -> float:
        nonlocal last
        gc.collect()
        before, last = last, tracemalloc.get_traced_memory()[0]
        return (last - before) / SAMPLES

    tracemalloc.start()
    yield since
    tracemalloc.stop()


def used_before() -> Any:
    """A plane that has served every verb of these tests once: what is made once is no sample's cost."""
    plane = new_plane()
    put(plane, 1, "x", "y", partition="before")
    batch(plane, 1, names=("x", "y"), partition="before")
    return plane


def fill(plane: Any) -> None:
    for _ in range(SAMPLES // PER_PUT):
        put(plane, PER_PUT, "x", "y")


def named(plane: Any, count: int = SAMPLES) -> None:
    """As many samples, each with a key and a tag."""
    for start in range(0, count, PER_PUT):
        keys = [f"rollout-{number:07d}" for number in range(start, start + PER_PUT)]
        samples = indexes(ask(plane, ROLLOUT, p.ResolveKeys, "p", keys, True))
        publish(plane, samples, "x", "y", tags={index: {"score": 0.5} for index in samples})


def test_a_sample_with_two_fields_takes_a_row_of_numbers(grown):
    plane = used_before()
    grown()
    fill(plane)
    assert 0 < grown() < SLIM < PROMISED


def test_a_task_that_has_drawn_half_of_them_adds_little(grown):
    plane = used_before()
    fill(plane)
    grown()
    for _ in range(SAMPLES // PER_BATCH // 2):
        batch(plane, PER_BATCH, names=("x", "y"))
    assert 0 < grown() < TASK


def test_a_task_of_two_ranks_whose_batches_are_acknowledged_adds_little(grown):
    plane = used_before()
    fill(plane)
    register(plane, dp_size=2)
    grown()
    for number in range(SAMPLES // PER_BATCH // 4):
        for rank in range(2):
            token = fetch(plane, PER_BATCH, rank, number, names=("x", "y")).token
            assert ack(plane, token) == 1
    assert 0 < grown() < TASK


def test_a_task_whose_batches_nobody_has_settled_yet_keeps_them_and_adds_little(grown):
    plane = used_before()
    fill(plane)
    grown()
    for number in range(SAMPLES // PER_BATCH // 2):
        batch(plane, PER_BATCH, 0, number, names=("x", "y"))
    assert 0 < grown() < TASK


def test_cleared_samples_of_a_writer_who_left_cost_nothing(grown):
    plane = used_before()
    grown()
    fill(plane)
    plane.received(ACTOR, [ask(plane, ACTOR, p.ClearPartition, "p").id])
    plane.client_gone(ROLLOUT, now=0.0)
    assert grown() < 0.2


def test_the_count_notices_what_is_kept_per_sample_in_python_objects(grown):
    plane = used_before()
    grown()
    named(plane)
    assert PROMISED < grown() < 2 * PROMISED, "a key in two dictionaries, a number to find it by, and packed tags"


@pytest.mark.parametrize("how", ["clear", "restore"])
def test_a_large_partition_that_is_gone_is_freed_in_slices(grown, how):
    plane, empty = used_before(), save(used_before())
    grown()
    named(plane, SAMPLES // 3)
    taken = grown()
    plane.client_gone(ROLLOUT, now=0.0, died=False)
    short_turns(plane, 2)
    if how == "clear":
        plane.received(ACTOR, [ask(plane, ACTOR, p.ClearPartition, "p").id])
    else:
        plane.received(SAVER, [load(plane, empty).id])
    assert ask(plane, ACTOR, p.ListPartitions).names == ["before"]
    freed = [-grown()]
    while plane.next_deadline() == -math.inf:
        assert plane.expire(0.0) == []
        freed.append(-grown())
    assert len(freed) > 5
    assert 0 < max(freed[:-1]) < taken / 8, "then only tables without entries are left"
    assert sum(freed) > 0.99 * taken
