# SPDX-License-Identifier: Apache-2.0
"""Spools: local directories for a checkpoint's files on their way to or from a URL. A killed process leaves its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from transfer_queue.errors import CheckpointError
from transfer_queue.transport.descriptors import closed_in_children

# Hosts may share a directory, and a lock may hold on one of them only.
_PREFIX = f"tq-spool-{socket.gethostname()}-"
_LOCK = "lock"


@contextmanager
def spooled_checkpoint(url: str) -> Iterator[Path]:
    """A local directory, not made yet, for a checkpoint on its way to or from a URL. It is removed in the end.

    TMPDIR decides where. What this user's killed processes of this host left there is removed first.

    Args:
        url: Named in errors that concern the files on their way.
    Examples:
        >>> with tq.spooled_checkpoint("memory://run/spooled") as directory:
        ...     client.save_checkpoint(directory)  # the queue goes on after this line
        ...     tq.upload_checkpoint(directory, "memory://run/spooled")
    """
    _remove_leftovers()
    owner, (folder, lock) = os.getpid(), _locked_folder()
    with lock:
        try:
            yield folder / "checkpoint"
        except CheckpointError as error:
            if str(folder) not in str(error):
                raise
            raise type(error)(f"{url}: {error} Its files pass through {folder}; TMPDIR names another place.") from error
        finally:
            if os.getpid() == owner:  # a forked child may inherit this context, and end
                shutil.rmtree(folder, ignore_errors=True)


def _locked_folder() -> tuple[Path, TextIO]:
    """It is given its name once it is locked, so that nobody takes it for a leftover."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    lock = open(hidden / _LOCK, "x")  # noqa: SIM115 (closed by the caller)
    closed_in_children.add(lock)
    with contextlib.suppress(OSError):  # the file system has no locks, so nobody removes a leftover there
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return hidden.rename(hidden.with_name(hidden.name[1:])), lock


def _remove_leftovers() -> None:
    """Remove the spools of this user whose processes have ended: their locks are free."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is in use, or has been removed meanwhile
            if folder.lstat().st_uid != os.geteuid():
                continue
            with open(folder / _LOCK, "a") as lock:  # it lacks the file if its removal was interrupted
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
