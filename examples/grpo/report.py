# SPDX-License-Identifier: Apache-2.0
"""The report of a run: a picture of its metrics and a summary."""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = dict[str, list[tuple[int, float]]]
"""(step, value) pairs by the name of the metric."""

_SMOOTHED_STEPS = 10
_BLUE, _ORANGE, _GREY = "#2864b4", "#d9722a", "#8a8f98"


class RunReport(L.Callback):
    """Draws ``reward.png`` next to the CSVLogger's ``version_…`` folder and prints a summary, at the end on rank zero.

    The module must have ``warmup_accuracy``.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first_wait_s: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"val/accuracy": float(pl_module.warmup_accuracy)}, step=trainer.global_step)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if self._first_wait_s is None:
            self._first_wait_s = trainer.datamodule.train_reader().waited_s

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logger = next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)
        if logger is None or not trainer.is_global_zero:
            return  # fast_dev_run removes the loggers
        logger.save()
        series = read_metrics(Path(logger.log_dir) / "metrics.csv")
        picture = Path(logger.root_dir) / "reward.png"
        draw(series, picture)
        waited_s = trainer.datamodule.train_reader().waited_s
        wall_s = time.perf_counter() - self._started
        print(summary(series, trainer.world_size, waited_s, self._first_wait_s or 0.0, wall_s))
        print(f"  picture             {picture}", flush=True)


def read_metrics(path: Path) -> Series:
    """Read the metrics of a CSVLogger, without the gaps."""
    series: Series = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name != "step":
                    series.setdefault(name, []).append((int(row["step"]), float(value)))
    return series


def summary(series: Series, world_size: int, waited_s: float, first_wait_s: float, wall_s: float) -> str:
    """Results and waits of the run, as text.

    Args:
        waited_s: Seconds that training waited for batches.
        first_wait_s: Seconds of these for the first batch, which the log's line on the bottleneck leaves out.
        wall_s: Seconds since the start of the run, with the warm-up.
    """
    accuracy, staleness = _values(series, "val/accuracy"), _values(series, "train/staleness")
    return "\n".join(
        (
            "",
            f"  warm-up accuracy    {accuracy[0]:.1%}",
            f"  final accuracy      {accuracy[-1]:.1%}  ({100 * (accuracy[-1] - accuracy[0]):+.1f} points)",
            f"  optimizer steps     {len(staleness)}",
            f"  answers trained on  {world_size * sum(_values(series, 'train/answers')):.0f}",
            f"  staleness           mean {fmean(staleness):.2f}, "
            f"max {max(_values(series, 'train/staleness_max')):.0f} versions",
            f"  waited for data     {waited_s:.1f} s, {first_wait_s:.1f} s of it for the first batch",
            f"  wall time           {wall_s:.0f} s",
        )
    )


def draw(series: Series, path: Path) -> None:
    """Four panels over the optimizer steps: reward, accuracy, staleness, wait."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    accuracy = _values(series, "val/accuracy")
    figure.suptitle(f"GRPO on chain_sum: {accuracy[0]:.0%} solved after the warm-up, {accuracy[-1]:.0%} at the end")
    for panel, axis in zip((_draw_reward, _draw_accuracy, _draw_staleness, _draw_wait), axes.flat, strict=True):
        panel(axis, series)
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_reward(axis: Axes, series: Series) -> None:
    steps, rewards = _columns(series, "train/reward")
    axis.plot(steps, rewards, color=_BLUE, alpha=0.3, linewidth=1, label="mean of a batch")
    axis.plot(steps, _smoothed(rewards), color=_BLUE, linewidth=2, label=f"mean of {_SMOOTHED_STEPS} batches")
    axis.set(title="Reward of the sampled answers", ylabel="reward (0 to 1)")
    axis.legend(loc="upper left", frameon=False)


def _draw_accuracy(axis: Axes, series: Series) -> None:
    steps, shares = _columns(series, "val/accuracy")
    percent = [100 * share for share in shares]
    axis.plot(steps, percent, color=_ORANGE, marker="o", markersize=4, linewidth=2, label="likeliest answer")
    axis.axhline(percent[0], color=_GREY, linestyle="--", label=f"after the warm-up: {shares[0]:.0%}")
    axis.set(title="Accuracy on held-out tasks", ylabel="entirely right (%)", ylim=(0, 100))
    axis.legend(loc="upper left", frameon=False)


def _draw_staleness(axis: Axes, series: Series) -> None:
    steps, highest = _columns(series, "train/staleness_max")
    axis.fill_between(steps, highest, step="mid", color=_BLUE, alpha=0.15, linewidth=0, label="stalest answer")
    axis.plot(*_columns(series, "train/staleness"), color=_BLUE, linewidth=1.5, label="mean of a batch")
    axis.set(title="Staleness of the answers trained on", ylabel="versions behind", ylim=(0, max(highest) + 1))
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.legend(loc="upper right", frameon=False)


def _draw_wait(axis: Axes, series: Series) -> None:
    steps, seconds = _columns(series, "queue/wait_s")
    axis.plot(steps, [1000 * value for value in seconds], color=_ORANGE, marker=".", linestyle="none")
    axis.set(title="Time that training waited for a batch", ylabel="milliseconds per step (log)", yscale="log")


def _columns(series: Series, name: str) -> tuple[list[int], list[float]]:
    pairs = series.get(name, [])
    return [step for step, _ in pairs], [value for _, value in pairs]


def _values(series: Series, name: str) -> list[float]:
    return _columns(series, name)[1]


def _smoothed(values: list[float]) -> list[float]:
    return [fmean(values[max(0, end - _SMOOTHED_STEPS) : end]) for end in range(1, len(values) + 1)]


def main(arguments: list[str]) -> None:
    """Draw the picture of an earlier run: ``python -m examples.grpo.report runs/grpo/version_0/metrics.csv``."""
    metrics = Path(arguments[0])
    draw(read_metrics(metrics), metrics.with_name("reward.png"))


if __name__ == "__main__":
    main(sys.argv[1:])
