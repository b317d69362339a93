# SPDX-License-Identifier: Apache-2.0
"""QueueMonitor(plot=...) draws a fit of any length, with staleness where samples have a version."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from matplotlib.figure import Figure
from matplotlib.image import imread
from producing import rows
from recorders import Recorder

from lightning_tq import QueueMonitor, TQDataModule, queue_picture
from lightning_tq.queue_picture import History, Point, draw
from tests.lightning.conftest import stream
from transfer_queue import ConfigError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def saving(figure: Figure, *args: Any, **options: Any) -> None:
        saved.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", saving)
    return saved


def labels(figure: Figure) -> list[str]:
    return [" ".join(axes.get_ylabel().split()) for axes in figure.axes]


@pytest.mark.parametrize("tagged", [True, False])
def test_a_fit_ends_with_its_picture(
    data: Make, trainer: MakeTrainer, tmp_path: Path, figures: list[Figure], tagged: bool
) -> None:
    dm = data(train=stream("train", num_batches=5, prefetch=False))
    dm.client.put(rows(40), partition_id="train", tags=[{"policy_version": 0}] * 40 if tagged else None)
    path = tmp_path / "new" / "queue.png"
    trainer(callbacks=[QueueMonitor(plot=path)]).fit(Recorder(), datamodule=dm)
    assert imread(path).shape[1] == 1080
    (figure,) = figures
    ages = ["mean staleness (versions)"] if tagged else []
    assert labels(figure) == ["samples ready", "time waiting for a batch (%)", *ages]
    assert re.search(r"was the bottleneck: it|kept pace: ", figure.get_suptitle())
    raw = [list(axes.lines[0].get_ydata()) for axes in figure.axes]
    assert raw[0] == [36.0, 32.0, 28.0, 24.0, 20.0]
    assert all(0 <= share <= 100 for share in raw[1])
    assert raw[2:] == ([[0.0, 1.0, 2.0, 3.0, 4.0]] if tagged else [])


@pytest.mark.parametrize(
    ("last_s", "label"), [(30.0, "seconds"), (600.0, "minutes"), (90_000.0, "hours")], ids=lambda value: str(value)
)
def test_the_time_is_shown_in_a_unit_that_can_be_read(
    tmp_path: Path, figures: list[Figure], last_s: float, label: str
) -> None:
    draw([Point(0.0, 1, 0.5, None), Point(last_s, 2, 0.5, None)], "title", tmp_path / "queue.png")
    assert figures[0].axes[-1].get_xlabel() == f"{label} since the first batch"


def test_one_batch_is_a_picture_too(tmp_path: Path) -> None:
    draw([Point(0.0, 0.0, 0.0, 0.0)], "title", tmp_path / "queue.png")


def test_a_history_is_bounded_and_keeps_even_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_picture, "_MOST_POINTS", 8)
    history = History()
    for number in range(100):
        history.add(Point(float(number), 0.0, 0.0, None))
        assert len(history.points) < 8
    times = [point.at_s for point in history.points]
    assert times == [16.0 * number for number in range(len(times))]
    assert times[-1] > 90


def test_without_matplotlib_the_option_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_picture, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"QueueMonitor\(plot='queue.png'\) needs matplotlib: install lightning-tq with its extra 'plot'",
    ):
        QueueMonitor(plot="queue.png")
    assert QueueMonitor().plot is None
