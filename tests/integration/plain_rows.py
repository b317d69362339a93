# SPDX-License-Identifier: Apache-2.0
"""What tests put: a batch made of its columns, and a value of no plain type."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict


def rows(**columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[len(next(iter(columns.values())))])


class Point:
    """Importable, so that pickle could store it."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x

    __hash__ = None  # type: ignore[assignment]
