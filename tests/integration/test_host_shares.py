# SPDX-License-Identifier: Apache-2.0
"""The server that a further host of a queue starts by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import transfer_queue as tq
from transfer_queue.config import merge
from transfer_queue.launch.member import MemberServer

pytestmark = pytest.mark.programs


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    tq.close()


def test_of_a_host_s_share_of_a_larger_queue_nobody_is_warned(caplog):
    conf = tq.init({"backend": {"SimpleStorage": {"memory": "900000GiB"}}})
    assert caplog.text.count("the system will kill servers") == 1
    with contextlib.closing(MemberServer(merge(conf), "later", conf.address, None, capacity_nbytes=1 << 20)):
        assert caplog.text.count("the system will kill servers") == 1
