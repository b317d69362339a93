# SPDX-License-Identifier: Apache-2.0
"""What a queue may leave behind: values in its units, promises of its controller, traces on this machine."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.own_processes import own_processes
from transfer_queue.transport.blocking import run_blocking


def units(client: Any) -> list[Any]:
    """What every storage unit says it holds."""
    return list(run_blocking(client.storage_manager.stats()))


def is_empty(unit: Any) -> bool:
    """No values. An arena may keep free pages for the next writes (``recyclable_nbytes``)."""
    return not any((unit.samples, unit.values, unit.live_nbytes, unit.held_nbytes, unit.blocks, unit.arena_nbytes))


def is_idle(unit: Any) -> bool:
    """Nothing is kept for a client."""
    return not (unit.parked or unit.leased_nbytes or unit.pins or unit.uncommitted_nbytes)


def unsettled(stats: dict[str, Any]) -> dict[str, Any]:
    """What the controller still keeps for a writer or a reader: this process is the only one left."""
    held = {name: partition["held"] for name, partition in stats["partitions"].items() if partition["held"]}
    servers = ("unit ", "controller.")  # storage units that joined, and the controller as a client of them
    clients = {
        name: numbers
        for name, numbers in stats["clients"].items()
        if not re.search(rf"[._]{os.getpid()}\.", name) and not name.startswith(servers)
    }
    found = {"held": held, "waiting": stats["waiting"], "clients": clients}
    return {name: what for name, what in found.items() if what}


def traces() -> dict[str, set[Any]]:
    """What this process and its children leave on the machine while they run."""
    mine = {str(os.getpid()), "tq"}
    shared = Path("/dev/shm")
    return {
        "processes": {child.pid for child in own_processes()},
        "directories": {path.name for path in Path(tempfile.gettempdir()).glob("tq-*")},
        "shared memory": {
            path.name for path in (shared.iterdir() if shared.exists() else ()) if _names(path.name, mine)
        },
        "memory files": set(_memory_files()),
    }


def _names(name: str, ours: set[str]) -> bool:
    return any(part in name for part in ours)


def _memory_files() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith("/memfd:"):
            yield f"{entry.name} {target}"
