# SPDX-License-Identifier: Apache-2.0
"""Detects at once that another process of this host has ended, without being its parent."""

from __future__ import annotations

import os
import select
from pathlib import Path


def pid_namespace() -> int | None:
    """Identifies the namespace in which this process's pids are valid; None if the system doesn't say."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


def open_process(pid: int | None, namespace: int | None) -> int | None:
    """A file descriptor that becomes readable when the process ends; -1 if it has ended, None if it can't be watched.

    The caller closes it. A pid of another namespace (another host or container) can't be watched.
    """
    if pid is None or namespace is None or namespace != pid_namespace() or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    except OSError:
        return None


def has_ended(descriptor: int | None) -> bool:
    """Return whether the process of ``open_process`` has ended; False if it can't be watched."""
    if descriptor is None:
        return False
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def close_descriptor(descriptor: int | None) -> None:
    """Close what ``open_process`` returned."""
    if descriptor is not None and descriptor >= 0:
        os.close(descriptor)
