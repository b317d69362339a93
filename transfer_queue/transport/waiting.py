# SPDX-License-Identifier: Apache-2.0
"""How a blocked thread waits for its replies, and for everything else that may end its wait."""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Collection
from typing import NamedTuple

from transfer_queue.errors import ClosedError, QueueUnreachableError
from transfer_queue.transport.connection import Connection, closed
from transfer_queue.transport.framing import Message
from transfer_queue.transport.loop import LONGEST_WAIT_S
from transfer_queue.transport.modes import cancel_descriptor
from transfer_queue.transport.spinning import Spin, longest_s


class _Here(threading.local):
    """This thread's spinning state."""

    def __init__(self) -> None:
        self.spin = Spin(longest_s())


_here = _Here()


class AllSent(NamedTuple):
    """See ``modes.Sent``."""

    connections: Collection[Connection]

    def is_near(self) -> bool:
        poll = select.poll()
        for connection in self.connections:
            if connection.unsent:
                return False
            poll.register(connection.descriptor, select.POLLIN)
        return bool(poll.poll(0) or _here.spin.look(poll.poll))


def wait_for_some(connections: Collection[Connection], wake: int, deadline: float) -> list[Message]:
    """Messages that arrived; none if there may be some now, or the deadline has passed.

    Raises:
        ClosedError: ``wake`` or the descriptor of ``cancel_on`` is readable.
        QueueUnreachableError: a peer has ended.
    """
    events = _poll(connections, wake, deadline)
    arrived: list[Message] = []
    try:
        for connection in connections:
            happened = events.get(connection.descriptor, 0)
            if happened & select.POLLOUT:
                connection.flush()
            if happened & ~select.POLLOUT:
                arrived += connection.receive()
    except QueueUnreachableError:
        _check_closed(events, wake)  # closing the client may end the queue at the same time
        raise
    if not arrived:
        _check_closed(events, wake)
    return arrived


def _poll(connections: Collection[Connection], wake: int, deadline: float) -> dict[int, int]:
    left = max(0.0, min(deadline - time.monotonic(), LONGEST_WAIT_S))
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    cancel = cancel_descriptor()
    if cancel is not None:
        poll.register(cancel, select.POLLIN)
    for connection in connections:
        poll.register(connection.descriptor, select.POLLIN | select.POLLOUT if connection.unsent else select.POLLIN)

    def sleep() -> list[tuple[int, int]]:
        return poll.poll(math.ceil(left * 1000))

    # Cancellable calls run for a reader that uses the core and the interpreter for other work, so they don't spin.
    return dict(sleep() if cancel is not None else _here.spin.wait(poll.poll, sleep, left))


def _check_closed(events: dict[int, int], wake: int) -> None:
    if wake in events:
        raise closed()
    if cancel_descriptor() in events:
        raise ClosedError("the call was cancelled by its own process.")
