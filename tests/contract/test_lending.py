# SPDX-License-Identifier: Apache-2.0
"""Attachments: a descriptor lent over a Unix socket to whoever connects, whatever borrowers and strangers do."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from transfer_queue.storage.shm.connect import borrow
from transfer_queue.storage.unit.lend import Lender

SEQPACKET = socket.SOCK_SEQPACKET


class Place:
    """A lender with a poller of its own, turned by hand or in a thread while somebody borrows."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lent = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed with the place)
        self.lent.write(b"lent")
        self.poller = select.poll()
        self.acts: dict[int, Callable[[], object]] = {}
        self.lender = Lender(path, self.attend, [self.lent.fileno()])

    def attend(self, descriptor: int, ready: Callable[[], object]) -> Callable[[], None]:
        self.poller.register(descriptor, select.POLLIN)
        self.acts[descriptor] = ready

        def stop() -> None:
            self.poller.unregister(descriptor)
            del self.acts[descriptor]

        return stop

    def turn(self, timeout_s: float = 0.0) -> bool:
        """Act on what is ready. Returns False where nothing was within the time."""
        ready = self.poller.poll(timeout_s * 1000)
        for descriptor, _ in ready:
            self.acts[descriptor]()
        return bool(ready)

    def borrow(self) -> int:
        made: list[list[int]] = []
        thread = threading.Thread(target=lambda: made.append(borrow(self.path)))
        thread.start()
        while thread.is_alive():
            self.turn(0.02)
        return made[0][0]

    def close(self) -> None:
        self.lender.close()
        self.lent.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Inside, this process can open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filled: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 20, hard))
        with contextlib.suppress(OSError):
            while True:
                filled.append(os.dup(0))
        yield
    finally:
        for descriptor in filled:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    gc.collect()  # what the tests before this one dropped
    before = descriptors()
    made = Place(str(tmp_path / "door"))
    yield made
    made.close()
    assert (descriptors(), os.path.exists(made.path)) == (before, False)


def test_each_borrower_gets_a_descriptor_of_its_own(place):
    numbers = [place.borrow(), place.borrow()]
    assert len({place.lent.fileno(), *numbers}) == 3
    assert os.pread(numbers[1], 10, 0) == b"lent"
    assert not os.get_inheritable(numbers[0])
    for number in numbers:
        os.close(number)


def test_what_was_lent_stays_when_the_lender_has_closed(tmp_path):
    place = Place(str(tmp_path / "door"))
    descriptor = place.borrow()
    place.lender.close()
    place.close()
    assert os.pread(descriptor, 10, 0) == b"lent"
    assert borrow(place.path) == []
    os.close(descriptor)


def test_nothing_is_left_of_borrowers_that_come_and_go(place):
    before = descriptors()
    for _ in range(20):
        os.close(place.borrow())
    assert descriptors() == before


def test_a_child_started_by_exec_does_not_inherit_what_was_borrowed(place):
    descriptor = place.borrow()
    look = f"import os, sys; sys.exit(os.path.lexists('/proc/self/fd/{descriptor}'))"
    assert subprocess.run([sys.executable, "-c", look], close_fds=False).returncode == 0
    os.close(descriptor)


@pytest.mark.parametrize("said", [b"", b"x" * 5000])
def test_a_stranger_that_talks_or_leaves_before_it_is_let_in_harms_nobody(place, said):
    with socket.socket(socket.AF_UNIX, SEQPACKET) as stranger:
        stranger.connect(place.path)
        stranger.send(said)
    while place.turn():
        pass
    os.close(place.borrow())


def test_out_of_descriptors_a_lender_refuses_at_once_and_lends_again_when_there_are_some(place):
    with socket.socket(socket.AF_UNIX, SEQPACKET) as refused:
        refused.connect(place.path)
        with no_descriptors():
            assert place.turn()
            assert not place.turn(), "it is told no more of one that it can do nothing for"
            assert refused.recv(100) == b""
    descriptor = place.borrow()
    os.close(descriptor)


def test_a_lender_that_has_not_even_a_spare_descriptor_closes_instead_of_spinning(place):
    with socket.socket(socket.AF_UNIX, SEQPACKET) as refused:
        refused.connect(place.path)
        place.lender._spare.close()  # as where another thread had been quicker to use it
        with no_descriptors():
            assert place.turn()
            assert place.acts == {}
    assert borrow(place.path) == []


def test_there_is_nothing_to_borrow_where_nobody_listens(tmp_path):
    before = descriptors()
    stale, plain = str(tmp_path / "stale"), tmp_path / "plain"
    with socket.socket(socket.AF_UNIX, SEQPACKET) as door:
        door.bind(stale)
    plain.write_bytes(b"")
    assert [borrow(path) for path in (str(tmp_path / "nothing"), stale, str(plain), "x" * 200)] == [[]] * 4
    assert descriptors() == before


def test_there_is_nothing_to_borrow_from_a_process_that_does_not_answer_in_time(tmp_path):
    before = descriptors()
    with socket.socket(socket.AF_UNIX, SEQPACKET) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()
        began = time.monotonic()
        assert borrow(str(tmp_path / "door"), timeout_s=0.05) == []
        assert time.monotonic() - began >= 0.05
    assert descriptors() == before


@pytest.mark.parametrize("lent", [0, 1, 2, 3])
def test_of_a_strange_lender_at_most_two_descriptors_are_taken(tmp_path, lent):
    before = descriptors()
    with socket.socket(socket.AF_UNIX, SEQPACKET) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()

        def answer() -> None:
            connection, _ = door.accept()
            with connection:
                socket.send_fds(connection, [b"short"], [0] * lent)

        thread = threading.Thread(target=answer)
        thread.start()
        found = borrow(str(tmp_path / "door"))
        thread.join()
        assert bool(found) == (lent > 0)
        for descriptor in found:
            os.close(descriptor)
    assert descriptors() == before
