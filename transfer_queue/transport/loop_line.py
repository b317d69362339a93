# SPDX-License-Identifier: Apache-2.0
"""One line of one event loop to one peer: any number of calls at once, each reply finds its call by its number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.transport.base import Call, Reply
from transfer_queue.transport.line import Line, gone


class LoopLine:
    """Used in its loop's thread only. The loop knows its descriptors only while a call waits, or has to be sent yet."""

    def __init__(self, line: Line, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._line = line
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._writing = False
        self._closed = False

    @property
    def broken(self) -> bool:
        return self._line.broken

    def send(self, request_id: int, call: Call) -> asyncio.Future[Reply]:
        """The future reply. ``forget`` must follow, whatever becomes of it."""
        if not self._waiting:
            self._listen()
        future = self._waiting[request_id] = self.loop.create_future()
        if call.frames and self._line.sends_later:  # the call may be given up before, and its line serves others
            call = Call(call.peer, call.header, [bytes(frame) for frame in call.frames])
        self._try(lambda: self._line.send(request_id, call))
        if self._line.tells_once:
            self.loop.call_soon(self._receive)
        if self._line.watch == -1:
            self._fail(lambda: gone(self._line.peer))
        return future

    def forget(self, request_id: int) -> None:
        """Nobody waits for this reply any more."""
        future = self._waiting.pop(request_id, None)
        if future is None:
            return
        if not future.done():
            self._line.own()  # the half of it that is sent can't be taken back, and the other must not be another's
        elif not future.cancelled():
            future.exception()  # looked at, so that asyncio doesn't complain about an error nobody awaited
        if not self._waiting:
            self._stop_listening()

    def _descriptors(self) -> dict[int, Callable[[], None]]:
        found: dict[int, Callable[[], None]] = {self._line.descriptor: self._receive}
        if self._line.watch is not None and self._line.watch >= 0:
            found[self._line.watch] = self._peer_ended
        return found

    def _listen(self) -> None:
        for descriptor, callback in self._descriptors().items():
            self.loop.add_reader(descriptor, callback)

    def _stop_listening(self) -> None:
        for descriptor in self._descriptors():
            self.loop.remove_reader(descriptor)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except QueueUnreachableError as error:
            text = str(error)
            self._fail(lambda: QueueUnreachableError(text))
            self._stop_listening()
        self._write(self._line.unsent and not self._line.broken)

    def _write(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self.loop.add_writer(self._line.descriptor, self._try, self._line.flush)
        elif self._writing and not wanted:
            self.loop.remove_writer(self._line.descriptor)
        self._writing = wanted

    def _receive(self) -> None:
        if not self._closed:
            self._try(self._take)

    def _take(self) -> None:
        for request_id, reply in self._line.receive():
            future = self._waiting.get(request_id)
            if future is not None and not future.done():
                future.set_result(reply)

    def _peer_ended(self) -> None:
        self._receive()  # what it said before it ended still counts
        self._fail(lambda: gone(self._line.peer))

    def _fail(self, error: Callable[[], Exception]) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error())

    def close(self, error: Callable[[], Exception]) -> None:
        """Fail what waits, close the line. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._fail(error)
        if self._waiting:
            self._stop_listening()
            self._waiting = {}
        self._write(False)
        self._line.close()

    def close_from_anywhere(self, error: Callable[[], Exception]) -> None:
        """``close``, in the loop's thread where that one is running it."""
        if self.loop.is_running() and asyncio._get_running_loop() is not self.loop:
            try:
                self.loop.call_soon_threadsafe(self.close, error)
                return
            except RuntimeError:  # it was closed in between
                pass
        self.close(error)
