# SPDX-License-Identifier: Apache-2.0
"""Of all tests: control planes that are checked when the test is over, time for slow machines, threads of torch."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.local_plane import LocalPlane
from tests.own_processes import SLOW

logging.getLogger().addHandler(logging.NullHandler())  # so that nobody logs around ``caplog``, for want of a handler

settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")  # what an example takes says nothing of the rule that it proves


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A slow machine gives every test more time, too."""
    for item in items if SLOW != 1.0 else ():
        mark = item.get_closest_marker("timeout")
        seconds = float(mark.args[0] if mark is not None else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * SLOW), append=False)


def pytest_collection_finish() -> None:
    """What was imported lives on, so that the many collections of garbage in the tests need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def signals_as_python_has_them() -> Iterator[None]:
    """They work in a test and in what it starts. A background shell or Lightning may have Ctrl-C ignored, nohup SIGHUP,
    and Ray leaves a handler of SIGTERM behind, with which Lightning sets none of its own.
    """
    default = signal.SIG_DFL
    python = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: default, signal.SIGHUP: default}
    before = {number: signal.signal(number, handler) for number, handler in python.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def one_torch_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where models are trained: they are tiny, and threads of several processes would wait for each other."""
    if request.path.parent.name not in ("lightning", "examples"):
        yield
        return
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the processes that the test starts
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_plane() -> Iterator[Callable[..., LocalPlane]]:
    """Planes by configuration: ``make_plane(capacity=4)``."""
    made: list[LocalPlane] = []

    def make(**config: Any) -> LocalPlane:
        made.append(LocalPlane(**config))
        return made[-1]

    yield make
    for plane in made:
        plane.check_invariants()


@pytest.fixture
def plane(make_plane: Callable[..., LocalPlane]) -> LocalPlane:
    """A plane as it is by default."""
    return make_plane()
