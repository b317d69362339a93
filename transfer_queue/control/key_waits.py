# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for keys of a partition: for changes of any, or until enough match a filter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from transfer_queue import protocol as p
from transfer_queue.control.filtered import FilteredSet
from transfer_queue.control.partition import Partition
from transfer_queue.control.queries import MOST_OF_A_PAGE, published_keys
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.state import PlaneState, To, keys_queue, reply_or_error
from transfer_queue.control.tag_filter import TagFilter, parse_filter
from transfer_queue.errors import InvalidRequestError, KeysTimeoutError

Wait = p.WatchKeys | p.WaitKeys


def wait(state: PlaneState, client: str, request: Wait, now: float) -> p.Reply | None:
    """Answer at once, or park the request."""
    if isinstance(request, p.WaitKeys) and request.count < 1:
        raise InvalidRequestError(f"wait_keys needs a count of at least 1, got {request.count}.")
    reply = _answer(state, request)
    if reply is None and not request.wait_s:
        reply = too_late(state, request, 0.0)
    if reply is None:
        state.waiters.park(client, request, now, now + request.wait_s, keys_queue(request.partition), 0.0)
    return reply


def serve(state: PlaneState, partition: str) -> Iterator[To]:
    """Answers to parked requests that this partition's last change decides. Many long ones take several turns."""
    for parked in state.waiters.waiting_in(keys_queue(partition)):
        if not state.budget.left > 0:
            state.budget.postpone(partition)
            return
        reply = reply_or_error(parked.request.id, partial(_answer, state, parked.request))
        if reply is not None:
            state.waiters.remove(parked)
            yield To(parked.client, reply)


def too_late(state: PlaneState, request: Wait, waited_s: float) -> p.Reply | None:
    """The last answer; None: it needs more turns, because its filter isn't compared with all keys yet."""
    reply = _answer(state, request)
    if reply is not None:
        return reply
    if isinstance(request, p.WatchKeys):
        return p.ChangedKeys(request.id, request.position)
    matching = _matching(state, request)
    if isinstance(matching, FilteredSet) and matching.num_unchecked:
        return None
    return p.Failed(request.id, KeysTimeoutError.__name__, _explained(state, request, matching, waited_s))


def _explained(state: PlaneState, request: p.WaitKeys, matching: ReadySet | None, waited_s: float) -> str:
    which = "there" if request.where is None else f"that match {request.where!r}"
    text = f"waited {waited_s:.1f} s for {request.count} keys of partition {request.partition!r} {which}"
    if matching is None:
        return f"{text}: there is no such partition. Check its name and its producers, or wait longer (timeout_s)."
    num_keys = state.partitions[request.partition].listed.matching(None).count
    return f"{text}: {matching.count} of its {num_keys} keys do. Check the producers, or wait longer (timeout_s)."


def _answer(state: PlaneState, request: Wait) -> p.Reply | None:
    where = None if request.where is None else parse_filter(request.where)
    return _changes(state, request, where) if isinstance(request, p.WatchKeys) else _enough(state, request)


# ---- changes ----


def _changes(state: PlaneState, request: p.WatchKeys, where: TagFilter | None) -> p.Reply | None:
    partition, position = state.partitions.get(request.partition), request.position
    if position is not None and (partition is None or position[0] != partition.incarnation):
        return p.Ended(request.id, "cleared")
    if partition is None:
        return None
    if position is None or position[1] != partition.serial:
        return _listing(state, request, partition, where)
    change = partition.listed.since(position[2], MOST_OF_A_PAGE)
    if change is None:
        return _listing(state, request, partition, where)
    if change.number == position[2]:
        return None
    named = [(key, index) for index in change.indexes if (key := partition.keys.key_of(index)) is not None]
    keys = published_keys(partition, named, where)
    others = [key for key, _ in named if key not in keys]  # they may have matched before
    state.budget.spend(len(named) + len(change.removed))
    return p.ChangedKeys(request.id, _position(partition, change.number), keys, change.removed + others)


def _listing(state: PlaneState, request: p.WatchKeys, partition: Partition, where: TagFilter | None) -> p.ChangedKeys:
    """The first page of all keys."""
    items, more = partition.keys.page(None, MOST_OF_A_PAGE)
    keys, last = published_keys(partition, items, where), items[-1][0] if more else None
    state.budget.spend(len(items))
    return p.ChangedKeys(request.id, _position(partition, partition.listed.number), keys, [], True, last)


def _position(partition: Partition, number: int) -> tuple[int, int, int]:
    return partition.incarnation, partition.serial, number


# ---- enough keys ----


def _matching(state: PlaneState, request: p.WaitKeys) -> ReadySet | None:
    partition = state.partitions.get(request.partition)
    return None if partition is None else partition.listed.matching(request.where)


def _enough(state: PlaneState, request: p.WaitKeys) -> p.Reply | None:
    """The first page of the keys that match, if there are enough."""
    matching = _matching(state, request)
    if matching is None or not state.budget.finish(matching, request.partition) or matching.count < request.count:
        return None
    partition = state.partitions[request.partition]
    rows = matching.first(MOST_OF_A_PAGE)
    indexes = partition.table.column("index")[rows].tolist()
    named = [(key, index) for index in indexes if (key := partition.keys.key_of(index)) is not None]
    keys, more = published_keys(partition, named, None), matching.count > len(rows)
    state.budget.spend(len(keys))
    return p.KeyList(request.id, {partition.name: keys}, more, named[-1][0] if more else None)
