# SPDX-License-Identifier: Apache-2.0
"""How often values that readers may know were replaced or forgotten: a word of memory that clients share."""

from __future__ import annotations

from typing import Any

import numpy as np


class Changes:
    """Whoever reads the same count before and after knows that what he read in between is as it was."""

    __slots__ = ("_word",)

    def __init__(self, memory: Any = None, offset: int = 0) -> None:
        """``memory``: where the count is kept; None: nobody shares it."""
        self._word = np.zeros(1, np.uint64) if memory is None else np.frombuffer(memory, np.uint64, 1, offset)

    @property
    def count(self) -> int:
        return int(self._word[0])

    def note(self) -> None:
        """One more; only the unit's thread does this, before it answers."""
        self._word[0] += 1
