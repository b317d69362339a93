# SPDX-License-Identifier: Apache-2.0
"""Whoever has no key, or another queue's, gets no answer to any request and changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import two_hosts
from tests.hosts.conftest import PROGRAM, Program
from tests.integration.any_request import every_request

STRANGER = Path(__file__).with_name("stranger.py")
STATE = "{name: found for name, found in client.get_stats().items() if name in ('partitions', 'storage_units')}"
CLIENTS = "list(client.get_stats()['clients'])"


@pytest.fixture(scope="module")
def both(privilege: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, Program]]:
    """A program with the key, which has put something, and a stranger on the other host."""
    with two_hosts(tmp_path_factory.mktemp("strangers")) as (a, b):
        server = a.serve()
        known = Program(a.join(server.local, str(PROGRAM)))
        known.do("put('p', 4)")
        yield known, Program(b.start(sys.executable, str(STRANGER), server.remote))


@pytest.mark.parametrize("kind", [type(request).__name__ for request in every_request()] + ["Put"])
def test_a_stranger_of_another_host_gets_nothing(both, kind):
    known, stranger = both
    before = known.do(STATE)
    assert stranger.do(kind) == ["refused", "refused"]
    assert known.do(STATE) == before
    assert len(known.do(CLIENTS)) == 1, "it has no session"
