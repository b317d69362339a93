# SPDX-License-Identifier: Apache-2.0
"""A client of another host whose link ends: it comes back, in a new session after a silence longer than its lease."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch

from tests.contract.breaking_links import Proxy, proxy_to
from tests.contract.transport_kit import JOIN_S, until
from tests.contract.units_kit import CONF
from tests.local_plane import LocalPlane
from transfer_queue import GroupSampler, TransferQueueClient
from transfer_queue import protocol as p
from transfer_queue.errors import QueueUnreachableError
from transfer_queue.server.front import Front
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.transport.base import USUAL_LIVENESS, Liveness
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.server import SocketServer
from transfer_queue.utils.machine import host_id
from transfer_queue.utils.zmq_utils import ZMQServerInfo

BEAT_S, LEASE_S = 0.1, 1.0
"""A client beats every two seconds, so one without calls is silent for longer than this lease."""


class Queue:
    def __init__(self, stack: ExitStack, liveness: Liveness) -> None:
        self.server = SocketServer("tcp://127.0.0.1:0", liveness=liveness)
        plane = LocalPlane()
        plane.state.units.add_own("controller", host_id(), [self.server.address], None)
        thread = threading.Thread(target=self.server.serve, args=(Front(CONF, plane, StorageUnit("own", None)),))
        thread.start()
        stack.callback(thread.join, 10.0)
        stack.callback(self.server.stop)
        self._stack = stack

    def client(self, name: str, address: str | None = None) -> TransferQueueClient:
        address = address or self.server.address
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
        yield Queue(stack, Liveness(BEAT_S, LEASE_S))


def again(call: Callable[[], Any]) -> Any:
    """The first call after the silence may find that its connection has ended; on a busy machine more of them do."""
    for _ in range(9):
        with suppress(QueueUnreachableError):
            return call()
    return call()


@pytest.mark.programs
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


# ---- a link that breaks while the session goes on ----

DRIVES = pytest.mark.parametrize("drive", [run_blocking, asyncio.run], ids=["blocking", "async"])


@pytest.fixture
def broken(recwarn: Any) -> Iterator[tuple[TransferQueueClient, TransferQueueClient, Proxy]]:
    """(a client whose link breaks, another one, the proxy of the first)"""
    with ExitStack() as stack:
        queue = Queue(stack, USUAL_LIVENESS)
        proxy = stack.enter_context(proxy_to(queue.server.address))
        yield queue.client("far", proxy.address), queue.client("near"), proxy


def loses_answer(
    call: Callable[[], Any], client: TransferQueueClient, proxy: Proxy, happened: Callable[[], bool]
) -> None:
    """The call has its effect, its answer is lost with the link, and the session goes on with another link."""
    client.get_partition_list()
    caller = client.session.caller
    proxy.links[-1].answers.clear()
    failed: list[BaseException] = []

    def attempt() -> None:
        try:
            call()
        except QueueUnreachableError as error:
            failed.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    until(happened)
    proxy.end_for_client()
    thread.join(JOIN_S)
    assert len(failed) == 1
    again(client.get_partition_list)
    assert client.session.caller is caller, "it is the same session"


def samples(client: TransferQueueClient, partition: str) -> int:
    return int(client.get_stats()["partitions"].get(partition, {"samples": 0})["samples"])


def unreceived(client: TransferQueueClient) -> int:
    return sum(int(each.get("unreceived", 0)) for each in client.get_stats()["clients"].values())


@DRIVES
def test_a_put_whose_answer_was_lost_left_nothing_and_may_be_repeated(broken, drive):
    far, near, proxy = broken
    rows = {"x": torch.arange(4)}
    far.put(rows, partition_id="before")  # the first one asks for more than this
    loses_answer(lambda: drive(far.async_put(rows, partition_id="p")), far, proxy, lambda: samples(near, "p") == 4)
    until(lambda: samples(near, "p") == 0)
    again(lambda: far.put(rows, partition_id="p"))
    assert samples(near, "p") == 4


@DRIVES
def test_a_batch_whose_answer_was_lost_goes_to_the_next_reader(broken, drive):
    far, near, proxy = broken
    near.put({"x": torch.arange(4)}, partition_id="p")
    fetch = (["x"], 4, "p", "fetch", "t")
    unread = unreceived(near)
    loses_answer(lambda: drive(far.async_get_meta(*fetch)), far, proxy, lambda: unreceived(near) > unread)
    assert near.get_data(near.get_meta(*fetch, timeout_s=JOIN_S))["x"].tolist() == [0, 1, 2, 3]


def test_a_lease_whose_answer_was_lost_counts_for_nothing(broken):
    far, near, proxy = broken
    near.register_task("actor", GroupSampler(groups=1))
    near.add_groups({"prompt": torch.arange(1)}, "p", keys=["a"], tasks=["actor"], worker_attempts=1)

    def state() -> Any:
        return near.kv_list("p")["p"]["a"]["group.state"]

    loses_answer(lambda: far.lease("p", timeout_s=JOIN_S), far, proxy, lambda: state() == "running")
    (lease,) = near.lease("p", timeout_s=JOIN_S)
    assert lease.attempt == 1
    lease.close({"response": torch.arange(2)})


def test_a_put_that_comes_after_its_cancel_is_refused(broken):
    far, near, proxy = broken
    far.put({"x": torch.arange(1)}, partition_id="before")
    old = proxy.links[-1]
    old.requests.clear()
    begun = len(old.asked)
    thread = threading.Thread(target=lambda: suppressed(lambda: far.put({"x": torch.arange(4)}, partition_id="late")))
    thread.start()
    until(lambda: b"late" in old.asked[begun:])
    proxy.end_for_client()
    thread.join(JOIN_S)
    again(far.get_partition_list)
    old.requests.set()
    until(lambda: b"was cancelled" in old.answered)
    assert near.get_partition_list() == ["before"]


def suppressed(call: Callable[[], Any]) -> None:
    with suppress(QueueUnreachableError):
        call()
