# SPDX-License-Identifier: Apache-2.0
"""A client of another host that was silent for longer than its lease: it comes back as a new session by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch

from tests.contract.transport_kit import until
from tests.contract.units_kit import CONF
from tests.local_plane import LocalPlane
from transfer_queue import TransferQueueClient
from transfer_queue import protocol as p
from transfer_queue.errors import QueueUnreachableError
from transfer_queue.server.front import Front
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.transport.base import Liveness
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.server import SocketServer
from transfer_queue.utils.machine import host_id
from transfer_queue.utils.zmq_utils import ZMQServerInfo

BEAT_S, LEASE_S = 0.1, 1.0
"""A client beats every two seconds, so one without calls is silent for longer than this lease."""


class Queue:
    def __init__(self, stack: ExitStack) -> None:
        self.server = SocketServer("tcp://127.0.0.1:0", insecure=True, liveness=Liveness(BEAT_S, LEASE_S))
        plane = LocalPlane()
        plane.state.units.add_own("controller", host_id(), [self.server.address], None)
        thread = threading.Thread(target=self.server.serve, args=(Front(CONF, plane, StorageUnit("own", None)),))
        thread.start()
        stack.callback(thread.join, 10.0)
        stack.callback(self.server.stop)
        self._stack = stack

    def client(self, name: str) -> TransferQueueClient:
        address = self.server.address
        client = TransferQueueClient(name, ZMQServerInfo("controller", "controller", ports={"request": address}))
        units = [{"name": "controller", "address": address}]
        client._storage_args = ("SimpleStorage", {"units": units, "inline_nbytes": 0})
        client._make_storage()
        self._stack.callback(client.close)
        return client

    def has_ended(self, name: str) -> bool:
        return not any(each.startswith(name) for each in self.server.clients())


@pytest.fixture
def queue(recwarn: Any) -> Iterator[Queue]:
    with ExitStack() as stack:
        yield Queue(stack)


def again(call: Callable[[], Any]) -> Any:
    """The first call after the silence may find that its connection has ended; on a busy machine more of them do."""
    for _ in range(9):
        with suppress(QueueUnreachableError):
            return call()
    return call()


def test_puts_go_on_after_a_silence_longer_than_the_lease(queue):
    client = queue.client("away")
    kept = client.put({"x": torch.arange(3)}, partition_id="p")
    for number in range(2):
        until(lambda: queue.has_ended("away"))
        assert again(lambda: client.get_data(kept)["x"].tolist()) == [0, 1, 2]
        meta = again(lambda n=number: client.put({"x": torch.full((40_000,), n)}, partition_id=f"later {n}"))
        assert again(lambda m=meta: client.get_data(m)["x"].unique().tolist()) == [number]
    again(lambda: client.put({"y": torch.arange(3)}, metadata=kept))
    assert again(lambda: client.get_data(kept.select_fields(["y"]))["y"].tolist()) == [0, 1, 2]


def test_what_it_held_is_undone(queue):
    client, other = queue.client("away"), queue.client("other")
    run_blocking(client.session.ask(p.Reserve, p.Reserved, "p", 3))
    until(lambda: queue.has_ended("away"))
    again(lambda: client.put({"x": torch.arange(2)}, partition_id="p"))
    stats = again(other.get_stats)
    assert (stats["partitions"]["p"]["held"], stats["partitions"]["p"]["samples"]) == (0, 2)
