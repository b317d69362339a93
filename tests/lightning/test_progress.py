# SPDX-License-Identifier: Apache-2.0
"""Progress alone, over random histories: where a resume continues, and which batches it can't need any more."""

from __future__ import annotations

from typing import Any, NamedTuple, cast, get_args

from hypothesis import given
from hypothesis import strategies as st

from lightning_tq.progress import Ack, AckRule, Position, Progress


class Batch(NamedTuple):
    """What ``Progress`` needs of a BatchMeta."""

    partition_ids: list[str]
    index: int


def after(micro_batch: int) -> Position:
    """The position after this micro-batch of two per batch."""
    return Position(partition_id="p", batch_index=(micro_batch + 1) // 2, micro_batch=(micro_batch + 1) % 2, epoch=0)


@given(
    ack=st.sampled_from(get_args(Ack)),
    keeps=st.booleans(),
    in_background=st.booleans(),
    moves=st.lists(st.sampled_from(["deliver", "train", "step", "save", "ack"]), max_size=80),
)
def test_a_batch_is_due_once_it_is_stepped_or_in_a_written_checkpoint(
    ack: Ack, keeps: bool, in_background: bool, moves: list[str]
) -> None:
    waits = ack == "checkpoint" or (ack != "step" and keeps)
    progress = Progress("train", AckRule(ack, keeps or ack == "checkpoint", in_background))
    progress.begin(Position(partition_id="p", epoch=0), False, {})
    delivered: list[Position] = []
    trained = stepped = due = acked = 0
    saved, is_new = [0] * (1 + in_background), True  # batches before the position of each checkpoint
    for move in [*moves, "step", "save", "step", "save", "ack"]:
        if move == "deliver":
            position = after(len(delivered))
            delivered.append(position)
            ends = [Batch(["p"], position.batch_index)] if position.micro_batch == 0 else []
            progress.deliver(position, cast(Any, ends))
        elif move == "train" and trained < len(delivered):
            progress.train(delivered[trained])
            trained += 1
        elif move == "step":
            progress.step()
            stepped, is_new = trained, True
            due = due if waits else stepped // 2
        elif move == "save":
            progress.save()
            waits = ack != "step"
            if is_new or not in_background:  # all files of one step are one checkpoint
                saved.append(stepped // 2)
            is_new = False
            due = max(due, saved[-1 - in_background])
        elif move == "ack":
            acked = max([acked, *(batch.index for batch in cast(Any, progress.take_due()).values())])
            assert acked == (0 if ack == "never" else due)
        assert progress.position == (delivered[stepped - 1] if stepped else None)
        assert progress.unstepped == trained - stepped
    assert acked == (0 if ack == "never" else trained // 2)


def test_a_resume_moves_on_from_the_partition_of_its_checkpoint_and_another_fit_begins_anew() -> None:
    trained, following = after(3), Position(partition_id="q", epoch=1)
    resumed = Progress("train", AckRule("auto", True))
    resumed.restore(trained)
    another = Progress("train", AckRule("auto", True), trained)
    for progress in (resumed, another):
        assert progress.begin(following, False, {}) == following
    assert resumed.left_partitions == ["p"]
    assert resumed.held_by_checkpoint(["o"]) == {"o": 2**53, "p": 2}
    assert (another.left_partitions, another.held_by_checkpoint(["o"])) == ([], {})


def test_a_resume_needs_no_batch_before_its_position_unless_nothing_is_acknowledged() -> None:
    for ack, held in (("auto", {"p": 2}), ("step", {"p": 2}), ("never", {})):
        progress = Progress("train", AckRule(cast(Ack, ack), True))
        progress.restore(after(4))
        assert progress.begin(Position(partition_id="p", epoch=0), False, {}) == after(4)
        assert (progress.kept, progress.held_by_checkpoint([])) == (2, held)
