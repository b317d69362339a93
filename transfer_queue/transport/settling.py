# SPDX-License-Identifier: Apache-2.0
"""In the client: the thread of a connection on which nobody waits, for what its server has yet to hear."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.transport.connections import Connection
from transfer_queue.transport.descriptors import READ, WRITE, Descriptors


class Settling(threading.Thread):
    """Drives an idle connection whenever something can be sent or read, until ``has_ended`` returns True.

    A server that has answers which nobody reads stops reading, too. So it isn't enough to send.
    """

    def __init__(self, connection: Connection, idle: list[Connection], has_ended: Callable[[Connection], bool]) -> None:
        super().__init__(name="tq-settling", daemon=True)
        self.turns = 0
        """Odd while this thread has taken the connection out of ``idle``."""
        self._connection = connection
        self._idle = idle
        self._has_ended = has_ended
        self._to_start = [None]
        self._nudged = Descriptors(self, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def nudge(self) -> None:
        """Look at the connection again. The first of several threads that ask for it starts this one.

        Where no thread can start, as while Python 3.12 ends, what can be sent at once is.
        """
        try:
            self._to_start.pop()
            self.start()
        except IndexError:
            pass  # another thread has started it
        except RuntimeError:
            self._to_start.append(None)
            self._drive()
        os.eventfd_write(self._nudged.at(0), 1)

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._nudged.at(0), READ)
        self._drive()
        while not self._has_ended(self._connection):
            poll.register(self._connection.descriptor, READ | WRITE if self._connection.unsent else READ)
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._nudged.at(0))
            self._drive()

    def _drive(self) -> None:
        self.turns += 1
        with contextlib.suppress(ValueError):  # a call uses it
            self._idle.remove(self._connection)
            with contextlib.suppress(QueueUnreachableError):
                self._connection.flush()
                self._connection.receive()
            self._idle.append(self._connection)
        self.turns += 1
