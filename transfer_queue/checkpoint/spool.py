# SPDX-License-Identifier: Apache-2.0
"""Spools: local directories for a checkpoint's files on their way to or from a URL. A killed process leaves its own."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transfer_queue.errors import CheckpointError
from transfer_queue.storage.locked_directories import make_locked, remove_directory

# Hosts may share a directory, and a lock may hold on one of them only. A new queue looks for leftovers of "tq-".
_PREFIX = f"spool-tq-{socket.gethostname()}-"


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
    owner, folder = os.getpid(), make_locked(_PREFIX, tempfile.gettempdir())
    try:
        yield Path(folder) / "checkpoint"
    except CheckpointError as error:
        if folder not in str(error):
            raise
        raise type(error)(f"{url}: {error} Its files pass through {folder}; TMPDIR names another place.") from error
    finally:
        if os.getpid() == owner:  # a forked child may inherit this context, and end
            remove_directory(folder)
