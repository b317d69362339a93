# SPDX-License-Identifier: Apache-2.0
"""The comparison as a picture: how many times better, on a logarithmic axis, with a mark where the goal is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.versus.figures import TIMES
from benchmarks.versus.table import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MET, MISSED, GOAL, QUIET = "#2f7d5b", "#c98a2b", "#1b1b1b", "#666666"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Lines without a ratio are left out."""
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    lines = [line for line in result["lines"] if line["ratio"] is not None]
    figure = Figure(figsize=(10, 0.34 * len(lines) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    _bars(axes, lines)
    _scale(axes, lines)
    facts = result["facts"]
    title = f"lightning-tq {facts['ours']} and TransferQueue {facts['peer']} doing the same work alternately"
    figure.suptitle(f"{title}, {facts['cores']} cores", fontsize=11)
    note = f"lightning-tq is so many times better, logarithmic; grey: TransferQueue {facts['peer']} → lightning-tq"
    figure.supxlabel(note, fontsize=9)
    _legend(axes)
    figure.savefig(path, dpi=120)


def _bars(axes: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    for place, line in enumerate(lines):
        axes.barh(place, line["ratio"] - 1, left=1, height=0.62, color=MISSED if line["met"] is False else MET)
        goal = line["goal_as_ratio"]
        if goal is not None:
            axes.plot([goal] * 2, [place - 0.42, place + 0.42], color=GOAL, linewidth=2, solid_capstyle="butt")
        after = max(line["ratio"], 1, goal or 0) * 1.1
        values = f"{short(line['peer'])} → {short(line['ours'])} {line['unit']}"
        axes.annotate(f"{short(line['ratio'])}{TIMES}", (after, place), va="center", fontsize=10)
        axes.annotate(values, (after, place), (46, 0), textcoords="offset points", va="center", fontsize=9, color=QUIET)


def _scale(axes: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    axes.set_xscale("log")
    widest = max([1.0, *(line[name] for line in lines for name in ("ratio", "goal_as_ratio") if line[name])])
    axes.set_xlim(right=widest * 20)  # room for the text behind the longest bar
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}{TIMES}")
    axes.axvline(1, color=QUIET, linewidth=1)
    axes.set_yticks(range(len(lines)), [line["label"] for line in lines], fontsize=10)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(axes: Axes) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys: list[Any] = [Patch(color=MET, label="goal met, or none set"), Patch(color=MISSED, label="goal missed")]
    keys.append(Line2D([], [], color=GOAL, linewidth=2, label="goal"))
    axes.legend(handles=keys, fontsize=9, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3, frameon=False)
