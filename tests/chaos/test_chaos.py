# SPDX-License-Identifier: Apache-2.0
"""Short runs of chaos, as a user starts them. Long ones: ``python -m tests.chaos --seeds 100 --minutes 30``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.run import privilege
from tests.own_processes import SLOW

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(280)


def run(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "tests.chaos", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=270 * SLOW)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.programs
@pytest.mark.parametrize(("world", "seed"), [("streams", 7), ("groups", 4), ("fits", 4)])
def test_nothing_is_lost_doubled_or_wrong_whatever_dies(tmp_path, world, seed):
    code, out, errors = run("--world", world, "--seed", str(seed), "--length", "0.4", "--directory", str(tmp_path))
    assert code == 0, errors
    summary = json.loads(out.splitlines()[0])
    assert sum(summary["faults"].values()) >= 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_nothing_is_lost_doubled_or_wrong_if_hosts_are_cut_off_and_die(tmp_path):
    if reason := privilege():
        pytest.skip(reason)
    code, _, errors = run("--world", "streams", "--hosts", "--seed", "1", "--directory", str(tmp_path))
    assert code == 0, errors
