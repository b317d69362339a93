# SPDX-License-Identifier: Apache-2.0
"""A client's line to the controller: says hello, asks, turns refusals into exceptions, says goodbye."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from transfer_queue import protocol as p
from transfer_queue.errors import ClosedError, ProtocolError, QueueUnreachableError, TransferQueueError, from_wire
from transfer_queue.transport.base import Buffer, Call, Peer
from transfer_queue.transport.caller import SocketCaller
from transfer_queue.transport.modes import run_blocking
from transfer_queue.utils.processes import pid_namespace

Q = TypeVar("Q", bound=p.Request)
R = TypeVar("R", bound=p.Reply)
_HELLO_TIMEOUT_S = 10.0
_LAST_WORDS_TIMEOUT_S = 1.0
_BEFORE_THE_SERVERS = 20
_HOLDING = (p.Fetch, p.Publish)
"""Requests that take or reserve something for the client without waiting for it."""


class Session:
    """One per client. Follows a fork: the child greets the controller under a name of its own."""

    def __init__(self, client_id: str, controller: Peer) -> None:
        self.controller = controller
        self.client_id = client_id
        self.timeout_s = 30.0
        self._ids = itertools.count(1)
        self._pid = os.getpid()
        self._closed = False
        self._config: dict[str, Any] = {}
        self._farewell: Finalize | None = None
        self.caller = SocketCaller(self._name())

    def _name(self) -> str:
        return f"{self.client_id}.{os.getpid()}.{uuid.uuid4().hex[:8]}"

    async def config(self) -> dict[str, Any]:
        """The running queue's configuration.

        Raises:
            QueueUnreachableError: nobody answers at the address.
        """
        self.follow_fork()
        if not self._config:
            await self._greet()
        return self._config

    def follow_fork(self) -> None:
        """In a forked child: leave the parent's sockets alone and start over."""
        if self._pid == os.getpid():
            return
        with _fork_lock():
            if self._pid != os.getpid():
                self.caller = self.caller.for_this_process(self._name())
                self._config, self._farewell = {}, None
                self._pid = os.getpid()

    async def _greet(self) -> None:
        if self._closed:
            raise ClosedError("this client was closed; make a new one, or call init() again.")
        _check_socket(self.controller.address)
        if self._farewell is None:
            # A process that just ends has left on purpose: without a goodbye it would count as a dead producer.
            self._farewell = Finalize(None, _leave, args=(weakref.ref(self),), exitpriority=_BEFORE_THE_SERVERS)
        hello = p.Hello(next(self._ids), os.getpid(), pid_namespace())
        welcome, _ = await self._exchange(hello, p.Welcome, _HELLO_TIMEOUT_S)
        config = json.loads(welcome.config)
        self.timeout_s = float(config["client"]["timeout_s"])
        self._config = config

    async def ask(self, request: type[p.Request], expected: type[R], *args: Any, wait_s: float = 0.0, **kw: Any) -> R:
        """Send one request and return its reply, which must be ``expected``.

        Args:
            wait_s: How long the controller may park the request, on top of the usual deadline.
        Raises:
            TransferQueueError: what the controller answered instead, as the class it named.
        """
        return await self.send(self.message(request, *args, **kw), expected, wait_s)

    def message(self, request: type[Q], *args: Any, **kw: Any) -> Q:
        """A request to ``send``, or to be told the controller by others."""
        return request(next(self._ids), *args, **kw)

    async def send(
        self, message: p.Request, expected: type[R], wait_s: float = 0.0, meanwhile: Callable[[], None] | None = None
    ) -> R:
        """See ``ask``. ``meanwhile`` is done while the answer is awaited, and must not raise."""
        return (await self.send_beside((), message, expected, wait_s, meanwhile))[0]

    async def send_beside(
        self,
        frames: Sequence[Buffer],
        message: p.Request,
        expected: type[R],
        wait_s: float = 0.0,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[R, list[memoryview]]:
        """See ``ask``: what travels beside the request, and what came beside the reply."""
        await self.config()
        try:
            return await self._exchange(message, expected, self.timeout_s + wait_s, meanwhile, frames)
        except (asyncio.CancelledError, KeyboardInterrupt):
            if wait_s or isinstance(message, _HOLDING):  # it may be parked, or hold something for nobody now
                await self.withdraw(message)
            raise

    async def withdraw(self, message: p.Request) -> None:
        """Nobody waits for its answer any more: the controller undoes what it did for it."""
        await self._tell(p.Withdraw(next(self._ids), message.id))

    async def _tell(self, request: p.Request) -> None:
        with contextlib.suppress(TransferQueueError):  # it may be gone already, and with it what it knew of us
            await self._exchange(request, p.Done, _LAST_WORDS_TIMEOUT_S)

    async def _exchange(
        self,
        request: p.Request,
        expected: type[R],
        timeout_s: float,
        meanwhile: Callable[[], None] | None = None,
        frames: Sequence[Buffer] = (),
    ) -> tuple[R, list[memoryview]]:
        call = Call(self.controller, p.encode(request), frames)
        replies = await self.caller.call_many([call] if meanwhile is None else _then(call, meanwhile), timeout_s)
        return self.read(replies[0].header, request, expected), replies[0].frames

    def read(self, answer: bytes, request: p.Request, expected: type[R]) -> R:
        """The controller's answer to this request; raises what ``ask`` raises."""
        try:
            reply = p.decode_reply(answer)
        except msgspec.DecodeError as error:
            raise ProtocolError(
                f"can't read the controller's answer: {error}. Do both run the same version?"
            ) from error
        if isinstance(reply, p.Failed):
            raise from_wire(reply.code, reply.text)
        if not isinstance(reply, expected):
            raise ProtocolError(f"the controller answered {type(reply).__name__} to {type(request).__name__}.")
        return reply

    def close(self) -> None:
        """Say goodbye if the controller is there, then close every socket. Idempotent, never raises."""
        known, self._config, self._closed = bool(self._config), {}, True
        if self._farewell is not None:
            self._farewell.cancel()
            self._farewell = None
        if known and self._pid == os.getpid():
            run_blocking(self._tell(p.Goodbye(next(self._ids))))
        self.caller.close()


def _then(call: Call, meanwhile: Callable[[], None]) -> Iterator[Call]:
    yield call
    meanwhile()


def _check_socket(address: str) -> None:
    """On this host a missing socket is known at once, without waiting for an answer."""
    path = address.removeprefix("ipc://")
    if path != address and not Path(path).exists():
        raise QueueUnreachableError(
            f"no queue at {address}: there is no such socket. Is the address right (TQ_ADDRESS, or the one that "
            f"init() returned), and is the process that started the queue still running?"
        )


def _leave(session: weakref.ref[Session]) -> None:
    alive = session()
    if alive is not None:
        alive.close()


_locks: dict[int, threading.Lock] = {}


def _fork_lock() -> threading.Lock:
    """One lock per process: a parent's may have been held when it forked."""
    return _locks.setdefault(os.getpid(), threading.Lock())
