# SPDX-License-Identifier: Apache-2.0
"""Several storage units that are nearly full: what has room in all of them together is stored in pieces."""

from __future__ import annotations

import contextlib

import pytest
import torch
from checkpoint_support import started

import transfer_queue as tq

LIKE = {"capacity_bytes": 1_000_000, "put_timeout_s": 0.2}
ROW = 4096


def rows(first: int, count: int) -> torch.Tensor:
    """Of 32 KiB each."""
    return torch.arange(first, first + count).reshape(-1, 1).expand(-1, ROW).contiguous()


@pytest.mark.parametrize("arena", [True, False])
def test_a_put_that_no_unit_has_room_for_goes_into_several(arena):
    with started(units=2, arena=arena, **LIKE) as client:
        for first in (0, 17):  # one unit each, where 443 KB are left
            client.put({"x": rows(first, 17)}, partition_id="p")
        client.put({"x": rows(34, 15)}, partition_id="p")  # 492 KB
        batch = client.get_meta(["x"], 49, "p", task_name="reader")
        assert torch.equal(client.get_data(batch, layout="dense")["x"], rows(0, 49))


@pytest.mark.parametrize("arena", [True, False])
def test_a_queue_whose_units_are_full_is_loaded_into_one_like_it(tmp_path, arena):
    count = 0
    with started(units=3, arena=arena, **LIKE) as client:
        with contextlib.suppress(tq.StorageFullError):
            for count in range(100):
                client.put({"x": rows(count, 1)}, partition_id="p")
        assert 80 < count < 99, "30 rows in each unit"
        client.save_checkpoint(tmp_path / "full")
    with started(units=3, arena=arena, **LIKE) as client:
        client.load_checkpoint(tmp_path / "full")
        batch = client.get_meta(["x"], count, "p", task_name="reader")
        assert torch.equal(client.get_data(batch, layout="dense")["x"], rows(0, count))
