# SPDX-License-Identifier: Apache-2.0
"""What the agent's training prints, and its picture."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L

_PER_LINE = 25


class Report(L.Callback):
    """Counts games won, their turns, and turns of episodes that more than one worker has played."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._began = folder, time.perf_counter()
        self._won: list[float] = []
        self._turns: list[list[int]] = []
        self._shared = self._rows = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, out: Any, batch: Any, at: int) -> None:
        data, meta = batch
        episodes: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for group, part, tags in zip(meta.group_index, data["part"].tolist(), meta.custom_meta, strict=True):
            episodes.setdefault((group, part), []).append(tags)
        self._rows += meta.size
        self._shared += sum(len({tags["worker"] for tags in turns}) > 1 for turns in episodes.values())
        self._won.append(fmean(turns[-1]["won"] for turns in episodes.values()))
        self._turns.append([len(turns) for turns in episodes.values()])
        if len(self._won) % _PER_LINE == 0:
            print(
                f"step {len(self._won):3}: won {fmean(self._won[-_PER_LINE:]):4.0%} of the games, "
                f"turns per game {self._mean_turns(slice(-_PER_LINE, None)):.1f} [{self._clock():.0f} s]",
                flush=True,
            )

    def finish(self, killed: int) -> None:
        """Print the summary and draw the picture."""
        picture = self._folder / "agents.png"
        self._draw(picture)
        sizes = [sum(turns) for turns in self._turns]
        print(f"\n  episodes            {sum(map(len, self._turns))}, of {self._rows} turns")
        print(f"  rows of a batch     {min(sizes)} to {max(sizes)}")
        print(f"  won                 {fmean(self._won[:5]):.0%} -> {fmean(self._won[-5:]):.0%}")
        print(f"  turns per game      {self._mean_turns(slice(0, 5)):.1f} -> {self._mean_turns(slice(-5, None)):.1f}")
        print(f"  workers killed      {killed}; {self._shared} episodes were continued by another one")
        print(f"  wall time           {self._clock():.0f} s")
        print(f"  picture             {picture}", flush=True)

    def _mean_turns(self, some: slice) -> float:
        return fmean(turns for batch in self._turns[some] for turns in batch)

    def _clock(self) -> float:
        return time.perf_counter() - self._began

    def _draw(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        steps = range(1, len(self._won) + 1)
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
        left.plot(steps, [100 * share for share in self._won], color="#2864b4", linewidth=1.5)
        left.set(title="Games won", ylabel="% of a batch's games", ylim=(0, 102))
        means = [fmean(turns) for turns in self._turns]
        right.fill_between(
            steps, [min(turns) for turns in self._turns], [max(turns) for turns in self._turns],
            color="#d9722a", alpha=0.15, linewidth=0, label="shortest and longest game",
        )  # fmt: skip
        right.plot(steps, means, color="#d9722a", linewidth=1.5, label="mean")
        right.axhline(3.7, color="#8a8f98", linestyle="--", label="halving the range each time")
        right.set(title="Turns of a game", ylabel="turns", ylim=(0, None))
        right.legend(frameon=False)
        for axis in (left, right):
            axis.set_xlabel("optimizer step")
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
