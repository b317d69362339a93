# SPDX-License-Identifier: Apache-2.0
"""Waiting for keys: until enough of them match a filter, or for each change of any. It waits in the controller."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import msgspec

from transfer_queue import protocol as p
from transfer_queue.client.base import ClientBase, checked_wait
from transfer_queue.errors import EndOfPartitionError, KeysTimeoutError
from transfer_queue.finding import Finding
from transfer_queue.protocol import Tags
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.session import Session
from transfer_queue.utils.logging_utils import get_logger

_encoder = msgspec.msgpack.Encoder(order="deterministic")  # equal tags are equal bytes
_log = get_logger(__name__)
_SLICE_S = 30.0
"""The longest wait of one request of a watch. After each one without news, it is logged what the watch waits for."""


class KeyChanges(NamedTuple):
    """What became of the keys that a watch follows since its last answer.

    Examples:
        >>> meta = tq.kv_put("q1", "train", tag={"done": True})
        >>> next(client.kv_watch("train"))
        KeyChanges(changed={'q1': {'done': True}}, removed=[], fresh=True)
    """

    changed: dict[str, dict[str, Any]]
    """New keys, and keys with new tags, each with all of its tags."""
    removed: list[str]
    """Keys that an earlier answer named, and that were cleared or match the filter no more."""
    fresh: bool = False
    """``changed`` is the whole list: the first answer, or the watch was too far behind to get each change."""


class KeyWatch:
    """An iterator of ``KeyChanges``, with ``for`` or ``async for``. It ends when the partition is cleared.

    Each change comes once and in order; several changes of one key between two answers come as one. So a dict
    that drops ``removed`` and takes over ``changed`` always equals a ``kv_list``. One thread or task may iterate.

    Raises:
        KeysTimeoutError: nothing changed for ``timeout_s`` seconds; the watch may be continued.
    """

    def __init__(self, session: Session, partition_id: str, where: str | None, timeout_s: float | None) -> None:
        self._session = session
        self._partition = partition_id
        self._where = where
        self._timeout_s = timeout_s
        self._position: tuple[int, int, int] | None = None
        self._known: dict[str, bytes] = {}  # key -> its tags, packed: what was yielded belongs to the caller
        self._ended = False

    def __iter__(self) -> KeyWatch:
        return self

    def __next__(self) -> KeyChanges:
        changes = run_blocking(self._next())
        if changes is None:
            raise StopIteration
        return changes

    def __aiter__(self) -> KeyWatch:
        return self

    async def __anext__(self) -> KeyChanges:
        changes = await self._next()
        if changes is None:
            raise StopAsyncIteration
        return changes

    async def _next(self) -> KeyChanges | None:
        """The next changes; None: the partition was cleared."""
        began = time.monotonic()
        while not self._ended:
            left_s = math.inf if self._timeout_s is None else max(0.0, began + self._timeout_s - time.monotonic())
            wait_s = min(_SLICE_S, left_s)
            args = (self._partition, self._position, self._where, wait_s)
            reply = await self._session.ask(p.WatchKeys, p.Reply, *args, wait_s=wait_s)
            if isinstance(reply, p.Ended):
                self._ended = True
                return None
            assert isinstance(reply, p.ChangedKeys)
            if reply.position == self._position:
                self._report(time.monotonic() - began)
                continue
            changes = await self._changes(reply)
            if changes.changed or changes.removed:
                return changes
        return None

    def _report(self, waited_s: float) -> None:
        where = "" if self._where is None else f" where {self._where}"
        found = Finding(
            kind="keys", what="kv_watch", waits_for=f"changed keys of {self._partition!r}{where}", age_s=waited_s,
            held_up_by=(f"{len(self._known)} are known",), to_do=("check the producers", "raise timeout_s"),
        )  # fmt: skip
        if self._timeout_s is not None and waited_s >= self._timeout_s:
            raise KeysTimeoutError(str(found))
        _log.warning("%s", found)

    async def _changes(self, reply: p.ChangedKeys) -> KeyChanges:
        """What the caller doesn't know yet. If this fails or is cancelled, the caller still doesn't know it."""
        # What changes while a long list comes in pages is in the next answer.
        keys = {**reply.keys, **await listed_after(self._session, self._partition, reply.last, self._where)}
        packed = {key: _encoder.encode(tags) for key, tags in keys.items()}
        gone = [key for key in self._known if key not in keys] if reply.fresh else reply.removed
        removed = [key for key in gone if key in self._known]
        if not reply.fresh:
            keys = {key: tags for key, tags in keys.items() if self._known.get(key) != packed[key]}
        known = {key: own for key, own in self._known.items() if key in packed} if reply.fresh else self._known
        self._position = reply.position
        self._known = known
        known.update(packed)
        for key in removed:
            known.pop(key, None)
        return KeyChanges(keys, removed, reply.fresh)


class KeyWaits(ClientBase):
    """Verbs that wait for keys."""

    async def async_wait_keys(
        self, partition_id: str, where: str | None = None, count: int = 1, timeout_s: float = 60.0
    ) -> dict[str, Tags]:
        """Keys and their tags, in order of insertion, as soon as at least ``count`` of them match.

        The request waits in the controller, and is answered by the put or the change of tags that decides it.

        Args:
            where: Only keys whose tags match, such as ``"done == true"``; docs/semantics.md has the grammar.
        Returns:
            All keys that match, not only ``count`` of them.
        Raises:
            KeysTimeoutError: fewer matched for ``timeout_s`` seconds; says how many, and how many keys there are.
            EndOfPartitionError: the partition was cleared meanwhile.
            InvalidRequestError: ``where`` is no filter, ``count`` is below 1, or ``timeout_s`` is NaN.
        Examples:
            >>> meta = tq.kv_batch_put(["q1", "q2"], "train", tags=[{"done": True}, {"done": True}])
            >>> list(client.wait_keys("train", where="done == true", count=2, timeout_s=5.0))
            ['q1', 'q2']
        """
        wait_s = checked_wait("wait_keys", timeout_s)
        reply = await self.session.ask(p.WaitKeys, p.Reply, partition_id, where, count, wait_s, wait_s=wait_s)
        if isinstance(reply, p.Ended):
            raise EndOfPartitionError(f"partition {partition_id!r} was cleared while {count} of its keys were awaited.")
        assert isinstance(reply, p.KeyList)
        return {**reply.keys[partition_id], **await listed_after(self.session, partition_id, reply.last, where)}

    def async_kv_watch(self, partition_id: str, where: str | None = None, timeout_s: float | None = None) -> KeyWatch:
        """Follow the keys of a partition and their tags, without polling: an iterator of ``KeyChanges``.

        The first answer lists the keys there are, once there are any. The iterator ends when the partition is cleared.

        Args:
            where: Only keys whose tags match; one that matches no more counts as removed.
            timeout_s: Longest wait for one answer, then KeysTimeoutError; None: no limit.
        Raises:
            InvalidRequestError: ``timeout_s`` is NaN. An invalid ``where`` is an error of the first answer.
        Examples:
            >>> meta = tq.kv_put("q1", "train", tag={"done": True})
            >>> for changes in client.kv_watch("train", where="done == true"):
            ...     print(changes.changed, changes.removed)
            ...     client.clear_partition("train")  # which ends the watch
            {'q1': {'done': True}} []
        """
        if timeout_s is not None:
            checked_wait("kv_watch", timeout_s)
        return KeyWatch(self.session, partition_id, where, timeout_s)


async def listed_after(session: Session, partition: str, last: int | None, where: str | None) -> dict[str, Tags]:
    """The pages of a list that follow the one that ended with this index; None: it was the last page."""
    keys: dict[str, Tags] = {}
    while last is not None:
        page = await session.ask(p.ListKeys, p.KeyList, partition, last, where)
        keys.update(page.keys.get(partition, {}))
        last = page.last
    return keys
