# SPDX-License-Identifier: Apache-2.0
"""Gloo ranks with partitions that fill no whole rounds: all ranks take the same steps and leftovers are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from producing import fill
from recorders import Recorder

from lightning_tq import TQDataModule
from tests.lightning.conftest import Rows, stream

pytestmark = pytest.mark.timeout(200)


def sizes(ranks: list[Rows], stage: str, partition: str) -> list[list[int]]:
    """Rows of each batch, per rank."""
    return [[len(batch) for at, name, batch in rows if (at, name) == (stage, partition)] for rows in ranks]


def distinct(ranks: list[Rows], stage: str, partition: str) -> int:
    given = [index for rows in ranks for at, name, batch in rows if (at, name) == (stage, partition) for index in batch]
    return len(set(given))


@pytest.mark.slow  # two ranks of one epoch are those of test_ddp
@pytest.mark.parametrize(
    ("ranks", "options", "trainer"),
    [
        (2, {"batch_size": 3}, {}),
        (3, {"batch_size": 4, "micro_batch_size": 3}, {"accumulate_grad_batches": 2}),
        (4, {"batch_size": 2, "num_workers": 2}, {"val_check_interval": 2}),
    ],
    ids=["2", "3-micro-batches", "4-workers"],
)
def test_samples_that_fill_no_round_are_dropped_on_all_ranks(
    run_ranks: Any, tmp_path: Path, ranks: int, options: dict[str, Any], trainer: dict[str, Any]
) -> None:
    plan = {"train": [17, 26, 40], "val": [13, 1, 9], "stream": options, "trainer": trainer}
    code, output, recorded = run_ranks("uneven_partitions_script.py", str(ranks), "LOGS", json.dumps(plan))
    assert code == 0, output
    size = options["batch_size"]
    of_batch = [3, 1] if "micro_batch_size" in options else [size]
    for epoch in range(3):
        rounds, left = divmod(plan["train"][epoch], ranks * size)
        assert sizes(recorded, "train", f"train@{epoch}") == [of_batch * rounds] * ranks
        assert distinct(recorded, "train", f"train@{epoch}") == rounds * ranks * size
        text = f"{left} sample{'s' * (left != 1)} of partition 'train@{epoch}' could not fill a last round"
        assert (text in output) == bool(left)
    left = 13 % (ranks * size)
    assert f"{left} sample{'s' * (left != 1)} of partition 'val@0' could not fill a last round" in output
    assert "So stream 'val0' has no batch, and what it would log is missing. To read them, set tail='pad'." in output
    assert len({rank.read_text() for rank in (tmp_path / "logs").glob("steps*")}) == 1
    assert json.loads((tmp_path / "logs" / "open").read_text()) == [0, 0, 0]  # every rank's batches are acknowledged


@pytest.mark.slow  # two ranks that pad are those of test_ddp
@pytest.mark.parametrize("ranks", [2, 4])
def test_padding_keeps_ranks_together_and_loses_nothing(run_ranks: Any, ranks: int) -> None:
    plan = {"train": [17, 1], "val": [5, 2], "stream": {"batch_size": 2, "tail": "pad"}, "trainer": {}}
    code, output, recorded = run_ranks("uneven_partitions_script.py", str(ranks), "LOGS", json.dumps(plan))
    assert code == 0, output
    for stage in ("train", "val"):
        for epoch, count in enumerate(plan[stage]):
            rounds = -(-count // (2 * ranks))
            batches = sizes(recorded, stage, f"{stage}@{epoch}")
            if (stage, epoch) == ("val", 0):  # the second loader also reads it in each epoch
                batches = [rank[:rounds] for rank in batches]
            assert batches == [[2] * rounds] * ranks
            assert distinct(recorded, stage, f"{stage}@{epoch}") == count
    assert "could not fill a last round" not in output


@pytest.mark.programs
def test_an_uneven_end_is_refused_for_training_on_several_ranks(run_ranks: Any) -> None:
    plan = {"train": [4], "val": [4], "stream": {"batch_size": 2, "tail": "uneven_ok"}, "trainer": {}}
    code, output, recorded = run_ranks("uneven_partitions_script.py", "2", "LOGS", json.dumps(plan))
    assert (code, recorded) == (1, [])
    assert "tail='uneven_ok' can end the stream on one of 2 ranks before the others" in output


def test_a_stream_without_a_tail_does_not_inherit_that_of_an_earlier_run(data: Any, trainer: Any) -> None:
    dm: TQDataModule = data(train=stream("train"))
    indexes = fill(dm.client, "train", 6)
    dm.client.register_task("learn", dp_size=1, tail="pad")
    model = Recorder()
    trainer().fit(model, datamodule=dm)
    assert model.indexes() == indexes


def test_an_uneven_end_is_allowed_on_one_rank(data: Any, trainer: Any) -> None:
    dm: TQDataModule = data(train=stream("train", tail="uneven_ok"))
    indexes = fill(dm.client, "train", 6)
    model = Recorder()
    fitted: Trainer = trainer()
    fitted.fit(model, datamodule=dm)
    assert (model.indexes(), fitted.global_step) == (indexes, 2)
