# SPDX-License-Identifier: Apache-2.0
"""The processes that tests started, without torch's own and the ones that are kept to fork from; and their patience."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

SLOW = float(os.environ.get("TQ_TEST_SLOW") or 1.0)
"""Tests wait so many times as long for other processes: more than 1 for a machine that has much else to do."""

_KEPT = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "tests.warm_python",
    "torch/_inductor/compile_worker",
)


def own_processes(pid: int | None = None, recursive: bool = True) -> list[psutil.Process]:
    """Living descendants of a process (None: this one)."""
    return [child for child in _children(psutil.Process(pid), recursive) if _counts(child)]


def _children(parent: psutil.Process, recursive: bool) -> list[psutil.Process]:
    """By the kernel's own lists, because psutil reads every process of the machine, and each test asks twice."""
    try:
        lists = [(thread / "children").read_text() for thread in Path(f"/proc/{parent.pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended, or this kernel keeps no lists
        return parent.children(recursive=recursive) if parent.is_running() else []
    found = []
    for pid in " ".join(lists).split():
        try:
            child = psutil.Process(int(pid))
        except psutil.NoSuchProcess:
            continue
        found += [child, *(_children(child, True) if recursive else [])]
    return found


def _counts(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        if not command or process.status() == psutil.STATUS_ZOMBIE:  # one that ends loses its command first
            return False
        return not any(name in command for name in _KEPT)
    except psutil.NoSuchProcess:  # ended meanwhile, or a zombie
        return False
