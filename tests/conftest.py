# SPDX-License-Identifier: Apache-2.0
"""Of all tests: control planes that are checked when the test is over, and time for slow machines."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.own_processes import SLOW
from transfer_queue.control.plane import ControlPlane
from transfer_queue.control.state import PlaneConfig


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A slow machine gives every test more time, too."""
    for item in items if SLOW != 1.0 else ():
        mark = item.get_closest_marker("timeout")
        seconds = float(mark.args[0] if mark is not None else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * SLOW), append=False)


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Ctrl-C works in a test and in what it starts, although a background shell or Lightning may have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
