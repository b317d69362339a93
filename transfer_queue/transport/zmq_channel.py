# SPDX-License-Identifier: Apache-2.0
"""The calling side over ZMQ: sockets are borrowed from a pool per call, so one request is on one socket at a time."""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from transfer_queue.errors import ClosedError, QueueUnreachableError
from transfer_queue.transport.base import Call, Peer, Reply
from transfer_queue.transport.modes import cancel_descriptor, is_blocking
from transfer_queue.transport.zmq_context import acquire_context, release_context
from transfer_queue.utils.processes import close_descriptor, has_ended, open_process

_SLICE_S = 0.5
"""How often a waiting coroutine looks whether its peer still lives; a blocked thread is told at once."""

_open: weakref.WeakSet[Any] = weakref.WeakSet()
_of_parents: list[Any] = []


def _keep_parents_sockets() -> None:
    # A child that closes (or collects) a socket of its parent disturbs it: keep them for ever, untouched.
    _of_parents.extend(_open)
    _open.clear()


os.register_at_fork(after_in_child=_keep_parents_sockets)


class ZmqCaller:
    """Calls peers from any thread and any event loop of the process that made it."""

    def __init__(self, client_id: str) -> None:
        self._client = client_id.encode()
        self._ids = itertools.count(1)
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._context: Any = None
        self._idle: dict[tuple[str, int], list[Any]] = {}
        self._loops: dict[int, asyncio.AbstractEventLoop] = {}
        self._watches: dict[Peer, int | None] = {}

    async def call_many(self, calls: Sequence[Call], timeout_s: float) -> list[Reply]:
        """See ``Caller``. A call that fails leaves no socket behind that a late answer could reach."""
        if self._closed:
            raise ClosedError("this client was closed; make a new one, or call init() again.")
        if self._pid != os.getpid():
            raise ClosedError("sockets don't survive a fork: this caller belongs to the parent process.")
        if is_blocking():
            return self._call_blocking(calls, timeout_s)
        return list(await asyncio.gather(*(self._call_async(call, timeout_s) for call in calls)))

    def close(self) -> None:
        """Close every socket. Idempotent; calls under way in other threads fail."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid() or self._context is None:
            return
        with self._lock:
            for sockets in self._idle.values():
                for socket in sockets:
                    socket.close(linger=0)
            self._idle.clear()
            for watch in self._watches.values():
                close_descriptor(watch)
            self._watches.clear()
        release_context()

    # ---- sockets ----

    def _borrow(self, peer: Peer, loop: asyncio.AbstractEventLoop | None) -> Any:
        key = (peer.address, id(loop) if loop else 0)
        with self._lock:
            if self._context is None:
                self._context = acquire_context()
            if loop is not None:
                self._forget_closed_loops(loop)
            idle = self._idle.get(key)
            if idle:
                return idle.pop()
        kind = zmq.Socket if loop is None else zmq.asyncio.Socket
        socket: Any = kind(self._context, zmq.DEALER)
        socket.linger = 0
        socket.set_hwm(0)
        socket.connect(peer.address)
        _open.add(socket)
        return socket

    def _give_back(self, peer: Peer, loop: asyncio.AbstractEventLoop | None, socket: Any) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault((peer.address, id(loop) if loop else 0), []).append(socket)
                return
        socket.close(linger=0)

    def _forget_closed_loops(self, current: asyncio.AbstractEventLoop) -> None:
        self._loops[id(current)] = current
        for key, loop in list(self._loops.items()):
            if not loop.is_closed():
                continue
            del self._loops[key]
            for pool in [pool for pool in self._idle if pool[1] == key]:
                for socket in self._idle.pop(pool):
                    socket.close(linger=0)

    def _watch(self, peer: Peer) -> int | None:
        with self._lock:
            if peer not in self._watches:
                self._watches[peer] = open_process(peer.pid, peer.pid_namespace)
            return self._watches[peer]

    def _parts(self, request_id: int, call: Call) -> list[Any]:
        return [self._client, struct.pack("<Q", request_id), call.header, *call.frames]

    # ---- blocking ----

    def _call_blocking(self, calls: Sequence[Call], timeout_s: float) -> list[Reply]:
        deadline = time.monotonic() + timeout_s
        waiting: dict[int, tuple[Any, int]] = {}
        replies: dict[int, Reply] = {}
        try:
            for position, call in enumerate(calls):
                socket, request_id = self._borrow(call.peer, None), next(self._ids)
                waiting[position] = (socket, request_id)
                socket.send_multipart(self._parts(request_id, call), copy=False)
            for position, call in enumerate(calls):
                socket, request_id = waiting[position]
                replies[position] = self._receive(call.peer, socket, request_id, deadline, timeout_s)
                del waiting[position]
                self._give_back(call.peer, None, socket)
        finally:
            for socket, _ in waiting.values():
                socket.close(linger=0)
        return [replies[position] for position in range(len(calls))]

    def _receive(self, peer: Peer, socket: Any, request_id: int, deadline: float, timeout_s: float) -> Reply:
        watch = self._watch(peer)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        if watch is not None and watch >= 0:
            poller.register(watch, zmq.POLLIN)
        cancel = cancel_descriptor()
        if cancel is not None:
            poller.register(cancel, zmq.POLLIN)
        while True:
            left = deadline - time.monotonic()
            events = dict(poller.poll(max(0.0, left) * 1000 if watch is None or watch >= 0 else 0))
            if socket in events:
                reply = _matching(socket.recv_multipart(copy=False), request_id)
                if reply is not None:
                    return reply
            elif cancel in events:
                raise ClosedError("the call was given up by its own process.")
            elif events or (watch is not None and watch < 0):
                raise _gone(peer)
            elif left <= 0:
                raise _silent(peer, timeout_s)

    # ---- on an event loop ----

    async def _call_async(self, call: Call, timeout_s: float) -> Reply:
        loop = asyncio.get_running_loop()
        socket, request_id = self._borrow(call.peer, loop), next(self._ids)
        done = False
        try:
            await socket.send_multipart(self._parts(request_id, call), copy=False)
            reply = await self._receive_async(call.peer, socket, request_id, timeout_s)
            done = True
            return reply
        finally:
            if done:
                self._give_back(call.peer, loop, socket)
            else:
                socket.close(linger=0)

    async def _receive_async(self, peer: Peer, socket: Any, request_id: int, timeout_s: float) -> Reply:
        deadline = time.monotonic() + timeout_s
        watch = self._watch(peer)
        while True:
            left = deadline - time.monotonic()
            if await socket.poll(max(0.0, min(left, _SLICE_S)) * 1000):
                reply = _matching(await socket.recv_multipart(copy=False), request_id)
                if reply is not None:
                    return reply
            elif has_ended(watch):
                raise _gone(peer)
            elif left <= 0:
                raise _silent(peer, timeout_s)


def _matching(parts: list[Any], request_id: int) -> Reply | None:
    if struct.unpack("<Q", parts[0].bytes)[0] != request_id:
        return None  # the late answer to a call that was given up
    return Reply(parts[1].bytes, [part.buffer for part in parts[2:]])


def _gone(peer: Peer) -> QueueUnreachableError:
    return QueueUnreachableError(
        f"{peer.name} at {peer.address} (process {peer.pid}) has ended. What it held is lost; look at its output and "
        f"start the queue again."
    )


def _silent(peer: Peer, timeout_s: float) -> QueueUnreachableError:
    return QueueUnreachableError(
        f"{peer.name} at {peer.address} did not answer within {timeout_s:.1f} s. Is the address right and the queue "
        f"still running?"
    )
