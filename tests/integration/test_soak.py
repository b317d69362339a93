# SPDX-License-Identifier: Apache-2.0
"""The soak as a test: processes that put, get and clear at random while others are killed see no wrong byte, and leave
nothing. By hand: ``python -m tests.integration.soak --help``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
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

WRITES_TO_A_VIEW = """
import sys
import transfer_queue as tq

tq.init(sys.argv[1])
client = tq.get_client()
view = client.get_data(client.get_meta(["a"], partition_id="p", mode="force_fetch"), copy=False)["a"]
print("got", flush=True)
(view.values() if view.is_nested else view)[:1] = 7
print("written", flush=True)
"""


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


@pytest.mark.slow
@pytest.mark.timeout(LONG_S + 300)
@pytest.mark.parametrize("arena", ARENAS)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_the_same_for_minutes(tmp_path, arena, tight):
    check(soak(Options(LONG_S / 2, SEED, 1.0, tight, arena), tmp_path))


@pytest.mark.skipif(not HAS_VIEWS, reason="get_data has no views yet")
@pytest.mark.parametrize("arena", ARENAS)
def test_a_write_to_a_view_fails_and_changes_nothing(start, arena):
    conf = start({"backend": {"SimpleStorage": {"arena": arena}}} if has_arena() else None)
    client = tq.get_client()
    meta = client.put(TensorDict({"a": torch.arange(4096).reshape(4, 1024)}, batch_size=[4]), partition_id="p")
    done = subprocess.run(
        [sys.executable, "-c", WRITES_TO_A_VIEW, str(conf.address)],
        capture_output=True, text=True, timeout=30, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    # Where a view is a read-only page of the unit's memory, nothing but a fault can refuse the write.
    assert done.stdout == "got\n", done.stderr
    assert done.returncode in (1, -signal.SIGSEGV, -signal.SIGBUS), done.stderr
    assert client.get_data(meta)["a"].values().tolist() == list(range(4096))
