# SPDX-License-Identifier: Apache-2.0
"""Private directories of a queue's sockets and keys, at paths that are short enough for sockets."""

from __future__ import annotations

import os
import tempfile

from transfer_queue.config import environment_text
from transfer_queue.errors import LaunchError
from transfer_queue.storage.locked_directories import SUFFIX, make_locked

_MAX_PATH_NBYTES = 107  # of a Unix socket
_NAME_NBYTES = 24
_RANDOM_NBYTES = 8  # what mkdtemp adds


def short_directory(prefix: str) -> str:
    """Make a directory for this user only, in which sockets with names of up to 24 characters can be bound.

    It lies in the system's temporary directory if that path is short enough and has no blanks, at which shells and
    scripts would tear the address; else in $XDG_RUNTIME_DIR, /tmp or /var/tmp. What this user's killed processes left
    there is removed first.

    Raises:
        LaunchError: none of them will do.
    """
    longest = _MAX_PATH_NBYTES - len(os.fsencode(f"/{prefix}{SUFFIX}/")) - _RANDOM_NBYTES - _NAME_NBYTES
    tried: dict[str, str] = {}
    parents = (tempfile.gettempdir(), environment_text("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp")
    for parent in dict.fromkeys(filter(None, parents)):
        if len(os.fsencode(os.path.abspath(parent))) > longest:
            tried[parent] = f"longer than {longest} bytes"
        elif len(parent.split()) > 1:
            tried[parent] = "has blanks"
        else:
            try:
                return make_locked(prefix, os.path.abspath(parent))
            except OSError as error:
                tried[parent] = error.strerror or str(error)
    found = "; ".join(f"{parent}: {reason}" for parent, reason in tried.items())
    raise LaunchError(
        f"there is no directory for the queue's sockets ({found}). Set TMPDIR to a short path that is writable."
    )
