# SPDX-License-Identifier: Apache-2.0
"""The client's calls over sockets: a blocked thread borrows connections, those of an event loop share one per peer.

A connection that a server has seen stays open until the caller is closed, whatever happens to its calls.
When the last one closes, the server considers the client gone, and releases everything that it holds there.
A connection on which nobody waits is still driven, by a thread, until its server has heard of the calls that failed.
Lists of connections change in one step of Python, which Ctrl-C can't interrupt.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

from transfer_queue.errors import ClosedError, QueueUnreachableError
from transfer_queue.transport.base import NOBODY_WAITS, USUAL_LIVENESS, Liveness, Peer, PeerCall
from transfer_queue.transport.blocking import is_blocking, look, pause
from transfer_queue.transport.connections import Connection, LoopConnection, closed, gone, revoke, silent
from transfer_queue.transport.descriptors import LONGEST_WAIT_S, READ, WRITE, Descriptors, Spin, longest_s
from transfer_queue.transport.settling import Settling
from transfer_queue.transport.unix import UnixConnection

if TYPE_CHECKING:
    from transfer_queue.transport.framing import Message
    from transfer_queue.transport.tcp import TcpLinks

_LAST = (-1,)
"""``target.extend(map(source.pop, _LAST))`` moves the last item in one step of Python: Ctrl-C can't lose it."""


_CLOSE_S = 1.0


class SocketCaller:
    """Calls peers from any thread and any event loop of the process that made it."""

    def __init__(
        self,
        client_id: str,
        server_key: str | None = None,
        liveness: Liveness = USUAL_LIVENESS,
    ) -> None:
        """The last two concern ``tcp://`` addresses only.

        Args:
            server_key: The public key of the queue's servers; None: no encryption.
            liveness: How often this client shows that it is alive, and how long a server may be silent.
        """
        self.client = client_id
        """The name of the session."""
        self._server_key = server_key
        self._liveness = liveness
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.lost: set[str] = set()
        """Addresses of servers of this host that have ended, or have ended this client's session."""
        # Kept here, so that no connection is closed because Ctrl-C lost it elsewhere.
        self._made: set[Connection] = set()
        self._idle: dict[str, list[Connection]] = {}
        self._loop_connections: dict[tuple[int, str], LoopConnection] = {}
        self._tcp: TcpLinks | None = None
        self._settling: dict[Connection, Settling] = {}
        self._blocked: set[object] = set()
        self._wake = Descriptors(self, *os.pipe())

    async def call_many(self, calls: Iterable[PeerCall], timeout_s: float) -> list[Message]:
        """Send each call as soon as it is made, then wait for all answers, up to ``timeout_s`` after the last send.

        Either all answers are returned, in the order of the calls, or the cancel of every sent call is sent. That
        covers a deadline, a cancelled task, Ctrl-C, a closed ``PendingCall``, and an error in a call or in making it.

        Raises:
            QueueUnreachableError: a peer has ended, or did not answer within ``timeout_s``.
            ClosedError: after ``close``, even if that came while the call waited.
        """
        self._check_process()
        if is_blocking():
            return await self._call_blocking(calls, timeout_s)
        return await self._call_on_loop(calls, timeout_s)

    async def post(self, call: PeerCall, number: int = NOBODY_WAITS) -> None:
        """Send a message that expects no answer, without waiting.

        What can't be sent now is sent as soon as there is room, and before the connection's next message.

        Args:
            number: ``NOBODY_WAITS`` or ``CONFIRM``.
        Raises:
            QueueUnreachableError: the peer has ended, as far as this is known by now.
            ClosedError: after ``close``.
        """
        self._check_process()
        if not is_blocking():
            shared = self._loop_connection(call.peer, asyncio.get_running_loop())
            try:
                shared.post(call, number)
            finally:
                self._leave(shared)
            return
        borrowed: list[Connection] = []
        try:
            connection = self._borrow(call.peer, borrowed)
            connection.send(number, call.header, call.frames)
            connection.own()
        finally:
            self._return(borrowed)

    def close(self) -> None:
        """Close every socket. Idempotent; active calls fail, in whatever thread or loop they wait."""
        with self._lock:
            if self._closed or self._pid != os.getpid():
                return
            os.write(self._wake.at(1), b"x")  # first, because the last of the blocked threads may close it from then on
            self._closed = True
            if not self._blocked:
                self._wake.close()
            to_close = list(self._loop_connections.values())
            self._loop_connections.clear()
        alive = [driver for driver in list(self._settling.values()) if driver.is_alive()]
        settling = [driver for driver in alive if driver is not threading.current_thread()]
        for driver in settling:
            driver.nudge()
        for driver in settling:
            driver.join(_CLOSE_S)
        self._close_idle()
        self._made.clear()  # borrowed ones are closed when they are returned
        for shared in to_close:
            shared.close_from_anywhere(closed())
        if self._tcp is not None:
            self._tcp.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError("sockets don't survive a fork: this caller belongs to the parent process.")

    # ---- connections ----

    def _borrow(self, peer: Peer, borrowed: list[Connection]) -> Connection:
        """A connection for this thread alone: one that it has already borrowed, or another one."""
        for connection in borrowed:
            if connection.peer.address == peer.address:
                return connection
        if self._closed:
            raise closed()
        idle = self._idle.setdefault(peer.address, [])
        while True:
            turns = self._turns() if self._settling else []
            try:
                borrowed.extend(map(idle.pop, _LAST))
                return borrowed[-1]
            except IndexError:
                may_return = turns != self._turns() or any(turn % 2 for turn in turns)
            if not may_return:  # no thread had one meanwhile
                borrowed.append(self._connect(peer))
                self._made.add(borrowed[-1])
                return borrowed[-1]

    def _connect(self, peer: Peer) -> Connection:
        if not peer.address.startswith("tcp://"):
            return UnixConnection(peer, self.client)
        from transfer_queue.transport.tcp import TcpLinks

        with self._lock:
            if self._closed:
                raise closed()
            if self._tcp is None:
                self._tcp = TcpLinks(self.client, self._server_key, self._liveness)
                Finalize(self, self._tcp.close, exitpriority=0)  # see UnixConnection
        return self._tcp.connect(peer)

    def _return(self, borrowed: list[Connection]) -> None:
        while borrowed:
            connection = borrowed[-1]
            if connection.broken:
                self._discard(borrowed.pop())
            else:
                self._idle.setdefault(connection.peer.address, []).extend(map(borrowed.pop, _LAST))
                if connection in self._settling or not connection.settled:
                    self._settle(connection)
        if self._closed:
            self._close_idle()

    def _discard(self, connection: Connection) -> None:
        """Close a broken connection, and the idle ones to the same server, which are broken as well."""
        if connection.peer.address.startswith("ipc://"):  # on others a session outlives its connection for a while
            self.lost.add(connection.peer.address)
        self._made.discard(connection)
        connection.close()
        self._close_all(self._idle.get(connection.peer.address, []))

    def _close_idle(self) -> None:
        for idle in list(self._idle.values()):
            self._close_all(idle)

    def _close_all(self, connections: list[Connection]) -> None:
        while connections:
            with contextlib.suppress(IndexError):  # another thread does the same
                connection = connections.pop()
                self._made.discard(connection)
                connection.close()

    # ---- connections on which nobody waits ----

    def _settle(self, connection: Connection) -> None:
        """The server gets all that was sent on an idle connection, whatever this client does next."""
        driver = self._settling.get(connection)
        if driver is None:
            driver = Settling(connection, self._idle[connection.peer.address], self._is_settled)
            driver = self._settling.setdefault(connection, driver)
        driver.nudge()

    def _is_settled(self, connection: Connection) -> bool:
        """Whether its thread may end. While a call uses the connection, it may: that call settles it when it ends."""
        if self._needs_settling(connection):
            return False
        self._settling.pop(connection, None)
        if self._needs_settling(connection):  # given back since
            self._settle(connection)
        return True

    def _needs_settling(self, connection: Connection) -> bool:
        return not (self._closed or connection.settled) and connection in self._idle[connection.peer.address]

    def _turns(self) -> list[int]:
        return [driver.turns for driver in list(self._settling.values())]

    # ---- in a blocked thread ----

    async def _call_blocking(self, calls: Iterable[PeerCall], timeout_s: float) -> list[Message]:
        borrowed: list[Connection] = []
        sent: dict[int, tuple[Connection, PeerCall]] = {}
        replies: dict[int, Message] = {}
        late: dict[int, Connection] = {}
        waiter = object()
        try:
            self._blocked.add(waiter)
            if self._closed:
                raise closed()
            wake = self._wake.at(0)
            for call in calls:
                connection = self._borrow(call.peer, borrowed)
                sent[call.number] = (connection, call)
                late[call.number] = connection
                connection.send(call.number, call.header, call.frames)
            await pause()
            deadline = time.monotonic() + timeout_s
            while late:
                arrived = wait_for_some(set(late.values()), wake, min(deadline, time.monotonic() + look()))
                for message in arrived:
                    if late.pop(message.number, None) is not None:
                        replies[message.number] = message
                if not arrived and time.monotonic() >= deadline:
                    first = next(iter(late.values()))
                    raise silent(first.peer, timeout_s, first.reached)
            return list(map(replies.__getitem__, sent))
        except BaseException:
            for connection, call in sent.values():
                revoke(connection, call.cancel)
            raise
        finally:
            self._blocked.discard(waiter)
            self._return(borrowed)
            if self._closed and not self._blocked:
                self._wake.close()

    # ---- on an event loop ----

    async def _call_on_loop(self, calls: Iterable[PeerCall], timeout_s: float) -> list[Message]:
        loop = asyncio.get_running_loop()
        sent: list[tuple[LoopConnection, PeerCall]] = []
        futures: list[asyncio.Future[Message]] = []
        try:
            for call in calls:
                connection = self._loop_connection(call.peer, loop)
                sent.append((connection, call))
                futures.append(connection.send(call))
            if futures:
                await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            replies = [future.result() for future in futures if future.done()]  # raises the error of a failed one
            if len(replies) < len(futures):
                late = (each for each, future in zip(sent, futures, strict=True) if not future.done())
                connection, call = next(late)
                raise silent(call.peer, timeout_s, connection.connection.reached)
        except BaseException:
            for connection, call in sent:
                connection.cancel(call)
            raise
        finally:
            for connection, call in sent:
                connection.done(call)
                self._leave(connection)
        return replies

    def _leave(self, shared: LoopConnection) -> None:
        """A call has ended. If it was the last one of its loop, the connection may be for a thread to drive."""
        if shared.is_left_unsettled:
            self._retire(lambda each: each is shared)

    def _loop_connection(self, peer: Peer, loop: asyncio.AbstractEventLoop) -> LoopConnection:
        key = (id(loop), peer.address)  # a connection keeps its loop alive, so the id stays unique
        found = self._loop_connections.get(key)
        if found is not None and not found.connection.broken:
            return found
        if found is not None:
            self._loop_connections.pop(key).close(gone(peer))
            self._discard(found.connection)
        self._retire(lambda each: each.loop.is_closed())
        borrowed: list[Connection] = []
        try:
            made = LoopConnection(self._borrow(peer, borrowed), loop)
            with self._lock:
                if self._closed:
                    raise closed()
                self._loop_connections[key] = made
                borrowed.clear()
            return made
        finally:
            self._return(borrowed)

    def _retire(self, is_over: Callable[[LoopConnection], bool]) -> None:
        """Take these connections back from their loops."""
        with self._lock:
            keys = [key for key, each in self._loop_connections.items() if is_over(each)]
            connections = [self._loop_connections.pop(key).retire() for key in keys]
        self._return(connections)


# ---- how a blocked thread waits ----


class _Here(threading.local):
    """This thread's spinning state."""

    def __init__(self) -> None:
        self.spin = Spin(longest_s())


_here = _Here()


def wait_for_some(connections: Collection[Connection], wake: int, deadline: float) -> list[Message]:
    """Messages that arrived; none if there may be some now, or the deadline has passed.

    Raises:
        ClosedError: ``wake`` is readable.
        QueueUnreachableError: a peer has ended.
    """
    events = _poll(connections, wake, deadline)
    arrived: list[Message] = []
    try:
        for connection in connections:
            happened = events.get(connection.descriptor, 0)
            if happened & WRITE:
                connection.flush()
            if happened & ~WRITE:
                arrived += connection.receive()
    except QueueUnreachableError:
        if wake in events:  # closing the client may end the queue at the same time
            raise closed() from None
        raise
    if wake in events and not arrived:
        raise closed()
    return arrived


def _poll(connections: Collection[Connection], wake: int, deadline: float) -> dict[int, int]:
    left = max(0.0, min(deadline - time.monotonic(), LONGEST_WAIT_S))
    poll = select.poll()
    poll.register(wake, READ)
    for connection in connections:
        poll.register(connection.descriptor, READ | WRITE if connection.unsent else READ)
    return dict(_here.spin.wait(poll.poll, lambda: poll.poll(math.ceil(left * 1000)), left))
