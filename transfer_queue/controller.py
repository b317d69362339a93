# SPDX-License-Identifier: Apache-2.0
"""The controller: one ControlPlane behind a transport, in a process or a thread of its own."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from transfer_queue import protocol as p
from transfer_queue.control.plane import ControlPlane, To
from transfer_queue.control.state import PlaneConfig
from transfer_queue.errors import ProtocolError, TransferQueueError, to_wire
from transfer_queue.sampler.registry import resolve
from transfer_queue.storage.base import StorageManager
from transfer_queue.transport.base import Buffer, Envelope, Outgoing
from transfer_queue.transport.modes import run_blocking
from transfer_queue.utils.logging_utils import get_logger

ValuesOf = Callable[[str, bytes, bytes], Sequence[Buffer]]
Watch = Callable[[int, int | None, Callable[[float], Iterable[Outgoing]]], Callable[[], None]]
_CLEARED_NBYTES = 256 * 1024
_log = get_logger(__name__)


def plane_config(conf: Mapping[str, Any], sampler: Any, preallocate: int) -> PlaneConfig:
    """The plane's part of a queue's configuration. ``sampler``: a name, a spec, an instance or a class."""
    controller = conf["controller"]
    return PlaneConfig(
        sampler=resolve(sampler, controller["sampler_modules"]),
        sampler_modules=tuple(controller["sampler_modules"]),
        capacity=conf["backend"]["SimpleStorage"]["total_storage_size"],
        preallocate=preallocate,
        producer_grace_s=controller["producer_grace_s"],
    )


class TransferQueueController:
    """Decodes requests, lets the plane decide, encodes its replies; a transport ``Handler``."""

    def __init__(
        self,
        plane: ControlPlane,
        conf: Mapping[str, Any],
        values: StorageManager | None = None,
        values_of: ValuesOf | None = None,
    ) -> None:
        """``values``: where nothing must stay of what a vanished writer stored and did not publish.

        ``values_of``: called with client, indexes and wish where a fetch has one; gives the frames beside its answer.
        """
        self.plane = plane
        self._welcome = json.dumps(conf).encode()
        self._values = values
        self._values_of = values_of
        self._waiting: dict[tuple[str, int], Envelope] = {}
        self._wishes: dict[tuple[str, int], bytes] = {}
        self._clients: dict[str, Callable[[], None]] = {}  # and what stops watching its process
        self._cleared: dict[str, deque[tuple[int, bytes]]] = {}
        self.watch: Watch | None = None
        """How the transport notices the death of a client's process; set by who serves this."""

    def handle(self, envelope: Envelope, header: bytes, frames: list[memoryview], now: float) -> Iterable[Outgoing]:
        try:
            request = p.decode_request(header)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            code, text = to_wire(ProtocolError(f"the controller can't read this request: {error}"))
            return [Outgoing(envelope, p.encode(p.Failed(0, code, text)))]
        self._waiting[envelope.client, request.id] = envelope
        if frames and self._values_of is not None:
            self._wishes[envelope.client, request.id] = bytes(frames[0])
        try:
            if isinstance(request, p.Hello):
                return self._welcome_client(envelope, request)
            replies = self.plane.handle(envelope.client, request, now)
            if isinstance(request, p.Withdraw):
                self._waiting.pop((envelope.client, request.request), None)
                self._wishes.pop((envelope.client, request.request), None)
                self._drop_cleared(envelope.client, request.request)
            if isinstance(request, p.Goodbye):
                return [*self._outgoing(replies), *self._forget(envelope.client, now, died=False)]
        except Exception as error:  # the one place: a bug of ours must not take the queue down
            replies = [To(envelope.client, p.Failed(request.id, *to_wire(error)))]
        return self._outgoing(replies)

    def expire(self, now: float) -> Iterable[Outgoing]:
        return self._outgoing(self.plane.expire(now))

    def next_deadline(self) -> float | None:
        return self.plane.next_deadline()

    def client_gone(self, client: str, now: float) -> Iterable[Outgoing]:
        """The client's process ended without a goodbye."""
        return self._forget(client, now, died=True) if client in self._clients else []

    def _forget(self, client: str, now: float, died: bool) -> list[Outgoing]:
        self._clients.pop(client, _nothing)()
        for known in (self._waiting, self._wishes):
            for key in [key for key in known if key[0] == client]:
                del known[key]
        replies = self.plane.client_gone(client, now, died=died)
        self._drop_orphans(client)
        return self._outgoing(replies)

    def _welcome_client(self, envelope: Envelope, request: p.Hello) -> Iterable[Outgoing]:
        client = envelope.client
        if client not in self._clients:  # two threads of it may greet at the same time
            self._clients[client] = _nothing
            if self.watch is not None:
                stop = self.watch(request.pid, request.pid_namespace, lambda now: self.client_gone(client, now))
                self._clients[client] = stop
        return self._outgoing([To(client, p.Welcome(request.id, self._welcome))])

    def _remember_cleared(self, client: str, request: int, indexes: bytes) -> None:
        """The client drops their values now; should it end before, or give that up, it is done for it."""
        mine = self._cleared.setdefault(client, deque())
        mine.append((request, indexes))
        while len(mine) > 1 and sum(len(packed) for _, packed in mine) > _CLEARED_NBYTES:
            mine.popleft()

    def _drop_cleared(self, client: str, request: int) -> None:
        """The client was told, or would have been, what this request cleared, and drops none of it."""
        self._drop_values(client, _indexes(told for told in self._cleared.get(client, ()) if told[0] == request))

    def _drop_orphans(self, client: str) -> None:
        orphans = [index for indexes in self.plane.take_orphans() for index in indexes.tolist()]
        self._drop_values(client, orphans + _indexes(self._cleared.pop(client, ())), forsake=True)

    def _drop_values(self, client: str, indexes: list[int], forsake: bool = False) -> None:
        """``forsake``: what it wrote and did not publish, too."""
        if self._values is None:
            return
        try:
            # First, so that nothing that is still on its way from the client arrives after the values are dropped.
            for write in run_blocking(self._values.forsake(client)) if forsake else ():
                lost = self.plane.unpublished(np.asarray(write.global_indexes, np.int64), write.field_names)
                run_blocking(self._values.take_back(write.number, lost.tolist(), client))
            if indexes:
                run_blocking(self._values.clear_rows(indexes))
        except TransferQueueError as error:  # a unit is gone, and the queue must answer on
            level = logging.WARNING if indexes else logging.DEBUG
            _log.log(level, "values that client %s left behind could not be freed: %s", client, error)

    def _outgoing(self, replies: Iterable[To]) -> list[Outgoing]:
        answers = []
        for client, reply in replies:
            if isinstance(reply, p.Cleared) and client in self._clients:
                self._remember_cleared(client, reply.id, reply.indexes)
            envelope = self._waiting.pop((client, reply.id), None)
            wish = self._wishes.pop((client, reply.id), None) if self._wishes else None
            if envelope is not None:
                frames = self._granted(client, reply, wish) if wish is not None else ()
                answers.append(Outgoing(envelope, p.encode(reply), frames))
        return answers

    def _granted(self, client: str, reply: p.Reply, wish: bytes) -> Sequence[Buffer]:
        """Values beside the answer."""
        if not isinstance(reply, p.Batch) or self._values_of is None:
            return ()
        try:
            return self._values_of(client, reply.indexes, wish)
        except Exception as error:  # whatever is wrong with a wish: the batch goes out, and its reader asks the units
            _log.warning("values for client %s could not be read beside its batch: %r", client, error)
            return ()


def _indexes(cleared: Iterable[tuple[int, bytes]]) -> list[int]:
    """Of samples that requests cleared."""
    return [index for _, packed in cleared for index in p.unpack_indexes(packed).tolist()]


def _nothing() -> None:
    """Stops the watch of a process that isn't watched."""
