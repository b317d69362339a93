# SPDX-License-Identifier: Apache-2.0
"""The calling side over ZMQ: a blocked thread borrows a socket per call, the calls of an event loop share one."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq

from transfer_queue.errors import ClosedError
from transfer_queue.transport.base import Call, Peer, Reply
from transfer_queue.transport.modes import cancel_descriptor, is_blocking
from transfer_queue.transport.zmq_context import close_socket
from transfer_queue.transport.zmq_lines import LoopLine, connect, gone, packed, reply_in, silent
from transfer_queue.utils.processes import close_descriptor, open_process


def _closed() -> ClosedError:
    return ClosedError("this client was closed; make a new one, or call init() again.")


class ZmqCaller:
    """Calls peers from any thread and any event loop of the process that made it."""

    def __init__(self, client_id: str) -> None:
        self._client = client_id.encode()
        self._ids = itertools.count(1)
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: dict[Peer, list[Any]] = {}
        self._watches: dict[Peer, int | None] = {}
        self._lines: dict[tuple[int, Peer], LoopLine] = {}
        self._num_blocked = 0
        self._wake: tuple[int, int] | None = None

    async def call_many(self, calls: Sequence[Call], timeout_s: float) -> list[Reply]:
        """See ``Caller``. Raises ClosedError after ``close``, also where that came while the call waited."""
        if self._pid != os.getpid():
            raise ClosedError("sockets don't survive a fork: this caller belongs to the parent process.")
        if is_blocking():
            with self._blocked() as wake:
                return self._call_blocking(calls, timeout_s, wake)
        return await self._call_on_loop(calls, timeout_s)

    def for_this_process(self, client_id: str) -> ZmqCaller:
        """After a fork: the child's own caller, under another name."""
        return ZmqCaller(client_id)

    def close(self) -> None:
        """Close every socket. Idempotent; calls under way fail, in whatever thread or loop they wait."""
        with self._lock:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
            lines = list(self._lines.values())
            self._lines.clear()
            if self._num_blocked and self._wake is not None:
                os.write(self._wake[1], b"x")
            else:
                self._close_descriptors()
            for socket in itertools.chain.from_iterable(self._idle.values()):
                close_socket(socket)
            self._idle.clear()
        for line in lines:
            line.close_from_anywhere(_closed)

    def _close_descriptors(self) -> None:
        for descriptor in [*self._watches.values(), *(self._wake or ())]:
            close_descriptor(descriptor)
        self._watches.clear()
        self._wake = None

    def _parts(self, request_id: int, call: Call) -> list[Any]:
        return [self._client, packed(request_id), call.header, *call.frames]

    # ---- in a blocked thread ----

    @contextmanager
    def _blocked(self) -> Iterator[int]:
        """Counts the threads inside; gives what becomes readable when the caller is closed meanwhile."""
        with self._lock:
            if self._closed:
                raise _closed()
            if self._wake is None:
                self._wake = os.pipe()
            self._num_blocked += 1
            wake = self._wake[0]
        try:
            yield wake
        finally:
            with self._lock:
                self._num_blocked -= 1
                if self._closed and not self._num_blocked:
                    self._close_descriptors()

    def _borrow(self, peer: Peer) -> Any:
        with self._lock:
            idle = self._idle.get(peer)
            if idle:
                return idle.pop()
        return connect(peer)

    def _give_back(self, peer: Peer, socket: Any) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(peer, []).append(socket)
                return
        close_socket(socket)

    def _watch(self, peer: Peer) -> int | None:
        with self._lock:
            if peer not in self._watches:
                self._watches[peer] = open_process(peer.pid, peer.pid_namespace)
            return self._watches[peer]

    def _call_blocking(self, calls: Sequence[Call], timeout_s: float, wake: int) -> list[Reply]:
        deadline = time.monotonic() + timeout_s
        waiting: dict[int, tuple[Any, int]] = {}
        replies: dict[int, Reply] = {}
        try:
            for position, call in enumerate(calls):
                socket, request_id = self._borrow(call.peer), next(self._ids)
                waiting[position] = (socket, request_id)
                socket.send_multipart(self._parts(request_id, call), copy=False)
            peers = {position: call.peer for position, call in enumerate(calls)}
            while waiting:
                self._receive(peers, waiting, replies, deadline, timeout_s, wake)
        finally:
            for socket, _ in waiting.values():
                close_socket(socket)  # with it goes the late answer to a call that was given up
        return [replies[position] for position in range(len(calls))]

    def _receive(
        self,
        peers: dict[int, Peer],
        waiting: dict[int, tuple[Any, int]],
        replies: dict[int, Reply],
        deadline: float,
        timeout_s: float,
        wake: int,
    ) -> None:
        """Wait for any of the replies and move it from ``waiting`` to ``replies``, or raise."""
        watches = {position: self._watch(peers[position]) for position in waiting}
        left = 0.0 if -1 in watches.values() else max(0.0, deadline - time.monotonic())
        poller = zmq.Poller()
        cancel = cancel_descriptor()
        for awaited in {wake, cancel, *watches.values(), *(socket for socket, _ in waiting.values())} - {None, -1}:
            poller.register(awaited, zmq.POLLIN)
        events = dict(poller.poll(math.ceil(left * 1000)))
        arrived = [position for position, (socket, _) in waiting.items() if socket in events]
        for position in arrived:
            socket, request_id = waiting[position]
            found = reply_in(socket.recv_multipart(copy=False))
            if found is not None and found[0] == request_id:
                replies[position] = found[1]
                del waiting[position]
                self._give_back(peers[position], socket)
        if arrived:
            return
        if wake in events:
            raise _closed()
        if cancel in events:
            raise ClosedError("the call was given up by its own process.")
        for position, watch in watches.items():
            if watch == -1 or watch in events:
                raise gone(peers[position])
        if time.monotonic() >= deadline:
            raise silent(peers[next(iter(waiting))], timeout_s)

    # ---- on an event loop ----

    async def _call_on_loop(self, calls: Sequence[Call], timeout_s: float) -> list[Reply]:
        loop = asyncio.get_running_loop()
        sent: list[tuple[LoopLine, int]] = []
        futures: list[asyncio.Future[Reply]] = []
        try:
            for call in calls:
                line, request_id = self._line(call.peer, loop), next(self._ids)
                sent.append((line, request_id))
                futures.append(line.send(request_id, self._parts(request_id, call)))
            if futures:
                await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            done = [future for future in futures if future.done()]
            replies = [future.result() for future in done]  # raises what one of them failed with
            if len(done) < len(futures):
                raise silent(
                    next(call.peer for call, future in zip(calls, futures, strict=True) if not future.done()), timeout_s
                )
            return replies
        finally:
            for line, request_id in sent:
                line.forget(request_id)

    def _line(self, peer: Peer, loop: asyncio.AbstractEventLoop) -> LoopLine:
        with self._lock:
            if self._closed:
                raise _closed()
            line = self._lines.get((id(loop), peer))  # a line keeps its loop alive, so the id stays its own
            if line is None:
                self._drop_closed_loops()
                line = self._lines[id(loop), peer] = LoopLine(peer, loop)
            return line

    def _drop_closed_loops(self) -> None:
        for key in [key for key, line in self._lines.items() if line.loop.is_closed()]:
            self._lines.pop(key).close(_closed)
