# SPDX-License-Identifier: Apache-2.0
"""Lease: a worker's handle to a group that it works on; the thread that renews leases; leases one after the other."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from functools import cached_property
from typing import Any, Literal, TypeVar

from tensordict import TensorDict

from transfer_queue import protocol as p
from transfer_queue.client.base import parts_of, tags_by_row, to_meta
from transfer_queue.client.given_rows import as_rows
from transfer_queue.client.put import Puts
from transfer_queue.errors import (
    ClosedError,
    EndOfPartitionError,
    InvalidRequestError,
    LeaseLostError,
    SessionEndedError,
    TransferQueueError,
)
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.pack import GivenRows
from transfer_queue.transport.blocking import blocking, run_blocking
from transfer_queue.utils.logging_utils import get_logger

Rows = TensorDict | Mapping[str, Any]
TagList = Sequence[Mapping[str, Any] | None] | None
_T = TypeVar("_T")
_log = get_logger(__name__)
_SETTLED_S = 0.05
"""A lease is renewed from then on. Its worker doesn't hear of a loss before."""
_RENEWED_PER_LEASE = 3
_JOIN_S = 2.0


class LeaseClient(Puts):
    """What leases need of their client: it puts their rows, and renews them."""

    @cached_property
    def renewals(self) -> Renewals:
        return Renewals(self)

    def end_threads(self) -> None:
        """The renewals of leases end. Idempotent."""
        if "renewals" in vars(self):
            self.renewals.close()

    async def put_members(self, rows: GivenRows, partition: str, tags: TagList, members: p.Members) -> BatchMeta:
        """New rows of a leased group. See ``Lease.put``."""
        count = int(rows.batch_size[0])
        if not count:
            raise InvalidRequestError("a put of a lease got 0 rows; there is nothing to store.")
        by_row = tags_by_row(tags, count)
        if len(by_row) > p.MOST_ROWS:
            raise InvalidRequestError(f"a put of a lease takes tags for {p.MOST_ROWS} rows, got {len(by_row)}.")
        meta = await self.put_new(rows, partition, by_row, members)
        meta.heads = [members.head] * count
        return meta


class Lease(AbstractContextManager["Lease"], AbstractAsyncContextManager["Lease"]):
    """A worker's right to work on a group, or on parts of it.

    It ends by ``close``, ``release`` or ``reject``, or is lost: its session ends, or nobody renews it for ``lease_s``
    seconds. This process renews it for as long as the object is alive. Each verb has an async twin, ``async_close`` and
    so on. As a context manager it releases what its body leaves open. If it is lost, the body ends without an error.

    Examples:
        >>> meta = client.add_groups({"prompt": torch.arange(2)}, "train")
        >>> with client.lease("train")[0] as lease:
        ...     rows = lease.close({"response": lease.head["prompt"] + torch.arange(3)}, tags=[{"reward": 1.0}] * 3)
        >>> client.kv_list("train", where="group.state == 'closed'")["train"][lease.key]["group.closed"]
        1
    """

    def __init__(
        self, client: LeaseClient, granted: p.GrantedLease, head: TensorDict, tags: Mapping[str, Any], lease_s: float
    ) -> None:
        self._client, self._granted, self._lease_s = client, granted, lease_s
        self.head = head
        """[1] The fields of the group's own row."""
        self.tags = {name: value for name, value in tags.items() if not name.startswith("group.")}
        """The tags that the head was added with."""
        self.partition, self.key = granted.partition, granted.key
        self.attempt = granted.attempt
        """1 for the first one; then one more for each attempt that has failed."""
        self.version = granted.version
        """The policy version that trained when the group got its first lease; None: nobody has said so."""
        self.parts = list(granted.parts)
        """The parts that are still to be closed."""
        self.part = granted.parts[0] if len(granted.parts) == 1 else None
        """The part, where the lease has one alone."""
        self.token = granted.token
        """Its number: later leases have larger ones."""
        self.aborted = False
        """Whether the work is of no use any more: the group is too old, cleared, or another worker's by now."""

    @property
    def is_open(self) -> bool:
        """Whether parts of it are to be closed, as far as this process knows."""
        return bool(self.parts) and not self.aborted

    async def async_members(self) -> BatchMeta:
        """Rows that earlier holders have left in these parts, for ``get_data``: with ``keep="all"``."""
        indexes = [index for own in self._granted.members.values() for index in p.unpack_indexes(own).tolist()]
        if not indexes:
            return BatchMeta.empty()
        packed = p.pack_indexes(indexes)
        return to_meta(await self._client.session.ask(p.Describe, p.Batch, self.partition, None, packed))

    @property
    def members(self) -> BatchMeta:
        """See ``async_members``."""
        return run_blocking(self.async_members())

    # ---- work ----

    async def async_put(self, rows: Rows, tags: TagList = None, part: int | None = None) -> BatchMeta:
        """Add rows to the group; ordinary tasks may read them at once.

        Args:
            rows: ``{field: [N, ...]}``, as for ``client.put``.
            tags: One mapping or None per row.
            part: Where they belong, if the lease has several open parts. None: the rows are dealt evenly to all of
                them, in order.
        Returns:
            Metadata of the rows.
        Raises:
            LeaseLostError: another worker has the work by now, or it is of no use; nothing was stored.
            GroupStateError: the part was closed.
            InvalidRequestError: the part isn't one of this lease's.
        """
        return await self._put(rows, tags, self._members(part))

    async def async_close(self, rows: Rows | None = None, tags: TagList = None, part: int | None = None) -> BatchMeta:
        """The work is done, with these last rows: one message. All open parts are closed, or this one.

        Raises:
            LeaseLostError: as for ``async_put``.
            GroupStateError: a part has no rows.
        """
        members = self._members(part, closes=True)
        if rows is not None:
            return await self._put(rows, tags, members)
        await self._end("close", members)
        return BatchMeta.empty()

    async def async_release(self, reason: str, blame: Literal["worker", "sample", "nobody"] = "worker") -> None:
        """The work is for another attempt.

        Args:
            blame: Whose fault it is. After ``worker_attempts`` of the worker's, or ``attempts`` of the sample's, the
                group fails. "nobody": the attempt does not count.
        """
        if blame not in ("worker", "sample", "nobody"):
            raise InvalidRequestError(f'blame must be "worker", "sample" or "nobody", got {blame!r}.')
        await self._end("release", self._members(closes=True), reason, blame)

    async def async_reject(self, reason: str) -> None:
        """The group is of no use to training. It leaves, with all its rows."""
        await self._end("reject", self._members(closes=True), reason)

    put = blocking(async_put)
    close = blocking(async_close)
    release = blocking(async_release)
    reject = blocking(async_reject)

    def _members(self, part: int | None = None, closes: bool = False) -> p.Members:
        """Of this part; None: of all open ones."""
        if part is not None and part not in self._granted.parts:
            own = self._granted.parts
            raise InvalidRequestError(f"this lease has no part {part!r}, but {len(own)} from {own[0]} to {own[-1]}.")
        parts = list(self.parts) if part is None else [part]
        if not parts:
            raise LeaseLostError("this lease has ended: its parts were closed, released or rejected before.")
        return p.Members(self.token, self._granted.head, parts, closes)

    async def _put(self, rows: Rows, tags: TagList, members: p.Members) -> BatchMeta:
        return await self._answered(members, self._client.put_members(as_rows(rows), self.partition, tags, members))

    async def _end(self, how: str, members: p.Members, reason: str = "", blame: str = "worker") -> None:
        if not isinstance(reason, str):
            raise InvalidRequestError(f"the reason for a {how} is a text, got {reason!r}.")
        end = (self.partition, members, how, reason[:1000], blame)
        await self._answered(members, self._client.session.ask(p.EndLease, p.Done, *end))

    async def _answered(self, members: p.Members, answer: Awaitable[_T]) -> _T:
        """The server's answer, and what follows from it for the lease."""
        try:
            reply = await answer
        except LeaseLostError:
            self._is_lost()
            raise
        if members.closes:
            closed = set(members.parts)
            self.parts = [each for each in self.parts if each not in closed]
            if not self.parts:
                self._client.renewals.remove(self)
                self.aborted = False  # a renewal may have heard first that it is over
        elif self.aborted:  # it was late, and nobody else had the work: the lease goes on
            self.aborted = False
            self._client.renewals.add([self])
        return reply

    def _is_lost(self) -> None:
        self.aborted = bool(self.parts)
        self._client.renewals.remove(self)

    # ---- as a context manager ----

    async def _leave(self, error: BaseException | None) -> bool:
        """Returns whether the error only says that this lease is lost."""
        if isinstance(error, LeaseLostError) and self.aborted:
            _log.info("%r: %s", self, error)
            return True
        if self.parts:
            text = "its body ended without closing it" if error is None else f"{type(error).__name__}: {error}"
            if error is None and not self.aborted:
                _log.warning("%r is given back: its body ended without close(), reject() or release().", self)
            with suppress(LeaseLostError):  # it is another's, or was cleared
                await self.async_release(text)
        return False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return run_blocking(self._leave(error))

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return await self._leave(error)

    def __repr__(self) -> str:
        state = "lost" if self.aborted else f"open parts {self.parts}" if self.parts else "ended"
        return f"Lease({self.key!r} of {self.partition!r}, attempt {self.attempt}, {state})"


class Renewals:
    """Says that this process works on its leases, in a thread that lives while there are any."""

    def __init__(self, client: LeaseClient) -> None:
        self._client = weakref.ref(client)
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._leases: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
        self._changed = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def add(self, leases: Sequence[Lease]) -> None:
        if self._pid != os.getpid():  # a forked child has leases of its own, and its parent may have held the lock
            self._begin()
        with self._lock:
            self._leases.update((lease.token, lease) for lease in leases)
            self._changed = True  # the thread asks for the new ones, too
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="transfer-queue-leases", daemon=True)
                self._thread.start()

    def remove(self, lease: Lease) -> None:
        if self._pid == os.getpid():
            with self._lock:
                self._leases.pop(lease.token, None)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed.set()
        thread = self._thread
        if thread is None or self._pid != os.getpid() or thread is threading.current_thread():
            return
        if thread.is_alive():  # one that another thread is about to start ends at once by itself
            thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            self._closed.wait(min(_SETTLED_S, self._period_s() / 2))  # many leases are over by then
            with self._lock:
                leases = dict(self._leases)
                client = self._client()
                if self._closed.is_set() or not leases or client is None:
                    self._thread = None
                    return
                self._changed = False
            period_s = self._period_s()
            tokens = list(leases)
            del leases
            lost: list[int] = []
            try:
                with suppress(_Again):
                    lost = self._renew(client, tokens, period_s)
            except (ClosedError, SessionEndedError):
                lost = tokens
            except TransferQueueError as error:  # the server may only be busy, and says later which are lost
                _log.warning("the leases of this process can't be renewed now: %s", error)
                self._closed.wait(period_s)
            for token in lost:
                lease = self._leases.get(token)
                if lease is not None:
                    lease._is_lost()

    def _period_s(self) -> float:
        with self._lock:
            return min((lease._lease_s for lease in self._leases.values()), default=0.0) / _RENEWED_PER_LEASE

    def _renew(self, client: LeaseClient, tokens: list[int], period_s: float) -> list[int]:
        parts = [tokens[some] for some in parts_of(len(tokens))]
        lost: list[int] = []
        for part in parts[:-1]:
            lost += run_blocking(client.session.ask(p.RenewLeases, p.Done, part)).value
        wait_s = 0.0 if lost else period_s
        last = client.session.ask(p.RenewLeases, p.Done, parts[-1], wait_s, wait_s=wait_s)
        return [*lost, *run_blocking(last, self._look).value]

    def _look(self) -> None:
        if self._changed or self._closed.is_set() or not self._leases:
            raise _Again


class _Again(Exception):
    """The leases have changed, so that others must be renewed, or sooner."""


class LeaseStream:
    """Leases one after the other, with ``for`` or ``async for``, until no group can need work any more.

    When it is left, by an error or a ``break``, it releases those that it has taken and that are still open.
    """

    def __init__(self, lease: Callable[[], Awaitable[list[Lease]]]) -> None:
        """``lease``: takes the next ones."""
        self._lease = lease
        self._taken: deque[Lease] = deque()
        """The first one is worked on."""

    async def _next(self) -> Lease | None:
        if self._taken:
            self._taken.popleft()
        if not self._taken:
            with suppress(EndOfPartitionError):
                self._taken.extend(await self._lease())
        return self._taken[0] if self._taken else None

    def __iter__(self) -> Iterator[Lease]:
        try:
            while (current := run_blocking(self._next())) is not None:
                yield current
        finally:
            run_blocking(self._leave())

    async def __aiter__(self) -> AsyncIterator[Lease]:
        try:
            while (current := await self._next()) is not None:
                yield current
        finally:
            await self._leave()

    async def _leave(self) -> None:
        blame: Literal["worker", "nobody"] = "worker"
        while self._taken:
            lease = self._taken.popleft()
            if lease.is_open:
                with suppress(TransferQueueError):
                    await lease.async_release("its worker has stopped asking for leases", blame)
            blame = "nobody"
