# SPDX-License-Identifier: Apache-2.0
"""Directories of one process, in client and server: locked while it lives. The next one removes what a killed one left.

They have sockets and keys of a queue, or a checkpoint's files on their way.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from transfer_queue.transport.descriptors import closed_in_children

SUFFIX = ".d"
"""Of directories whose owner holds a lock on them for as long as it lives."""


class _Lock:
    """On a directory; it ends with this process. A fork has none."""

    def __init__(self, directory: str) -> None:
        self._descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # the file system has no locks, so nobody removes a leftover there
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        closed_in_children.add(self)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_held: dict[str, _Lock] = {}


def make_locked(prefix: str, parent: str) -> str:
    """Make one for this user only. What this user's killed processes left there under this prefix is removed first.

    Raises:
        OSError: it can't be made there.
    """
    _remove_leftovers(prefix, parent)
    hidden = tempfile.mkdtemp(prefix=f".{prefix}", suffix=SUFFIX, dir=parent)  # mode 0700
    made, lock = os.path.join(parent, os.path.basename(hidden)[1:]), _Lock(hidden)
    os.rename(hidden, made)  # it gets its name once it is locked, so that nobody takes it for a leftover
    _held[made] = lock
    return made


def remove_directory(path: str) -> None:
    """Remove it with all that it holds. Idempotent."""
    shutil.rmtree(path, ignore_errors=True)
    lock = _held.pop(path, None)
    if lock is not None:
        lock.close()


def _remove_leftovers(prefix: str, parent: str) -> None:
    """Those whose locks are free: their owners were killed, and so are the servers that the owners had started."""
    for path in Path(parent).glob(f"{prefix}*{SUFFIX}"):
        with suppress(OSError):  # it is in use, or has been removed meanwhile
            if path.is_symlink() or path.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
