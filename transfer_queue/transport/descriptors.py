# SPDX-License-Identifier: Apache-2.0
"""File descriptors with an owner. They are closed once: by the owner, with it, or in a forked child."""

from __future__ import annotations

import os
import weakref


class Descriptors:
    """Not closed when the process ends, because other threads may still use them; the kernel closes them after the last
    thread.
    """

    def __init__(self, owner: object, *descriptors: int) -> None:
        self._open = list(descriptors)
        weakref.finalize(owner, _close, self._open).atexit = False
        _all.add(self)

    def at(self, position: int) -> int:
        """One of the descriptors; -1 once they are closed."""
        try:
            return self._open[position]
        except IndexError:
            return -1

    def close(self) -> None:
        """Close all. Idempotent, in any thread."""
        _close(self._open)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        try:
            descriptor = descriptors.pop()
        except IndexError:  # another thread closed it
            return
        os.close(descriptor)


_all: weakref.WeakSet[Descriptors] = weakref.WeakSet()


def _after_fork() -> None:
    # A child's copy would keep a dead parent's connection open, or the contents of a file alive.
    for copies in list(_all):
        copies.close()


os.register_at_fork(after_in_child=_after_fork)
