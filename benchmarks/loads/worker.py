# SPDX-License-Identifier: Apache-2.0
"""One workload on one system, in a fresh interpreter: prints its figures."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

FIGURES = "FIGURES "


def main(workload: str, system: str, scale: float, folder: str) -> None:
    """``workload``: a module of this package, whose ``SYSTEMS`` has the function to call."""
    found: dict[str, Any] = import_module(f"benchmarks.loads.{workload}").SYSTEMS[system](scale, folder)
    print(FIGURES + json.dumps(found), flush=True)
