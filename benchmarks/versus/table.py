# SPDX-License-Identifier: Apache-2.0
"""The comparison as a markdown table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.versus.figures import TIMES


def markdown(result: Mapping[str, Any]) -> str:
    """One row per line of the comparison; the ratio says how many times better ours is."""
    facts = result["facts"]
    rows = [["what", f"TransferQueue {facts['peer']}", f"lightning-tq {facts['ours']}", "ratio", "goal", "met"]]
    rows.append(["---", "---:", "---:", "---:", "---", "---"])
    for line in result["lines"]:
        ratio = "" if line["ratio"] is None else f"{short(line['ratio'])}{TIMES}"
        met = {None: "", True: "yes", False: "no"}[line["met"]]
        rows.append([line["label"], _value(line, "peer"), _value(line, "ours"), ratio, line["goal"] or "", met])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def short(number: float) -> str:
    """Three digits at most, thousands apart."""
    if abs(number) >= 100:
        return f"{number:,.0f}".replace(",", " ")
    return f"{number:.3g}" if abs(number) < 10 else f"{number:.1f}"


def _value(line: Mapping[str, Any], package: str) -> str:
    value = line[package]
    if value is None:
        return "no answer"
    text = f"{short(value)} {line['unit']}"
    return text if line["memcpy_ms"] is None else f"{text} ({short(value / line['memcpy_ms'])}{TIMES} memcpy)"
