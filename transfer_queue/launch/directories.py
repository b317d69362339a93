# SPDX-License-Identifier: Apache-2.0
"""Private directories of a queue's sockets and keys. What a killed process left of them, the next start removes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from transfer_queue.config import environment_text
from transfer_queue.errors import LaunchError
from transfer_queue.transport.descriptors import closed_in_children

_MAX_PATH_NBYTES = 107  # of a Unix socket
_NAME_NBYTES = 24
_RANDOM_NBYTES = 8  # what mkdtemp adds
_SUFFIX = ".d"
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


def short_directory(prefix: str) -> str:
    """Make a directory for this user only, in which sockets with names of up to 24 characters can be bound.

    It lies in the system's temporary directory if that path is short enough and has no blanks, at which shells and
    scripts would tear the address; else in $XDG_RUNTIME_DIR, /tmp or /var/tmp. What this user's killed processes left
    there is removed first.

    Raises:
        LaunchError: none of them will do.
    """
    longest = _MAX_PATH_NBYTES - len(os.fsencode(f"/{prefix}{_SUFFIX}/")) - _RANDOM_NBYTES - _NAME_NBYTES
    tried: dict[str, str] = {}
    for parent in (tempfile.gettempdir(), environment_text("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp"):
        if not parent or parent in tried:
            continue
        if len(os.fsencode(os.path.abspath(parent))) > longest:
            tried[parent] = f"longer than {longest} bytes"
            continue
        if len(parent.split()) > 1:
            tried[parent] = "has blanks"
            continue
        try:
            return _locked(prefix, os.path.abspath(parent))
        except OSError as error:
            tried[parent] = error.strerror or str(error)
    found = "; ".join(f"{parent}: {reason}" for parent, reason in tried.items())
    raise LaunchError(
        f"there is no directory for the queue's sockets ({found}). Set TMPDIR to a short path that is writable."
    )


def remove_directory(path: str) -> None:
    """Remove it with all that it holds. Idempotent."""
    shutil.rmtree(path, ignore_errors=True)
    lock = _held.pop(path, None)
    if lock is not None:
        lock.close()


def _locked(prefix: str, parent: str) -> str:
    """It is given its name once it is locked, so that nobody takes it for a leftover."""
    _remove_leftovers(prefix, parent)
    hidden = tempfile.mkdtemp(prefix=f".{prefix}", suffix=_SUFFIX, dir=parent)  # mode 0700
    made, lock = os.path.join(parent, os.path.basename(hidden)[1:]), _Lock(hidden)
    os.rename(hidden, made)
    _held[made] = lock
    return made


def _remove_leftovers(prefix: str, parent: str) -> None:
    """Those whose locks are free: their owners were killed, and so are the servers that the owners had started."""
    for path in Path(parent).glob(f"{prefix}*{_SUFFIX}"):
        with suppress(OSError):  # it is in use, or has been removed meanwhile
            if path.is_symlink() or path.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
