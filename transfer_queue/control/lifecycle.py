# SPDX-License-Identifier: Apache-2.0
"""The verbs that change partitions, samples and tasks: create, seal, tag, clear, register, acknowledge, reset."""

from __future__ import annotations

import msgspec
import numpy as np

from transfer_queue import protocol as p
from transfer_queue.calls import PAGE, Call, Holding
from transfer_queue.control import following, group_work
from transfer_queue.control.consumer import IN_HAND
from transfer_queue.control.draw import foreign
from transfer_queue.control.group_record import check_tags
from transfer_queue.control.leases import LEASES
from transfer_queue.control.partition import Partition
from transfer_queue.control.rows import Rows
from transfer_queue.control.serving import Reading
from transfer_queue.control.state import WRITERS, PlaneState, ended
from transfer_queue.errors import InvalidRequestError


def create(state: PlaneState, call: Call, request: p.CreatePartition) -> p.Reply:
    """Create a partition, or return False if it exists. ``num_samples`` and ``fields`` apply either way, as a producer
    may have come first.
    """
    wanted = request.num_samples
    if wanted is not None and wanted < 1:
        raise InvalidRequestError(f"num_samples must be at least 1 or None, got {wanted}.")
    is_new = request.partition not in state.partitions
    partition = state.get_or_create(request.partition)
    if wanted is not None and partition.num_samples not in (None, wanted):
        raise InvalidRequestError(
            f"partition {request.partition!r} seals itself at {partition.num_samples} samples, now num_samples is "
            f"{wanted}. Name one number, or clear the partition first."
        )
    partition.schema.declare(request.fields, request.partition)
    if wanted is not None:
        partition.num_samples = wanted
        partition.seal_if_complete()
        state.changed(partition)
    state.refuses(request.partition)
    return p.Done(request.id, is_new)


def seal(state: PlaneState, call: Call, request: p.SealPartition) -> p.Reply:
    """Seal a partition. An unused partition is created first, so that its consumers get the end of stream."""
    partition = state.get_or_create(request.partition)
    partition.seal()
    state.changed(partition)
    state.waits.wake_first((LEASES,))
    return p.Done(request.id)


def set_tags(state: PlaneState, call: Call, request: p.SetTags) -> p.Reply:
    """Set tags. Unknown partitions and samples are ignored."""
    for tags in request.tags.values():
        check_tags(tags.values())
    for name, tags in request.tags.items():
        partition = state.partitions.get(name)
        if partition is not None:
            groups = partition.groups
            partition.set_tags(tags if groups is None else groups.with_reserved(tags, request.merge), request.merge)
            state.changed(partition)  # a sampler may have waited for a tag
            group_work.look_again(state, partition, tags)
    return p.Done(request.id)


class Clearing(Holding):
    """Samples that were cleared. The caller deletes their values; if it never gets the answer, the plane does."""

    def __init__(self, state: PlaneState, indexes: p.Indexes) -> None:
        self._state, self._indexes = state, indexes

    def undo(self) -> bool:
        self._state.delete(self._indexes)
        return False


def cleared(state: PlaneState, call: Call, indexes: p.Indexes) -> p.Cleared:
    """Reply with the samples that may lose their values."""
    if len(indexes):
        state.calls.hold(call, Clearing(state, indexes))
    return p.Cleared(call.request.id, p.pack_indexes(indexes))


def clear_samples(state: PlaneState, call: Call, request: p.ClearSamples) -> p.Reply:
    """Clear samples. Unknown ones are ignored; an empty partition stays."""
    partition = state.partitions.get(request.partition)
    if partition is None:
        return p.Cleared(request.id, b"")
    before = state.dropped.wanted(partition)
    gone = partition.clear(group_work.clearing(state, partition, p.unpack_indexes(request.indexes)))
    state.dropped.samples_cleared(partition, before)
    state.freed(partition)
    group_work.look_again(state, partition)
    return cleared(state, call, state.freezes.keep(gone))


BeingRead = tuple[str, Reading]
"""(client, batch)"""


def clear_consumed(state: PlaneState, call: Call, request: p.ClearConsumed) -> p.Reply:
    """Clear what all tasks consumed; nothing while one of the required tasks has read nothing yet."""
    partition = state.partitions.get(request.partition)
    if partition is None:
        return p.Cleared(request.id, b"")
    being_read, gone, more = _being_read(state, partition), p.NO_INDEXES, False
    if not request.dry_run:
        partition.clears = request.tasks
        gone, more = _clear_done(state, partition, being_read)
    return msgspec.structs.replace(
        cleared(state, call, gone), held_by=_held_by(partition, being_read), more=more,
        not_begun=sorted(set(request.tasks) - partition.consumers.keys()),
        unread=0 if partition.consumers else partition.num_live, readers=_readers(partition, being_read),
    )  # fmt: skip


def _clear_done(state: PlaneState, partition: Partition, being_read: list[BeingRead]) -> tuple[p.Indexes, bool]:
    """Clear some of what all tasks are done with. Returns what may lose its values, and whether there is more."""
    wanted = set(partition.clears or ()) | (set() if partition.groups is None else partition.groups.tasks())
    done = partition.done_with(wanted, PAGE + 1, [batch.indexes for _, batch in being_read])
    gone = partition.clear(done[:PAGE])
    if len(gone):
        state.freed(partition)
        group_work.look_again(state, partition)
    return state.freezes.keep(gone), len(done) > PAGE


def _being_read(state: PlaneState, partition: Partition) -> list[BeingRead]:
    """Batches that their clients may still read."""
    return [(call.client, held) for call, held in state.calls.holdings(Reading) if held.serial == partition.serial]


def _held_by(partition: Partition, being_read: list[BeingRead]) -> dict[str, int]:
    """By task: the number of samples that it has not consumed or has in flight, or a client may still read."""
    counts = {}
    for task, consumer in partition.consumers.items():
        kept = _rows_left(partition, [batch.indexes for _, batch in being_read if batch.task == task])
        if consumer.hands.counts:
            kept = np.union1d(kept, (consumer.given == IN_HAND).nonzero()[0])
        counts[task] = consumer.num_unconsumed + consumer.ledger.num_open_samples
        counts[task] += int(np.count_nonzero(consumer.consumed[kept]))
    return {task: count for task, count in counts.items() if count}


def _readers(partition: Partition, being_read: list[BeingRead]) -> dict[str, int]:
    """By client: the number of samples that it may still read."""
    by_client: dict[str, list[p.Indexes]] = {}
    for client, batch in being_read:
        by_client.setdefault(client, []).append(batch.indexes)
    counts = {client: len(_rows_left(partition, own)) for client, own in by_client.items()}
    return {client: count for client, count in counts.items() if count}


def _rows_left(partition: Partition, batches: list[p.Indexes]) -> Rows:
    """Rows of the samples of these batches that aren't cleared."""
    rows, found = partition.table.find(np.concatenate([p.NO_INDEXES, *batches]))
    return np.unique(rows[found])


def register_task(state: PlaneState, call: Call, request: p.RegisterTask) -> p.Reply:
    """Say how a task draws. Its waiting fetches are examined again."""
    before = state.tasks.by_name.get(request.task)
    state.tasks.register(request)
    try:
        group_work.registered(state, request.task)
    except BaseException:
        del state.tasks.by_name[request.task]
        if before is not None:
            state.tasks.by_name[request.task] = before
        raise
    if request.follows is not None:
        following.begin(state, request.task, request.follows)
    for wait in state.fetches_of(request.task):
        state.waits.examine(wait)
    return p.Done(request.id)


def ack(state: PlaneState, call: Call, request: p.Ack) -> p.Reply:
    """Acknowledge batches. Returns how many."""
    partition = state.partitions.get(request.partition)
    if partition is None or request.task not in partition.consumers:
        return p.Done(request.id, 0)
    ledger = partition.consumers[request.task].ledger
    acked = ledger.ack(request.tokens, request.earlier)
    if request.before:
        acked += ledger.ack_before(request.dp_rank, request.before)
    group_work.acked(state, partition, request.task, acked)
    if acked:
        state.changed(partition)  # a reader may wait for fields of this batch
        if state.tasks.is_follower(request.task):
            _clear_again(state, partition)
    return p.Done(request.id, len(acked))


def _clear_again(state: PlaneState, partition: Partition) -> None:
    """A task is done with samples. A client that asked to clear them before may wait for room, and not ask again."""
    more = partition.clears is not None
    while more:
        gone, more = _clear_done(state, partition, _being_read(state, partition))
        state.delete(gone)


def reset_consumption(state: PlaneState, call: Call, request: p.ResetConsumption) -> p.Reply:
    """Mark all samples as unconsumed, for one task or for all. Returns False for an unknown partition."""
    partition = state.partitions.get(request.partition)
    if partition is None:
        return p.Done(request.id, False)
    for name, consumer in partition.consumers.items():
        leader = state.tasks.get(name).follows
        if request.task in (None, name, leader):
            of_rounds = leader or name  # a follower alone keeps what its leader had
            consumer.reset(state.tasks.get(of_rounds).dp_size if request.task in (None, of_rounds) else None)
            group_work.reset(state, partition, name)
    state.changed(partition)
    return p.Done(request.id, True)


def forget_task(state: PlaneState, call: Call, request: p.ForgetTask) -> p.Reply:
    """Delete a task in all partitions and end its waiting fetches. If it comes again, it reads from the start."""
    if state.tasks.is_follower(request.task):  # groups may only have waited for it
        for partition in state.partitions.values():
            if request.task in partition.consumers:
                ledger = partition.consumers[request.task].ledger
                acked = ledger.ack([entry.token for entry in ledger.open_entries()])
                group_work.acked(state, partition, request.task, acked)
    known = [partition for partition in state.partitions.values() if partition.forget_task(request.task)]
    for partition in known:
        group_work.reset(state, partition, request.task)
        _clear_again(state, partition)
    state.tasks.by_name.pop(request.task, None)
    state.dropped.forget(request.task)
    state.waits.decide(state.fetches_of(request.task), ended)
    return p.Done(request.id, len(known))


def expect_producers(state: PlaneState, call: Call, request: p.ExpectProducers) -> p.Reply:
    """Forget the producers that died, because others replace them, however long these take to start."""
    state.producers.forget_deaths()
    return p.Done(request.id, True)


def note_exit(state: PlaneState, call: Call, request: p.NoteExit) -> p.Reply:
    """Keep how a producer ended, for those who ask why its fields have no producer."""
    state.producers.note(request.client, request.how, request.last_line, request.planned)
    return p.Done(request.id, True)


def clear_partition(state: PlaneState, call: Call, request: p.ClearPartition) -> p.Reply:
    """Clear a partition. Fetches that wait for it get the end of stream."""
    if request.partition not in state.partitions:
        return p.Cleared(request.id, b"")
    for sampler in state.tasks.samplers():
        with foreign(sampler):
            sampler.clear_cache(request.partition)
    partition = state.partitions.pop(request.partition)
    group_work.partition_gone(state, partition)
    state.dropped.partition_cleared(partition)
    indexes = partition.drop()
    state.discard(partition)
    state.cut_off(request.partition)
    state.waits.wake_first(WRITERS)
    return cleared(state, call, state.freezes.keep(indexes))
