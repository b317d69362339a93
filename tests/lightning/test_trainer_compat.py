# SPDX-License-Identifier: Apache-2.0
"""The progress that Lightning saves, corrected to batches that are in an optimizer step."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_tq.trainer_compat import correct_progress


def counts(done: int, more: int = 1) -> dict[str, int]:
    """Counts at the end of a batch, where one more is processed than completed."""
    return {"ready": done + more, "completed": done, "started": done + more, "processed": done + more}


@pytest.mark.parametrize(
    ("unstepped", "total", "current"),
    [(0, counts(9), counts(4)), (2, counts(7), counts(2)), (4, counts(5), counts(0))],
)
def test_a_checkpoint_counts_only_batches_in_a_step(
    unstepped: int, total: dict[str, int], current: dict[str, int]
) -> None:
    progress = {"total": counts(9), "current": counts(4), "is_last_batch": False}
    correct_progress(saved(progress, epoch={"ready": 2, "completed": 1, "started": 2, "processed": 1}), unstepped)
    assert progress == {"total": total, "current": current, "is_last_batch": False}


def saved(progress: dict[str, Any], epoch: dict[str, int]) -> dict[str, Any]:
    epochs = {"total": epoch, "current": dict(epoch)}
    loop = {
        "epoch_loop.batch_progress": progress,
        "epoch_progress": epochs,
        "epoch_loop.state_dict": {"_batches_that_stepped": 9},
    }
    return {"loops": {"fit_loop": loop}}


@pytest.mark.parametrize(
    ("batches", "epoch", "stepped"),
    [(counts(9), counts(1) | {"processed": 1}, 10), (counts(10, 0), counts(1), 9)],
    ids=["its last batch", "its end"],
)
def test_a_checkpoint_from_the_end_of_an_epoch_starts_the_next_one(
    batches: dict[str, int], epoch: dict[str, int], stepped: int
) -> None:
    progress = {"total": batches, "current": counts(4), "is_last_batch": True}
    checkpoint = saved(progress, epoch)
    correct_progress(checkpoint, 0)
    assert progress == {"total": counts(10, 0), "current": counts(0, 0), "is_last_batch": False}
    assert checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] == stepped
    assert checkpoint["loops"]["fit_loop"]["epoch_progress"] == {"total": counts(2, 0), "current": counts(2, 0)}
