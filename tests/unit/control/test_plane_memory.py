# SPDX-License-Identifier: Apache-2.0
"""What a sample costs the controller: bytes of the plane's own memory, counted, and how they are freed."""

from __future__ import annotations

import gc
import itertools
import math
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from control_kit import ACTOR, ROLLOUT, ack, ask, batch, fetch, indexes, publish, put, register

from transfer_queue import protocol as p
from transfer_queue.calls import Turn
from transfer_queue.control.plane import ControlPlane
from transfer_queue.control.state import PlaneConfig

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


def used_before() -> ControlPlane:
    """A plane that has served every verb of these tests once: what is made once is no sample's cost."""
    plane = ControlPlane(PlaneConfig())
    put(plane, 1, "x", "y", partition="before")
    batch(plane, 1, names=("x", "y"), partition="before")
    return plane


def fill(plane: ControlPlane) -> None:
    for _ in range(SAMPLES // PER_PUT):
        put(plane, PER_PUT, "x", "y")


def named(plane: ControlPlane) -> None:
    """As many samples, each with a key and a tag."""
    for start in range(0, SAMPLES, PER_PUT):
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
def test_a_large_partition_that_is_gone_is_freed_in_slices(plane, how):
    names = [f"k{i}" for i in range(50_000)]
    samples = indexes(ask(plane, ROLLOUT, p.ResolveKeys, "p", names, True))
    ask(plane, ROLLOUT, p.SetTags, {"p": {index: {"v": 1} for index in samples}})
    gone = plane.state.partitions["p"]
    plane.calls.turn = Turn(itertools.count(step=1e-3).__next__)
    if how == "clear":
        ask(plane, ACTOR, p.ClearPartition, "p")
    else:
        ask(plane, ACTOR, p.Restore, ask(ControlPlane(), ACTOR, p.Freeze).state)
    assert (plane.state.partitions, plane.next_deadline()) == ({}, -math.inf)
    sizes = [len(gone.keys)]
    while plane.next_deadline() is not None:
        assert plane.expire(0.0) == []
        sizes.append(len(gone.keys))
    assert len(sizes) > 5
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[-1], len(gone.tags)) == (0, 0)
