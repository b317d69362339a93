# SPDX-License-Identifier: Apache-2.0
"""The processes that tests started, without the ones that Python keeps beside multiprocessing; and their patience."""

from __future__ import annotations

import os

import psutil

SLOW = float(os.environ.get("TQ_TEST_SLOW") or 1.0)
"""Tests wait so many times as long for other processes: more than 1 for a machine that has much else to do."""

_PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def own_processes(pid: int | None = None, recursive: bool = True) -> list[psutil.Process]:
    """Living descendants of a process (None: this one)."""
    return [child for child in psutil.Process(pid).children(recursive=recursive) if _counts(child)]


def _counts(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        if not command or process.status() == psutil.STATUS_ZOMBIE:  # one that ends loses its command first
            return False
        return not any(name in command for name in _PYTHONS_OWN)
    except psutil.NoSuchProcess:  # ended meanwhile, or a zombie
        return False
