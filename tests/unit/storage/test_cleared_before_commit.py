# SPDX-License-Identifier: Apache-2.0
"""Samples that are cleared between a write's publish and its commit: the commit must not bring their values back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from unit_kit import LoneUnit

from transfer_queue.protocol import Done, Request, pack_indexes
from transfer_queue.storage.messages import (
    ColumnHeader,
    Columns,
    Commit,
    Delete,
    Deleted,
    EndSession,
    Read,
    Rows,
    Write,
    Written,
)
from transfer_queue.storage.wire import dense_layout

WRITER = "writer"
WRITE = 7  # the call that writes


def packed(*indexes: int) -> bytes:
    return pack_indexes(np.array(indexes, np.int64))


def asked(unit: LoneUnit, request: Request, frames: Sequence[Any] = (), client: str = WRITER) -> Any:
    (answer,) = unit.handle(client, request, [memoryview(frame) for frame in frames], now=0.0)
    return answer.reply


def written(indexes: Sequence[int]) -> LoneUnit:
    """A unit with an uncommitted write of one byte for each of these indexes."""
    unit = LoneUnit()
    part = ColumnHeader("x", dense_layout("uint8", 1, (1,)), len(indexes), nbytes=len(indexes))
    write = Write(WRITE, packed(*indexes), Columns([part]))
    assert asked(unit, write, [bytes(indexes)]) == Written(WRITE)
    return unit


COMMITS = {
    "by the writer": Commit(8, [WRITE]),
    "by the end of the writer's session": EndSession(8, WRITER, [WRITE]),
    "by a reader": Read(8, packed(3), ["x"]),
}


@pytest.mark.parametrize("commit", COMMITS.values(), ids=COMMITS)
def test_a_commit_stores_only_what_was_not_cleared_since(commit: Request) -> None:
    unit = written([1, 2, 3])
    assert asked(unit, Delete(1, packed(1, 9))) == Deleted(1, 0)
    assert asked(unit, Delete(2, packed(2))) == Deleted(2, 0)
    assert isinstance(asked(unit, commit), Done | Rows)
    assert (unit.stats().samples, unit.stats().live_nbytes, unit.stats().uncommitted_nbytes) == (1, 1, 0)


@pytest.mark.parametrize("clears", [[packed(1, 2, 3)], [packed(1), packed(3, 2)], [packed(1, 2), packed(2, 3)]])
def test_a_write_whose_samples_are_all_cleared_is_dropped_at_once(clears: list[bytes]) -> None:
    unit = written([1, 2, 3])
    for number, indexes in enumerate(clears):
        asked(unit, Delete(number, indexes))
    assert unit.stats().uncommitted_nbytes == 0
    assert asked(unit, Commit(8, [WRITE])) == Done(8)
    assert unit.stats().held_nbytes == 0
