# SPDX-License-Identifier: Apache-2.0
"""A connection that all calls of one event loop to one peer share; replies find their calls by number."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.transport.base import NOBODY_WAITS, Call, Reply
from transfer_queue.transport.connection import Connection


class _Asked(NamedTuple):
    future: asyncio.Future[Reply]
    cancel: bytes


class LoopConnection:
    """Used in its loop's thread only. The loop watches its descriptor only while calls wait or have to be sent."""

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._connection = connection
        self._asked: dict[int, _Asked] = {}
        self._writing = False
        self._closed = False

    @property
    def broken(self) -> bool:
        return self._connection.broken

    def send(self, request_id: int, call: Call) -> asyncio.Future[Reply]:
        """Send a call and return its future reply. ``done`` or ``cancel`` must follow in every case."""
        if not self._asked:
            self.loop.add_reader(self._connection.descriptor, self._receive)
        future = self.loop.create_future()
        self._asked[request_id] = _Asked(future, call.cancel)
        self._try(lambda: self._connection.send(request_id, call.header, call.frames))
        return future

    def tell(self, call: Call) -> None:
        """Send without expecting an answer. Raises QueueUnreachableError if the peer has ended."""
        try:
            self._connection.send(NOBODY_WAITS, call.header, call.frames)
            self._connection.own()
        finally:
            self._write()

    def done(self, request_id: int) -> None:
        """Stop waiting for the reply."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return
        if asked.future.done() and not asked.future.cancelled():
            asked.future.exception()  # retrieved, so that asyncio doesn't log it
        if not self._asked and not self._closed:
            self.loop.remove_reader(self._connection.descriptor)

    def cancel(self, request_id: int) -> None:
        """The call has failed: send its cancel after it, and stop waiting for its reply."""
        asked = self._asked.get(request_id)
        if asked is not None and not self._closed:
            revoke(self._connection, asked.cancel)
            self._write()
        self.done(request_id)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except QueueUnreachableError as error:
            text = str(error)
            self._fail(lambda: QueueUnreachableError(text))
            self.loop.remove_reader(self._connection.descriptor)
        self._write()

    def _write(self) -> None:
        wanted = self._connection.unsent and not self._connection.broken
        if wanted and not self._writing:
            self.loop.add_writer(self._connection.descriptor, self._try, self._connection.flush)
        elif self._writing and not wanted:
            self.loop.remove_writer(self._connection.descriptor)
        self._writing = wanted

    def _receive(self) -> None:
        if not self._closed:
            self._try(self._take)

    def _take(self) -> None:
        for request_id, header, frames in self._connection.receive():
            asked = self._asked.get(request_id)
            if asked is not None and not asked.future.done():
                asked.future.set_result(Reply(header, frames))

    def _fail(self, error: Callable[[], Exception]) -> None:
        for future, _ in self._asked.values():
            if not future.done():
                future.set_exception(error())

    def retire(self) -> Connection:
        """Return the connection for use elsewhere, because its loop has closed; waiting calls are cancelled."""
        for asked in self._asked.values():
            revoke(self._connection, asked.cancel)
        self._asked.clear()
        self._closed = True
        return self._connection

    def close(self, error: Callable[[], Exception]) -> None:
        """Fail waiting calls, and close the connection. Idempotent."""
        if self._closed:
            return
        self._fail(error)
        if not self.loop.is_closed():
            self.loop.remove_reader(self._connection.descriptor)
            self.loop.remove_writer(self._connection.descriptor)
        self._closed = True
        self._connection.close()

    def close_from_anywhere(self, error: Callable[[], Exception]) -> None:
        """``close``, in the loop's thread if the loop is running there."""
        if self.loop.is_running() and asyncio._get_running_loop() is not self.loop:
            try:
                self.loop.call_soon_threadsafe(self.close, error)
                return
            except RuntimeError:  # it was closed in between
                pass
        self.close(error)


def revoke(connection: Connection, cancel: bytes) -> None:
    """Send the cancel after a call, and return the call's frames to their owner."""
    if connection.broken:
        return
    connection.own()
    if cancel:
        with contextlib.suppress(QueueUnreachableError):  # the peer has ended, and the call with it
            connection.send(NOBODY_WAITS, cancel)
