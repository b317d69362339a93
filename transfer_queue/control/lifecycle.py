# SPDX-License-Identifier: Apache-2.0
"""The verbs that begin and end things: create and seal partitions, tag samples, clear both."""

from __future__ import annotations

from transfer_queue import protocol as p
from transfer_queue.control.draw import foreign
from transfer_queue.control.state import PlaneState
from transfer_queue.errors import InvalidRequestError


def create(state: PlaneState, request: p.CreatePartition) -> p.Reply:
    """False when it exists; ``num_samples`` counts all the same, for a producer may have come first."""
    wanted = request.num_samples
    if wanted is not None and wanted < 1:
        raise InvalidRequestError(f"num_samples must be at least 1 or None, got {wanted}.")
    partition = state.partitions.get(request.partition)
    if partition is None:
        state.create(request.partition, wanted)
        return p.Done(request.id, True)
    if wanted is not None:
        if partition.num_samples not in (None, wanted):
            raise InvalidRequestError(
                f"partition {request.partition!r} seals itself at {partition.num_samples} samples, now num_samples is "
                f"{wanted}. Name one number, or clear the partition first."
            )
        partition.num_samples = wanted
        partition.seal_if_complete()
        state.touch(request.partition)
    return p.Done(request.id, False)


def seal(state: PlaneState, request: p.SealPartition) -> p.Reply:
    """A partition that nobody used yet is made, so that its consumers are told."""
    state.get_or_create(request.partition).seal()
    state.touch(request.partition)
    return p.Done(request.id)


def set_tags(state: PlaneState, request: p.SetTags) -> p.Reply:
    """Unknown partitions and samples are ignored."""
    for name, tags in request.tags.items():
        partition = state.partitions.get(name)
        if partition is not None:
            partition.set_tags(tags, request.merge)
            state.touch(name)  # a sampler may have waited for a tag
    return p.Done(request.id)


def clear_samples(state: PlaneState, request: p.ClearSamples) -> p.Reply:
    """Unknown samples are ignored; an empty partition stays."""
    partition = state.partitions.get(request.partition)
    if partition is None:
        return p.Cleared(request.id, b"")
    indexes = p.unpack_indexes(request.indexes)
    state.strand(partition.unpublished(indexes))
    cleared = state.frozen.keep(partition.clear(indexes))
    state.touch(request.partition)
    return p.Cleared(request.id, p.pack_indexes(cleared))


def clear_consumed(state: PlaneState, request: p.ClearConsumed) -> p.Reply:
    """Nothing while one of the tasks that must be done hasn't begun."""
    partition = state.partitions.get(request.partition)
    if partition is None:
        return p.Cleared(request.id, b"")
    cleared = state.frozen.keep(partition.clear(partition.done_with(request.tasks)))
    if len(cleared):
        state.touch(request.partition)
    return p.Cleared(request.id, p.pack_indexes(cleared))


def clear_partition(state: PlaneState, request: p.ClearPartition) -> p.Reply:
    """Fetches that wait on it are told that it is gone."""
    if request.partition not in state.partitions:
        return p.Cleared(request.id, b"")
    for sampler in state.tasks.samplers():
        with foreign(sampler):
            sampler.clear_cache(request.partition)
    partition = state.partitions.pop(request.partition)
    state.producers.forget(request.partition)
    state.strand(partition.unpublished())
    state.cut_off.extend(state.waiters.remove_where(lambda parked: parked.lane == request.partition))
    return p.Cleared(request.id, p.pack_indexes(state.frozen.keep(partition.drop())))
