# SPDX-License-Identifier: Apache-2.0
"""The picture of a fit: samples ready, waiting and staleness over time. It needs matplotlib (the extra "plot")."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from transfer_queue.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

_MOST_POINTS = 2_000
BLUE, ORANGE = "#2864b4", "#d9722a"
_GREEN, _GREY = "#3a8f5c", "#5c6068"
_SIZE_INCHES, _DPI = (9.0, 2.1), 120


class Point(NamedTuple):
    """Values of one training batch."""

    at_s: float
    """Seconds since the first batch, without validation."""
    ready: float
    """Samples ready for the training task."""
    starved: float
    """Share of the time since the previous point that training waited for a batch."""
    staleness: float | None
    """Mean age of the batch's samples in versions, if they have a version."""


class History:
    """At most 2000 points of a fit of any length. Whenever they are that many, every second one is dropped."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._every = 1
        self._seen = 0

    def add(self, point: Point) -> None:
        if self._seen % self._every == 0:
            self.points.append(point)
        self._seen += 1
        if len(self.points) == _MOST_POINTS:
            del self.points[1::2]
            self._every *= 2


def check_matplotlib(option: str) -> None:
    """Raise ConfigError, which names this option, where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{option} needs matplotlib: install lightning-tq with its extra 'plot' (docs/start.md), or omit it."
        )


class Panel(NamedTuple):
    """One curve, in a box of its own."""

    label: str
    at: Sequence[float]
    values: Sequence[float]
    color: str
    most: float | None = None
    """Where the vertical axis ends. None: above the largest value."""


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """Draw panels over time: samples ready, time spent waiting and, if known, staleness."""
    seconds = [point.at_s for point in points]
    unit_s, unit = next(
        (s, name) for s, name in ((3600, "hours"), (60, "minutes"), (1, "seconds")) if seconds[-1] >= 2 * s or s == 1
    )
    at = [second / unit_s for second in seconds]
    ages = [(x, point.staleness) for x, point in zip(at, points, strict=True) if point.staleness is not None]
    panels = [
        Panel("samples ready", at, [point.ready for point in points], BLUE),
        Panel("time waiting for\na batch (%)", at, [100 * point.starved for point in points], ORANGE, 100),
        Panel("mean staleness\n(versions)", [x for x, _ in ages], [float(age) for _, age in ages], _GREEN),
    ]
    draw_panels(panels, title, f"{unit} since the first batch", path)


def draw_panels(panels: Sequence[Panel], title: str, x_label: str, path: Path) -> None:
    """Draw those that have values, one below the other. Makes the folder."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [panel for panel in panels if panel.values]
    size = (_SIZE_INCHES[0], _SIZE_INCHES[1] * len(shown) + 0.7)
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, wrap=True)
    boxes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for box, panel in zip(boxes, shown, strict=True):
        _draw_panel(box, panel)
    boxes[-1].set_xlim(0.0, max(1e-9, *(panel.at[-1] for panel in shown)))  # they share it
    figure.align_ylabels()
    boxes[-1].set_xlabel(x_label)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    """Values as a thin line, and their running mean as a thick one."""
    from matplotlib.ticker import MaxNLocator

    axes.fill_between(panel.at, panel.values, color=panel.color, alpha=0.15, linewidth=0)
    axes.plot(panel.at, panel.values, color=panel.color, alpha=0.45, linewidth=0.8)
    axes.plot(panel.at, _running_mean(panel.values), color=panel.color, linewidth=1.8, clip_on=False)
    axes.set_ylabel(panel.label)
    axes.set_ylim(0, panel.most or max(1.0, 1.08 * max(panel.values)))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.grid(axis="y", color=_GREY, alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Means over a fifteenth of all values each, fewer at both ends."""
    half = len(values) // 30
    windows = (values[max(0, at - half) : at + half + 1] for at in range(len(values)))
    return [fmean(window) for window in windows]
