# SPDX-License-Identifier: Apache-2.0
"""The verbs that change nothing: describe, status, keys, statistics."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from transfer_queue import protocol as p
from transfer_queue.calls import PAGE, Call, Holding, Name, Wait
from transfer_queue.control.checkpoints import Freezing
from transfer_queue.control.group_numbers import group_numbers
from transfer_queue.control.leases import LEASES
from transfer_queue.control.leasing import matching
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import PUBLISHED, RowState, all_of
from transfer_queue.control.serving import ServedFetch
from transfer_queue.control.serving import describe as describe_samples
from transfer_queue.control.state import FETCHES, KEYS, SAVING, WRITERS, PlaneState
from transfer_queue.control.tag_filter import TagFilter, parse_filter
from transfer_queue.control.writing import Permit, Reservation
from transfer_queue.diagnosis import keys_where
from transfer_queue.errors import TransferQueueError

_MOST_NAMED = 4
_MOST_LINES = 64
_OF_ARRAYS = 40 * PAGE
"""Samples per reply that consists of arrays only."""


def describe(state: PlaneState, call: Call, request: p.Describe) -> p.Reply:
    """Metadata of samples, consumed or not; without indexes, a page of all samples that the partition reports."""
    partition, more, fields = state.get(request.partition), False, request.fields
    if request.indexes is None:
        rows, more = partition.page(request.after, PAGE)
        indexes = partition.table.column("index")[rows]
        if fields is None:
            fields = partition.common_fields()
    else:
        indexes = p.unpack_indexes(request.indexes)
        rows = partition.rows_of(indexes)
        if fields is None:
            fields = [*partition.schema.fields_of(rows), *partition.lost_of(indexes)] if len(rows) else []
    batch = describe_samples(request.id, partition, indexes, fields, rows)
    return msgspec.structs.replace(batch, more=True) if more else batch


def consumption_status(state: PlaneState, call: Call, request: p.ConsumptionStatus) -> p.Reply:
    """One int8 per sample; zeros for an unknown task."""
    partition = state.partitions.get(request.partition)
    if request.summary:
        return p.Done(request.id, partition is not None and _all_consumed(partition, request.task))
    if partition is None:
        return p.Status(request.id, known=False)
    rows, more = partition.page(request.after, _OF_ARRAYS)
    consumer = partition.consumers.get(request.task)
    status = np.zeros(len(rows), dtype=np.int8) if consumer is None else consumer.consumed[rows].astype(np.int8)
    indexes = p.pack_indexes(partition.table.column("index")[rows])
    return p.Status(request.id, True, indexes, status.tobytes(), 1, more)


def production_status(state: PlaneState, call: Call, request: p.FieldStatus) -> p.Reply:
    """[samples, fields] int8, columns in order of registration; unknown if a field is."""
    partition = state.partitions.get(request.partition)
    if partition is None or not request.fields or not set(request.fields) <= set(partition.schema.names):
        return p.Done(request.id, False) if request.summary else p.Status(request.id, known=False)
    if request.summary:
        return p.Done(request.id, _all_produced(partition, request.fields))
    rows, more = partition.page(request.after, _OF_ARRAYS)
    names = [name for name in partition.schema.names if name in request.fields]
    status = np.stack([partition.schema.has(name)[rows] for name in names], axis=1).astype(np.int8)
    indexes = p.pack_indexes(partition.table.column("index")[rows])
    return p.Status(request.id, True, indexes, status.tobytes(), len(names), more)


def _all_consumed(partition: Partition, task: str) -> bool:
    """Whether there are rows that status calls report, and the task has consumed all of them."""
    consumer = partition.consumers.get(task)
    return bool(consumer and partition.num_live and not consumer.num_unconsumed and not partition.lacks_inserts())


def _all_produced(partition: Partition, fields: list[str]) -> bool:
    other = partition.table.column("state") != RowState.LIVE
    return not partition.lacks_inserts() and all(all_of(partition.schema.has(name) | other) for name in fields)


def list_partitions(state: PlaneState, call: Call, request: p.ListPartitions) -> p.Reply:
    """Names of all partitions."""
    return p.Names(request.id, list(state.partitions))


def keys_of(state: PlaneState, call: Call, request: p.KeysOf) -> p.Reply:
    """Keys of samples; None for a sample without a key."""
    partition = state.get(request.partition)
    return p.Names(request.id, [partition.keys.key_of(i) for i in p.unpack_indexes(request.indexes).tolist()])


def list_keys(state: PlaneState, call: Call, request: p.ListKeys) -> p.Reply:
    """A page of the keys of published samples and their tags; empty for an unknown partition.

    With a filter, a page holds those that match of as many keys.
    """
    where = None if request.where is None else parse_filter(request.where)
    partition = state.partitions.get(request.partition)
    if partition is None:
        return p.KeyList(request.id, {})
    items, more = partition.keys.page(request.after, PAGE)
    keys = {partition.name: published_keys(partition, items, where)}
    return p.KeyList(request.id, keys, items[-1][1] if more else None)


def published_keys(partition: Partition, items: list[tuple[str, int]], where: TagFilter | None) -> dict[str, p.Tags]:
    """Those of these keys, with their indexes, that are published and match, and their tags."""
    if not items:
        return {}
    indexes = np.array([index for _, index in items], dtype=np.int64)
    rows = partition.rows_of(indexes)
    live = PUBLISHED[partition.table.column("state")[rows]]
    tags = partition.tags.of(indexes, rows)
    found = {key: tags.get(index, {}) for (key, index), shown in zip(items, live.tolist(), strict=True) if shown}
    return found if where is None else {key: own for key, own in found.items() if where.matches(own)}


def list_lost(state: PlaneState, call: Call, request: p.ListLost) -> p.Reply:
    """By field, the samples that lost it."""
    partition = state.partitions.get(request.partition)
    lost = {} if partition is None else partition.lost()
    return p.Done(request.id, {name: p.pack_indexes(indexes) for name, indexes in lost.items()})


def stats(state: PlaneState, call: Call, request: p.GetStats) -> p.Reply:
    """Statistics of every partition, task and client, and the waiting requests with what they wait for.

    ``abandoned``: a field of the partition with lost producers. ``dropped``: samples by task and reason. ``put_total``
    and ``done_total`` only grow: samples put, and samples that the task got or that were cleared, each time.
    """
    now = state.calls.now
    partitions = list(state.partitions.values())  # in the order of their serial numbers
    at = bisect_right(partitions, request.after, key=attrgetter("serial"))
    page: dict[str, Any] = {"partitions": {}}
    while at < len(partitions) and (state.calls.turn.has_time() or not page["partitions"]):
        page["partitions"][partitions[at].name] = _partition_stats(state, partitions[at], now)
        at += 1
    if at < len(partitions):
        page["more"] = partitions[at - 1].serial
    if not request.after:
        page |= {
            "waiting": _waiting(state, now),
            "capacity": state.config.capacity,
            "next_index": state.allocator.next_index,
            "dropped": state.dropped.counts(state.partitions.values()),
            "producers": state.producers.by_field(now),
            "lost_producers": state.producers.lost_by_field(now),
            "clients": _clients(state),
            "storage_units": [msgspec.structs.asdict(unit) for unit in state.units.by_number.values()],
            "lost_units": list(state.units.lost.values()),
        }
    return p.Done(request.id, page)


def _clients(state: PlaneState) -> dict[str, dict[str, int]]:
    """What each session holds. ``unreceived``: answers that its client has not confirmed."""
    clients = {}
    for client in state.calls.clients():
        calls = state.calls.of(client)
        held: list[Holding] = [each for call in calls for each in call.holdings]
        writes = [each for each in held if isinstance(each, Reservation)]
        clients[client] = {
            "reservations": len(writes), "reserved": sum(len(write.indexes) for write in writes),
            "leaves": sum(isinstance(each, Permit) and each.replaces() for each in held),
            "freezes": sum(isinstance(each, Freezing) for each in held),
            "parked": sum(call.wait is not None for call in calls),
            "unreceived": sum(call.reply is not None for call in calls),
        }  # fmt: skip
    return clients


def _waiting(state: PlaneState, now: float) -> list[dict[str, Any]]:
    """The waiting calls of producers and consumers, and what each waits for."""
    alike: dict[object, dict[str, Any]] = {}  # all ranks of a task wait for the same
    waits = [wait for wait in state.waits if wait.queue in (WRITERS, SAVING) or wait.queue[0] in (FETCHES, KEYS)]
    return [*(_waiting_call(state, wait, now, alike) for wait in waits), *_waiting_workers(state, now)]


def _waiting_workers(state: PlaneState, now: float) -> Iterator[dict[str, Any]]:
    """One entry for all workers that wait for leases of the same partitions. ``where``: the filter of all of them."""
    lines: dict[Name, list[Wait]] = {}
    for wait in state.waits.of((LEASES,)):
        lines.setdefault(wait.queue[:2], []).append(wait)
    for waits in islice(lines.values(), _MOST_LINES):
        first = min(waits, key=lambda wait: wait.since - wait.owner.request.waited_s)
        asked = first.owner.request
        names = [*asked.partitions[:_MOST_NAMED], *["others"] * (len(asked.partitions) > _MOST_NAMED)]
        yield {
            "partition": ", ".join(names), "task": None, "client": first.owner.client,
            "waited_s": now - first.since + asked.waited_s, "writer": False, "wanted": None, "workers": len(waits),
            "partitions": [each.name for each in islice(matching(state, asked.partitions), _MOST_NAMED)],
            "where": asked.where if all(wait.owner.request.where == asked.where for wait in waits) else None,
        }  # fmt: skip


def _waiting_call(state: PlaneState, wait: Wait, now: float, alike: dict[object, dict[str, Any]]) -> dict[str, Any]:
    request = getattr(wait.owner.request, "begin", wait.owner.request)
    return {
        "partition": getattr(request, "partition", None), "task": getattr(request, "task", None),
        "client": wait.owner.client, "waited_s": now - wait.since + getattr(request, "waited_s", 0.0),
        "writer": wait.queue in (WRITERS, SAVING), **_wanting(state, wait.queue, request, now, alike),
    }  # fmt: skip


def _wanting(
    state: PlaneState, queue: Name, request: p.Request, now: float, alike: dict[object, dict[str, Any]]
) -> dict[str, Any]:
    if isinstance(request, p.ResolveKeys):
        return {"wanted": len(request.keys)}
    if isinstance(request, p.WatchKeys | p.WaitKeys):
        return {"wanted": getattr(request, "count", None), "keys": keys_where(request.where)}
    if not isinstance(request, p.Fetch):
        return {"wanted": getattr(request, "count", None)}
    partition = state.partitions.get(request.partition)
    consumer = None if partition is None else partition.consumers.get(request.task)
    rank, index = request.dp_rank, request.batch_index
    drawn = None if consumer is None or index is None else consumer.ledger.get((rank, index))
    of_rank = rank if drawn is not None or index is None else None
    key = (*queue, *request.fields, request.batch_size, request.dp_size, of_rank, index)
    if key not in alike:
        alike[key] = _wanted_by(state, request, now)
    return alike[key]


def _wanted_by(state: PlaneState, request: p.Fetch, now: float) -> dict[str, Any]:
    """``lacking`` counts, by field, the undrawn samples without it.

    ``unmatched``: samples that lack nothing, and don't match the fetch's filter.
    """
    task, partition = state.tasks.get(request.task), state.partitions.get(request.partition)
    try:
        if partition is None:
            missing = p.NotReady(request.id, task.needed_yet(request), 0, 0)
        else:
            served = ServedFetch(state, request, partition, task, task.size_for(request))
            missing = served.not_ready(now)
    except TransferQueueError as error:  # the next request of its task gets this error
        return {"fields": request.fields, "refused": str(error)}
    return {
        "fields": request.fields, "wanted": missing.wanted, "ready": missing.ready, "lacking": missing.lacking,
        "unmatched": missing.unmatched, "in_hand": missing.in_hand,
    }  # fmt: skip


def _produced(partition: Partition) -> dict[str, int]:
    """By field, the number of samples that have it. Heads are none. With groups, only fields that some sample has."""
    counts = partition.schema.counts
    if partition.groups is None:
        return dict(counts)
    is_head = partition.table.column("state") == RowState.HEAD
    of_heads = {name: int(np.count_nonzero(partition.schema.has(name) & is_head)) for name in counts}
    return {name: count - of_heads[name] for name, count in counts.items() if count > of_heads[name]}


def _partition_stats(state: PlaneState, partition: Partition, now: float) -> dict[str, Any]:
    tasks = {}
    for task, consumer in partition.consumers.items():
        end, follows = consumer.end_of(None), state.tasks.get(task).follows
        tasks[task] = {
            **({} if follows is None else {"follows": follows}),
            "ready": consumer.ready_counts(),
            "consumed": partition.num_live - consumer.num_unconsumed,
            "done_total": consumer.num_done,
            **({"in_hand": sum(consumer.hands.counts.values())} if consumer.hands.fields else {}),
            "in_flight": len(consumer.ledger),
            "in_flight_samples": consumer.ledger.num_open_samples,
            "drawn": consumer.ledger.end,
            "dp_sizes": consumer.ledger.dp_sizes(),
            "settled": consumer.ledger.first_open(),
            "ended": None if end is None else end.reason,
            "dropped": 0 if end is None else end.dropped,
            "asked_s_ago": None if consumer.asked_at is None else now - consumer.asked_at,
            **({} if consumer.starved_s is None else {"starved_s": consumer.starved_s}),
        }
    return {
        "samples": partition.num_live, "published": partition.num_published,
        "put_total": partition.num_published + partition.num_withdrawn, "held": partition.num_reserved,
        "sealed": partition.sealed, "num_samples": partition.num_samples, "keys": len(partition.keys),
        "fields": partition.schema.names, "produced": _produced(partition), "tasks": tasks,
        "lost": {name: len(indexes) for name, indexes in partition.lost().items()},
        "abandoned": state.producers.missing(partition.schema.names, now),
        **({} if partition.groups is None else {"groups": group_numbers(state, partition, now)}),
    }  # fmt: skip
