# SPDX-License-Identifier: Apache-2.0
"""How often a plane examines those who wait, and pages of a size."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.control.counting_kit import Looks, count_looks
from transfer_queue.control import queries


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Planes that are made after it count."""
    return count_looks(monkeypatch)


@pytest.fixture
def page_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes pages hold so many samples or keys."""

    def hold(most: int) -> None:
        monkeypatch.setattr(queries, "PAGE", most)
        monkeypatch.setattr(queries, "_OF_ARRAYS", most)

    return hold
