# SPDX-License-Identifier: Apache-2.0
"""A task that follows another is given the same batches, and keeps their samples until it acknowledges them."""

from __future__ import annotations

from typing import Any

import msgspec
from control_kit import (
    ACTOR,
    SAVER,
    ack,
    ask,
    batch,
    cancel,
    chores,
    clear,
    clear_consumed,
    fetch,
    indexes,
    load,
    new_plane,
    put,
    refused,
    register,
    save,
)

from transfer_queue import SequentialSampler
from transfer_queue import protocol as p


def follow(plane: Any, task: str = "copy") -> None:
    register(plane, task, follows="train")


def open_entries(plane: Any, task: str = "copy") -> list[dict[str, Any]]:
    """The batches that the task has not acknowledged, as the frozen state of this task names them."""
    frozen = ask(plane, SAVER, p.Freeze, 0.0, task)
    assert ask(plane, SAVER, p.Thaw, frozen.id).indexes == b""
    state = msgspec.msgpack.decode(frozen.state)
    tasks = [own for each in state["partitions"] for own in each["consumers"]]
    assert {own["task"] for own in tasks} <= {task}
    entries = [entry for own in tasks for entry in own["ledger"]["entries"]]
    samples = {index for each in state["partitions"] for index in p.unpack_indexes(each["index"]).tolist()}
    wanted = {index for entry in entries for index in p.unpack_indexes(entry["indexes"]).tolist()}
    assert samples == wanted, "nothing else is saved"
    return entries


def open_batches(plane: Any) -> dict[tuple[int, int], list[int]]:
    """By (rank, batch)."""
    entries = open_entries(plane)
    return {(each["rank"], each["batch_index"]): p.unpack_indexes(each["indexes"]).tolist() for each in entries}


def ack_all(plane: Any) -> None:
    ack(plane, *(entry["token"] for entry in open_entries(plane)), task="copy")


def test_it_gets_what_is_open_now_and_all_that_comes_whoever_acknowledges_it_first(plane):
    put(plane, 8)
    settled, kept = fetch(plane, 2, 0, 0), fetch(plane, 2, 0, 1)
    ack(plane, settled.token)
    follow(plane)
    later = fetch(plane, 2, 0, 2)
    ack(plane, kept.token, later.token)
    assert open_batches(plane) == {(0, 1): [2, 3], (0, 2): [4, 5]}


def test_both_shares_of_a_round_are_given_at_once(plane):
    register(plane, dp_size=2, sampler="RankAwareSampler")
    follow(plane)
    put(plane, 4)
    batch(plane, 2, 1, 0)
    assert open_batches(plane) == {(0, 0): [0, 1], (1, 0): [2, 3]}


class FailsAtTheThird(SequentialSampler):
    drawn = 0

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        self.drawn += 1
        if self.drawn == 3:
            raise ValueError("of the user")
        return super().sample(ready_indexes, batch_size, *args, **kwargs)


def test_it_is_given_what_was_drawn_before_the_sampler_failed(make_plane):
    plane = make_plane(sampler=FailsAtTheThird())
    follow(plane)
    put(plane, 6)
    refused(fetch(plane, 2, 0, 2, first_index=0), "SamplerError", "of the user")
    assert open_batches(plane) == {(0, 0): [0, 1], (0, 1): [2, 3]}


def test_a_clear_that_it_held_up_is_made_up_for_once_it_has_acknowledged(plane):
    follow(plane)
    put(plane, 4)
    ack(plane, fetch(plane, 2, 0, 0).token)
    assert clear_consumed(plane, "train") == []
    ack_all(plane)
    assert chores(plane) == [0, 1]
    ack(plane, fetch(plane, 2, 0, 1).token)
    assert clear_consumed(plane, "train") == []
    assert ask(plane, ACTOR, p.ForgetTask, "copy").value == 1
    assert chores(plane) == [2, 3]


def test_what_the_other_task_was_done_with_before_is_not_kept_for_it(plane):
    put(plane, 4)
    ack(plane, fetch(plane, 2, 0, 0).token)
    follow(plane)
    assert clear_consumed(plane, "train") == [0, 1]


def test_a_batch_that_never_arrived_is_taken_from_both(plane):
    register(plane, dp_size=1)
    follow(plane)
    put(plane, 4)
    cancel(plane, ACTOR, fetch(plane, 2, 0))
    assert open_batches(plane) == {}
    assert batch(plane, 3, 0) == [0, 1, 2]
    assert open_batches(plane) == {(0, 1): [0, 1, 2]}


def test_after_a_reset_it_is_given_what_the_other_task_is_given_again(plane):
    follow(plane)
    put(plane, 4)
    ack(plane, fetch(plane, 2, 0, 0).token)
    ack_all(plane)
    ask(plane, ACTOR, p.ResetConsumption, "p", "train")
    assert batch(plane, 4, 0, 0) == [0, 1, 2, 3]
    assert open_batches(plane) == {(0, 0): [0, 1, 2, 3]}


def test_it_loses_what_is_cleared_before_it_acknowledges_it(plane):
    def lost() -> int:
        counts = ask(plane, ACTOR, p.GetStats).value["dropped"]
        return int(counts.get("copy", {}).get("cleared", 0))

    follow(plane)
    put(plane, 8)
    batch(plane, 2, 0, 0)
    ack_all(plane)
    for number in (1, 2):
        batch(plane, 2, 0, number)
    clear(plane, [0, 1, 7])  # two that it has acknowledged, and one that nobody was given
    assert lost() == 0
    clear(plane, [2])
    assert lost() == 1
    ask(plane, ACTOR, p.ClearPartition, "p")
    assert lost() == 4


def test_it_is_in_no_checkpoint_and_follows_the_queue_that_one_restores(plane):
    put(plane, 4)
    batch(plane, 2, 0, 0)
    saved = save(plane)
    follow(plane)
    assert msgspec.msgpack.decode(save(plane))["tasks"] == msgspec.msgpack.decode(saved)["tasks"]
    other = new_plane()
    follow(other)
    load(other, saved)
    other.read(ACTOR, [])
    assert indexes(fetch(other, 2, 0, 1)) == [2, 3]
    assert open_batches(other) == {(0, 0): [0, 1], (0, 1): [2, 3]}


def test_it_draws_nothing_itself_and_can_t_follow_in_a_circle(plane):
    follow(plane)
    put(plane, 2)
    refused(fetch(plane, 2, task="copy"), "InvalidRequestError", "'copy' follows 'train'")
    refused(ask(plane, ACTOR, p.RegisterTask, "train", follows="train"), "InvalidRequestError", "circle")
    refused(ask(plane, ACTOR, p.RegisterTask, "train", follows="copy"), "InvalidRequestError", "circle")
