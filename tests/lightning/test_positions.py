# SPDX-License-Identifier: Apache-2.0
"""Position: what a checkpoint stores of a stream, and which checkpoints a run refuses to resume from."""

from __future__ import annotations

import pytest

from lightning_tq.batch import Position
from lightning_tq.checks import list_names
from transfer_queue.errors import InvalidRequestError

SAVED = {
    "partition_id": "train@1", "batch_index": 3, "micro_batch": 1, "epoch": 1, "batch_size": 4, "micro_batch_size": 2,
    "dp_size": 2,
}  # fmt: skip


def test_a_position_survives_a_checkpoint() -> None:
    assert Position.from_dict(SAVED, "train").as_dict() == SAVED


def test_a_position_without_sizes_is_accepted_and_unknown_keys_are_ignored() -> None:
    short = {name: SAVED[name] for name in ("partition_id", "batch_index", "micro_batch")}
    position = Position.from_dict({**short, "of a later version": 1}, "train")
    assert position.as_dict() == short
    position.check_sizes(Position.from_dict(SAVED, "train"), "train")


def test_a_dict_that_is_not_a_position_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"can't resume stream 'train' from \{'batch_index': 3\}"):
        Position.from_dict({"batch_index": 3}, "train")


def test_an_acknowledged_batch_is_refused_and_the_next_one_is_not() -> None:
    position = Position.from_dict(SAVED, "train")
    position.check_not_acked(3)
    with pytest.raises(InvalidRequestError, match="the batches before 4 were acknowledged"):
        position.check_not_acked(4)


def test_a_cleared_partition_is_refused_unless_nothing_was_read_or_the_queue_is_new() -> None:
    position = Position.from_dict(SAVED, "train")
    position.check_partition_exists(["train@1"])
    position.check_partition_exists([])
    Position(partition_id="train@1").check_partition_exists(["train@2"])
    with pytest.raises(InvalidRequestError, match=r"'train@1', which was cleared\. The queue holds 'train@2'"):
        position.check_partition_exists(["train@2"])


def test_a_message_names_the_first_of_many_partitions() -> None:
    assert list_names(["b", "a"]) == "'a', 'b'"
    assert list_names([f"train@{epoch}" for epoch in range(9)], most=2) == "'train@0', 'train@1' and 7 more"
