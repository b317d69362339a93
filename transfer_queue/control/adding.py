# SPDX-License-Identifier: Apache-2.0
"""Clients that add fields to what they fetch, such as teachers: what they leave undone goes to others of their task."""

from __future__ import annotations

from collections.abc import Iterable

from transfer_queue import protocol as p
from transfer_queue.calls import Call, Until
from transfer_queue.control.draw import Task
from transfer_queue.control.partition import Partition
from transfer_queue.control.serving import Reading, ServedFetch, Taken
from transfer_queue.control.state import PlaneState
from transfer_queue.errors import InvalidRequestError
from transfer_queue.sampler.group_sampler import GroupSampler

_MOST_NAMED = 5


class InHand(Reading):
    """A batch whose client is to add fields. What still lacks some is given again if the client ends before."""

    until = Until.DONE

    def __init__(self, state: PlaneState, served: ServedFetch) -> None:
        super().__init__(served, b"")
        self.consumer, self.adds = served.consumer, served.adds
        self._taken = Taken(state, served, None, None)

    @property
    def indexes(self) -> p.Indexes:
        """Its samples that lack some."""
        return self._taken.in_hand()

    def undo(self) -> bool:
        return self._taken.undo()


def begin(state: PlaneState, call: Call, request: p.Fetch, task: Task) -> None:
    """A client asks for more: it is a living producer of these fields, and keeps no batch that has them by now."""
    if isinstance(task.sampler, GroupSampler) or not request.dp_rank is request.batch_index is None:
        raise InvalidRequestError(
            f"a fetch with adds={request.adds} shares the samples of task {task.name!r} with other clients. So it has "
            f"no dp_rank and no batch_index, and the task has no GroupSampler. Use another task name."
        )
    state.producers.announced(call, request.adds)
    for earlier in state.calls.of(call.client):
        if any(not len(held.indexes) for held in state.calls.held(call.client, earlier.number, InHand)):
            state.calls.take(call.client, earlier.number, InHand)


def others_go_on(state: PlaneState, call: Call, served: ServedFetch) -> bool:
    """Whether the end of this client's stream must wait: if another one dies, this one gets what that has in hand."""
    consumer = served.consumer
    if not served.adds or not consumer.num_in_hand:
        return False
    batches = [held for each in state.calls.of(call.client) for held in each.holdings if isinstance(held, InHand)]
    return consumer.num_in_hand > sum(len(held.indexes) for held in batches if held.consumer is consumer)


def in_hand(state: PlaneState, partition: Partition, fields: Iterable[str]) -> dict[str, int]:
    """By client, the samples of this partition to which it has yet to add one of these fields; of some clients only."""
    counts: dict[str, int] = {}
    if not any(consumer.num_in_hand for consumer in partition.consumers.values()):
        return counts
    wanted = set(fields)
    for call, held in state.calls.holdings(InHand):
        if held.serial != partition.serial or wanted.isdisjoint(held.adds):
            continue
        if len(counts) == _MOST_NAMED and call.client not in counts:
            break
        if count := len(held.indexes):
            counts[call.client] = counts.get(call.client, 0) + count
    return counts
