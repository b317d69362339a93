# SPDX-License-Identifier: Apache-2.0
"""What a client says to a unit on its attachment: one word per hold, no answer."""

from __future__ import annotations

LET_GO, BEGIN = range(2)


def pack_word(what: int, number: int) -> int:
    """``what`` the client does with its hold of this number."""
    return number << 1 | what


def unpack_word(word: int) -> tuple[int, int]:
    """(what, number)."""
    return word & 1, word >> 1
