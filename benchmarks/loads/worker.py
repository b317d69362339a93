# SPDX-License-Identifier: Apache-2.0
"""One workload on one system, in a fresh interpreter: its figures."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def main(workload: str, system: str, scale: float, folder: str) -> dict[str, Any]:
    """``workload``: a module of this package, whose ``SYSTEMS`` has the function to call."""
    found: dict[str, Any] = import_module(f"benchmarks.loads.{workload}").SYSTEMS[system](scale, folder)
    return found
