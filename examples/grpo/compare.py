# SPDX-License-Identifier: Apache-2.0
"""Accuracy over prompts trained, of two runs: ``python -m examples.grpo.compare``."""

from __future__ import annotations

import sys
from pathlib import Path

from examples.grpo.report import read_metrics

GROUPS = 64  # per optimizer step, in both configurations
RUNS = {"grpo": "every group", "grpo_dapo": "only groups with std(reward) > 0"}
_COLORS = {"grpo": "#8a8f98", "grpo_dapo": "#2864b4"}

Curve = list[tuple[int, float]]


def read(folder: Path, name: str) -> Curve:
    """(prompts trained, share of held-out tasks solved) of the newest run of that name."""
    versions = sorted((folder / name).glob("version_*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    if not versions:
        raise FileNotFoundError(f"there is no {folder / name}/version_*/metrics.csv: run configs/{name}.yaml first.")
    series = read_metrics(versions[-1])["val/accuracy"]
    return [(GROUPS * (step + 1 if step else 0), share) for step, share in series]


def prompts_until(curve: Curve, share: float) -> int | None:
    """Prompts trained when this share was first solved."""
    return next((prompts for prompts, solved in curve if solved >= share), None)


def draw(curves: dict[str, Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, curve in curves.items():
        prompts, shares = zip(*curve, strict=True)
        axis.plot(prompts, [100 * share for share in shares], marker="o", markersize=4, linewidth=2,
                  color=_COLORS[name], label=RUNS[name])  # fmt: skip
    axis.set(title="Accuracy on held-out tasks", xlabel="prompts trained", ylabel="entirely right (%)", ylim=(0, 100))
    axis.legend(loc="upper left", frameon=False)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(folder: str = "runs") -> None:
    curves = {name: read(Path(folder), name) for name in RUNS}
    for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
        found = {RUNS[name]: prompts_until(curve, share) for name, curve in curves.items()}
        if any(found.values()):
            texts = (f"{prompts or 'more'} prompts ({label})" for label, prompts in found.items())
            print(f"{share:.0%} are solved after " + ", ".join(texts))
    picture = Path(folder) / "grpo_compared.png"
    draw(curves, picture)
    print(f"picture {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
