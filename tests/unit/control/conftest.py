# SPDX-License-Identifier: Apache-2.0
"""How often a plane examines those who wait."""

from __future__ import annotations

import pytest

from tests.unit.control.counting_kit import Looks, count_looks


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Planes that are made after it count."""
    return count_looks(monkeypatch)
