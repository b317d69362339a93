# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for keys of a partition: for changes of any, or until enough match a filter."""

from __future__ import annotations

from dataclasses import replace

from transfer_queue import protocol as p
from transfer_queue.calls import MORE, PAGE, Call, More, Wait
from transfer_queue.control.partition import Partition
from transfer_queue.control.queries import published_keys
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.state import KEYS, PlaneState
from transfer_queue.control.tag_filter import TagFilter, parse_filter
from transfer_queue.diagnosis import keys_where, no_keys
from transfer_queue.errors import InvalidRequestError, KeysTimeoutError

KeyWait = p.WatchKeys | p.WaitKeys


def wait_for_keys(state: PlaneState, call: Call, request: KeyWait) -> Wait:
    """The wait for what is asked. It is examined at once."""
    if isinstance(request, p.WaitKeys) and request.count < 1:
        raise InvalidRequestError(f"wait_keys needs a count of at least 1, got {request.count}.")
    where = None if request.where is None else parse_filter(request.where)
    matching: ReadySet | None = None  # kept while it waits: what was compared once needn't be compared again

    def answer(wait: Wait, has_turn: bool) -> p.Reply | More | None:
        nonlocal matching
        if isinstance(request, p.WatchKeys):
            reply = _changes(state, request, where)
            return reply or (p.ChangedKeys(request.id, request.position) if wait.late else None)
        partition = state.partitions.get(request.partition)
        matching = None if partition is None else partition.listed.matching(request.where)
        if partition is not None and matching is not None:
            if not matching.finish(state.calls.turn):
                return MORE
            if matching.count >= request.count:
                return _first_page(request, partition, matching)
        return _too_late(state, call, request, matching, state.calls.now - wait.since) if wait.late else None

    return Wait((KEYS, request.partition), state.calls.now + request.wait_s, answer, due=True)


def _too_late(
    state: PlaneState, call: Call, request: p.WaitKeys, matching: ReadySet | None, waited_s: float
) -> p.Failed:
    why = "there is no such partition"
    if matching is not None:
        num_keys = state.partitions[request.partition].listed.matching(None).count
        why = f"{matching.count:,} of its {num_keys:,} keys match"
    found = no_keys(call.client, request.partition, request.count, keys_where(request.where), waited_s)
    return p.Failed(request.id, KeysTimeoutError.__name__, str(replace(found, held_up_by=(why,))))


# ---- changes ----


def _changes(state: PlaneState, request: p.WatchKeys, where: TagFilter | None) -> p.Reply | None:
    partition, position = state.partitions.get(request.partition), request.position
    if position is not None and (partition is None or position[0] != partition.incarnation):
        return p.Ended(request.id, "cleared")
    if partition is None:
        return None
    if position is None or position[1] != partition.serial:
        return _listing(state, request, partition, where)
    change = partition.listed.since(position[2], PAGE)
    if change is None:
        return _listing(state, request, partition, where)
    if change.number == position[2]:
        return None
    named = [(key, index) for index in change.indexes if (key := partition.keys.key_of(index)) is not None]
    keys = published_keys(partition, named, where)
    others = [key for key, _ in named if key not in keys]  # they may have matched before
    return p.ChangedKeys(request.id, _position(partition, change.number), keys, change.removed + others)


def _listing(state: PlaneState, request: p.WatchKeys, partition: Partition, where: TagFilter | None) -> p.ChangedKeys:
    """The first page of all keys."""
    items, more = partition.keys.page(-1, PAGE)
    keys, last = published_keys(partition, items, where), items[-1][1] if more else None
    return p.ChangedKeys(request.id, _position(partition, partition.listed.number), keys, [], True, last)


def _position(partition: Partition, number: int) -> tuple[int, int, int]:
    return partition.incarnation, partition.serial, number


# ---- enough keys ----


def _first_page(request: p.WaitKeys, partition: Partition, matching: ReadySet) -> p.KeyList:
    """The first page of the keys that match."""
    rows = matching.first(PAGE)
    indexes = partition.table.column("index")[rows].tolist()
    named = [(key, index) for index in indexes if (key := partition.keys.key_of(index)) is not None]
    more = matching.count > len(rows)
    keys = published_keys(partition, named, None)
    return p.KeyList(request.id, {partition.name: keys}, named[-1][1] if more else None)
