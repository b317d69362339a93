# SPDX-License-Identifier: Apache-2.0
"""What torchrun starts again goes on from the last checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun_script import EPOCHS, SAMPLES

from tests.lightning.conftest import HERE, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


def test_ranks_that_torchrun_starts_again_train_every_sample_once(tmp_path: Path) -> None:
    """First rank 1 is killed, then rank 0, and with it the queue that it owns."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), "TMPDIR": str(tmp_path)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as docs/lightning.md says
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    kills = [[0, 1, 7], [1, 0, 16]]
    ended = subprocess.run(
        [sys.executable, "-m", *torchrun, str(HERE / "torchrun_script.py"), str(tmp_path), json.dumps(kills)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-5000:]
    trained: dict[tuple[int, int], list[int]] = {}  # a step after the last checkpoint is done again
    for rank in range(2):
        for line in (tmp_path / f"rank{rank}.jsonl").read_text().splitlines():
            step, numbers = json.loads(line)
            trained[rank, step] = numbers
    assert sorted(number for numbers in trained.values() for number in numbers) == list(range(EPOCHS * SAMPLES))
