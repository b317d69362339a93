# SPDX-License-Identifier: Apache-2.0
"""The calling side over sockets: a blocked thread borrows a line per call, the calls of an event loop share one."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
import time
from collections.abc import Iterable

from transfer_queue.errors import ClosedError
from transfer_queue.transport.base import Call, Peer, Reply
from transfer_queue.transport.blocked import AllSent, Asked, wait_for_some
from transfer_queue.transport.descriptors import Descriptors
from transfer_queue.transport.line import Line, closed, gone, silent, unconnected
from transfer_queue.transport.loop_line import LoopLine
from transfer_queue.transport.modes import is_blocking, pause
from transfer_queue.transport.plain_line import PlainLine
from transfer_queue.transport.zmq_line import ZmqLine

_NOBODY_THERE = (errno.ENOENT, errno.ECONNREFUSED)
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SocketCaller:
    """Calls peers from any thread and any event loop of the process that made it.

    Whether a peer is called over a plain Unix socket or over ZMQ is found out by trying, once.
    """

    def __init__(self, client_id: str) -> None:
        self._client = client_id
        self._ids = itertools.count(1)
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._plain: dict[Peer, bool] = {}
        self._idle: dict[tuple[str, int | None], list[Line]] = {}
        self._lines: dict[tuple[int, Peer], LoopLine] = {}
        self._num_blocked = 0
        self._wake: Descriptors | None = None

    async def call_many(self, calls: Iterable[Call], timeout_s: float) -> list[Reply]:
        """See ``Caller``. Raises ClosedError after ``close``, also where that came while the call waited."""
        if self._pid != os.getpid():
            raise ClosedError("sockets don't survive a fork: this caller belongs to the parent process.")
        if is_blocking():
            wake = self._enter()
            try:
                return await self._call_blocking(calls, timeout_s, wake)
            finally:
                self._leave()
        return await self._call_on_loop(calls, timeout_s)

    def for_this_process(self, client_id: str) -> SocketCaller:
        """After a fork: the child's own caller, under another name."""
        return SocketCaller(client_id)

    def close(self) -> None:
        """Close every socket. Idempotent; calls under way fail, in whatever thread or loop they wait."""
        with self._lock:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
            lines = list(self._lines.values())
            self._lines.clear()
            if self._num_blocked and self._wake is not None:
                os.write(self._wake.at(1), b"x")
            elif self._wake is not None:
                self._wake.close()
            for line in itertools.chain.from_iterable(self._idle.values()):
                line.close()
            self._idle.clear()
        for loop_line in lines:
            loop_line.close_from_anywhere(closed)

    def _connect(self, peer: Peer) -> Line:
        plain = self._plain.get(peer)
        if plain is False:
            return ZmqLine(peer, self._client)
        try:
            line = PlainLine(peer, self._client)
        except BlockingIOError:  # too many newcomers at once: over ZMQ they wait for each other
            return ZmqLine(peer, self._client)
        except OSError as error:
            if error.errno in _NO_ROOM or (plain and error.errno not in _NOBODY_THERE):
                raise unconnected(peer, error) from error
            if plain:
                raise gone(peer) from error
            self._plain[peer] = False
            return ZmqLine(peer, self._client)
        self._plain[peer] = True
        return line

    # ---- in a blocked thread ----

    def _enter(self) -> int:
        """One more thread that waits; gives what becomes readable when the caller is closed meanwhile."""
        with self._lock:
            if self._closed:
                raise closed()
            if self._wake is None:
                self._wake = Descriptors(self, *os.pipe())
            self._num_blocked += 1
            return self._wake.at(0)

    def _leave(self) -> None:
        with self._lock:
            self._num_blocked -= 1
            if self._closed and not self._num_blocked and self._wake is not None:
                self._wake.close()

    def _borrow(self, peer: Peer) -> Line:
        with self._lock:
            idle = self._idle.get((peer.address, peer.pid))
            if idle:
                return idle.pop()
        return self._connect(peer)

    def _give_back(self, line: Line) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault((line.peer.address, line.peer.pid), []).append(line)
                return
        line.close()

    async def _call_blocking(self, calls: Iterable[Call], timeout_s: float, wake: int) -> list[Reply]:
        waiting: dict[int, Asked] = {}
        replies: dict[int, Reply] = {}
        try:
            for position, call in enumerate(calls):
                asked = waiting[position] = Asked(self._borrow(call.peer), next(self._ids))
                asked.line.send(asked.request_id, call)
            may_be_here = await pause(AllSent(waiting))
            deadline = time.monotonic() + timeout_s
            while waiting:
                for position, reply in wait_for_some(waiting, wake, deadline, timeout_s, may_be_here):
                    replies[position] = reply
                    self._give_back(waiting.pop(position).line)
                may_be_here = False
        finally:
            for asked in waiting.values():
                asked.line.close()  # with it goes the late answer to a call that was given up
        return [replies[position] for position in sorted(replies)]

    # ---- on an event loop ----

    async def _call_on_loop(self, calls: Iterable[Call], timeout_s: float) -> list[Reply]:
        loop = asyncio.get_running_loop()
        sent: list[tuple[LoopLine, int]] = []
        peers: list[Peer] = []
        futures: list[asyncio.Future[Reply]] = []
        try:
            for call in calls:
                line, request_id = self._line(call.peer, loop), next(self._ids)
                sent.append((line, request_id))
                peers.append(call.peer)
                futures.append(line.send(request_id, call))
            if futures:
                await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            done = [future for future in futures if future.done()]
            replies = [future.result() for future in done]  # raises what one of them failed with
            if len(done) < len(futures):
                late = (peer for peer, future in zip(peers, futures, strict=True) if not future.done())
                raise silent(next(late), timeout_s)
            return replies
        finally:
            for line, request_id in sent:
                line.forget(request_id)

    def _line(self, peer: Peer, loop: asyncio.AbstractEventLoop) -> LoopLine:
        with self._lock:
            if self._closed:
                raise closed()
            key = (id(loop), peer)  # a line keeps its loop alive, so the id stays its own
            line = self._lines.get(key)
            if line is not None and line.broken:
                self._lines.pop(key).close(lambda: gone(peer))
                line = None
            if line is None:
                self._drop_closed_loops()
                line = self._lines[key] = LoopLine(self._connect(peer), loop)
            return line

    def _drop_closed_loops(self) -> None:
        for key in [key for key, line in self._lines.items() if line.loop.is_closed()]:
            self._lines.pop(key).close(closed)
