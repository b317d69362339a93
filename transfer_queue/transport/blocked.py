# SPDX-License-Identifier: Apache-2.0
"""How a blocked thread waits for the replies to all it asked, and for everything else that may end its wait."""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from transfer_queue.errors import ClosedError, QueueUnreachableError
from transfer_queue.transport.base import Reply
from transfer_queue.transport.line import Line, closed, gone, silent
from transfer_queue.transport.modes import cancel_descriptor
from transfer_queue.transport.readiness import LONGEST_WAIT_S
from transfer_queue.transport.spinning import Spin, longest_s


class _Here(threading.local):
    """What this thread has learnt."""

    def __init__(self) -> None:
        self.spin = Spin(longest_s())


_here = _Here()


class Asked(NamedTuple):
    """One request that was sent, and the line that its reply comes on."""

    line: Line
    request_id: int


class AllSent(NamedTuple):
    """See ``modes.Sent``."""

    waiting: Mapping[int, Asked]

    def is_near(self) -> bool:
        poll = select.poll()
        for line, _ in self.waiting.values():
            if line.tells_once or line.unsent:
                return False
            poll.register(line.descriptor, select.POLLIN)
        return bool(poll.poll(0) or _here.spin.look(poll.poll))


def wait_for_some(
    waiting: Mapping[int, Asked], wake: int, deadline: float, timeout_s: float, may_be_here: bool = False
) -> list[tuple[int, Reply]]:
    """Replies that came meanwhile, by the keys of ``waiting``; none when there may be some now.

    Args:
        may_be_here: They were asked for some time ago: don't wait to be told.

    Raises:
        ClosedError: ``wake`` or what ``cancel_on`` named is readable.
        QueueUnreachableError: a peer is gone, or the deadline has passed.
    """
    events: dict[int, int] = {}
    try:
        arrived = _untold(waiting, may_be_here)
        if arrived:
            return arrived
        events = _poll(waiting, wake, deadline)
        for position, (line, request_id) in waiting.items():
            happened = events.get(line.descriptor, 0)
            if happened & select.POLLOUT:
                line.flush()
            if happened & ~select.POLLOUT:
                arrived += _reply(position, line, request_id)
    except QueueUnreachableError:
        _check_given_up(events or _poll(waiting, wake, 0.0), wake)  # who closes the client may end the queue right then
        raise
    if not arrived:
        _check(events, waiting, wake, deadline, timeout_s)
    return arrived


def _reply(position: int, line: Line, request_id: int) -> list[tuple[int, Reply]]:
    return [(position, reply) for number, reply in line.receive() if number == request_id]


def _untold(waiting: Mapping[int, Asked], may_be_here: bool) -> list[tuple[int, Reply]]:
    """Replies whose news may have been swallowed, or that are here before anybody asked for news."""
    found: list[tuple[int, Reply]] = []
    for position, (line, request_id) in waiting.items():
        if may_be_here or line.tells_once:
            found += _reply(position, line, request_id)
    return found


def _poll(waiting: Mapping[int, Asked], wake: int, deadline: float) -> dict[int, int]:
    left = max(0.0, min(deadline - time.monotonic(), LONGEST_WAIT_S))
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    cancel = cancel_descriptor()
    if cancel is not None:
        poll.register(cancel, select.POLLIN)
    for line, _ in waiting.values():
        poll.register(line.descriptor, select.POLLIN | select.POLLOUT if line.unsent else select.POLLIN)
        if line.watch == -1:
            left = 0.0
        elif line.watch is not None:
            poll.register(line.watch, select.POLLIN)

    def sleep() -> list[tuple[int, int]]:
        return poll.poll(math.ceil(left * 1000))

    # What may be cancelled runs behind a reader who has other things to do with the core, and with the interpreter.
    return dict(sleep() if cancel is not None else _here.spin.wait(poll.poll, sleep, left))


def _check(
    events: Mapping[int, int], waiting: Mapping[int, Asked], wake: int, deadline: float, timeout_s: float
) -> None:
    """Raises when it is over."""
    _check_given_up(events, wake)
    for line, _ in waiting.values():
        if line.watch == -1 or line.watch in events:
            raise gone(line.peer)
    if time.monotonic() >= deadline:
        raise silent(next(iter(waiting.values())).line.peer, timeout_s)


def _check_given_up(events: Mapping[int, int], wake: int) -> None:
    if wake in events:
        raise closed()
    if cancel_descriptor() in events:
        raise ClosedError("the call was given up by its own process.")
