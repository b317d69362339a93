# SPDX-License-Identifier: Apache-2.0
"""Turn: how long a server works before it looks at its sockets again. These three constants cut all of its work."""

from __future__ import annotations

import itertools
from collections.abc import Callable

TURN_S = 0.004
"""Work that is left after this time goes on in the next turn, so that no client waits long for the work of others."""
PIECE = 2_000
"""Samples that one step of long work handles: about a millisecond. Slower work handles a part of it, arrays more."""
PIECE_NBYTES = 2 * 1024 * 1024
"""Bytes of values that one step moves: a millisecond or less."""
PAGE = 5 * PIECE // 2
"""Samples, keys or partitions in one reply to a list that comes in pages: some milliseconds."""


class Turn:
    """The time of one turn. It reads no clock of its own."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """``clock``: monotonic seconds. By default each look takes 20 µs, so that tests can be repeated."""
        self._clock = clock or itertools.count(step=2e-5).__next__
        self._end = 0.0

    def begin(self) -> None:
        """A turn begins now."""
        self._end = self._clock() + TURN_S

    def has_time(self) -> bool:
        """Whether more may be done in this turn."""
        return self._clock() < self._end
