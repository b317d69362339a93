# SPDX-License-Identifier: Apache-2.0
"""The command ``lightning-tq`` in the test's own process: the function that its console script calls."""

from __future__ import annotations

from lightning_tq.cli import main as lightning_tq

__all__ = ["lightning_tq"]
