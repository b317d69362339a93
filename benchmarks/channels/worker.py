# SPDX-License-Identifier: Apache-2.0
"""One measurement in a fresh interpreter: opens the channel, and reads it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from benchmarks.channels.batches import Open, consume


def main(way: str, batches: int, threads: int, producer_threads: int, cleared: bool, folder: str) -> dict[str, Any]:
    """``way``: "module:function" of an ``Open`` below this package; ``threads``: torch's, of the reader."""
    module, _, function = way.partition(":")
    opened: Open = getattr(import_module(f"benchmarks.channels.{module}"), function)
    with opened(batches, producer_threads, cleared, folder) as channel:
        figures: dict[str, Any] = consume(channel, batches, threads)
    return figures
