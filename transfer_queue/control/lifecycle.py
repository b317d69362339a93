# SPDX-License-Identifier: Apache-2.0
"""The verbs that change partitions, samples and tasks: create, seal, tag, clear, register, acknowledge, reset."""

from __future__ import annotations

import msgspec
import numpy as np

from transfer_queue import protocol as p
from transfer_queue.control.draw import foreign
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import Rows
from transfer_queue.control.serving import Taken
from transfer_queue.control.sessions import Record
from transfer_queue.control.state import PlaneState, keys_queue
from transfer_queue.errors import InvalidRequestError


def create(state: PlaneState, request: p.CreatePartition) -> p.Reply:
    """Create a partition, or return False if it exists. ``num_samples`` and ``fields`` apply either way, as a producer
    may have come first.
    """
    wanted = request.num_samples
    if wanted is not None and wanted < 1:
        raise InvalidRequestError(f"num_samples must be at least 1 or None, got {wanted}.")
    partition = state.partitions.get(request.partition)
    if partition is None:
        state.create(request.partition, wanted).schema.declare(request.fields, request.partition)
        return p.Done(request.id, True)
    if wanted is not None and partition.num_samples not in (None, wanted):
        raise InvalidRequestError(
            f"partition {request.partition!r} seals itself at {partition.num_samples} samples, now num_samples is "
            f"{wanted}. Name one number, or clear the partition first."
        )
    partition.schema.declare(request.fields, request.partition)
    if wanted is not None:
        partition.num_samples = wanted
        partition.seal_if_complete()
        state.mark_dirty(request.partition)
    return p.Done(request.id, False)


def seal(state: PlaneState, request: p.SealPartition) -> p.Reply:
    """Seal a partition. An unused partition is created first, so that its consumers get the end of stream."""
    state.get_or_create(request.partition).seal()
    state.mark_dirty(request.partition)
    return p.Done(request.id)


def set_tags(state: PlaneState, request: p.SetTags) -> p.Reply:
    """Set tags. Unknown partitions and samples are ignored."""
    for name, tags in request.tags.items():
        partition = state.partitions.get(name)
        if partition is not None:
            partition.set_tags(tags, request.merge)
            state.mark_dirty(name)  # a sampler may have waited for a tag
    return p.Done(request.id)


class Clearing(Record):
    """Samples that were cleared. The caller deletes their values; if it never gets the answer, the plane does."""

    __slots__ = ("_state", "indexes")

    def __init__(self, state: PlaneState, kind: type[p.Request], reply: p.Cleared, indexes: p.Indexes) -> None:
        super().__init__(kind, reply)
        self._state, self.indexes = state, indexes

    def undo(self) -> bool:
        self._state.delete(self.indexes)
        return False


def cleared(state: PlaneState, client: str, request: p.Request, indexes: p.Indexes) -> p.Cleared:
    """Reply with the samples that may lose their values, and record the reply."""
    reply = p.Cleared(request.id, p.pack_indexes(indexes))
    if len(indexes):
        state.calls.add(client, request.id, Clearing(state, type(request), reply, indexes))
    return reply


def clear_samples(state: PlaneState, client: str, request: p.ClearSamples) -> p.Reply:
    """Clear samples. Unknown ones are ignored; an empty partition stays."""
    partition = state.partitions.get(request.partition)
    if partition is None:
        return p.Cleared(request.id, b"")
    undrawn = {task: consumer.num_undrawn for task, consumer in partition.consumers.items()}
    gone = partition.clear(p.unpack_indexes(request.indexes))
    state.dropped.samples_cleared(partition, undrawn)
    state.mark_dirty(request.partition)
    return cleared(state, client, request, state.freezes.keep(gone))


Reading = tuple[str, Taken]
"""(client, batch)"""
MOST_PER_CLEAR = 5_000
"""Samples that one request clears; more would block other clients for too long."""


def clear_consumed(state: PlaneState, client: str, request: p.ClearConsumed) -> p.Reply:
    """Clear what all tasks consumed; nothing while one of the required tasks has read nothing yet."""
    partition = state.partitions.get(request.partition)
    if partition is None:
        return p.Cleared(request.id, b"")
    being_read = _being_read(state, partition)
    if request.dry_run:
        return _explained(p.Cleared(request.id, b""), partition, request.tasks, being_read)
    done = partition.done_with(request.tasks, MOST_PER_CLEAR + 1, [batch.indexes for _, batch in being_read])
    gone = partition.clear(done[:MOST_PER_CLEAR])
    if len(gone):
        state.mark_dirty(request.partition)
    reply = cleared(state, client, request, state.freezes.keep(gone))
    complete = _explained(reply, partition, request.tasks, being_read, more=len(done) > MOST_PER_CLEAR)
    record = state.calls.get(client, request.id)
    if record is not None:
        record.reply = complete
    return complete


def _explained(
    reply: p.Cleared, partition: Partition, tasks: list[str], being_read: list[Reading], more: bool = False
) -> p.Cleared:
    """The reply, with the reasons why samples stay."""
    not_begun = sorted(set(tasks) - partition.consumers.keys())
    unread = 0 if partition.consumers else partition.num_live
    unnamed = [(client, batch) for client, batch in being_read if batch.batch is None]
    by_client: dict[str, list[p.Indexes]] = {}
    for client, batch in unnamed:
        by_client.setdefault(client, []).append(batch.indexes)
    readers = {client: len(_rows_left(partition, own)) for client, own in by_client.items()}
    return msgspec.structs.replace(
        reply, held_by=_held_by(partition, [batch for _, batch in unnamed]), not_begun=not_begun, more=more,
        unread=unread, readers={client: count for client, count in readers.items() if count},
    )  # fmt: skip


def _being_read(state: PlaneState, partition: Partition) -> list[Reading]:
    """Batches that their clients may still read."""
    return [
        (client, record)
        for client in state.calls.clients()
        for _, record in state.calls.of(client)
        if isinstance(record, Taken) and record.serial == partition.serial
    ]


def _held_by(partition: Partition, unnamed: list[Taken]) -> dict[str, int]:
    """By task: the number of samples that it has not consumed or has in flight, or a client may still read."""
    counts = {}
    for task, consumer in partition.consumers.items():
        unread = _rows_left(partition, [batch.indexes for batch in unnamed if batch.task == task])
        counts[task] = consumer.num_unconsumed + consumer.ledger.num_open_samples()
        counts[task] += int(np.count_nonzero(consumer.consumed[unread]))
    return {task: count for task, count in counts.items() if count}


def _rows_left(partition: Partition, batches: list[p.Indexes]) -> Rows:
    """Rows of the samples of these batches that aren't cleared."""
    rows, found = partition.table.find(np.concatenate([np.empty(0, dtype=np.int64), *batches]))
    return np.unique(rows[found])


def register_task(state: PlaneState, request: p.RegisterTask) -> p.Reply:
    """Say how a task draws. Its parked fetches are examined again."""
    state.tasks.register(request)
    state.mark_all_dirty(request.task)
    return p.Done(request.id)


def ack(state: PlaneState, request: p.Ack) -> p.Reply:
    """Acknowledge batches. Returns how many."""
    partition = state.partitions.get(request.partition)
    consumer = None if partition is None else partition.consumers.get(request.task)
    num_acked = 0 if consumer is None else consumer.ledger.ack(request.tokens, request.earlier)
    if num_acked:
        state.mark_dirty(request.partition, request.task)  # a reader may wait for fields of this batch
    return p.Done(request.id, num_acked)


def reset_consumption(state: PlaneState, request: p.ResetConsumption) -> p.Reply:
    """Mark all samples as unconsumed, for one task or for all. Returns False for an unknown partition."""
    partition = state.partitions.get(request.partition)
    if partition is None:
        return p.Done(request.id, False)
    for name, consumer in partition.consumers.items():
        if request.task in (None, name):
            consumer.reset()
    state.mark_dirty(request.partition, request.task)
    return p.Done(request.id, True)


def forget_task(state: PlaneState, request: p.ForgetTask) -> p.Reply:
    """Delete a task in all partitions and end its parked fetches. If it comes again, it reads from the start."""
    known = [partition for partition in state.partitions.values() if partition.forget_task(request.task)]
    for partition in known:
        state.mark_dirty(partition.name)  # a writer may wait for room, and a reader for its end
    state.tasks.remove(request.task)
    state.dropped.forget(request.task)
    for parked in state.waiters.all():
        if isinstance(parked.request, p.Fetch) and parked.request.task == request.task:
            state.waiters.remove(parked)
            state.cut_off.append(parked)
    return p.Done(request.id, len(known))


def expect_producers(state: PlaneState, request: p.ExpectProducers) -> p.Reply:
    """Forget the producers that died, because others replace them, however long these take to start."""
    state.producers.forget_deaths()
    return p.Done(request.id, True)


def clear_partition(state: PlaneState, client: str, request: p.ClearPartition) -> p.Reply:
    """Clear a partition. Fetches that wait for it get the end of stream."""
    if request.partition not in state.partitions:
        return p.Cleared(request.id, b"")
    for sampler in state.tasks.samplers():
        with foreign(sampler):
            sampler.clear_cache(request.partition)
    partition = state.partitions.pop(request.partition)
    for queue in (request.partition, keys_queue(request.partition)):
        state.cut_off.extend(state.waiters.remove_queue(queue))
    state.dropped.partition_cleared(partition)
    indexes = partition.drop()
    state.discard(partition)
    return cleared(state, client, request, state.freezes.keep(indexes))
