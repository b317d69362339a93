# SPDX-License-Identifier: Apache-2.0
"""TQBatch, which Lightning doesn't take apart, and Position: which checkpoints a run refuses to resume from."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Mapping, Sequence

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection, is_dataclass_instance
from producing import rows
from tensordict import TensorDict

from lightning_tq import TQBatch
from lightning_tq.checks import list_names
from lightning_tq.progress import Position
from transfer_queue import BatchMeta
from transfer_queue.errors import InvalidRequestError

SAVED = {
    "partition_id": "train@1", "batch_index": 3, "micro_batch": 1, "epoch": 1, "batch_size": 4, "micro_batch_size": 2,
    "dp_size": 2,
}  # fmt: skip


@pytest.fixture
def batch() -> TQBatch:
    return TQBatch(rows(3), BatchMeta([5, 6, 7], ["train"] * 3), Position(partition_id="train"))


def test_it_unpacks_as_data_and_metadata(batch: TQBatch) -> None:
    data, meta = batch
    assert (data is batch[0], meta is batch[1], len(batch), batch.size) == (True, True, 2, 3)
    with pytest.raises(IndexError):
        batch[2]
    with pytest.raises(TypeError, match=r"a batch is a pair.*Write: data, meta = batch; data\['x'\]"):
        batch["x"]  # type: ignore[index]


def test_an_attribute_that_it_lacks_is_explained_and_counts_as_lacking(batch: TQBatch) -> None:
    with pytest.raises(AttributeError, match=r"so batch\.x names none of its parts.*data, meta = batch; data\['x'\]"):
        _ = batch.x  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"^'TQBatch' object has no attribute '__array__'$"):
        _ = batch.__array__  # type: ignore[attr-defined]
    assert (hasattr(batch, "x"), getattr(batch, "keys", None), hasattr(batch, "size")) == (False, None, True)
    same = copy.copy(batch)
    assert (same.data is batch.data, same.meta is batch.meta, same.position) == (True, True, batch.position)
    assert torch.equal(copy.deepcopy(batch).data["x"], batch.data["x"])


def test_it_is_not_a_collection(batch: TQBatch) -> None:
    assert not isinstance(batch, (tuple, Mapping, Sequence, Iterable))
    assert not is_dataclass_instance(batch)
    assert apply_to_collection(batch, torch.Tensor, torch.zeros_like) is batch


def test_moving_it_moves_the_values_and_leaves_the_metadata_alone(batch: TQBatch) -> None:
    moved = move_data_to_device(batch, torch.device("meta"))
    assert (moved.data.device.type, list(moved.data["text"])) == ("meta", ["row 0", "row 1", "row 2"])
    assert (moved.meta is batch.meta, moved.position) == (True, batch.position)


def test_it_travels_between_processes(batch: TQBatch) -> None:
    arrived = pickle.loads(pickle.dumps(batch))
    assert torch.equal(arrived.data["x"], batch.data["x"])
    assert (arrived.meta, arrived.position) == (batch.meta, batch.position)


def test_without_the_ack_callback_lightning_says_how_to_give_the_batch_size(batch: TQBatch) -> None:
    with pytest.raises(MisconfigurationException, match="provide the batch_size"):
        extract_batch_size(batch)


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
    position.check_partition_exists({"train@1": 4})
    position.check_partition_exists({})
    Position(partition_id="train@1").check_partition_exists({"train@2": 1})
    with pytest.raises(InvalidRequestError, match=r"cleared or never was in this queue\. The queue holds 'train@2'"):
        position.check_partition_exists({"train@2": 0})


def test_a_partition_whose_batches_the_task_was_never_given_is_another_one_and_refused() -> None:
    position = Position.from_dict(SAVED, "train")  # within batch 3, so 4 batches were given
    with pytest.raises(
        InvalidRequestError, match=r"has given the stream's task only 3 batches of it\. If Stream\(task"
    ):
        position.check_partition_exists({"train@1": 3, "val": 9})


@pytest.mark.parametrize(
    "existing",
    [
        {},
        {"train@1": 4, "train@0": 9},
        {"train@2": 0, "train@3": 2},
        {"val": 0, "train@3": 0},
        {"val": 9},
    ],
    ids=["new queue", "not made yet", "there", "nothing read", "another stream's"],
)
def test_a_next_partition_that_producers_may_still_make_is_waited_for(existing: dict[str, int]) -> None:
    Position.from_dict(SAVED, "train").check_next(Position(partition_id="train@2"), existing, "train@*")


def test_a_next_partition_that_was_read_since_the_checkpoint_is_refused() -> None:
    position = Position.from_dict(SAVED, "train")
    with pytest.raises(InvalidRequestError, match="at batch 0 of partition 'train@2', but the batches before 1 were"):
        position.check_next(Position(partition_id="train@2", batch_index=1), {"train@2": 1}, "train@*")
    with pytest.raises(
        InvalidRequestError, match=r"Both are gone from the queue, and training has come to 'train@3'\."
    ):
        position.check_next(Position(partition_id="train@2"), {"train@3": 1, "train@4": 0, "val": 9}, "train@*")


def test_a_message_names_the_first_of_many_partitions() -> None:
    assert list_names(["b", "a"]) == "'a', 'b'"
    assert list_names([f"train@{epoch}" for epoch in range(9)], most=2) == "'train@0', 'train@1' and 7 more"


@pytest.mark.skipif(torch.__version__ < "2.7", reason="this torch can't index jagged tensors")
def test_rows_that_are_selected_from_jagged_fields_of_equal_shape_can_be_computed_with() -> None:
    x = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(1), torch.ones(3)], layout=torch.jagged)
    data = TensorDict({"x": x, "mask": torch.full_like(x, 2.0)}, batch_size=[3])
    meta = BatchMeta(global_indexes=[4, 5, 6], partition_ids=["p"] * 3)
    chosen = TQBatch(data, meta).select([2, 0]).data
    assert [row.tolist() for row in (chosen["x"] * chosen["mask"]).unbind()] == [[2.0] * 3, [2.0] * 2]
