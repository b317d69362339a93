# SPDX-License-Identifier: Apache-2.0
"""TQBatch unpacks as data and metadata, and Lightning does not take it apart."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection, is_dataclass_instance
from producing import rows

from lightning_tq import TQBatch
from lightning_tq.batch import Position
from transfer_queue import BatchMeta


@pytest.fixture
def batch() -> TQBatch:
    return TQBatch(rows(3), BatchMeta([5, 6, 7], ["train"] * 3), Position(partition_id="train"))


def test_it_unpacks_as_data_and_metadata(batch: TQBatch) -> None:
    data, meta = batch
    assert (data is batch[0], meta is batch[1], len(batch), batch.size) == (True, True, 2, 3)
    with pytest.raises(IndexError):
        batch[2]


def test_it_is_not_a_collection(batch: TQBatch) -> None:
    assert not isinstance(batch, (tuple, Mapping, Sequence, Iterable))
    assert not is_dataclass_instance(batch)
    assert apply_to_collection(batch, torch.Tensor, torch.zeros_like) is batch


def test_moving_it_moves_the_values_and_leaves_the_metadata_alone(batch: TQBatch) -> None:
    moved = move_data_to_device(batch, torch.device("meta"))
    assert (moved.data.device.type, list(moved.data["text"])) == ("meta", ["row 0", "row 1", "row 2"])
    assert (moved.meta is batch.meta, moved.position) == (True, batch.position)


def test_it_travels_between_processes(batch: TQBatch) -> None:
    copy = pickle.loads(pickle.dumps(batch))
    assert torch.equal(copy.data["x"], batch.data["x"])
    assert (copy.meta, copy.position) == (batch.meta, batch.position)


def test_without_the_ack_callback_lightning_says_how_to_give_the_batch_size(batch: TQBatch) -> None:
    with pytest.raises(MisconfigurationException, match="provide the batch_size"):
        extract_batch_size(batch)
