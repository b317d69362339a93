# SPDX-License-Identifier: Apache-2.0
"""The soak as a test: processes that put, get and clear at random while others are killed see no wrong byte, and leave
nothing. By hand: ``python -m tests.integration.soak --help``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.integration.soak import OPERATIONS, Options, soak

ARENAS = [pytest.param(True, id="arena"), pytest.param(False, id="frames")]
SLOW = pytest.mark.slow
SHORT_S = 3.0
LONG_S = float(os.environ.get("TQ_SOAK_SECONDS") or 600.0)
SEED = int(os.environ.get("TQ_SOAK_SEED") or 7)


def check(summary: dict[str, Any]) -> None:
    print(summary)
    assert summary["kills"] >= 1
    assert {name for name in OPERATIONS if not summary["by_operation"][name]} <= {"clear_partition", "cancel"}
    assert (summary["live_nbytes"], summary["held_nbytes"]) == (0, 0)


@pytest.mark.programs
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("tight", "arena"),
    [
        pytest.param(False, True, id="roomy-arena"),
        pytest.param(True, False, id="tight-frames"),
        pytest.param(True, True, id="tight-arena", marks=SLOW),
        pytest.param(False, False, id="roomy-frames", marks=SLOW),
    ],
)
def test_random_work_of_processes_that_are_killed_reads_no_wrong_byte_and_leaves_nothing(tmp_path, arena, tight):
    check(soak(Options(SHORT_S, SEED, 0.6, tight, arena), tmp_path))


@pytest.mark.programs
@pytest.mark.timeout(180)
@pytest.mark.parametrize("tight", [pytest.param(False, id="roomy", marks=SLOW), pytest.param(True, id="tight")])
def test_the_same_where_every_server_has_a_process_of_its_own(tmp_path, tight):
    check(soak(Options(SHORT_S, SEED, 0.6, tight, processes="each"), tmp_path))


@SLOW
@pytest.mark.timeout(LONG_S + 300)
@pytest.mark.parametrize("arena", ARENAS)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_the_same_for_minutes(tmp_path, arena, tight):
    check(soak(Options(LONG_S / 2, SEED, 1.0, tight, arena), tmp_path))
