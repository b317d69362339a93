# SPDX-License-Identifier: Apache-2.0
"""Requests that no client of ours makes: a unit refuses them, keeps nothing of them, and goes on."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.storage.arena_kit import PAGE, ArenaClient, ArenaUnit, indexes_of, of_arena, refused, row_layout
from tests.unit.storage.unit_kit import Asker
from transfer_queue.protocol import Failed, pack_indexes
from transfer_queue.storage.messages import ColumnHeader, Columns, Read, Write
from transfer_queue.storage.wire import ragged_layout

KIB = 1024


@pytest.fixture
def small() -> Asker:
    return Asker(capacity_bytes=100 * KIB)


@pytest.mark.parametrize(
    ("request_", "code", "fragment"),
    [
        (Write(1, b"123", Columns([])), "ProtocolError", "indexes are 8 bytes each"),
        (Read(1, b"123", ["a"]), "ProtocolError", "indexes are 8 bytes each"),
        (Read(1, pack_indexes(np.array([4])), ["a"]), "StorageKeyNotFoundError", "field 'a' for sample 4"),
    ],
)
def test_a_bad_request_is_answered_and_the_unit_lives_on(small, request_, code, fragment):
    ((_, failed),) = small.ask(request_)
    assert (type(failed), failed.id, failed.code) == (Failed, 1, code)
    assert fragment in failed.text
    assert small.write(1, 10) == [("me", "written 1")]


def test_a_malformed_write_fails_in_its_own_turn_although_it_would_have_to_wait(small):
    small.write(0, 80)
    columns = Columns([ColumnHeader("a", ragged_layout("uint8", 1, 1), 1)])
    broken = Write(small.number(), pack_indexes(np.array([1])), columns, 10.0)
    half_of_a_length = np.zeros(4, np.uint8)
    ((client, failed),) = small.ask(broken, [np.zeros(60 * KIB, np.uint8), half_of_a_length], client="other")
    assert (client, type(failed), failed.id, failed.code) == ("other", Failed, broken.id, "ProtocolError")
    assert small.delete(0) == [("me", f"done {small.calls}")]


@pytest.fixture
def unit() -> ArenaUnit:
    return ArenaUnit(pages=10)


@pytest.fixture
def me(unit) -> ArenaClient:
    return ArenaClient(unit, "me")


@pytest.fixture
def other(unit) -> ArenaClient:
    return ArenaClient(unit, "other")


def part(offset: int, nbytes: int, rows: int = 1, **more) -> ColumnHeader:
    return ColumnHeader("a", row_layout(nbytes), rows, offset=offset, nbytes=nbytes * rows, **more)


BAD_PARTS = {
    "beyond the end": lambda at: [part(at + PAGE, 3 * PAGE + 1)],
    "before the beginning": lambda at: [part(at - PAGE, PAGE)],
    "far away": lambda at: [part(at + (1 << 50), PAGE)],
    "overlapping": lambda at: [part(at, 2 * PAGE), part(at + PAGE, PAGE)],
    "overlapping within a page": lambda at: [part(at, 10), part(at + 16, 10)],
    "the same twice": lambda at: [part(at, PAGE), part(at, PAGE)],
    "not on a page": lambda at: [part(at + 8, PAGE)],
    "of no bytes": lambda at: [ColumnHeader("a", row_layout(0), 1, offset=at, nbytes=0)],
    "of fewer than no bytes": lambda at: [ColumnHeader("a", row_layout(8), 1, offset=at, nbytes=-PAGE), part(at, PAGE)],
    "of another size than its rows": lambda at: [ColumnHeader("a", row_layout(8), 3, offset=at, nbytes=8)],
    "of rows that the write does not name": lambda at: [part(at, 8, rows=5)],
    "of no rows": lambda at: [ColumnHeader("a", row_layout(8), 0, offset=at, nbytes=8)],
    "of rows out of order": lambda at: [part(at, PAGE, selection=0)],
    "whose shapes are missing": lambda at: [ColumnHeader("a", ragged_layout("uint8", 1, 1), 1, offset=at, nbytes=8)],
    "at positions of no table": lambda at: [part(at, 8, positions=3)],
}


@pytest.mark.parametrize("parts", BAD_PARTS.values(), ids=BAD_PARTS)
def test_a_write_with_a_bad_part_is_refused_and_nothing_leaks(me, other, unit, parts):
    other.put({100: 1})
    lease, at = me.leased(4)
    tables = [pack_indexes(np.zeros(1, np.int64))]
    refused(me.one(Write(me.number(), indexes_of([1, 2]), Columns(parts(at), tables, lease))), "")
    stats = unit.stats()
    assert (of_arena(unit), stats.values, stats.uncommitted_nbytes) == ((1, 0, 0), 1, 0)
    me.put({1: 3, 2: 4})
    assert me.values([1, 2, 100]) == {1: 3, 2: 4, 100: 1}
