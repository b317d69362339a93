# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks: each sample goes to one of them, however the ranks are started, and no process remains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lightning.conftest import Rows

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def run(run_ranks: Any) -> Any:
    """``run("ddp", ...)``: the script's exit code, its output, and the batches of each rank."""
    return lambda strategy, *args: run_ranks("ddp_script.py", strategy, "LOGS", *args)


def given(ranks: list[Rows], stage: str, partition: str) -> list[list[list[int]]]:
    """Batches of each rank."""
    return [[batch for at, name, batch in rows if (at, name) == (stage, partition)] for rows in ranks]


@pytest.mark.programs
def test_each_sample_is_trained_on_one_rank_and_leftovers_are_dropped_and_reported(run: Any) -> None:
    code, output, ranks = run("ddp", "--test")
    assert code == 0, output
    # Rounds are 2 ranks x 4 rows. 22 rows are two rounds and 6 rows; 9 rows for validation are one round and 1 row.
    beyond = 0  # indexes of an earlier reservation may stay unused between two partitions
    for epoch in range(2):
        batches = given(ranks, "train", f"train@{epoch}")
        first = batches[0][0][0]
        assert first >= beyond
        assert batches == [[_four(first), _four(first + 8)], [_four(first + 4), _four(first + 12)]]
        validated = given(ranks, "val", f"val@{epoch}")
        beyond = validated[0][0][0]
        assert beyond >= first + 22
        assert validated == [[_four(beyond)], [_four(beyond + 4)]]
        beyond += 9
    assert given(ranks, "test", "val@1") == validated  # the queue outlived the fit
    for text in ("6 samples of partition 'train@0'", "1 sample of partition 'val@1'"):
        assert f"{text} could not fill a last round" in output


def _four(start: int) -> list[int]:
    return list(range(start, start + 4))


@pytest.mark.programs
def test_padding_gives_every_rank_the_same_number_of_batches_and_loses_nothing(run: Any) -> None:
    code, output, ranks = run("ddp_fork", "--tail", "pad", "--num-workers", "2", "--test")
    assert code == 0, output
    for epoch in range(2):
        train, val = given(ranks, "train", f"train@{epoch}"), given(ranks, "val", f"val@{epoch}")
        assert [[len(batch) for batch in batches] for batches in train + val] == [[4] * 3] * 2 + [[4] * 2] * 2
        for ranks_batches, count in ((train, 22), (val, 9)):
            indexes = {index for rank in ranks_batches for batch in rank for index in batch}
            assert indexes == set(range(min(indexes), min(indexes) + count))


@pytest.mark.programs
@pytest.mark.parametrize("how", [pytest.param("raise", marks=pytest.mark.slow), "SIGKILL"])
def test_a_rank_that_fails_ends_the_other_and_everything_it_started(run: Any, how: str) -> None:
    code, output, ranks = run("ddp", "--fail-rank", "0" if how == "SIGKILL" else "1", "--how", how)
    assert code != 0
    assert "failed on request" in output or how == "SIGKILL"
    assert [len(given(ranks, "train", "train@1")[rank]) for rank in range(2)] == [1, 1]


@pytest.mark.programs
def test_a_sigterm_amid_a_step_ends_all_ranks_after_it(run: Any) -> None:
    """Lightning's own handler would broadcast at once, while the other rank is in the reduction of gradients."""
    code, output, ranks = run("ddp", "--fail-rank", "0", "--how", "SIGTERM")
    assert code == 0, output
    assert [len(given(ranks, "train", "train@1")[rank]) for rank in range(2)] == [1, 1]
