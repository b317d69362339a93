# SPDX-License-Identifier: Apache-2.0
"""How many batches a bounded queue has room for before a checkpoint must be saved."""

from __future__ import annotations

import pytest

from lightning_tq.queue_room import Room


@pytest.mark.parametrize(
    ("samples", "batch", "kept", "left", "look"),
    [(100, 10, 0, 5, 2), (100, 10, 4, 1, 1), (100, 10, 5, 0, 1), (40, 10, 0, 1, 1), (40, 10, 1, 0, 1)],
)
def test_half_of_the_room_and_three_batches_are_left_for_what_comes(
    samples: float, batch: float, kept: int, left: int, look: int
) -> None:
    room = Room(samples, batch)
    assert (room.batches_left(kept), room.batches_until_look(kept)) == (left, look)


def test_heads_of_groups_take_room() -> None:
    states = {"waiting": 28, "running": 2, "ready": 1, "drawn": 3, "trained": 100, "rejected": 7}
    task = {"in_flight": 1, "in_flight_samples": 6, "consumed": 6}
    partitions = {"train": {"samples": 8, "tasks": {"learn": task}, "groups": {"states": states}}}
    found = Room.of({"partitions": partitions, "capacity": 60}, [], "learn", 1, None)
    assert found == Room(60 - 34, 6, 6)


@pytest.mark.parametrize(
    ("samples", "given", "left"), [(100, 0, 7), (100, 40, 3), (100, 70, 0), (100, 100, -3), (1e9, 0, 100)]
)
def test_three_batches_are_left_where_only_finished_partitions_are_cleared(
    samples: float, given: float, left: int
) -> None:
    assert Room(samples, 10, given).batches_until_full == left
