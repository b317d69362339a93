# SPDX-License-Identifier: Apache-2.0
"""Attachments: a descriptor lent over a Unix socket, words said on it, and the end of the guest's process heard."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from transfer_queue.transport.attachments import Attachment, Reception, attach

WAIT_S = 10.0
SEQPACKET = socket.SOCK_SEQPACKET


class Book:
    """A host that notes what happens to it."""

    def __init__(self) -> None:
        self.lent = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed with the place)
        self.lent.write(b"lent")
        self.events: list[tuple] = []

    def attached(self, guest: int) -> tuple[int, bytes]:
        self.events.append(("attached", guest))
        return self.lent.fileno(), b"hello"

    def told(self, guest: int, word: int, now: float) -> list:
        self.events.append(("told", guest, word))
        return []

    def detached(self, guest: int, now: float) -> list:
        self.events.append(("detached", guest))
        return []


class Place:
    """A reception with a poller of its own, turned by hand or in a thread while a guest attaches."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.book = Book()
        self.poller = select.poll()
        self.acts: dict[int, Callable[[float], object]] = {}
        self.reception = Reception(path, self.attend, self.book)

    def attend(self, descriptor: int, ready: Callable[[float], object]) -> Callable[[], None]:
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
            if descriptor in self.acts:
                self.acts[descriptor](0.0)
        return bool(ready)

    def until(self, *events: tuple) -> None:
        """Turn until these are the events since the last time."""
        deadline = time.monotonic() + WAIT_S
        while len(self.book.events) < len(events) and time.monotonic() < deadline:
            self.turn(0.1)
        while self.turn():
            pass
        assert self.book.events == list(events)
        self.book.events.clear()

    def attach(self) -> Attachment:
        made: list[Attachment | None] = []
        thread = threading.Thread(target=lambda: made.append(attach(self.path)))
        thread.start()
        while thread.is_alive():
            self.turn(0.02)
        assert made[0] is not None
        return made[0]

    def close(self) -> None:
        self.reception.close()
        self.book.lent.close()


def descriptors() -> int:
    return len(numbers_of_descriptors())


def numbers_of_descriptors() -> set[str]:
    listed = os.listdir("/proc/self/fd")  # with the one that lists
    return {number for number in listed if os.path.lexists(f"/proc/self/fd/{number}")}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    gc.collect()  # what the tests before this one dropped
    before = descriptors()
    made = Place(str(tmp_path / "door"))
    yield made
    made.close()
    assert (descriptors(), os.path.exists(made.path)) == (before, False)


def stranger(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, SEQPACKET)
    connection.connect(path)
    return connection


def test_a_guest_gets_a_descriptor_of_its_own_a_number_and_the_greeting(place):
    first, second = place.attach(), place.attach()
    assert [(guest.number, guest.greeting) for guest in (first, second)] == [(1, b"hello"), (2, b"hello")]
    assert len({place.book.lent.fileno(), first.descriptor, second.descriptor}) == 3
    assert os.pread(second.descriptor, 10, 0) == b"lent"
    assert not os.get_inheritable(first.descriptor)
    first.close()
    second.close()


def test_words_arrive_in_order_and_the_end_after_them(place):
    guest, words = place.attach(), [0, 1, 5, 2**64 - 1, 5]
    for word in words:
        guest.say(word)
    guest.close()
    place.until(("attached", 1), *(("told", 1, word) for word in words), ("detached", 1))


def told(*words: int) -> list[tuple]:
    return [("told", 1, word) for word in words]


def test_words_that_the_host_has_no_room_for_never_wait_and_are_said_in_order_when_there_is_some(place):
    guest = place.attach()
    for word in range(3000):
        guest.say(word)
    assert not guest.say_at_once(9999), "the host's buffer is full"
    place.until(("attached", 1), *told(*range(3000)))  # an idle guest says no more
    guest.say(3000)
    place.until(*told(3000))
    guest.close()


def test_the_words_of_a_dropped_guest_are_heard_before_its_end(place):
    guest = place.attach()
    for word in range(3000):
        guest.say(word)
    del guest
    place.until(("attached", 1), *told(*range(3000)), ("detached", 1))


def test_a_guest_that_leaves_with_words_unsaid_is_gone_once_the_host_has_heard_the_others(place):
    before, guest = descriptors(), place.attach()
    for word in range(3000):
        guest.say(word)
    guest.close()
    deadline = time.monotonic() + WAIT_S
    while ("detached", 1) not in place.book.events and time.monotonic() < deadline:
        place.turn(0.1)
    heard = len(place.book.events) - 2
    assert place.book.events == [("attached", 1), *told(*range(heard)), ("detached", 1)]
    assert (heard < 3000, descriptors()) == (True, before)


def test_a_process_ends_at_once_with_words_unsaid(place, script):
    process = script("for word in range(3000): guest.say(word)", place.path)
    while not place.book.events:  # the guest may have said some words by then
        assert place.turn(WAIT_S)
    # The host is busy from here on: it doesn't look at what is said.
    _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (0, "")
    while ("detached", 1) not in place.book.events:
        assert place.turn()
    heard = [event for event in place.book.events if event[0] == "told"]
    assert (heard, len(heard) < 3000) == (told(*range(len(heard))), True)


def test_in_one_turn_the_host_hears_no_more_of_one_guest_than_it_must(place):
    guest, other = place.attach(), place.attach()
    place.book.events.clear()
    for word in range(3000):
        guest.say(word)
    other.say(7)
    place.turn()
    heard = [event[1] for event in place.book.events]
    assert (heard.count(1) < 1000, heard.count(2)) == (True, 1)
    guest.close()
    other.close()


def refused(*_: object) -> int:
    raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_had_words_are_said_with_later_ones_in_order(place):
    guest = place.attach()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("_thread.start_new_thread", refused)
        for word in range(3000):
            guest.say(word)
        while place.turn():
            pass
        assert len(place.book.events) < 1000
        guest.catch_up()
    place.until(("attached", 1), *told(*range(3000)))
    guest.close()


def test_a_word_said_at_once_overtakes_those_that_wait(place):
    guest = place.attach()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("_thread.start_new_thread", refused)
        for word in range(3000):
            guest.say(word)
    while place.turn():
        pass
    place.book.events.clear()
    assert guest.say_at_once(9999)
    place.until(*told(9999))
    guest.close()


def test_words_of_several_threads_all_arrive_once(place):
    guest = place.attach()
    threads = [threading.Thread(target=lambda n=n: [guest.say(1000 * n + i) for i in range(200)]) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        place.turn(0.01)
    deadline = time.monotonic() + WAIT_S
    while len(place.book.events) < 801 and time.monotonic() < deadline:
        place.turn(0.1)
    assert sorted(place.book.events[1:]) == sorted(told(*(1000 * n + i for n in range(4) for i in range(200))))
    guest.close()


def test_what_is_said_to_a_host_that_ended_or_after_leaving_is_no_error(place):
    guest, other = place.attach(), place.attach()
    place.reception.close()
    guest.say(1)
    assert not guest.say_at_once(1)
    guest.close()
    guest.close()
    other.close()
    other.say(2)
    assert not other.say_at_once(2)
    place.reception = Reception(place.path, place.attend, place.book)


ATTACH = """
import os, sys
from transfer_queue.transport.attachments import attach
guest = attach(sys.argv[1])
"""


@pytest.fixture
def script() -> Iterator[Callable[..., subprocess.Popen]]:
    started = []

    def run(code: str, path: str, before: str = "") -> subprocess.Popen:
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                [sys.executable, "-W", "error", "-c", before + ATTACH + code, path],
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                text=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_the_death_of_a_process_is_heard_after_what_it_said(place, script):
    process = script("guest.say(5); print('said', flush=True); sys.stdin.read()", place.path)
    place.until(("attached", 1), ("told", 1, 5))
    os.kill(process.pid, signal.SIGKILL)
    place.until(("detached", 1))


LAST = """
import atexit, sys
def last():  # all that was registered later has been done by now
    print('ending', flush=True)
    sys.stdin.read()
atexit.register(last)
"""


def test_a_process_that_ends_is_attached_as_long_as_its_threads_may_run(place, script):
    process = script("", place.path, before=LAST)
    place.until(("attached", 1))
    assert process.stdout.readline() == "ending\n"
    while place.turn():
        pass
    assert place.book.events == []
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    place.until(("detached", 1))


def test_an_attachment_that_is_dropped_ends(place):
    guest, before = place.attach(), descriptors()
    del guest
    gc.collect()
    place.until(("attached", 1), ("detached", 1))
    assert descriptors() == before - 3, "its two ends, and the host's"


def test_a_forked_child_keeps_no_descriptor_of_its_parents_attachment_and_closes_none_twice(place):
    before = numbers_of_descriptors()
    guest, theirs = place.attach(), place.book.lent.fileno()
    added = numbers_of_descriptors() - before
    child = os.fork()
    if child == 0:
        kept = len(added & numbers_of_descriptors()) - 1  # the host's end is no guest's
        reused = [os.dup(theirs) for _ in range(2)]
        guest.close()
        os._exit(10 * kept + len([os.fstat(descriptor) for descriptor in reused]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert os.pread(guest.descriptor, 10, 0) == b"lent"
    guest.close()


def test_a_forked_child_does_not_keep_the_attachment_of_its_dead_parent_alive(place, script):
    process = script(
        "child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "else: guest.say(13); os.read(0, 1); os._exit(0)\n"
        "sys.stdin.read()",
        place.path,
    )
    place.until(("attached", 1))
    child = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    place.until(("detached", 1))
    os.kill(child, 0)  # it lives, and nothing that it says is its parent's word
    process.stdin.write("x")


def test_a_child_started_by_exec_inherits_neither_the_attachment_nor_the_descriptor(place):
    guest = place.attach()
    held = ["-c", "import os; print([f for f in os.listdir('/proc/self/fd') if int(f) > 2][:-1])"]
    shown = subprocess.run([sys.executable, *held], capture_output=True, text=True, close_fds=False, check=True).stdout
    assert str(guest.descriptor) not in shown
    guest.close()
    place.until(("attached", 1), ("detached", 1))


@pytest.mark.parametrize("garbage", [b"x", b"x" * 7, b"", b"x" * 4001, b"x" * 8 * 513, b"x" * 9])
def test_a_stranger_that_says_garbage_harms_nobody(place, garbage):
    guest = place.attach()
    connection = stranger(place.path)
    connection.send(garbage)
    connection.send(b"more")
    while place.turn():
        pass
    connection.close()
    guest.say(3)
    while place.turn(0.05):
        pass
    assert [event for event in place.book.events if event[1] == guest.number] == [("attached", 1), ("told", 1, 3)]
    assert place.book.events.count(("detached", 2)) == 1
    guest.close()


def test_a_stranger_that_leaves_before_it_is_let_in_is_shown_out_once(place):
    stranger(place.path).close()
    place.until(("attached", 1), ("detached", 1))
    place.attach().close()
    place.until(("attached", 2), ("detached", 2))


def test_a_host_out_of_descriptors_lets_newcomers_in_when_a_guest_leaves_and_does_not_spin_until_then(place):
    guest = place.attach()
    newcomer = stranger(place.path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filled = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 20, hard))
        with contextlib.suppress(OSError):
            while True:
                filled.append(os.dup(0))
        assert place.turn()
        assert not place.turn(), "nothing can be done for it now"
        guest.close()
        place.until(("attached", 1), ("detached", 1), ("attached", 2))
    finally:
        for descriptor in filled:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    newcomer.close()
    place.until(("detached", 2))


def test_there_is_no_attachment_where_nobody_listens(tmp_path):
    before = descriptors()
    stale, plain = str(tmp_path / "stale"), tmp_path / "plain"
    with socket.socket(socket.AF_UNIX, SEQPACKET) as door:
        door.bind(stale)
    plain.write_bytes(b"")
    assert [attach(path) for path in (str(tmp_path / "nothing"), stale, str(plain), "x" * 200)] == [None] * 4
    assert descriptors() == before


def test_there_is_no_attachment_to_a_host_that_does_not_answer_in_time(tmp_path):
    before = descriptors()
    with socket.socket(socket.AF_UNIX, SEQPACKET) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()
        begun = time.monotonic()
        assert attach(str(tmp_path / "door"), timeout_s=0.05) is None
        assert 0.05 <= time.monotonic() - begun < WAIT_S
    assert descriptors() == before


@pytest.mark.parametrize(
    ("greeting", "lent"), [(b"", 0), (b"short", 1), (struct.pack("<Q", 1), 0), (struct.pack("<Q", 1), 2)]
)
def test_there_is_no_attachment_to_a_host_that_lends_nothing_or_greets_wrongly_and_nothing_leaks(
    tmp_path, greeting, lent
):
    before = descriptors()
    with socket.socket(socket.AF_UNIX, SEQPACKET) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()

        def answer() -> None:
            connection, _ = door.accept()
            with connection:
                socket.send_fds(connection, [greeting], [0] * lent)

        thread = threading.Thread(target=answer)
        thread.start()
        attachment = attach(str(tmp_path / "door"))
        thread.join()
        if lent == 2:  # more than asked for are cut off by the kernel
            assert attachment is not None
            attachment.close()
        else:
            assert attachment is None
    assert descriptors() == before


def test_guests_that_come_and_go_leave_no_descriptor(place):
    before = descriptors()
    for _ in range(20):
        place.attach().close()
    while place.turn(0.05):
        pass
    assert descriptors() == before
