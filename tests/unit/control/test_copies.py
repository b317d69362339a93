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
    ack,
    ask,
    clear,
    fetch,
    publish,
    put,
    register,
    reserve,
    seal,
    send,
)

from transfer_queue import protocol as p
from transfer_queue.control import snapshot
from transfer_queue.control.plane import ControlPlane
from transfer_queue.control.rows import RowTable
from transfer_queue.control.saved import SavedQueue, decode
from transfer_queue.control.snapshot import Snapshot
from transfer_queue.control.state import PlaneConfig


def read(taken: Snapshot) -> list[bytes]:
    """All slices of its moment."""
    parts: list[bytes] = []
    while len(parts) < taken.num_parts:
        parts.append(taken.part(len(parts)))
    taken.close()
    return parts


def at_once(plane: ControlPlane) -> list[SavedQueue]:
    return list(map(decode, read(Snapshot(plane.state, 0.0))))


DECLARED = p.DeclaredField("int8")


class Busy:
    """A plane in the middle of everything. Samples 2 to 13 are there, in puts of four; two more are reserved."""

    def __init__(self, preallocate: int = 1) -> None:
        self.plane = plane = ControlPlane(PlaneConfig(preallocate=preallocate))
        for name in ("before", "next"):
            put(plane, 1, partition=name)
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
    "ack with a fetch": lambda busy: fetch(busy.plane, 99, 0, 9, task="alone", acks=[busy.alone.token]),
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


@pytest.mark.parametrize("what", CHANGES)
def test_a_partition_is_copied_before_it_changes(what, monkeypatch):
    monkeypatch.setattr(snapshot, "ROWS", 50)  # a slice for each partition, so that nobody has looked at this one yet
    busy, change = Busy(preallocate=30 if "preallocated" in what else 1), CHANGES[what]
    if isinstance(change, tuple):
        change[0](busy)
        change = change[1]
    expected, taken, other = at_once(busy.plane), Snapshot(busy.plane.state, 0.0), Snapshot(busy.plane.state, 0.0)
    change(busy)
    busy.plane.check_invariants()
    assert at_once(busy.plane) != expected, "it is a change"
    for each in (taken, other):
        assert list(map(decode, read(each))) == expected


def test_a_freeze_and_requests_that_change_nothing_copy_nothing(monkeypatch):
    busy = Busy()
    monkeypatch.delattr(RowTable, "frozen")
    expected, taken = at_once(busy.plane), Snapshot(busy.plane.state, 0.0)
    for verb, args in (
        (p.Describe, ("p",)), (p.GetStats, ()), (p.ListKeys, ()), (p.ConsumptionStatus, ("p", "train")),
        (p.ClearSamples, ("p", p.pack_indexes([777]))),
    ):  # fmt: skip
        ask(busy.plane, ACTOR, verb, *args)
    fetch(busy.plane, 99)
    assert list(map(decode, read(taken))) == expected


def test_a_copy_that_failed_is_tried_again_before_anything_changes(monkeypatch):
    busy = Busy()
    expected, taken = at_once(busy.plane), Snapshot(busy.plane.state, 0.0)
    with monkeypatch.context() as patch:
        patch.delattr(RowTable, "frozen")
        assert isinstance(ask(busy.plane, ROLLOUT, p.SealPartition, "p"), p.Failed)
    seal(busy.plane)
    assert list(map(decode, read(taken))) == expected
