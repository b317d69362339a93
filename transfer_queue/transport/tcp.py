# SPDX-License-Identifier: Apache-2.0
"""The client's connections to other hosts, over ZMQ with CURVE. Imported only if needed.

A ``TcpConnection`` is what a caller borrows. All those to one peer share a ``_Link``, which has one ZMQ socket.
One thread per caller uses these sockets. So no call waits for ZMQ, and servers see that the client is alive.

    threads with calls                         thread of TcpLinks
    TcpConnection.send     -> link.outbox  ->  _Link.send, socket
    TcpConnection.receive  <- own inbox    <-  _Link.serve, socket
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from transfer_queue.errors import QueueUnreachableError
from transfer_queue.transport.base import CONFIRM, Buffer, Liveness, Peer
from transfer_queue.transport.connections import gone, no_address, unconnected
from transfer_queue.transport.descriptors import Descriptors
from transfer_queue.transport.framing import FramingError, Message
from transfer_queue.transport.tcp_wire import BEAT, BYE, CALL, HELLO, LINGER_MS, VERSION, PartsReader, pack

AT_ONCE_NBYTES = 1 << 18
"""A larger message is copied by the links' thread, while the parts before are on their way."""
_CLOSE_S = 5.0
_MOST_CANCELS = 1024
"""Of one link that the next one repeats."""
_TRY_AGAIN_MS = 1000
_REFUSES_S = 0.2
"""A host that is reached refuses a port on which nobody listens sooner than this."""
_ID_BITS = 40
_ID_MASK = (1 << _ID_BITS) - 1
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class TcpConnection:
    """See ``Connection``. All connections of a caller to one peer share a link, which distinguishes them by number."""

    unsent = False
    settled = True  # the links' thread sends and receives, whether calls wait or not

    def __init__(self, links: TcpLinks, link: _Link, number: int) -> None:
        self.peer = link.peer
        self.broken = False
        self._links = links
        self._link = link
        self._number = number
        self._inbox: deque[Message] = deque()
        self._large: _LargeMessage | None = None
        """The last one. Those before it are copied first."""
        self._readable = Descriptors(self, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._closing = threading.Lock()
        self.descriptor = self._readable.at(0)

    @property
    def reached(self) -> bool:
        return self._link.is_connected

    def send(self, number: int, header: bytes, frames: Sequence[Buffer] = ()) -> None:
        if number == CONFIRM:
            self._links.tell(self.peer, header)
            return
        if self._link.error is not None:
            raise self._broken(self._link.error)
        number = number and self._number << _ID_BITS | number
        if sum(memoryview(frame).nbytes for frame in frames) <= AT_ONCE_NBYTES:
            self._link.outbox.extend(list(pack(number, header, frames)))  # one step: the parts stay together
        else:
            large = self._large = _LargeMessage(number, header, frames)
            self._link.outbox.append(large)
            if self._link.error is not None:  # since the check above
                large.copied.set()
        self._links.wake()

    def flush(self) -> None:
        """Nothing to do: the links' thread sends."""

    def own(self) -> None:
        """Wait until the links' thread has copied the large messages, which takes as long as to copy them here."""
        if self._large is not None:
            self._large.copied.wait()
            self._large = None

    def receive(self) -> list[Message]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        if self._link.error is not None:
            if not messages:
                raise self._broken(self._link.error)
            self.make_readable()  # the error comes next
        return messages

    def _broken(self, text: str) -> QueueUnreachableError:
        self.broken = True
        return QueueUnreachableError(text)

    def deliver(self, message: Message) -> None:
        """Add a message, in the links' thread."""
        self._inbox.append(message)
        self.make_readable()

    def make_readable(self) -> None:
        """Make ``receive`` due; in any thread."""
        with self._closing:
            if self._readable.at(0) >= 0:
                os.eventfd_write(self._readable.at(0), 1)

    def close(self) -> None:
        with self._closing:
            self._readable.close()


class _LargeMessage:
    """A message that is copied part by part while ZMQ sends the parts before. No signal interrupts that thread."""

    def __init__(self, number: int, header: bytes, frames: Sequence[Buffer]) -> None:
        self._content = (number, header, frames)
        self.copied = threading.Event()

    def parts(self) -> Iterator[list[Any]]:
        try:
            yield from pack(*self._content)
        finally:
            self.copied.set()


class _Link:
    """One ZMQ socket, connected to one peer. Only the links' thread uses it."""

    def __init__(
        self, context: zmq.Context[Any], peer: Peer, client: str, server_key: str | None, cancels: Sequence[bytes] = ()
    ) -> None:
        """``cancels``: what the peer may not have heard over the link before.

        Raises QueueUnreachableError: the address is invalid, or there are no descriptors.
        """
        self.peer = peer
        self.outbox: deque[list[Any] | _LargeMessage | bytes] = deque([[HELLO, VERSION, client.encode()], *cancels])
        """Bytes are the header of a cancel."""
        self._unconfirmed: deque[bytes] = deque()
        self.connections: weakref.WeakValueDictionary[int, TcpConnection] = weakref.WeakValueDictionary()
        self.error: str | None = None
        self._silent_beats = 0
        self.is_connected = self.is_welcome = False
        self._reader = PartsReader()
        self.dealer: Any = None
        self.monitor: Any = None
        try:
            self.dealer = _dealer(context, server_key)
            self.monitor = self.dealer.get_monitor_socket(_EVENTS)
            self.dealer.connect(peer.address)
        except zmq.ZMQError as error:
            self.close()
            if error.errno in (zmq.EINVAL, zmq.EPROTONOSUPPORT):
                raise no_address(peer) from error
            raise unconnected(peer, OSError(error.errno, error.strerror)) from error

    def send(self) -> None:
        with contextlib.suppress(zmq.Again):  # the connection has ended; its monitor tells
            while self.outbox:
                for parts in self._parts(self.outbox.popleft()):
                    self.dealer.send_multipart(parts, zmq.NOBLOCK, copy=False)

    def _parts(self, message: list[Any] | _LargeMessage | bytes) -> Iterable[list[Any]]:
        if isinstance(message, bytes):
            self._unconfirmed.append(message)
            return pack(CONFIRM, message, ())
        return message.parts() if isinstance(message, _LargeMessage) else [message]

    def unheard(self) -> list[bytes]:
        """The cancels that the peer has not confirmed, once this link has ended. The first ones, if there are many."""
        unsent = (message for message in self.outbox if isinstance(message, bytes))
        return [*self._unconfirmed, *unsent][:_MOST_CANCELS]

    def serve(self, beat: Liveness | None) -> None:
        """Send and handle all messages that are here; then check whether the connection has ended.

        ``beat``: a beat is due, too.
        """
        if beat is not None:
            self.outbox.append([BEAT])
        self.send()
        with contextlib.suppress(zmq.Again):
            while True:
                self._handle(self.dealer.recv_multipart(zmq.NOBLOCK, copy=False))
        with contextlib.suppress(zmq.Again):
            while True:
                self._handle_event(recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"])
        if beat is not None:
            self._count_beat(*beat)

    def _handle(self, parts: Sequence[zmq.Frame]) -> None:
        self._silent_beats = 0
        kind = parts[0].bytes
        if kind == BYE and not self.is_welcome:
            self.fail(
                f"{self.peer.name} at {self.peer.address} has ended this connection without a word: it is of another "
                f"version, or was asked to. Use the same version of lightning-tq on both sides."
            )
        self.is_welcome = True
        if kind == BYE:
            self.fail(
                f"{self.peer.name} at {self.peer.address} has ended this connection: it was asked to, or heard nothing "
                f"of this client for too long. What the client held there has been released."
            )
        try:
            messages = self._reader.add(parts[1:]) if kind == CALL else []
        except FramingError as error:
            self.fail(f"{self.peer.name} at {self.peer.address} sent {error}")
            return
        for message in messages:
            connection = self.connections.get(message.number >> _ID_BITS)
            if message.number == CONFIRM and self._unconfirmed:
                self._unconfirmed.popleft()
            elif connection is not None:
                connection.deliver(message._replace(number=message.number & _ID_MASK))

    def _handle_event(self, event: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self.is_connected = True
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._look_who_listens()
        elif event == zmq.EVENT_DISCONNECTED:
            self.fail(str(gone(self.peer)))
        else:
            self.fail(
                f"can't connect to {self.peer.name} at {self.peer.address}: it does not accept this client's key, or "
                f"has ended just now. Its public key is in its key file: name a copy by TQ_KEY_FILE or key_file. "
                f"Without encryption there is none."
            )

    def _look_who_listens(self) -> None:
        """ZMQ could not connect, and doesn't say why. If the link is down, it tries again, until the lease is over."""
        if self.is_connected:
            return  # another event says that it has ended
        host, _, port = self.peer.address.removeprefix("tcp://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), _REFUSES_S).close()
        except (ConnectionRefusedError, socket.gaierror) as error:
            self.fail(str(unconnected(self.peer, error)))
        except OSError:
            return

    def _count_beat(self, heartbeat_s: float, lease_s: float) -> None:
        """Fail once the peer has been silent for a lease. Its messages reset the count."""
        # Beats are counted, not seconds: after a pause of this process, the peer may still be well.
        if self.error is None and self._silent_beats * heartbeat_s >= lease_s:
            self.fail(
                f"{self.peer.name} at {self.peer.address} has been silent for {lease_s:.0f} s, and was given "
                f"up. Is its host reachable, and its process running?"
            )
        self._silent_beats += 1

    def fail(self, text: str) -> None:
        """Record an error; the first one counts."""
        if self.error is None:
            self.error = text
            for connection in list(self.connections.values()):
                connection.make_readable()
            for message in list(self.outbox):
                if isinstance(message, _LargeMessage):
                    message.copied.set()  # it won't be sent

    def close(self) -> None:
        if self.monitor is not None:
            self.dealer.disable_monitor()
            self.monitor.close(linger=0)
        if self.dealer is not None:
            self.dealer.close(linger=LINGER_MS if self.error is None else 0)


def _dealer(context: zmq.Context[Any], server_key: str | None) -> Any:
    dealer: Any = context.socket(zmq.DEALER)
    dealer.set_hwm(0)  # nothing is ever dropped, and a send never waits for room
    dealer.reconnect_ivl = _TRY_AGAIN_MS  # until it is connected once; a connection that has ended is closed at once
    if server_key is not None:
        public, secret = zmq.curve_keypair()
        dealer.curve_publickey, dealer.curve_secretkey = public, secret
        dealer.curve_serverkey = server_key.encode()
    return dealer


class TcpLinks:
    """All TCP connections of one caller, and the thread that serves them."""

    def __init__(self, client: str, server_key: str | None, liveness: Liveness) -> None:
        self._client = client
        self._server_key = server_key
        self._liveness = liveness
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._new: deque[_Link] = deque()
        self._num_connections = 0
        self._closed = False
        self._wake = Descriptors(self, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._thread = threading.Thread(target=self._run, name="tq-tcp", daemon=True)
        self._thread.start()
        _all.add(self)

    def connect(self, peer: Peer) -> TcpConnection:
        """Add a connection. Raises QueueUnreachableError: the address is invalid, or there are no descriptors."""
        with self._lock:
            link = self._links.get(peer.address)
            if link is None or link.error is not None:
                cancels = [] if link is None else link.unheard()
                link = _Link(self._context, peer, self._client, self._server_key, cancels)
                self._links[peer.address] = link
                self._new.append(link)
            self._num_connections += 1
            made = TcpConnection(self, link, self._num_connections)
            link.connections[self._num_connections] = made
        self.wake()
        return made

    def tell(self, peer: Peer, cancel: bytes) -> None:
        """Send a cancel, over the next link if this one has ended.

        A session goes on only with another link, which begins with the cancels that the peer may not have heard.
        """
        with self._lock:
            self._links[peer.address].outbox.append(cancel)
        self.wake()

    def wake(self) -> None:
        """Wake the thread, which has work to do."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake.at(0), 1)

    def close(self) -> None:
        """Say goodbye to all peers, and wait until that is sent. Idempotent."""
        with self._lock:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
            os.eventfd_write(self._wake.at(0), 1)
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)
        self._wake.close()

    # ---- in the thread ----

    def _run(self) -> None:
        links: list[_Link] = []
        poller = zmq.Poller()
        poller.register(self._wake.at(0), zmq.POLLIN)
        beat_at = time.monotonic() + self._liveness.heartbeat_s
        while not self._closed:
            poller.poll(math.ceil(max(0.0, beat_at - time.monotonic()) * 1000))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake.at(0))
            while self._new:
                links.append(self._new.popleft())
                poller.register(links[-1].dealer, zmq.POLLIN)
                poller.register(links[-1].monitor, zmq.POLLIN)
            is_due = time.monotonic() >= beat_at
            if is_due:
                beat_at = time.monotonic() + self._liveness.heartbeat_s
            for link in links:
                link.serve(self._liveness if is_due else None)
            for link in [link for link in links if link.error is not None]:
                links.remove(link)
                poller.unregister(link.dealer)
                poller.unregister(link.monitor)
                link.close()
        for link in [*links, *self._new]:
            link.outbox.append([BYE])
            link.send()
            link.close()
        self._context.term()


_all: weakref.WeakSet[TcpLinks] = weakref.WeakSet()
_of_parents: list[object] = []


def _after_fork() -> None:
    # To use, close or collect a socket of the parent here would disturb both, so all are kept forever.
    for links in list(_all):
        _of_parents.append((links._context, [(link.dealer, link.monitor) for link in links._links.values()]))
    _all.clear()


os.register_at_fork(after_in_child=_after_fork)
