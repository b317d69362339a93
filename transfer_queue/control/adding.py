# SPDX-License-Identifier: Apache-2.0
"""Clients that add fields to what they fetch, such as teachers: what they leave undone goes to others of their task."""

from __future__ import annotations

from collections.abc import Iterable

from transfer_queue import protocol as p
from transfer_queue.calls import Call, Holding, Until
from transfer_queue.control.consumer import Consumer
from transfer_queue.control.draw import Task
from transfer_queue.control.partition import Partition
from transfer_queue.control.state import PlaneState
from transfer_queue.errors import InvalidRequestError
from transfer_queue.sampler.group_sampler import GroupSampler

_MOST_NAMED = 5


class InHand(Holding):
    """All that a client has in hand of a task in one partition. Others get what lacks a field if the client ends."""

    until = Until.SESSION

    def __init__(self, state: PlaneState, client: str, partition: Partition, consumer: Consumer) -> None:
        self._state, self._client, self._partition = state, client, partition.name
        self.consumer = consumer  # the object itself, because the task may be deleted and created again

    def partition(self) -> Partition | None:
        """None: it is gone, or this task was deleted there; then nothing is in hand."""
        found = self._state.partitions.get(self._partition)
        return found if found is not None and found.consumers.get(self.consumer.task) is self.consumer else None

    @property
    def is_over(self) -> bool:
        return self._client not in self.consumer.hands.counts or self.partition() is None

    def undo(self) -> bool:
        partition = self.partition()
        if partition is not None:
            self.consumer.drop_hand(self._client)
            self._state.changed(partition)
        return True


def begin(state: PlaneState, call: Call, request: p.Fetch, task: Task) -> None:
    """A client that adds fields asks for samples: it is a living producer of these fields.

    Raises InvalidRequestError.
    """
    if not request.dp_rank is request.batch_index is task.dp_size is None or isinstance(task.sampler, GroupSampler):
        raise InvalidRequestError(
            f"a fetch with adds={request.adds} shares the samples of task {task.name!r} with other clients. So it has "
            f"no dp_rank and no batch_index, and the task has no dp_size and no GroupSampler. Use another task name."
        )
    if both := set(request.adds) & set(request.fields):
        raise InvalidRequestError(
            f"adds={request.adds} names {sorted(both)[0]!r}, which this fetch waits for. Name only what you will put."
        )
    partition = state.partitions.get(request.partition)
    if partition is not None and task.name in partition.consumers:
        partition.consumers[task.name].hands.check(request.adds)
    state.producers.announced(call, request.adds)


def took(state: PlaneState, call: Call, partition: Partition, consumer: Consumer) -> None:
    """The call's client was given a batch to add fields to."""
    client = call.client
    mine = state.calls.of_session(client, InHand)
    for each in mine:
        if each.is_over and each.consumer is not consumer:
            state.calls.leave(client, each)
    if client in consumer.hands.counts and not any(each.consumer is consumer for each in mine):
        state.calls.hold(call, InHand(state, client, partition, consumer))


def in_hand(partition: Partition, fields: Iterable[str]) -> dict[str, int]:
    """By client, the samples of this partition to which it has yet to add one of these fields; of some clients only."""
    counts: dict[str, int] = {}
    adders = [partition.consumers[task] for task in partition.adders if task in partition.consumers]
    for consumer in adders:
        if consumer.hands.counts and not set(fields).isdisjoint(consumer.hands.fields):
            counts |= consumer.hands.counts
    return dict(list(counts.items())[:_MOST_NAMED])
