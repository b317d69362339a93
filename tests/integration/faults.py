# SPDX-License-Identifier: Apache-2.0
"""Faults that the tests make: servers that stand still, impatient clients, strangers at the socket."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

import transfer_queue as tq
from tests.integration.clients import connect
from transfer_queue.transport.base import NOBODY_WAITS
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.framing import _MARK, _PREFIX, Inbound, Message, encode

SLOW = float(os.environ.get("TQ_TEST_SLOW", "1"))
"""Deadlines are multiplied by it; a busy machine needs 4 or so."""
NOTICE_S = 10.0 * SLOW
SERVED_S = 15.0 * SLOW
IMPATIENT_S = 0.2


def comes_true(wanted: Callable[[], Any], within_s: float = NOTICE_S) -> bool:
    """Looks again and again until the deadline."""
    deadline, clock = time.monotonic() + within_s, threading.Event()
    while not wanted():
        if time.monotonic() > deadline:
            return False
        clock.wait(0.02)
    return True


def server_pids(conf: Any) -> list[int]:
    """Processes of the queue: the controller's first."""
    units = conf.backend.SimpleStorage.zmq_info
    return list(dict.fromkeys([conf.controller.zmq_info.pid, *(units[name].pid for name in units)]))


def stop(pid: int) -> None:
    """Returns once the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    assert comes_true(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Inside, these processes stand still."""
    for pid in pids:
        stop(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def client_of(conf: Any, name: str, timeout_s: float | None = None) -> tq.TransferQueueClient:
    """One more client. It is connected, and knows how its values travel."""
    own = conf.copy()
    own.client.timeout_s = timeout_s or conf.client.timeout_s
    client = connect(name, own)
    client.get_partition_list()
    for _, unit in run_blocking(client.storage_manager._units.all()):
        assert (unit.arena is None) == (unit.path == "frames")  # asking for the arena maps it
    return client


def impatient_client(conf: Any, name: str = "impatient") -> tq.TransferQueueClient:
    """Its calls wait for no server longer than a moment, besides the wait that they ask for."""
    client = client_of(conf, name, IMPATIENT_S)
    client.session.timeout_s = IMPATIENT_S
    return client


def check_served(conf: Any, partition: str = "served") -> None:
    """Another client's put and get work, and soon."""
    began = time.monotonic()
    other = connect("bystander", conf)
    try:
        other.session.timeout_s = SERVED_S
        meta = other.put({"bystander": torch.arange(3)}, partition_id=partition)
        assert other.get_data(meta)["bystander"].tolist() == [0, 1, 2]
        fetched = other.get_meta(["bystander"], 3, partition, task_name="bystander", timeout_s=SERVED_S)
        assert fetched.global_indexes == meta.global_indexes
        assert other.get_stats()["partitions"][partition]["held"] == 0
        other.clear_partition(partition)
    finally:
        other.close()
    assert time.monotonic() - began < SERVED_S


@contextmanager
def ctrl_c(after_s: float) -> Iterator[None]:
    """Inside, Ctrl-C comes after so many seconds."""
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


# ---- strangers ----


def stranger(conf: Any) -> socket.socket:
    """A bare connection to the controller's socket."""
    bare = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bare.settimeout(SERVED_S)
    bare.connect(str(conf.address).removeprefix("ipc://"))
    return bare


def framed(header: bytes, number: int = NOBODY_WAITS) -> bytes:
    """A message as it travels."""
    return b"".join(encode(number, header))


def promise(header_nbytes: int, num_frames: int) -> bytes:
    """The beginning of a message: of a header of so many bytes, and so many frames."""
    return _PREFIX.pack(_MARK, header_nbytes, 1, num_frames)


def received_replies(bare: socket.socket, count: int) -> list[Message]:
    """The next answers that come in."""
    inbound, found = Inbound(), list[Message]()
    while len(found) < count:
        found += inbound.receive(bare)
    return found
