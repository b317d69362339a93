# SPDX-License-Identifier: Apache-2.0
"""File descriptors with an owner: closed once, when it lets go of them, is dropped, or stayed behind in a fork."""

from __future__ import annotations

import os
import weakref


class Descriptors:
    """Not closed as the process ends, while other threads may still use what they stand for: the kernel closes them
    after the last thread."""

    def __init__(self, owner: object, *descriptors: int) -> None:
        self._open = list(descriptors)
        weakref.finalize(owner, _close, self._open).atexit = False
        _all.add(self)

    def at(self, position: int) -> int:
        """One of them; -1 when they are closed."""
        try:
            return self._open[position]
        except IndexError:
            return -1

    def close(self) -> None:
        """Idempotent, in any thread."""
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
    # A child's copy of a connection would keep a dead parent's alive, one of a file all that was in it.
    for copies in list(_all):
        copies.close()


os.register_at_fork(after_in_child=_after_fork)
