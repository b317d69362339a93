# SPDX-License-Identifier: Apache-2.0
"""A server's orders: what the process that starts it writes to its standard input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transfer_queue.config import FullConfig, typed


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What to serve, where, and when to end."""

    conf: dict[str, Any]
    """The configuration as clients get it, which may have sections that are not ours."""
    address: str
    """``ipc://PATH``, where programs of this host come."""
    directory: str
    """Of its socket. It is removed with the last server."""
    controller: bool = False
    """Whether it decides."""
    unit: str | None = None
    """Name of the storage unit that it hosts."""
    join: str | None = None
    """Address of the controller that its unit joins; None: its own."""
    listen: str | None = None
    """``tcp://HOST:PORT``, where programs of other hosts come."""
    key_file: str | None = None
    """Of the keys for ``listen`` and ``join``. None: no encryption."""
    sampler: Any = None
    """The default sampler of tasks: by name, as ``BaseSampler.spec``, or itself where they stay in this process."""
    sys_path: list[str]
    """Where modules are found, for samplers and backends of the user's own."""
    backend_path: str | None = None
    """``module:class`` of the storage backend. None: it can't be imported here."""
    parent: int | None = None
    """The process with which it ends. None: it ends by a signal."""
    capacity_bytes: int | None = None
    """Most bytes of values in its unit. None: no limit."""
    inline_nbytes: int | None = None
    """See ``StorageUnit``. None: its default."""

    @property
    def config(self) -> FullConfig:
        """The configuration."""
        return typed(self.conf)
