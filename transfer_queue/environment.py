# SPDX-License-Identifier: Apache-2.0
"""What a queue depends on outside of itself, as read now: the installation, torch's build, memory, limits, keys."""

# Readings only: ``lightning-tq doctor`` judges them. torch is not imported, which takes seconds and may be what fails.

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transfer_queue
from transfer_queue import own_files
from transfer_queue.config import SharedMemoryConfig, merge, queue_key_file, typed
from transfer_queue.utils.machine import machine_memory

if TYPE_CHECKING:
    from omegaconf import DictConfig

_TORCH_VERSION = re.compile(r"^__version__ = ['\"](.+)['\"]", re.MULTILINE)
_TORCH_DEVICE = re.compile(r"^(cuda|hip|xpu)\b.* = ['\"](.+)['\"]", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Of this process and host, and of the configuration that was given."""

    version: str
    """Of lightning-tq."""
    folder: str
    """Where ``transfer_queue`` is."""
    changed_files: tuple[str, ...] | None
    """Files that are not as installed. None: they can't be compared, as those of a clone."""
    other_version: str | None
    """Of the distribution TransferQueue, if it is installed, too."""
    remedy: tuple[str, ...]
    """Commands that install lightning-tq anew, without TransferQueue."""
    torch: str | None
    """Version of torch. None: it is not installed."""
    torch_device: str | None
    """What torch was built for, such as "cuda 12.8". None: only for CPUs."""
    gpus: int
    """Devices of NVIDIA that this process could see."""
    shm_free: int | None
    """Free bytes of /dev/shm. None: there is none that this process can write."""
    open_files: int
    """Most files that a process may open, after it has raised its limit; -1: any number."""
    machine_memory: int
    """Bytes of the machine, or a smaller limit of its cgroup."""
    memory: int | None
    """Configured most bytes of values. None: no limit."""
    key_file: str | None
    key_mode: int | None
    """Permissions of the key file. None: there is no such file, or this user can't read it."""


def read_environment(conf: DictConfig | Mapping[str, Any] | None = None) -> Environment:
    """Read it.

    Args:
        conf: The configuration of a queue on this host, as ``init`` takes or returns it.
    Raises:
        ConfigError: as ``init``.
    """
    config = None if conf is None else typed(merge(conf))
    storage = SharedMemoryConfig() if config is None else config.backend.SimpleStorage
    key_file = (None if config is None else config.key_file) or queue_key_file()
    torch, device = _torch_build()
    changed = own_files.changed_files()
    return Environment(
        version=transfer_queue.__distribution_version__, folder=str(Path(own_files.__file__).parent),
        changed_files=None if changed is None else tuple(changed), other_version=own_files.other_version(),
        remedy=own_files.commands(), torch=torch, torch_device=device,
        gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))), shm_free=_free_bytes("/dev/shm"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1], machine_memory=machine_memory(),
        memory=storage.memory_bytes(), key_file=key_file, key_mode=None if key_file is None else _mode_of(key_file),
    )  # fmt: skip


def _torch_build() -> tuple[str | None, str | None]:
    """Version, and what it was built for, from the file that torch's build writes."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None, None
    text = Path(found.origin).with_name("version.py").read_text()
    version, device = _TORCH_VERSION.search(text), _TORCH_DEVICE.search(text)
    return version[1] if version else "", f"{device[1]} {device[2]}" if device else None


def _free_bytes(folder: str) -> int | None:
    if not os.access(folder, os.W_OK):
        return None
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _mode_of(path: str) -> int | None:
    return Path(path).stat().st_mode & 0o777 if os.access(path, os.R_OK) else None
