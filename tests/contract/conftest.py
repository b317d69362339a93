# SPDX-License-Identifier: Apache-2.0
"""What tests of the transports share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from transport_kit import SOCKETS, Desk, desk_behind, held


@pytest.fixture(scope="session", autouse=True)
def thread_of_pyzmq() -> None:
    """The first buffer that is shared with ZMQ starts a thread of pyzmq, which stays."""
    zmq.Frame(bytearray(1 << 20), copy=False)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No thread and no file of this test's."""
    gc.collect()  # what the tests before this one dropped
    before = held()
    yield
    assert held() == before


@pytest.fixture(params=["local", *SOCKETS])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Callable[..., Any], Any, Desk]]:
    """(makes callers, peer, what serves it)"""
    with desk_behind(request.param, tmp_path) as found:
        yield found


@pytest.fixture(params=SOCKETS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of sockets."""
    return str(request.param)
