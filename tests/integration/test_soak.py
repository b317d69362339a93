# SPDX-License-Identifier: Apache-2.0
"""The soak as a test: processes that put, get and clear at random while others are killed see no wrong byte, and leave
nothing. By hand: ``python -m tests.integration.soak --help``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.soak import OPERATIONS, Options, has_arena, soak
from tests.integration.soak_reads import HAS_VIEWS

ARENAS = [pytest.param(True, id="arena"), pytest.param(False, id="frames")] if has_arena() else [None]
SHORT_S = 3.0
LONG_S = float(os.environ.get("TQ_SOAK_SECONDS") or 600.0)
SEED = int(os.environ.get("TQ_SOAK_SEED") or 7)


def check(summary: dict[str, Any]) -> None:
    print(summary)
    assert summary["kills"] >= 1
    assert {name for name in OPERATIONS if not summary["by_operation"][name]} <= {"clear_partition", "give_up"}
    assert (summary["live_nbytes"], summary["held_nbytes"]) == (0, 0)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("arena", ARENAS)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_random_work_of_processes_that_are_killed_reads_no_wrong_byte_and_leaves_nothing(tmp_path, arena, tight):
    check(soak(Options(SHORT_S, SEED, 0.6, tight, arena), tmp_path))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_the_same_where_every_server_has_a_process_of_its_own(tmp_path, tight):
    check(soak(Options(SHORT_S, SEED, 0.6, tight, processes="each"), tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(LONG_S + 300)
@pytest.mark.parametrize("arena", ARENAS)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_the_same_for_minutes(tmp_path, arena, tight):
    check(soak(Options(LONG_S / 2, SEED, 1.0, tight, arena), tmp_path))


@pytest.mark.skipif(not HAS_VIEWS, reason="get_data has no views in this version")
@pytest.mark.parametrize("arena", ARENAS)
def test_a_write_to_a_view_reaches_neither_what_is_stored_nor_another_view(start, arena):
    start({"backend": {"SimpleStorage": {"arena": arena, "num_data_storage_units": 1}}})
    client = tq.get_client()
    rows = torch.arange(64 * 2048).reshape(64, 2048)
    meta = client.put(TensorDict({"a": rows}, batch_size=[64]), partition_id="p")
    earlier, view = (client.get_data(meta, copy=False)["a"] for _ in range(2))
    view.values().fill_(7)
    later, copied = client.get_data(meta, copy=False)["a"], client.get_data(meta)["a"]
    assert all(torch.equal(seen.values(), rows.flatten()) for seen in (earlier, later, copied))
