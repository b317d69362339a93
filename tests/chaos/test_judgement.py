# SPDX-License-Identifier: Apache-2.0
"""The checkers of the chaos suite find each kind of damage in a ledger, and none in one without."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.chaos import fits_check, groups_check, streams_check
from tests.chaos.groups import fate_of
from tests.chaos.ledger import Record
from tests.chaos.plan import Plan, make_plan
from tests.chaos.rows import WrongValueError, check_rows, rows_of

Line = tuple[int, str, str, dict[str, Any]]
"""(life, actor, event, what)"""
PLAN = Plan("streams", 1, 1.0, {}, {"producer": 1, "scorer": 1, "trainer": 1, "reader": 1}, {"chunk": 4, "chunks": 2})
GROUPS = Plan(
    "groups", 1, 1.0, {}, {"feeder": 1, "worker": 1, "trainer": 1},
    {"count": 10, "stale": "train", "max_staleness": None},
)  # fmt: skip


def records(*lines: Line) -> list[Record]:
    return [Record(float(at), *line) for at, line in enumerate(lines)]


def trained(batch: int, *numbers: int, life: int = 0) -> Line:
    return life, "trainer-0", "trained", {"part": "part-0", "batch": batch, "numbers": list(numbers)}


def acking(batch: int) -> Line:
    return 0, "trainer-0", "acking", {"part": "part-0", "batch": batch}


def read(*numbers: int, life: int = 0) -> Line:
    return life, "reader-0", "read", {"part": "part-0", "numbers": list(numbers)}


def restored(began: float | None, life: int) -> Line:
    return life, "restorer-0", "restored", {"began": began}


ALL_READ = read(0, 1, 2, 3), read(4, 5, 6, 7)


def test_a_run_without_damage_is_not_blamed():
    again = trained(1, 4, 5, 6, 7)  # after the death of the trainer
    assert streams_check.check(PLAN, records(trained(0, 0, 1, 2, 3), again, again, *ALL_READ)) == []


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([trained(0, 0, 1, 2, 3), trained(1, 4, 5, 6)], r"1 samples were never trained: \[7\]"),
        ([trained(0, 0, 1, 2, 3), trained(1, 3, 4, 5, 6, 7)], r"1 samples were trained more than once: \[3\]"),
        ([trained(0, 0, 1, 2, 3), trained(1, 4, 5, 6, 7, 99)], r"nobody put them: \[99\]"),
        ([trained(0, 4, 5, 6, 7), trained(0, 0, 1, 2, 3), trained(1, 4, 5, 6, 7)], "was .4, 5, 6, 7., and then"),
        ([trained(0, 0, 1, 2, 3), trained(1, 4, 5, 6, 7), read(0)], r"1 samples were read twice in life 0: \[0\]"),
        (
            [trained(0, *range(8)), (0, "reader-0", "error", {"kind": "QueueUnreachableError", "text": "gone"})],
            "got QueueUnreachableError, which no fault explains: gone",
        ),
        ([trained(0, *range(8)), (0, "trainer-0", "unsaved", {"text": "no"})], "could not save: no"),
    ],
    ids=["lost", "doubled", "invented", "changed", "read twice", "unexplained", "unsaved"],
)  # fmt: skip
def test_damage_is_named(lines, text):
    found = streams_check.check(PLAN, records(*lines, *ALL_READ))
    assert len(found) == 1
    assert re.search(text, found[0])


def test_samples_that_no_reader_got_are_missed_beyond_what_readers_took_along():
    whole = [trained(0, *range(8)), read(0, 1, 2, 3)]
    assert "4 samples were never read, and 0 readers died" in streams_check.check(PLAN, records(*whole))[0]
    died = (0, "reader-0", "began", {"pid": 1})
    assert streams_check.check(PLAN, records(*whole, died)) == []


def test_a_restored_queue_has_forgotten_what_was_not_acknowledged_before_its_checkpoint():
    before = [trained(0, 0, 1, 2, 3), acking(0), (0, "trainer-0", "saved", {"began": 1.5}), trained(1, 4, 5, 6, 7)]
    life = [restored(1.5, 1), *ALL_READ]
    assert streams_check.check(PLAN, records(*before, *life))[0] == "4 samples were never trained: [4, 5, 6, 7]"
    assert streams_check.check(PLAN, records(*before, *life, trained(1, 4, 5, 6, 7, life=1))) == []
    fresh = [restored(None, 1), *ALL_READ, trained(0, 4, 5, 6, 7, life=1)]
    assert streams_check.check(PLAN, records(*before, *fresh))[0] == "4 samples were never trained: [0, 1, 2, 3]"


def left(**states: str) -> Line:
    return 0, "auditor-0", "left", {"states": states}


GONE = {f"g{number}": fate_of(number) for number in range(10) if fate_of(number) != "trained"}


@pytest.mark.parametrize(
    ("trained_ones", "states", "text"),
    [
        ((0, 1, 2, 4, 6, 8), GONE, None),
        ((0, 1, 2, 4, 6), GONE, r"1 groups are neither trained nor there: \[8\]"),
        ((0, 1, 2, 4, 6, 8, 8), GONE, r"1 groups were trained more than once: \[8\]"),
        ((0, 1, 2, 4, 6, 8), {**GONE, "g8": "closed"}, r"1 groups were trained and are still there: \[8\]"),
        ((0, 1, 2, 4, 6, 8), {**GONE, "g7": "closed"}, "group 7 ended as closed"),
        ((0, 1, 2, 4, 6), {**GONE, "g8": "stale"}, "group 8 ended as stale"),
    ],
    ids=["none", "lost", "doubled", "kept", "gate", "stale"],
)
def test_groups_are_accounted_for(trained_ones, states, text):
    found = groups_check.check(GROUPS, records(trained(0, *trained_ones), left(**states)))
    assert re.search(text, "; ".join(found)) if text else found == []


def test_the_model_that_came_out_says_how_often_each_sample_was_trained():
    plan = make_plan("fits", 1)
    assert fits_check.check(plan, records()) == ["no fit came to its end"]
    models = [(0, "trainer-0", "model", {"steps": 9, "wrong": wrong}) for wrong in ([3], [], [5, 7])]
    assert fits_check.check(plan, records(*models[:2])) == []
    assert "2 samples were not trained exactly once" in fits_check.check(plan, records(*models))[0]


@pytest.mark.parametrize("field", ["tokens", "vector", "text"])
def test_a_wrong_value_is_noticed(field):
    rows = rows_of([3, 4], 8)
    assert check_rows(rows, 8) == [3, 4]
    wrong = {**rows, field: rows_of([3, 5], 8)[field]}
    with pytest.raises(WrongValueError, match=f"field '{field}' of row 4"):
        check_rows(wrong, 8)


def test_a_seed_means_the_same_plan_everywhere():
    for world in ("streams", "groups"):
        assert make_plan(world, 5) == make_plan(world, 5)
        assert len({make_plan(world, seed).text() for seed in range(20)}) == 20
        assert f"--world {world} --seed 5 --length 1" in make_plan(world, 5).command()
