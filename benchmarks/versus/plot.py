# SPDX-License-Identifier: Apache-2.0
"""The comparison as a picture: how many times better, on a logarithmic axis, with a mark where the goal is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.versus.figures import TIMES
from benchmarks.versus.table import short

MET, MISSED, GOAL = "#2f7d5b", "#c98a2b", "#1b1b1b"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Lines without a ratio are left out."""
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    lines = [line for line in result["lines"] if line["ratio"] is not None]
    figure = Figure(figsize=(10, 0.36 * len(lines) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    colors = [MISSED if line["met"] is False else MET for line in lines]
    places = range(len(lines))
    axes.barh(places, [line["ratio"] - 1 for line in lines], left=1, height=0.62, color=colors)
    for place, line in zip(places, lines, strict=True):
        axes.text(max(line["ratio"], 1) * 1.08, place, f"{short(line['ratio'])}{TIMES}", va="center", fontsize=9)
        if line["goal_as_ratio"] is not None:
            at = [line["goal_as_ratio"]] * 2
            axes.plot(at, [place - 0.42, place + 0.42], color=GOAL, linewidth=2, solid_capstyle="butt")
    axes.set_xscale("log")
    widest = max([1.0, *(line[name] for line in lines for name in ("ratio", "goal_as_ratio") if line[name])])
    axes.set_xlim(right=widest * 2.2)
    axes.axvline(1, color="#777777", linewidth=1)
    axes.set_yticks(places, [line["label"] for line in lines], fontsize=9)
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("times better than the peer, measured alternately in one run (log scale)", fontsize=9)
    facts = result["facts"]
    axes.set_title(
        f"lightning-tq {facts['ours']} beside TransferQueue {facts['peer']}, {facts['cores']} cores",
        fontsize=11,
        loc="left",
    )
    keys: list[Any] = [Patch(color=MET, label="goal met, or none"), Patch(color=MISSED, label="goal missed")]
    keys.append(Line2D([], [], color=GOAL, linewidth=2, label="goal"))
    axes.legend(handles=keys, fontsize=8, loc="lower right", frameon=True)
    figure.savefig(path, dpi=120)
