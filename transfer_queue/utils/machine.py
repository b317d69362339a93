# SPDX-License-Identifier: Apache-2.0
"""The machine: the memory that this process may use, and the end of other processes."""

from __future__ import annotations

import functools
import os
import re
import socket
from pathlib import Path

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", re.IGNORECASE)
_CGROUPS = Path("/sys/fs/cgroup")


def parse_bytes(amount: str | int) -> int | None:
    """A number of bytes from "4GiB", "500MB" or a plain number; None for anything else."""
    if isinstance(amount, bool):
        return None
    if isinstance(amount, int):
        return amount
    match = _AMOUNT.fullmatch(amount)
    return None if match is None else int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or a smaller limit of its cgroup."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_cgroup_limits()])


def _cgroup_limits() -> list[int]:
    """Limits of this process's cgroup and its parents, versions 1 and 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (_CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (_CGROUPS, "memory.max")
        own = Path(path.lstrip("/"))
        for folder in (own, *own.parents):
            limits.append(_limit(root / folder / name))
    return [limit for limit in limits if limit is not None]


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max": no limit


def host_and_port(address: str) -> tuple[str, str]:
    """ "[::1]" and "5555" of "tcp://[::1]:5555"."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, port


def is_any_host(host: str) -> bool:
    """Whether a server of this host listens on all networks."""
    return host in ("0.0.0.0", "*", "[::]", "::")


def pid_namespace() -> int | None:
    """Identifies the namespace in which this process's pids are valid; None if the system doesn't say."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


@functools.cache
def host_id() -> str:
    """The same text for all processes of one host that reach each other's network addresses."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def open_process(pid: int | None, namespace: int | None) -> int | None:
    """A file descriptor that becomes readable when the process ends; -1 if it has ended, None if it can't be watched.

    The caller closes it. A pid of another namespace (another host or container) can't be watched.
    """
    if pid is None or namespace is None or namespace != pid_namespace():
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    except OSError:
        return None
