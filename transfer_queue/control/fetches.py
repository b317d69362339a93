# SPDX-License-Identifier: Apache-2.0
"""The verb of consumers: a fetch is answered, or waits in the queue of its task and filter until it can be."""

from __future__ import annotations

import math
from functools import partial

import msgspec

from transfer_queue import protocol as p
from transfer_queue.calls import MORE, Call, More, Name, Wait
from transfer_queue.control import adding, following, group_work
from transfer_queue.control.draw import Task
from transfer_queue.control.group_numbers import group_numbers
from transfer_queue.control.partition import Partition
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.serving import ServedFetch, check_fetch
from transfer_queue.control.state import FETCHES, PlaneState
from transfer_queue.control.writing import writers_of
from transfer_queue.diagnosis import without_producers
from transfer_queue.errors import InvalidRequestError, ProducersGoneError


def fetch(state: PlaneState, call: Call, request: p.Fetch) -> p.Reply | Wait:
    """Try to answer at once. No fetch draws before one that waits in front of it."""
    task = state.tasks.get(request.task)
    if task.follows is not None:
        raise InvalidRequestError(f"task {task.name!r} follows {task.follows!r}, so it draws no batches of its own.")
    dp_size = check_fetch(request, task)
    if (trainer := state.leases.trainers.get(request.task)) is not None and trainer.batches:
        _hear_of_trained(state, call, request, dp_size)
    if request.adds:
        adding.begin(state, call, request, task)
    return _Reader(state, call, request).begin(task, dp_size)


def _hear_of_trained(state: PlaneState, call: Call, request: p.Fetch, dp_size: int | None) -> None:
    """A reader that asks has trained those before it; unless it says more, also those of other partitions."""
    task, here = request.task, state.partitions.get(request.partition)
    rank = 0 if request.dp_rank is None and dp_size is not None else request.dp_rank
    before = request.trained if request.trained is not None else request.batch_index
    reader = call.client if rank is None and before is None else rank
    if here is not None and here.groups is not None:
        if before is None and rank is not None:
            before = here.consumer(task).ledger.next_index(rank)
        group_work.heard_of_trained(state, here, task, reader, before)
    if request.trained is None:
        group_work.has_trained_all(state, task, reader, besides=request.partition)


class _Reader:
    """One fetch until it is answered."""

    def __init__(self, state: PlaneState, call: Call, request: p.Fetch) -> None:
        self._state, self._call, self._fetch = state, call, request
        self._line: Name = (FETCHES, request.partition, request.task, request.where)
        self._ready: ReadySet | None = None  # kept while it waits: what was compared once needn't be compared again

    def begin(self, task: Task, dp_size: int | None) -> p.Reply | Wait:
        state, fetch = self._state, self._fetch
        order = math.inf if fetch.batch_index is None else float(fetch.batch_index)
        deadline = state.calls.now + fetch.wait_s
        is_first = state.waits.would_be_first(self._line, order)
        late = deadline <= state.calls.now
        reply = self._answer(task, dp_size, late, is_first)
        if isinstance(reply, p.Reply):
            return reply
        rank = 0 if fetch.dp_rank is None and dp_size is not None else fetch.dp_rank
        batch = (FETCHES, fetch.partition, fetch.task, rank, fetch.batch_index)
        return Wait(self._line, deadline, self._examined, order=order, keys=(batch,), due=reply is not None)

    def _examined(self, wait: Wait, has_turn: bool) -> p.Reply | More | None:
        task = self._state.tasks.get(self._fetch.task)
        return self._answer(task, task.size_for(self._fetch), wait.late, has_turn)

    def _answer(self, task: Task, dp_size: int | None, late: bool, may_draw: bool) -> p.Reply | More | None:
        state, fetch, now = self._state, self._fetch, self._state.calls.now
        partition = state.partitions.get(fetch.partition)
        if fetch.after is not None and (partition is None or not partition.gave(fetch.after, fetch.task)):
            return p.Ended(fetch.id, "cleared")
        if partition is None:
            self._check_producers(now)
            return _no_partition(state, fetch, task) if late else None
        served = ServedFetch(state, fetch, partition, task, dp_size)
        served.client = self._call.client
        served.consumer.asked_at = now
        if fetch.dp_rank == 0:
            served.consumer.starved_s = fetch.starved_s
        if fetch.where is not None:
            self._ready = served.ready()
        try:
            reply: p.Reply | More | None = served.answer(now, may_draw)
        finally:  # a sampler may raise after it has drawn earlier batches
            following.wrote(state, partition, fetch.task, served.written)
            if state.waits.count:
                self._wake_others(served)
        if isinstance(reply, p.Batch):
            self._hold(served, reply)
        elif fetch.adds and isinstance(reply, p.Ended) and served.consumer.hands.others_have(self._call.client):
            reply = None  # if another one dies, this client gets what that has in hand
        elif reply is None:
            _wake_in_time(state, self._line, served.decided_by_time(now))
            self._check_producers(now)
        if reply is not None or not late:
            return reply
        return self._not_ready(served, now) if served.finish_comparing() else MORE

    def _hold(self, served: ServedFetch, batch: p.Batch) -> None:
        state = self._state
        if served.adds:
            adding.took(state, self._call, served.partition, served.consumer)
        if self._fetch.batch_index is None:
            for each in served.holdings(state, batch):
                state.calls.hold(self._call, each)
            if batch.batch_index is None and served.partition.groups is not None:
                group_work.reads(state, self._call)

    def _wake_others(self, served: ServedFetch) -> None:
        """Rounds may have been drawn, also without an own batch, and ends decided."""
        waits, task = self._state.waits, self._line[:3]
        for rank, index in served.written:
            waits.wake_key((*task, rank, index))
            waits.wake_key((*task, rank, None))
        if served.consumer.take_decided():
            waits.wake(task)
        elif served.has_given:
            waits.wake_first(task)  # a finite stream may have ended with it

    def _check_producers(self, now: float) -> None:
        """Raises ProducersGoneError if nobody produces one of the fields any more."""
        fetch = self._fetch
        missing = self._state.producers.missing(fetch.fields, now)
        if missing is None:
            return
        partition = self._state.partitions.get(fetch.partition)
        lost = {} if partition is None else partition.lost()
        groups = None if partition is None else partition.groups
        facts = {
            "end": self._state.producers.end_of(missing), "groups": groups is not None,
            "lost": {field: len(indexes) for field, indexes in lost.items() if field in fetch.fields},
            "waiting": 0 if groups is None else groups.numbers().get("waiting", 0),
            "grace_s": self._state.config.producer_grace_s,
        }  # fmt: skip
        raise ProducersGoneError(str(without_producers(fetch.task, fetch.partition, missing, facts)))

    def _is_about_groups(self, partition: Partition) -> bool:
        """Whether the task draws groups, or some get no worker, because a task that is to train them draws none."""
        sampler_of = self._state.leases.sampler
        named = () if partition.groups is None else partition.groups.tasks()
        return sampler_of(self._fetch.task) is not None or any(sampler_of(task) is None for task in named)

    def _not_ready(self, served: ServedFetch, now: float) -> p.NotReady:
        reply = served.not_ready(now)
        if self._is_about_groups(served.partition):
            reply = msgspec.structs.replace(reply, groups=group_numbers(self._state, served.partition, now))
        if not served.partition.num_reserved:
            return reply
        owed_by = writers_of(self._state, served.partition)
        return msgspec.structs.replace(reply, reserved=served.partition.num_reserved, owed_by=owed_by)


def _no_partition(state: PlaneState, fetch: p.Fetch, task: Task) -> p.NotReady:
    """There is nothing, and the queue holds something else. Only some of many partitions are looked at."""
    return p.NotReady(fetch.id, task.needed_yet(fetch), 0, 0, elsewhere=state.holds())


def _wake_in_time(state: PlaneState, line: Name, at: float | None) -> None:
    """The first fetch of this line is examined at that time, and then says whether it is to be once more.

    So a line has one timer, however many fetches wait in it and however often something is published meanwhile.
    """
    if at is not None and line not in state.timed_lines:
        state.timed_lines.add(line)
        state.calls.at(at, partial(_time_has_come, state, line))


def _time_has_come(state: PlaneState, line: Name) -> None:
    state.timed_lines.discard(line)
    state.waits.wake_first(line)
