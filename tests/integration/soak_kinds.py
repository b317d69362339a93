# SPDX-License-Identifier: Apache-2.0
"""Which shapes of put the soak makes, where they go, and which fields its fetches ask for."""

from __future__ import annotations

from typing import NamedTuple

from tests.integration.soak_values import MAX_ROW_NBYTES

PARTITIONS = ("soak-a", "soak-b", "soak-c")
ASKED = (["num"], ["u8"], ["num", "u8"], ["num", "ids"], ["ids"], ["text"], ["num", "text", "obj"], ["half", "flag"],
         ["big"], ["num", "big"], ["late"], ["num", "back"])  # fmt: skip


class Kind(NamedTuple):
    """A shape of put: how many samples, which fields, and the bytes of a row of each."""

    weight: int
    samples: tuple[int, int]
    fields: tuple[str, ...]
    row_nbytes: int


KINDS = {
    "tiny": Kind(8, (1, 1), ("u8",), 100),
    "small": Kind(8, (2, 64), ("num", "u8", "half", "flag"), 200),
    "talk": Kind(4, (1, 40), ("num", "text", "obj"), 300),
    "rl": Kind(5, (16, 128), ("num", "ids", "text"), 4096 * 8),
    "wide": Kind(2, (64, 256), ("num", "u8", "half", "flag", "ids", "late"), 2048),
    "large": Kind(1, (1, 64), ("num", "big"), MAX_ROW_NBYTES),
}
