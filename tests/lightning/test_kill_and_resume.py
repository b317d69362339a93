# SPDX-License-Identifier: Apache-2.0
"""Training that is killed at random steps and resumed trains the same samples in the same order."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from producing import fill_all
from resume_script import newest

import transfer_queue as tq
from tests.lightning.conftest import HERE, ROOT
from tests.warm_python import Program

pytestmark = pytest.mark.timeout(280)

Line = list[Any]
"""[optimizer step, partition, rows] of a micro-batch"""


class Training:
    """Runs of one training in a folder, each in its own process."""

    def __init__(self, folder: Path, **plan: Any) -> None:
        folder.mkdir()
        self.folder = folder
        self.plan = {"devices": 1, "save_queue": False, "clear_finished": True, "folder": str(folder), **plan}
        self.kept: list[list[Line]] = [[] for _ in range(self.plan["devices"])]

    def run(self, kill: tuple[int, str] | None = None) -> int:
        """Run until the end or the kill. Keeps the lines up to the newest checkpoint, and adds the new ones."""
        for record in self.folder.glob("rank*"):
            record.unlink()
        found = newest(self.folder)
        since = 0 if found is None else int(found.stem.split("=")[1])
        self.kept = [[line for line in rank if line[0] < since] for rank in self.kept]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
        environment["TMPDIR"] = str(self.folder.parent)
        with (self.folder.parent / "output").open("a") as output:
            words = (HERE / "resume_script.py", json.dumps({**self.plan, "kill": kill}))
            process = Program(words, ROOT, environment, output, output)
            try:
                code = process.wait(100)
            finally:
                process.end()  # in case it hangs
                if kill is not None:  # otherwise another rank could still record a step before it ends
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        for rank, lines in enumerate(self.kept):
            record = self.folder / f"rank{rank}.jsonl"
            lines += [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        return code

    def weights(self) -> Any:
        return json.loads((self.folder / "weights.json").read_text())


def run_with_kills(training: Training, rng: random.Random, batches: int, kills: int = 2) -> list[tuple[int, str]]:
    """Kill it at random points, then run it to its end. Returns the points."""
    points = []
    for _ in range(kills):
        points.append(
            (rng.randrange(1, batches), rng.choice(["training", "training", "saving", "saved", "validation"]))
        )
        code = training.run(points[-1])
        if code == 0:  # it ended before this point
            return points
        assert code == -signal.SIGKILL, (code, points, (training.folder.parent / "output").read_text()[-3000:])
    assert training.run() == 0, (points, (training.folder.parent / "output").read_text()[-3000:])
    return points


SINGLE: dict[str, dict[str, Any]] = {
    "epochs, micro-batches, accumulation": {
        "stream": {"partition": "train@{epoch}", "batch_size": 4, "micro_batch_size": 2},
        "trainer": {"max_epochs": 3, "accumulate_grad_batches": 3, "val_check_interval": 7},
        "save_every": 2,
    },
    "steps, workers, known length": {
        "stream": {"partition": "train", "batch_size": 6, "micro_batch_size": 4, "num_workers": 2, "num_batches": 10,
                   "clear_consumed": True},
        "trainer": {"max_epochs": 4},
        "save_every": 3,
    },
    "steps in the name of the partition": {
        "stream": {"partition": "step@{global_step}", "batch_size": 5, "num_workers": 1},
        "trainer": {"max_epochs": 3, "accumulate_grad_batches": 2, "check_val_every_n_epoch": 1},
        "save_every": 1,
    },
}  # fmt: skip


@pytest.fixture
def seed() -> int:
    """Set TQ_TEST_SEED to repeat a run."""
    found = int(os.environ.get("TQ_TEST_SEED", random.SystemRandom().randrange(10**6)))
    print(f"TQ_TEST_SEED={found}")
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.programs if name.startswith("epochs") else pytest.mark.slow)
        for name in SINGLE
    ],
)
def test_killed_training_resumes_as_if_never_killed(tmp_path: Path, name: str, seed: int) -> None:
    check_equal(tmp_path, seed, devices=1, **SINGLE[name])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_training_of_two_ranks_resumes_as_if_never_killed(tmp_path: Path, seed: int, workers: int) -> None:
    stream = {"partition": "train@{epoch}", "batch_size": 4, "micro_batch_size": 2, "num_workers": workers}
    trainer = {"max_epochs": 2, "accumulate_grad_batches": 2}
    check_equal(tmp_path, seed, devices=2, stream=stream, trainer=trainer, save_every=2, kills=1)


@pytest.mark.programs
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_killed_with_its_queue_resumes_from_the_saved_queue(tmp_path: Path, seed: int, devices: int) -> None:
    stream = {"partition": "train", "task": "learn", "batch_size": 4, "micro_batch_size": 2, "clear_consumed": True}
    plan = {"devices": devices, "stream": stream, "trainer": {"max_epochs": 1, "accumulate_grad_batches": 3}}
    plan |= {"queue": {"units": 1}, "save_every": 2}
    whole = Training(tmp_path / "whole", **{**plan, "save_every": 0})
    assert whole.run() == 0, (tmp_path / "output").read_text()[-3000:]
    parts = Training(tmp_path / "parts", **plan, save_queue=True)
    points = run_with_kills(parts, random.Random(seed), len(whole.kept[0]), kills=3 - devices)
    assert parts.kept == whole.kept, (seed, points)
    assert parts.weights() == whole.weights(), (seed, points)
    kept = {path.name for path in parts.folder.glob("*.ckpt*")}  # Lightning also keeps the ones it resumed from
    assert kept == {f"{path.stem}.ckpt{end}" for path in parts.folder.glob("*.ckpt") for end in ("", ".tq")}


def check_equal(tmp_path: Path, seed: int, kills: int = 2, **plan: Any) -> None:
    address = str(tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})["address"])
    os.environ.pop("TQ_ADDRESS", None)
    fill_all(tq.get_client())
    plan["queue"] = {"address": address}
    stream = plan.pop("stream")
    whole = Training(tmp_path / "whole", stream={**stream, "task": "whole", "clear_consumed": False}, **plan)
    whole.plan |= {"save_every": 0, "clear_finished": False}
    assert whole.run() == 0, (tmp_path / "output").read_text()[-3000:]
    parts = Training(tmp_path / "parts", stream={**stream, "task": "parts"}, **plan)
    points = run_with_kills(parts, random.Random(seed), len(whole.kept[0]), kills)
    assert parts.kept == whole.kept, (seed, points)
    assert parts.weights() == whole.weights(), (seed, points)
