# SPDX-License-Identifier: Apache-2.0
"""Samples that a task never gets are counted once, by reason, also after their partition is gone."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.control.control_kit import ACTOR, ask, batch, clear, fetch, new_plane, put, register, seal
from transfer_queue import protocol as p


def dropped(plane: Any) -> Any:
    return ask(plane, ACTOR, p.GetStats).value["dropped"]


def test_a_tail_is_counted_while_its_partition_lives_and_afterwards(plane):
    register(plane, dp_size=2, tail="drop")
    put(plane, 3)
    seal(plane)
    for rank in (0, 1):
        batch(plane, 1, rank, 0)
    assert isinstance(fetch(plane, 1, 0, 1), p.Ended)
    assert dropped(plane) == {"train": {"tail": 1, "cleared": 0}}
    ask(plane, ACTOR, p.ClearPartition, "p")
    assert dropped(plane) == {"train": {"tail": 1, "cleared": 0}}


def test_samples_that_are_cleared_before_a_task_got_them_are_counted(plane):
    samples = put(plane, 6)
    batch(plane, 2)
    clear(plane, samples[1:3])
    assert dropped(plane) == {"train": {"tail": 0, "cleared": 1}}
    ask(plane, ACTOR, p.ClearPartition, "p")
    assert dropped(plane) == {"train": {"tail": 0, "cleared": 4}}


def test_nothing_counts_for_a_task_that_was_forgotten_or_never_read(plane):
    put(plane, 4)
    batch(plane, 1)
    put(plane, 4, partition="q")
    ask(plane, ACTOR, p.ClearPartition, "q")
    assert dropped(plane) == {}
    ask(plane, ACTOR, p.ClearPartition, "p")
    ask(plane, ACTOR, p.ForgetTask, "train")
    assert dropped(plane) == {}


def test_producers_and_the_age_of_their_fields_are_told(plane):
    put(plane, 1, now=5.0)
    own = {"alive": 1, "clients": ["rollout"], "published_s_ago": 2.5}
    assert ask(plane, ACTOR, p.GetStats, now=7.5).value["producers"] == {"x": own}


def test_statistics_of_many_partitions_come_in_pages(plane):
    for number in range(250):
        ask(plane, ACTOR, p.CreatePartition, f"p{number}")
    pages, after = [], 0
    while after is not None:
        pages.append(ask(plane, ACTOR, p.GetStats, after).value)
        after = pages[-1].get("more")
    assert len(pages) > 1
    assert ["clients" in page for page in pages] == [True] + [False] * (len(pages) - 1)
    assert [name for page in pages for name in page["partitions"]] == [f"p{number}" for number in range(250)]


names = st.integers(0, 349).map("p{}".format)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.lists(names, max_size=120), st.lists(names, max_size=120)), min_size=3, max_size=3))
def test_a_partition_that_stays_is_told_once_while_others_come_and_go(changes):
    plane = new_plane()
    for number in range(250):
        ask(plane, ACTOR, p.CreatePartition, f"p{number}")
    stays = {f"p{number}" for number in range(250)}
    told: list[str] = []
    after: int | None = 0
    for gone, made in changes:
        page = ask(plane, ACTOR, p.GetStats, after).value
        told += page["partitions"]
        after = page.get("more")
        for name in gone:
            ask(plane, ACTOR, p.ClearPartition, name)
        stays -= set(gone)
        for name in set(made) - set(ask(plane, ACTOR, p.ListPartitions).names):
            ask(plane, ACTOR, p.CreatePartition, name)
        plane.check_invariants()
        if after is None:
            break
    while after is not None:
        page = ask(plane, ACTOR, p.GetStats, after).value
        told += page["partitions"]
        after = page.get("more")
    assert {name: told.count(name) for name in stays} == dict.fromkeys(stays, 1)
