# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: timing a call many times, the time of one memcpy, printing the line."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def median_ms(call: Callable[[], Any], repeats: int, warmup: int = 3) -> float:
    """Median wall time of one call in milliseconds."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def memcpy_ms(nbytes: int, repeats: int = 9) -> float:
    """Median time of one copy of so many bytes into memory that was touched before."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return median_ms(lambda: target.copy_(source), repeats)


def report(question: str, **figures: Any) -> None:
    """Print the line; floats rounded to three digits."""
    print(json.dumps({"question": question, **{name: _rounded(value) for name, value in figures.items()}}))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
