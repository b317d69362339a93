# SPDX-License-Identifier: Apache-2.0
"""The control plane: one pure machine that turns requests into replies. No sockets, clocks, threads or torch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from transfer_queue import protocol as p
from transfer_queue.control import checkpoints, lifecycle, queries, writing
from transfer_queue.control.serving import Service, Taken, check_fetch, give_back
from transfer_queue.control.state import PlaneConfig, PlaneState
from transfer_queue.control.waiters import Parked
from transfer_queue.errors import ProducersGoneError, TransferQueueError, to_wire


class To(NamedTuple):
    """A reply and the client it goes to."""

    client: str
    reply: p.Reply


_LAST = (math.inf, math.inf)
_REFUSALS = (TransferQueueError, ValueError, TypeError, OverflowError)
Verb = Callable[[str, Any, float], p.Reply | None]


class ControlPlane:
    """State of the whole queue but for the values. ``now`` is any monotonic clock's seconds, passed in."""

    def __init__(self, config: PlaneConfig | None = None) -> None:
        self._state = state = PlaneState(config or PlaneConfig())
        self._verdicts: list[tuple[float, str]] = []
        self._verbs: dict[type[p.Request], Verb] = {
            p.Hello: lambda client, request, now: p.Done(request.id),
            p.Goodbye: lambda client, request, now: p.Done(request.id),
            p.CreatePartition: lambda client, request, now: lifecycle.create(state, request),
            p.SealPartition: lambda client, request, now: lifecycle.seal(state, request),
            p.RegisterTask: self._register_task,
            p.Reserve: self._write,
            p.Insert: self._write,
            p.ResolveKeys: self._rewrite,
            p.CheckFields: self._rewrite,
            p.Cancel: lambda client, request, now: writing.cancel(state, client, request),
            p.Publish: lambda client, request, now: writing.publish(state, client, request, now),
            p.Fetch: self._fetch,
            p.Withdraw: self._withdraw,
            p.Ack: self._ack,
            p.Describe: lambda client, request, now: queries.describe(state, request),
            p.ConsumptionStatus: lambda client, request, now: queries.consumption_status(state, request),
            p.ProductionStatus: lambda client, request, now: queries.production_status(state, request),
            p.ResetConsumption: self._reset_consumption,
            p.SetTags: lambda client, request, now: lifecycle.set_tags(state, request),
            p.ClearSamples: lambda client, request, now: lifecycle.clear_samples(state, request),
            p.ClearConsumed: lambda client, request, now: lifecycle.clear_consumed(state, request),
            p.ClearPartition: lambda client, request, now: lifecycle.clear_partition(state, request),
            p.ListPartitions: lambda client, request, now: p.Names(request.id, list(state.partitions)),
            p.KeysOf: lambda client, request, now: queries.keys_of(state, request),
            p.ListKeys: lambda client, request, now: queries.list_keys(state, request),
            p.GetStats: lambda client, request, now: queries.stats(state, request, now),
            p.Freeze: lambda client, request, now: checkpoints.freeze(state, client, request, now),
            p.Thaw: lambda client, request, now: checkpoints.thaw(state, client, request),
            p.Stage: lambda client, request, now: checkpoints.stage(state, client, request),
            p.Restore: lambda client, request, now: checkpoints.restore(state, client, request, now),
        }

    @property
    def state(self) -> PlaneState:
        return self._state

    # ---- the machine ----

    def handle(self, client: str, request: p.Request, now: float) -> list[To]:
        """Carry out one request. Returns its reply, unless it is parked, and those of the requests it decides."""
        replies = []
        try:
            reply = self._verbs[type(request)](client, request, now)
        except _REFUSALS as error:
            reply = p.Failed(request.id, *to_wire(error))
        if reply is not None:
            replies.append(To(client, reply))
        replies.extend(self._settle(now))
        deadline = self._state.waiters.next_deadline()
        if deadline is not None and deadline <= now:
            replies.extend(self.expire(now))  # a request that doesn't want to wait
        return replies

    def expire(self, now: float) -> list[To]:
        """Answer parked requests whose deadline has come, and those whose producers are dead."""
        replies = []
        for parked in self._state.waiters.expired(now):
            replies.append(To(parked.client, self._give_up(parked, now)))
            self._make_way(parked)
        while self._verdicts and self._verdicts[0][0] <= now:
            self._state.touch(heapq.heappop(self._verdicts)[1])
        return replies + self._settle(now)

    def next_deadline(self) -> float | None:
        """When ``expire`` has something to do, None: never."""
        parked = self._state.waiters.next_deadline()
        if not self._verdicts:
            return parked
        verdict = self._verdicts[0][0]
        return verdict if parked is None else min(parked, verdict)

    def client_gone(self, client: str, now: float, died: bool = True) -> list[To]:
        """Forget what a client waited for and reserved; its death may leave consumers without a producer."""
        state = self._state
        for parked in state.waiters.remove_where(lambda parked: parked.client == client):
            self._make_way(parked)
        holder = state.forget_holder(client)
        if holder is not None:
            self._take_back(holder)
        state.client_gone(client)
        for name in state.producers.gone(client, died, now):
            heapq.heappush(self._verdicts, (state.producers.verdict_at(now), name))
        return self._settle(now)

    def _make_way(self, parked: Parked) -> None:
        """One that waited has left: those behind it may be served now. Writers are looked at after every request."""
        if isinstance(parked.request, p.Fetch):
            self._state.touch(parked.lane, parked.request.task)

    def _take_back(self, holder: int) -> None:
        state = self._state
        state.orphans.extend(state.take_stranded(holder))
        for partition in state.partitions.values():
            held = partition.held_by(holder)
            if len(held):
                state.orphans.append(partition.give_back(held))
                state.touch(partition.name)

    def take_orphans(self) -> list[p.Indexes]:
        """Indexes given back without their writer: values may lie in storage and must be dropped there."""
        orphans, self._state.orphans = self._state.orphans, []
        return [dropped for indexes in orphans if len(dropped := self._state.frozen.keep(indexes))]

    def unpublished(self, indexes: p.Indexes, fields: Sequence[str]) -> p.Indexes:
        """Those of these samples that are gone, or lack one of these fields; not those that are being saved."""
        indexes = indexes[~self._state.frozen.holds(indexes)]
        for partition in self._state.partitions.values():
            rows, found = partition.table.find(indexes)
            lacking = np.ones(len(indexes), dtype=np.bool_)
            lacking[found] = ~partition.schema.complete(rows[found], fields)
            indexes = indexes[lacking]
        return indexes

    def check_invariants(self) -> None:
        """Raises AssertionError where the books disagree; for tests."""
        seen = [partition.table.column("index") for partition in self._state.partitions.values()]
        together = np.concatenate(seen) if seen else np.empty(0)
        assert len(np.unique(together)) == len(together), "an index belongs to one partition"
        for partition in self._state.partitions.values():
            partition.check_invariants()
        used = sum(partition.num_used for partition in self._state.partitions.values())
        assert used == self._state.allocator.num_used, "samples and reservations are counted"
        assert not self._state.touched, "every touched lane was served"

    def _settle(self, now: float) -> list[To]:
        """End the fetches of a cleared partition, give room to parked writers, serve every lane that was touched.

        Only the first concerns anybody where nobody waits.
        """
        state = self._state
        replies = [To(parked.client, p.Ended(parked.request.id, "cleared")) for parked in state.cut_off]
        state.cut_off.clear()
        if not state.waiters:
            state.touched.clear()
            return replies
        replies.extend(To(*answer) for answer in checkpoints.admit_freezers(state, now))
        replies.extend(self._admit_rewriters(now))
        replies.extend(self._admit_writers(now))
        while state.touched:
            name = next(iter(state.touched))
            replies.extend(self._serve(name, state.touched.pop(name), now))
        return replies

    def _give_up(self, parked: Parked, now: float) -> p.Reply:
        request = parked.request
        if parked.lane == checkpoints.FREEZERS:
            return checkpoints.take(self._state, parked.client, request, now)
        if parked.lane == checkpoints.REWRITERS:
            return checkpoints.kept_waiting(request, now - parked.since)
        if parked.lane == writing.WRITERS:
            return writing.full(self._state, request, now - parked.since)
        may_draw = self._state.waiters.is_first(parked.lane, request.task, parked.rank)
        return self._answer(parked.client, request, now, may_draw, waited=True) or self._not_ready(request, now)

    # ---- consumers ----

    def _fetch(self, client: str, fetch: p.Fetch, now: float) -> p.Reply | None:
        """Looked at once, and those who wait already only where this one's answer may change theirs."""
        state, lane, task = self._state, fetch.partition, fetch.task
        check_fetch(fetch, state.tasks.get(task))
        order = math.inf if fetch.batch_index is None else float(fetch.batch_index)
        deadline = now + fetch.wait_s
        partition = state.partitions.get(lane)
        settled = fetch.acks and partition is not None and partition.consumer(task).ledger.ack(fetch.acks)
        if settled and not state.waiters.is_first(lane, task, _LAST):
            state.waiters.park(client, fetch, now, deadline, lane, order)
            state.touch(lane, task)  # those in front go first: they may have waited for a batch that is settled now
            return None
        due = deadline <= now
        reply = self._answer(client, fetch, now, state.waiters.is_first(lane, task, (order, math.inf)), waited=due)
        if reply is not None:
            state.touch(lane, task)
        elif due:
            reply = self._not_ready(fetch, now)
        else:
            state.waiters.park(client, fetch, now, deadline, lane, order)
        return reply

    def _serve(self, lane: str, only: str | None, now: float) -> list[To]:
        """Answer what can be answered; within a task nobody draws past one who waits in front."""
        replies = []
        waiting: set[str] = set()
        for parked in self._state.waiters.lane(lane):
            task = parked.request.task
            if only not in (None, task):
                continue
            reply = self._answer(parked.client, parked.request, now, may_draw=task not in waiting)
            if reply is None:
                waiting.add(task)
                continue
            if task in waiting:
                # A batch given again may have been the last one that those in front waited for.
                self._state.touch(lane, task)
            self._state.waiters.remove(parked)
            replies.append(To(parked.client, reply))
        return replies

    def _answer(self, client: str, fetch: p.Fetch, now: float, may_draw: bool, waited: bool = False) -> p.Reply | None:
        partition = self._state.partitions.get(fetch.partition)
        if fetch.after is not None and (partition is None or not partition.gave(fetch.after, fetch.task)):
            return p.Ended(fetch.id, "cleared")
        if partition is None:
            return None
        try:
            service = Service(fetch, partition, self._state.tasks.get(fetch.task))
            reply = service.answer(now, may_draw, waited)
        except _REFUSALS as error:
            return p.Failed(fetch.id, *to_wire(error))
        if isinstance(reply, p.Batch) and fetch.batch_index is None:
            taken = service.taken(reply)
            self._state.answered.remember(client, fetch.id, taken.drawn.nbytes, partial(self._give_back, taken))
        return reply or self._abandoned(fetch, now)

    def _give_back(self, taken: Taken) -> None:
        partition = self._state.find(taken.partition, taken.incarnation)
        if partition is not None:
            give_back(partition, taken)
            self._state.touch(taken.partition, taken.task)

    def _abandoned(self, fetch: p.Fetch, now: float) -> p.Failed | None:
        missing = self._state.producers.missing(fetch.partition, fetch.fields, now)
        if missing is None:
            return None
        text = (
            f"task {fetch.task!r} waits for samples of partition {fetch.partition!r}, and every producer of field "
            f"{missing!r} has died. Look at the producers' output, restart them, then fetch again."
        )
        return p.Failed(fetch.id, ProducersGoneError.__name__, text)

    def _not_ready(self, fetch: p.Fetch, now: float) -> p.Reply:
        partition = self._state.partitions.get(fetch.partition)
        task = self._state.tasks.get(fetch.task)
        try:
            if partition is None:
                return p.NotReady(fetch.id, task.needed(fetch), 0, 0)
            return Service(fetch, partition, task).not_ready(now)
        except _REFUSALS as error:  # the task was registered anew since
            return p.Failed(fetch.id, *to_wire(error))

    def _withdraw(self, client: str, request: p.Withdraw, now: float) -> p.Reply:
        meant = (client, request.request)
        given_up = self._state.waiters.remove_where(lambda parked: (parked.client, parked.request.id) == meant)
        for parked in given_up:
            self._make_way(parked)
        undone = not given_up and self._state.answered.undo(client, request.request)
        return p.Done(request.id, len(given_up) + undone)

    def _ack(self, client: str, request: p.Ack, now: float) -> p.Reply:
        partition = self._state.partitions.get(request.partition)
        consumer = None if partition is None else partition.consumers.get(request.task)
        settled = 0 if consumer is None else consumer.ledger.ack(request.tokens, request.earlier)
        if settled:
            self._state.touch(request.partition, request.task)  # a peer may wait for fields of a batch settled now
        return p.Done(request.id, settled)

    def _reset_consumption(self, client: str, request: p.ResetConsumption, now: float) -> p.Reply:
        partition = self._state.partitions.get(request.partition)
        if partition is None:
            return p.Done(request.id, False)
        for name, consumer in partition.consumers.items():
            if request.task in (None, name):
                consumer.reset()
        self._state.touch(request.partition, request.task)
        return p.Done(request.id, True)

    def _register_task(self, client: str, request: p.RegisterTask, now: float) -> p.Reply:
        self._state.tasks.register(request)
        for lane in self._state.waiters.lanes():
            if not lane.startswith("\0"):
                self._state.touch(lane, request.task)
        return p.Done(request.id)

    # ---- producers ----

    def _write(self, client: str, request: writing.Writer, now: float) -> p.Reply | None:
        reply, nobody_waits = None, self._state.waiters.first_come(writing.WRITERS) is None
        if nobody_waits or not writing.count_of(self._state, request):  # who needs no room waits behind nobody
            reply = writing.admit(self._state, client, request)
        else:
            writing.check(self._state, request)
        if reply is None:
            self._state.waiters.park(client, request, now, now + request.wait_s, writing.WRITERS, 0.0)
        return reply

    def _admit_writers(self, now: float) -> list[To]:
        """First come, first served: a small put never overtakes a large one that waits for room."""
        replies = []
        while (parked := self._state.waiters.first_come(writing.WRITERS)) is not None:
            try:
                reply = writing.admit(self._state, parked.client, parked.request)
            except TransferQueueError as error:
                reply = p.Failed(parked.request.id, *to_wire(error))
            if reply is None:
                break
            self._state.waiters.remove(parked)
            replies.append(To(parked.client, reply))
        return replies

    # ---- checkpoints ----

    def _rewrite(self, client: str, request: checkpoints.Rewrite, now: float) -> p.Reply | None:
        if checkpoints.park_rewrite(self._state, client, request, now):
            return None
        if isinstance(request, p.CheckFields):
            return writing.check_fields(self._state, client, request)
        return self._write(client, request, now)

    def _admit_rewriters(self, now: float) -> list[To]:
        """Whoever waits no longer for a checkpoint is carried out, and may then wait for room."""
        replies = []
        for client, request in checkpoints.take_rewriters(self._state):
            try:
                reply = self._rewrite(client, request, now)
            except _REFUSALS as error:
                reply = p.Failed(request.id, *to_wire(error))
            if reply is not None:
                replies.append(To(client, reply))
        return replies
