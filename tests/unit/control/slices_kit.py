# SPDX-License-Identifier: Apache-2.0
"""Saved states in many slices: how a test reads one, puts one together, and has slices that are small."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import msgspec
import pytest
from control_kit import SAVER, ask

from tests.local_plane import LocalPlane
from transfer_queue import protocol as p
from transfer_queue.control import restoring, saved, snapshot, state

_calls = itertools.count(10**6)


@contextlib.contextmanager
def small_slices(rows: int = 4) -> Iterator[None]:
    """Slices of so few rows, and of two batches, so that small queues have many. What is gone is freed two by two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "ROWS", rows)
        patch.setattr(snapshot, "BATCHES", 2)
        patch.setattr(snapshot, "_PARTITION", 1)
        patch.setattr(state, "PIECE", 2)
        yield


def parts_of(plane: LocalPlane) -> list[bytes]:
    """The whole state as it is now, in slices."""
    frozen = ask(plane, SAVER, p.Freeze)
    parts = [frozen.state, *rest_of(plane, frozen)]
    ask(plane, SAVER, p.Thaw, frozen.id)
    return parts


def rest_of(plane: LocalPlane, frozen: p.Frozen) -> list[bytes]:
    """The other slices of a freeze that has begun."""
    parts: list[bytes] = []
    call = frozen.id
    while len(parts) + 1 < frozen.num_parts:
        frozen = ask(plane, SAVER, p.ReadFrozen, call, len(parts) + 1)
        parts.append(frozen.state)
    return parts


def whole(plane: LocalPlane) -> bytes:
    """The state in one slice, as older versions saved it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "ROWS", 10**6)
        patch.setattr(snapshot, "BATCHES", 10**6)
        (found,) = parts_of(plane)
    return found


def recut(part: bytes) -> list[bytes]:
    """The slices of a state that is one."""
    return [msgspec.msgpack.encode(each) for each in restoring.recut(saved.decode(part))]


def restore_parts(plane: LocalPlane, parts: list[bytes], shift: int = 0) -> int:
    """All but the last one. Returns the number of the call that began it, 0 without any."""
    begun = 0
    for number, part in enumerate(parts[:-1]):
        call = next(_calls)
        begun = begun or call
        for _ in range(2):  # once more, as after a lost answer
            (to,) = plane.handle(SAVER, p.RestorePart(call, begun, number, part, shift), 0.0)
            assert to.reply == p.Done(call)
    return begun
