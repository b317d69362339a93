# SPDX-License-Identifier: Apache-2.0
"""A freeze reads a partition where it lies. Whatever changes it first, the freeze has a copy before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from control_kit import (
    ACTOR,
    CRITIC,
    INT,
    REWARDER,
    ROLLOUT,
    SAVER,
    ack,
    ask,
    clear,
    fetch,
    new_plane,
    publish,
    put,
    register,
    reserve,
    seal,
    send,
)
from slices_kit import parts_of, rest_of, small_slices

from transfer_queue import protocol as p

DECLARED = p.DeclaredField("int8")


class Busy:
    """A plane in the middle of everything. Samples 2 to 13 are there, in puts of four; two more are reserved."""

    def __init__(self, preallocate: int = 1) -> None:
        self.plane = plane = new_plane(preallocate=preallocate)
        for name in ("before", "next"):
            put(plane, 1, partition=name)
        ask(plane, ROLLOUT, p.CreatePartition, "empty")
        ask(plane, "unit", p.JoinUnit, "unit", "host", ["tcp://unit:1"])
        register(plane, "ranks", dp_size=2, tail="drop")
        for _ in range(3):
            put(plane, 4, "x", "y", lengths=[1, 2, 3, 4])
        lies = msgspec.structs.replace(INT, units=[(1, 2)])
        send(plane, ROLLOUT, p.Publish, "p", p.pack_indexes([2, 3]), {"far": lies})
        self.reserved = reserve(plane, 2)
        self.drawn = fetch(plane, 2)
        self.alone = fetch(plane, 2, 0, task="alone")
        self.named = fetch(plane, 1, 0, 0, task="ranks")
        self.unnamed = fetch(plane, 1, 1, task="ranks", client=CRITIC)
        self.keyed = ask(plane, REWARDER, p.ResolveKeys, "p", ["u", "v"], True)
        self.put = ask(plane, REWARDER, p.Reserve, "p", 2)
        fields = {"x": INT, "y": INT}
        publishing = p.Publish(self.put.id, "p", self.put.indexes, fields, completes=self.put.id, uncommitted=True)
        plane.handle(REWARDER, publishing, 0.0)


def after_reset(busy: Busy) -> None:
    ask(busy.plane, ACTOR, p.ResetConsumption, "p", "alone")


def read_all(busy: Busy) -> None:
    """Two tasks have all samples, and none is under way any more."""
    busy.plane.client_gone(ROLLOUT, 0.0)
    busy.plane.client_gone(REWARDER, 0.0)
    fetch(busy.plane, 14, 0, 0, task="over", finite=True, dp_size=1)
    for rank in (0, 1):
        fetch(busy.plane, 7, rank, 0, task="two", finite=True, dp_size=2)


def draw_round(busy: Busy) -> None:
    fetch(busy.plane, 1, 0, 1, task="ranks")


def ended(*args: Any, **kwargs: Any) -> None:
    assert isinstance(fetch(*args, finite=True, **kwargs), p.Ended)


CHANGES: dict[str, Callable[[Busy], Any] | tuple[Callable[[Busy], Any], Callable[[Busy], Any]]] = {
    "reserve": lambda busy: reserve(busy.plane, 1),
    "insert": lambda busy: ask(busy.plane, ROLLOUT, p.Insert, "p", 2, ["later"]),
    "keys": lambda busy: ask(busy.plane, ROLLOUT, p.ResolveKeys, "p", ["w"], True),
    "publish": lambda busy: publish(busy.plane, busy.reserved, "x"),
    "another field": lambda busy: publish(busy.plane, [3, 4], "z", client=REWARDER),
    "seal": lambda busy: seal(busy.plane),
    "a reservation of a preallocated sample is released": lambda busy: busy.plane.client_gone(ROLLOUT, 0.0),
    "a put is taken back": lambda busy: ask(busy.plane, REWARDER, p.Cancel, busy.put.id),
    "an insert is undone": lambda busy: ask(busy.plane, REWARDER, p.Cancel, busy.keyed.id),
    "tags": lambda busy: ask(busy.plane, ROLLOUT, p.SetTags, {"p": {5: {"v": 1}}}, True),
    "a new task": lambda busy: fetch(busy.plane, 99, task="new"),
    "a task is forgotten": lambda busy: ask(busy.plane, ACTOR, p.ForgetTask, "train"),
    "clear": lambda busy: clear(busy.plane, [2, 9]),
    "a batch is drawn": lambda busy: fetch(busy.plane, 2),
    "a batch is given back": lambda busy: ask(busy.plane, ACTOR, p.Cancel, busy.drawn.id),
    "a rank's batch is drawn": lambda busy: fetch(busy.plane, 2, 0, task="alone"),
    "a rank's batch is given back": lambda busy: ask(busy.plane, ACTOR, p.Cancel, busy.alone.id),
    "a round is drawn": draw_round,
    "a drawn batch is given": (draw_round, lambda busy: fetch(busy.plane, 1, 1, task="ranks")),
    "a batch is missed": lambda busy: ask(busy.plane, CRITIC, p.Cancel, busy.unnamed.id),
    "ack": lambda busy: ack(busy.plane, busy.named.token, task="ranks"),
    "reset": lambda busy: ask(busy.plane, ACTOR, p.ResetConsumption, "p"),
    "a replay": (after_reset, lambda busy: fetch(busy.plane, 2, 0, 0, task="alone")),
    "the rest of a replay": (after_reset, lambda busy: fetch(busy.plane, 2, 0, 0, task="alone", skip=1)),
    "the end of a stream": (
        lambda busy: (
            busy.plane.client_gone(ROLLOUT, 0.0), busy.plane.client_gone(REWARDER, 0.0), seal(busy.plane)
        ),
        lambda busy: fetch(busy.plane, 15),
    ),
    "the end of a pass": (read_all, lambda busy: ended(busy.plane, 1, 0, 1, task="over", dp_size=1, pass_start=0)),
    "the end for a rank": (read_all, lambda busy: ended(busy.plane, 1, 0, 1, task="two", dp_size=2)),
    "a number of samples": lambda busy: ask(busy.plane, ROLLOUT, p.CreatePartition, "p", 30),
    "a declaration": lambda busy: ask(busy.plane, ROLLOUT, p.CreatePartition, "p", None, {"d": DECLARED}),
    "a unit is lost": lambda busy: busy.plane.client_gone("unit", 0.0),
}  # fmt: skip


@pytest.fixture
def a_slice_each():
    """A slice for each partition. A freeze that was read once has looked at the first three of them only."""
    with small_slices(rows=1):
        yield


@pytest.mark.parametrize("what", CHANGES)
def test_a_partition_is_copied_before_it_changes(what, a_slice_each):
    busy, change = Busy(preallocate=30 if "preallocated" in what else 1), CHANGES[what]
    if isinstance(change, tuple):
        change[0](busy)
        change = change[1]
    expected, freezes = parts_of(busy.plane), [ask(busy.plane, SAVER, p.Freeze) for _ in range(2)]
    change(busy)
    busy.plane.check_invariants()
    assert parts_of(busy.plane) != expected, "it is a change"
    assert [[each.state, *rest_of(busy.plane, each)] for each in freezes] == [expected] * 2
