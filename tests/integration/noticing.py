# SPDX-License-Identifier: Apache-2.0
"""Waiting for what a server notices a moment later: a process that ended, memory that is free again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tests.own_processes import SLOW

WAIT_S = 10.0 * SLOW


def until(wanted: Callable[[], Any]) -> bool:
    """Has it come true within the time a server needs to notice?"""
    deadline, clock = time.monotonic() + WAIT_S, threading.Event()
    while not wanted():
        if time.monotonic() > deadline:
            return False
        clock.wait(0.02)
    return True


def until_parked(client: Any, count: int = 1, **of: str) -> None:
    """Returns once so many fetches of this ``partition`` or ``task`` wait in the controller."""
    waiting: list[Any] = []

    def parked() -> bool:
        waiting[:] = client.get_stats()["waiting"]
        return sum(of.items() <= each.items() for each in waiting) >= count

    assert until(parked), f"{count} fetches of {of} should wait, these do: {waiting}"


def ended(process: Any) -> int:
    """Exit code of a process that ends by itself."""
    process.join(WAIT_S)
    return int(process.exitcode)
