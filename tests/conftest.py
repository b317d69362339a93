# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: control planes whose books are checked when the test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from transfer_queue.control.plane import ControlPlane
from transfer_queue.control.state import PlaneConfig


@pytest.fixture
def make_plane() -> Iterator[Callable[..., ControlPlane]]:
    """Planes by configuration: ``make_plane(capacity=4)``."""
    made: list[ControlPlane] = []

    def make(**config: Any) -> ControlPlane:
        made.append(ControlPlane(PlaneConfig(**config)))
        return made[-1]

    yield make
    for plane in made:
        plane.check_invariants()


@pytest.fixture
def plane(make_plane: Callable[..., ControlPlane]) -> ControlPlane:
    """A plane as it is by default."""
    return make_plane()
