# SPDX-License-Identifier: Apache-2.0
"""A control plane without a server: requests go straight to its room of calls, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from transfer_queue import protocol as p
from transfer_queue.calls import Answer, Call, Turn
from transfer_queue.calls.turn import TURN_S
from transfer_queue.control.partition import Partition
from transfer_queue.control.plane import ControlPlane
from transfer_queue.control.rows import PUBLISHED, RowState
from transfer_queue.control.state import PlaneConfig
from transfer_queue.control.writing import held_up_by


class To(NamedTuple):
    """A reply and the client it goes to."""

    client: str
    reply: p.Reply


def tags_of(reply: p.Batch) -> dict[int, p.Tags]:
    """Those of samples that have some."""
    tags = p.unpack_tags(reply.tags)
    return {index: own for index, own in zip(p.unpack_indexes(reply.indexes).tolist(), tags, strict=bool(tags)) if own}


class LocalPlane(ControlPlane):
    def __init__(self, **config: Any) -> None:
        super().__init__(PlaneConfig(**config))
        self.calls.verbs |= self.verbs
        self.calls.verbs[p.Cancel] = lambda call, cancel: p.Done(cancel.id, self.calls.cancel(call.client, cancel.call))

    def make_turns_short(self) -> None:
        """From now on, a turn is over after one look at the clock."""
        self.calls.turn = Turn(itertools.count(step=TURN_S / 2).__next__)

    def handle(self, client: str, request: p.Request, now: float) -> list[To]:
        return _to(self.calls.handle(Call(client, request, now), now))

    def expire(self, now: float) -> list[To]:
        return _to(self.calls.expire(now))

    def next_deadline(self) -> float | None:
        return self.calls.next_deadline()

    def client_gone(self, client: str, now: float, died: bool = True) -> list[To]:
        return _to(self.calls.client_gone(client, now, died))

    def received(self, client: str, numbers: Iterable[int]) -> None:
        self.calls.received(client, numbers)

    def held_up_by(self) -> str:
        return held_up_by(self.state)

    def check_invariants(self) -> None:
        """Raise AssertionError if the tables disagree."""
        partitions = list(self.state.partitions.values())
        indexes = np.concatenate([np.empty(0), *(partition.table.column("index") for partition in partitions)])
        assert len(np.unique(indexes)) == len(indexes), "an index belongs to one partition"
        for partition in partitions:
            _check(partition)
        serials = [partition.serial for partition in partitions]
        assert serials == sorted(serials), "pages of statistics go by these"
        used = sum(partition.num_used for partition in partitions)
        assert used == self.state.allocator.num_used, "samples and reservations are counted"
        self.calls.check_invariants()


def _check(partition: Partition) -> None:
    index, state = partition.table.column("index"), partition.table.column("state")
    assert (np.diff(index) > 0).all(), "indexes ascend"
    assert np.count_nonzero(state == RowState.LIVE) == partition.num_live, "live rows are counted"
    assert np.isin(state, (RowState.RESERVED, RowState.RESERVED_FREE)).sum() == partition.num_reserved, "reserved rows"
    assert np.count_nonzero(state == RowState.HEAD) == partition.num_heads_held, "heads are counted"
    assert np.count_nonzero(state == RowState.DEAD) == partition.table.num_dead, "dead rows are counted"
    partition.free.check_invariants((state == RowState.FREE).nonzero()[0])
    known = set(index[state != RowState.DEAD].tolist())
    assert known.issuperset(partition.tags), "tags belong to rows"
    assert known.issuperset(at for _, at in partition.keys.items()), "keys belong to rows"
    assert partition.keys.is_ascending(), "keys are in the order of their samples"
    for name, count in partition.schema.counts.items():
        assert count == np.count_nonzero(partition.schema.has(name) & PUBLISHED[state]), f"{name!r} is counted"
    partition.listed.check_invariants()
    if partition.groups is not None:
        partition.groups.check_invariants()
    for consumer in partition.consumers.values():
        consumer.check_invariants()


def _to(answers: list[Answer]) -> list[To]:
    return [To(answer.call.client, answer.reply) for answer in answers]
