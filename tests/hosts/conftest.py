# SPDX-License-Identifier: Apache-2.0
"""Hosts of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from host_kit import Host, missing_privilege, two_hosts


@pytest.fixture(scope="session")
def privilege() -> None:
    """Skips where no network namespace can be made."""
    reason = missing_privilege()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def hosts(privilege: None, tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as both:
        yield both
