# SPDX-License-Identifier: Apache-2.0
"""Gloo ranks under each strategy: equal batches within a data-parallel group, disjoint ones between groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.conftest import Rows

pytestmark = pytest.mark.timeout(200)


def batches(group: int, groups: int, count: int) -> list[list[int]]:
    """Micro-batches of one row out of batches of two: group g of G gets pairs g, g + G, g + 2 G, ... of a partition."""
    return [[pair + row] for pair in range(2 * group, count, 2 * groups) for row in range(2)]


def in_order(ranks: list[Rows]) -> list[Rows]:
    """Replace indexes, which may have gaps, by row numbers in the partition."""
    indexes: dict[str, set[int]] = {}
    for _, partition, rows in (row for rank in ranks for row in rank):
        indexes.setdefault(partition, set()).update(rows)
    number = {index: at for rows in indexes.values() for at, index in enumerate(sorted(rows))}
    return [[(stage, partition, [number[row] for row in rows]) for stage, partition, rows in rank] for rank in ranks]


def topologies(folder: Path) -> list[Any]:
    """The topology that each rank recorded."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("logs/topology*.json"))]


@pytest.mark.parametrize(
    ("strategy", "groups", "readers"),
    [
        pytest.param("ddp_spawn", [0, 1], [0, 1], marks=pytest.mark.slow),
        pytest.param("ddp_fork", [0, 1], [0, 1], marks=pytest.mark.slow),
        pytest.param("ddp", [0, 1, 2, 3], [0, 1, 2, 3], marks=pytest.mark.slow),
        # 2 x 2, sharded, so steps are collectives of peers and of groups.
        pytest.param("model_parallel", [0, 0, 1, 1], [0, 2], marks=pytest.mark.slow),
        # The same groups, from the user's dp_rank and dp_size.
        pytest.param("across", [0, 1, 0, 1], [0, 1], marks=pytest.mark.slow),
    ],
)
def test_peers_get_the_same_batches_and_groups_share_the_rest(
    run_ranks: Any, tmp_path: Path, strategy: str, groups: list[int], readers: list[int]
) -> None:
    code, output, ranks = run_ranks("strategies_script.py", strategy, str(len(groups)), "LOGS")
    assert code == 0, output
    size = max(groups) + 1
    expected = []
    for group in groups:
        rows = []
        for epoch in range(2):
            rows += [("train", f"train@{epoch}", row) for row in batches(group, size, 24)]
            rows += [("val", f"val@{epoch}", row) for row in batches(group, size, 8)]
        expected.append(rows)
    assert in_order(ranks) == expected
    assert topologies(tmp_path) == [[group, size, rank in readers] for rank, group in enumerate(groups)]


@pytest.mark.slow
def test_the_same_holds_for_a_loop_on_fabric(run_ranks: Any, tmp_path: Path) -> None:
    code, output, ranks = run_ranks("fabric_script.py", "LOGS")
    assert code == 0, output
    assert in_order(ranks) == [
        [("train", f"train@{epoch}", row) for epoch in range(2) for row in batches(group, 2, 24)]
        for group in (0, 0, 1, 1)
    ]
    assert topologies(tmp_path) == [[0, 2, True], [0, 2, False], [1, 2, True], [1, 2, False]]
