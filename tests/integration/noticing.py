# SPDX-License-Identifier: Apache-2.0
"""Waiting for what a server notices a moment later: a process that ended, memory that is free again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

WAIT_S = 10.0


def until(wanted: Callable[[], Any]) -> bool:
    """Has it come true within the time a server needs to notice?"""
    deadline, clock = time.monotonic() + WAIT_S, threading.Event()
    while not wanted():
        if time.monotonic() > deadline:
            return False
        clock.wait(0.02)
    return True


def ended(process: Any) -> int:
    """Exit code of a process that ends by itself."""
    process.join(WAIT_S)
    return int(process.exitcode)
