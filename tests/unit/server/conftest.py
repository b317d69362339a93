# SPDX-License-Identifier: Apache-2.0
"""A front with two clients, for the tests of puts, gets and sessions."""

from __future__ import annotations

import pytest

from tests.unit.server.front_kit import Client, front_of
from transfer_queue.server.front import Front


@pytest.fixture
def front() -> Front:
    return front_of()


@pytest.fixture
def me(front) -> Client:
    return Client(front, "me")


@pytest.fixture
def other(front) -> Client:
    return Client(front, "other")
