# SPDX-License-Identifier: Apache-2.0
"""What a freeze costs: only what changes meanwhile is copied, and nothing is kept once it was read."""

from __future__ import annotations

import pytest
from control_kit import ACTOR, ROLLOUT, SAVER, ask, fetch, put, seal
from slices_kit import parts_of, rest_of, small_slices, whole
from test_copies import Busy

from transfer_queue import protocol as p
from transfer_queue.control.restoring import recut
from transfer_queue.control.rows import RowTable
from transfer_queue.control.saved import decode
from transfer_queue.errors import CheckpointError


@pytest.fixture(autouse=True, scope="module")
def in_small_slices():
    with small_slices():
        yield


@pytest.mark.parametrize("how", ["read", "thaw", "end"])
def test_a_frozen_state_keeps_nothing_aside_once_it_is_read(plane, how):
    ask(plane, ROLLOUT, p.ResolveKeys, "p", [f"key {number}" for number in range(12)], True)
    frozen = ask(plane, SAVER, p.Freeze)
    partition = plane.state.partitions["p"]
    seal(plane)
    assert (len(partition.keys.watches), len(partition.tags.watches)) == (1, 1)
    if how == "read":
        rest_of(plane, frozen)
    elif how == "thaw":
        ask(plane, SAVER, p.Thaw, frozen.id)
    else:
        plane.client_gone(SAVER, 0.0)
    assert (partition.keys.watches, partition.tags.watches, plane.state.snapshots) == ({}, {}, set())


@pytest.mark.parametrize("how", ["read", "thaw", "end"])
def test_a_partition_is_not_copied_once_it_was_read_or_the_freeze_is_over(plane, how):
    put(plane, 9)
    frozen = ask(plane, SAVER, p.Freeze)
    partition = plane.state.partitions["p"]
    assert len(partition.table.copies) == 1
    if how == "read":
        rest_of(plane, frozen)
    elif how == "thaw":
        ask(plane, SAVER, p.Thaw, frozen.id)
    else:
        plane.client_gone(SAVER, 0.0)
    assert partition.table.copies == []


def test_columns_of_different_lengths_are_refused_before_anything_is_cut(plane):
    put(plane, 20)
    fetch(plane, 2, 0, 0)
    state = decode(whole(plane))
    state.partitions[0].state += b"\x03"
    with pytest.raises(CheckpointError, match="contradicts itself"):
        list(recut(state))


def test_a_freeze_and_requests_that_change_nothing_copy_nothing(monkeypatch):
    busy = Busy()
    monkeypatch.delattr(RowTable, "frozen")
    expected, frozen = parts_of(busy.plane), ask(busy.plane, SAVER, p.Freeze)
    for verb, args in (
        (p.Describe, ("p",)), (p.GetStats, ()), (p.ListKeys, ("p",)), (p.ConsumptionStatus, ("p", "train")),
        (p.ClearSamples, ("p", p.pack_indexes([777]))),
    ):  # fmt: skip
        ask(busy.plane, ACTOR, verb, *args)
    fetch(busy.plane, 99)
    assert [frozen.state, *rest_of(busy.plane, frozen)] == expected


def test_a_copy_that_failed_is_tried_again_before_anything_changes(monkeypatch):
    busy = Busy()
    expected, frozen = parts_of(busy.plane), ask(busy.plane, SAVER, p.Freeze)
    with monkeypatch.context() as patch:
        patch.delattr(RowTable, "frozen")
        assert isinstance(ask(busy.plane, ROLLOUT, p.SealPartition, "p"), p.Failed)
    seal(busy.plane)
    assert [frozen.state, *rest_of(busy.plane, frozen)] == expected
