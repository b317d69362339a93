# SPDX-License-Identifier: Apache-2.0
"""A client's session with a queue: call numbers, hello and goodbye, confirmation of receipt, cancels."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import threading
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from transfer_queue import protocol as p
from transfer_queue.config import FullConfig, typed
from transfer_queue.errors import ProtocolError, QueueUnreachableError, TransferQueueError, from_wire
from transfer_queue.transport.base import CONFIRM, NOBODY_WAITS, Buffer, Peer, PeerCall
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.caller import SocketCaller
from transfer_queue.transport.connections import closed
from transfer_queue.transport.framing import Message
from transfer_queue.utils.machine import pid_namespace

R = TypeVar("R", bound=p.Reply)
_HELLO_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 1.0
_BEFORE_THE_SERVERS = 20
_COPYING_LOOK_S = 2e-3
"""How often ``close`` checks whether other threads have ended their copies. It can't wait for a lock, because Ctrl-C
might leave that locked.
"""

Ask = tuple[Peer, p.Request, Sequence[Buffer]]
"""A request, its server, and its frames."""


class Session:
    """One per client, for all servers of its queue. A forked child has a session and a name of its own.

    A server keeps the answer of every call with an effect until the client confirms receipt.
    The client's next message to that server does this (``received``).
    Likewise the controller keeps batches without ledger entry until a message says that they were read.
    """

    def __init__(self, client_id: str, controller: Peer, key_file: str | None = None) -> None:
        """``key_file``: of the server's public key, for ``tcp://`` addresses."""
        self.controller = controller
        self.client_id = client_id
        self._server_key: str | None = None
        if key_file is not None:
            # It loads ZMQ, which a client of this host never needs.
            from transfer_queue.transport.tcp_wire import read_public_key

            self._server_key = read_public_key(key_file)
        self.timeout_s = 30.0
        self._numbers = itertools.count(1)
        self._pid = os.getpid()
        self._welcome = b""
        self._config: FullConfig | None = None
        self._at_exit: Finalize | None = None
        self._start()

    def _start(self) -> None:
        process = "" if self.client_id.endswith(f"_{os.getpid()}") else f".{os.getpid()}"
        self.caller = SocketCaller(f"{self.client_id}{process}.{uuid.uuid4().hex[:8]}", self._server_key)
        self._received: dict[str, set[int]] = {}
        self.done_reading: set[int] = set()
        """Fetches whose batches were read, or can't be read any more; the next message to the controller names them."""
        self._copying: set[object] = set()
        self.is_closed = False
        """Whether ``close`` was called in this process."""

    # ---- calls ----

    def number(self) -> int:
        """A number that no other call of this session has."""
        return next(self._numbers)

    async def call_many(self, asks: Sequence[Ask], timeout_s: float, keep: bool = False) -> list[Message]:
        """Send all requests, then wait for all answers, in the order of ``asks``. On failure they are cancelled.

        Args:
            keep: The servers keep the answers until ``done``, because more steps follow.
        """
        confirmed, calls = dict[str, tuple[list[int], list[int]]](), []
        for peer, request, frames in asks:
            if peer.address not in confirmed:
                confirmed[peer.address] = self._to_tell(peer)
            # A publish can't be reverted. Its answer stays, so that the caller can ask for the outcome.
            cancel = None if isinstance(request, p.Publish) else partial(self._cancel_of, request)
            calls.append(
                PeerCall(peer, p.encode_request(request, *confirmed[peer.address]), frames, cancel, request.id)
            )
        replies = await self.caller.call_many(calls, timeout_s)
        for peer, request, _ in asks:
            own, (received, read) = self._received.setdefault(peer.address, set()), confirmed[peer.address]
            own.difference_update(received)
            self.done_reading.difference_update(read)
            if not keep and isinstance(request, p.KEPT):
                own.add(request.id)
        return replies

    def _to_tell(self, peer: Peer) -> tuple[list[int], list[int]]:
        """What the next message to this server says of earlier calls: those received, and those read."""
        own = self._received.get(peer.address)
        read = self.done_reading if peer.address == self.controller.address else None
        few = p.MOST_ROWS  # the rest goes with later messages
        # Whole lists, because other threads add to these sets: an iterator made here might meet another size.
        return list(own or ())[:few], list(read or ())[:few]

    def _cancel_of(self, request: p.Request) -> bytes:
        return p.encode_request(p.Cancel(self.number(), request.id))

    def done(self, peer: Peer, *calls: int) -> None:
        """These kept calls are done, so the server may delete their answers."""
        self._received.setdefault(peer.address, set()).update(calls)

    async def post_done(self, *calls: int) -> None:
        """As ``done`` for the controller, but sent now, because others may wait for it. Nothing is left to cancel."""
        self.done(self.controller, *calls)  # again with the next message, if the connection ends before this arrives
        await self._post(self.controller, p.encode_request(p.Cancel(self.number(), calls[-1]), calls))

    async def post(self, peer: Peer, request: p.Request) -> None:
        """Send without waiting for an answer; a server that has ended raises nothing."""
        await self._post(peer, p.encode_request(request))

    async def cancel(self, call: int) -> None:
        """Cancel a call that the controller has answered and keeps."""
        await self._post(self.controller, p.encode_request(p.Cancel(self.number(), call)), CONFIRM)

    async def _post(self, peer: Peer, header: bytes, number: int = NOBODY_WAITS) -> None:
        with contextlib.suppress(TransferQueueError):
            await self.caller.post(PeerCall(peer, header), number)

    # ---- the controller ----

    async def config(self) -> FullConfig:
        """The running queue's configuration.

        Raises:
            QueueUnreachableError: no server answers at the address.
        """
        self.follow_fork()
        if self.controller.address in self.caller.lost:  # what answers there now knows nothing of this session
            self.renew(self.caller)
        if self._config is None:
            self._config = await self._greet()
        return self._config

    async def plain_config(self) -> dict[str, Any]:
        """The same for users, with sections that are not ours."""
        await self.config()
        plain: dict[str, Any] = json.loads(self._welcome)
        return plain

    def follow_fork(self) -> None:
        """In a forked child, start a new session and leave the parent's sockets alone."""
        if self._pid == os.getpid():
            return
        with _fork_lock():
            if self._pid != os.getpid():
                self._start()
                self._config, self._at_exit = None, None
                self._pid = os.getpid()

    def renew(self, ended: SocketCaller) -> None:
        """The servers have ended the session of this caller, so the next call begins another one.

        Calls that still use the old caller are left alone. It closes, and all ends that came back since, with the last.
        """
        with _fork_lock():
            if self.caller is ended and not self.is_closed:
                self._start()
                self._config = None

    async def _greet(self) -> FullConfig:
        if self.is_closed:
            raise closed()
        _check_socket(self.controller.address)
        if self._at_exit is None:
            # Without a goodbye, a process that simply ends would count as a dead producer.
            self._at_exit = Finalize(None, _close_at_exit, args=(weakref.ref(self),), exitpriority=_BEFORE_THE_SERVERS)
        hello = p.Hello(self.number(), os.getpid(), p.PROTOCOL_VERSION, pid_namespace())
        reply = (await self.call_many([(self.controller, hello, ())], _HELLO_TIMEOUT_S))[0]
        self._welcome = self.read(reply.header, hello, p.Welcome).config
        config = typed(json.loads(self._welcome))
        self.timeout_s = config.client.timeout_s
        return config

    async def ask(self, request: type[p.Request], expected: type[R], *args: Any, wait_s: float = 0.0) -> R:
        """Send one request to the controller and return its reply, which must be ``expected``.

        Args:
            wait_s: How long the controller may park the request, on top of the usual deadline.
        Raises:
            TransferQueueError: the controller's error, as the class it named.
        """
        return await self.send(request(self.number(), *args), expected, wait_s)

    async def send(self, message: p.Request, expected: type[R], wait_s: float = 0.0, keep: bool = False) -> R:
        """See ``ask``; ``keep``: see ``call_many``."""
        return (await self.send_with_frames(message, expected, wait_s, keep=keep))[0]

    async def send_with_frames(
        self,
        message: p.Request,
        expected: type[R],
        wait_s: float = 0.0,
        frames: Sequence[Buffer] = (),
        keep: bool = False,
    ) -> tuple[R, list[memoryview]]:
        """See ``ask``; with the frames of the request and of the reply."""
        await self.config()
        try:
            replies = await self.call_many([(self.controller, message, frames)], self.timeout_s + wait_s, keep)
            return self.read(replies[0].header, message, expected), replies[0].frames
        except (asyncio.CancelledError, KeyboardInterrupt):  # the answer may be here, and its caller never gets it
            self._received.get(self.controller.address, set()).discard(message.id)
            await self.cancel(message.id)
            raise

    async def stats(self) -> dict[str, Any]:
        """Numbers of the whole queue: see ``TransferQueueClient.get_stats``."""
        stats: dict[str, Any] = (await self.ask(p.GetStats, p.Done)).value
        after = stats.pop("more", None)
        while after is not None:  # in pages, so that many partitions hold up no other client
            page = (await self.ask(p.GetStats, p.Done, after)).value
            stats["partitions"].update(page["partitions"])
            after = page.get("more")
        return stats

    def read(self, answer: bytes, request: p.Request, expected: type[R]) -> R:
        """The controller's reply to this request; raises what ``ask`` raises."""
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

    # ---- the end ----

    @contextmanager
    def using_memory(self) -> Iterator[None]:
        """Inside, ``close`` waits, so that this session's leases and pins stay its own."""
        copying = object()
        try:  # each step is one of Python's, so Ctrl-C leaves neither a lock nor a count behind
            self._copying.add(copying)
            if self.is_closed:
                raise closed()
            yield
        finally:
            self._copying.discard(copying)

    def close(self) -> None:
        """Say goodbye if the controller is there, then close every socket. Idempotent, never raises."""
        known, self._config = self._config is not None, None
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        if self._pid != os.getpid():
            return
        self.is_closed = True
        turn = threading.Event()
        while self._copying:
            turn.wait(_COPYING_LOOK_S)
        if known:
            run_blocking(self._say_goodbye())
        self.caller.close()

    async def _say_goodbye(self) -> None:
        with contextlib.suppress(
            TransferQueueError
        ):  # it may have ended already, and its state of this session with it
            await self.call_many([(self.controller, p.Goodbye(self.number()), ())], _GOODBYE_TIMEOUT_S)


def _check_socket(address: str) -> None:
    """Fail at once on a missing socket of this host, without waiting for an answer."""
    path = address.removeprefix("ipc://")
    try:
        missing = path != address and not Path(path).exists()
    except PermissionError:
        raise QueueUnreachableError(
            f"the queue at {address} belongs to another user: its directory can't be entered. "
            f"Ask as that user, or start one of your own."
        ) from None
    if missing:
        raise QueueUnreachableError(
            f"no queue at {address}: there is no such socket. Is the address right (TQ_ADDRESS, or the one that "
            f"init() returned), and is the process that started the queue still running?"
        )


def _close_at_exit(session: weakref.ref[Session]) -> None:
    alive = session()
    if alive is not None:
        alive.close()


_locks: dict[int, threading.Lock] = {}


def _fork_lock() -> threading.Lock:
    """One lock per process, because a parent's may have been locked when it forked."""
    return _locks.setdefault(os.getpid(), threading.Lock())
