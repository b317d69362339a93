# SPDX-License-Identifier: Apache-2.0
"""The control plane: one pure machine that turns requests into replies. No sockets, clocks, threads or torch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from transfer_queue import protocol as p
from transfer_queue.control import checkpoints, key_waits, lifecycle, queries, run_table, units, writing
from transfer_queue.control.partition import Partition
from transfer_queue.control.serving import ServedFetch, TakenUnread, check_fetch
from transfer_queue.control.sessions import Record
from transfer_queue.control.state import LAST, Line, Parked, PlaneConfig, PlaneState, To, line_of, reply_or_error
from transfer_queue.errors import ProducersGoneError, ProtocolError

_MOST_NAMED = 5
Verb = Callable[[str, Any, float], p.Reply | None]


class ControlPlane:
    """The state of the whole queue except the values. ``now`` is seconds of any monotonic clock, passed in."""

    def __init__(self, config: PlaneConfig | None = None) -> None:
        self.state = state = PlaneState(config or PlaneConfig())
        self._faults: list[str] = []
        self._grace_ends: list[float] = []  # when producers of some field are lost
        self._verbs: dict[type[p.Request], Verb] = {
            p.CreatePartition: lambda client, request, now: lifecycle.create(state, request),
            p.SealPartition: lambda client, request, now: lifecycle.seal(state, request),
            p.RegisterTask: lambda client, request, now: lifecycle.register_task(state, request),
            p.Reserve: lambda client, request, now: writing.write(state, client, request, now),
            p.Insert: lambda client, request, now: writing.write(state, client, request, now),
            p.ResolveKeys: lambda client, request, now: writing.rewrite(state, client, request, now),
            p.CheckFields: lambda client, request, now: writing.rewrite(state, client, request, now),
            p.Publish: lambda client, request, now: writing.publish(state, client, request, now),
            p.Fetch: self._fetch,
            p.Cancel: self._cancel,
            p.Ack: lambda client, request, now: lifecycle.ack(state, request),
            p.Describe: lambda client, request, now: queries.describe(state, request),
            p.ConsumptionStatus: lambda client, request, now: queries.consumption_status(state, request),
            p.FieldStatus: lambda client, request, now: queries.production_status(state, request),
            p.ResetConsumption: lambda client, request, now: lifecycle.reset_consumption(state, request),
            p.SetTags: lambda client, request, now: lifecycle.set_tags(state, request),
            p.ClearSamples: lambda client, request, now: lifecycle.clear_samples(state, client, request),
            p.ClearConsumed: lambda client, request, now: lifecycle.clear_consumed(state, client, request),
            p.ClearPartition: lambda client, request, now: lifecycle.clear_partition(state, client, request),
            p.ListPartitions: lambda client, request, now: p.Names(request.id, list(state.partitions)),
            p.KeysOf: lambda client, request, now: queries.keys_of(state, request),
            p.ListKeys: lambda client, request, now: queries.list_keys(state, request),
            p.WatchKeys: lambda client, request, now: key_waits.wait(state, client, request, now),
            p.WaitKeys: lambda client, request, now: key_waits.wait(state, client, request, now),
            p.ForgetTask: lambda client, request, now: lifecycle.forget_task(state, request),
            p.ExpectProducers: lambda client, request, now: lifecycle.expect_producers(state, request),
            p.EvictClient: self._evict,
            p.GetStats: lambda client, request, now: queries.stats(state, request, now),
            p.JoinUnit: lambda client, request, now: units.join(state, client, request),
            p.ListLost: lambda client, request, now: queries.list_lost(state, request),
            p.ListUnits: lambda client, request, now: units.list_units(state, client, request, now),
            p.WatchRun: lambda client, request, now: run_table.watch(state, client, request, now),
            p.LeaveRun: lambda client, request, now: run_table.leave(state, client, request),
            p.Freeze: lambda client, request, now: checkpoints.freeze(state, client, request, now),
            p.ReadFrozen: lambda client, request, now: checkpoints.read_frozen(state, client, request),
            p.Thaw: lambda client, request, now: checkpoints.thaw(state, client, request),
            p.Stage: lambda client, request, now: checkpoints.stage(state, client, request),
            p.RestorePart: lambda client, request, now: checkpoints.restore_part(state, client, request, now),
            p.Restore: lambda client, request, now: checkpoints.restore(state, client, request, now),
        }

    # ---- entry points ----

    def handle(self, client: str, request: p.Request, now: float) -> list[To]:
        """Serve one request. Returns its reply, unless it is parked, and replies to requests that it decides.

        An answered but not received call gets the same answer again; a call that is already parked gets none.
        """
        if self.state.waiters.find(client, request.id) is not None:
            return []
        self.state.budget.begin_turn()
        reply = reply_or_error(request.id, partial(self._carry_out, client, request, now))
        own = [] if reply is None else [To(client, reply)]
        return own + self._serve_all_due(now)

    def _carry_out(self, client: str, request: p.Request, now: float) -> p.Reply | None:
        known = self.state.calls.get(client, request.id)
        if known is not None and not _completes(known, request):
            return _same_answer(known, request)
        verb = self._verbs.get(type(request))
        if verb is None:
            raise ProtocolError(f"the control plane has no verb {type(request).__name__}.")
        return verb(client, request, now)

    def received(self, client: str, calls: Iterable[int]) -> None:
        """The client has these calls' answers, or no longer needs them: no cancel will undo them."""
        self.state.calls.received(client, calls)

    def read(self, client: str, calls: Iterable[int]) -> None:
        """The client has read the batches of these calls, or can't read them any more: they may be cleared."""
        for call in calls:
            if isinstance(self.state.calls.get(client, call), TakenUnread):
                self.state.calls.take(client, call)

    def answered(self, client: str, call: int) -> p.Reply | None:
        """This call's answer, until the client has confirmed receipt."""
        record = self.state.calls.get(client, call)
        return None if record is None else record.reply

    def expire(self, now: float) -> list[To]:
        """Answer parked requests past their deadline or with lost producers, and do a little of what takes long."""
        self.state.tidy()
        self.state.budget.begin_turn()
        for partition in self.state.budget.take_unfinished():
            self.state.mark_dirty(partition)
        return self._expire(now)

    def _expire(self, now: float) -> list[To]:
        replies = []
        for parked in self.state.waiters.expired(now, max(1, self.state.budget.num_answers)):
            self.state.budget.examined(answered=True)
            reply = reply_or_error(parked.request.id, partial(self._too_late, parked, now))
            if reply is None:
                self.state.waiters.put_back(parked)
                continue
            self._make_way(parked)
            replies.append(To(parked.client, reply))
        while self._grace_ends and self._grace_ends[0] <= now:
            heapq.heappop(self._grace_ends)
            self.state.mark_all_dirty()
        return replies + self._serve_waiting(now)

    def next_deadline(self) -> float | None:
        """When ``expire`` has work: minus infinity for at once, None for never."""
        state = self.state
        left = state.cut_off or (state.writers_left and len(state.writers))
        return -math.inf if left or not (state.is_tidy and state.budget.is_finished) else self._next_due()

    def _next_due(self) -> float | None:
        parked = self.state.waiters.next_deadline()
        if not self._grace_ends:
            return parked
        return self._grace_ends[0] if parked is None else min(parked, self._grace_ends[0])

    def client_gone(self, client: str, now: float, died: bool = True) -> list[To]:
        """The session has ended: its parked calls are removed, and its answered but not received calls are undone.

        A death may leave consumers without a producer.
        """
        self._end_session(client, now, died)
        return self._serve_all_due(now)

    def _end_session(self, client: str, now: float, died: bool) -> None:
        state = self.state
        for parked in state.waiters.of(client):
            self._remove(parked)
        undone = [reply_or_error(0, partial(_undone, record)) for record in state.calls.end(client)]
        units.lose(state, client)
        state.runs.end_session(client)
        for grace_end in state.producers.gone(client, died, now):
            heapq.heappush(self._grace_ends, grace_end)
        self._faults += [failed.text for failed in undone if isinstance(failed, p.Failed)]

    def take_faults(self) -> list[str]:
        """Why calls of ended sessions could not be undone, since the last call of this: our faults, to be logged."""
        faults, self._faults = self._faults, []
        return faults

    def _remove(self, parked: Parked) -> None:
        self.state.waiters.remove(parked)
        self._make_way(parked)

    def _make_way(self, parked: Parked) -> None:
        """Examine the requests behind a removed one. Writers are examined after every request anyway."""
        if isinstance(parked.request, p.Fetch):
            self.state.mark_dirty(parked.queue, parked.request.task)
        elif parked.queue == writing.WRITERS:
            self.state.writers.remove(parked)

    def take_unused(self) -> list[p.Indexes]:
        """The samples whose values became unused since the last call, and must be deleted."""
        unused, self.state.unused = self.state.unused, []
        return unused

    def held_up_by(self) -> str:
        """A sentence that names the tasks that keep the queue full; empty if there are none."""
        return writing.held_up_by(self.state).rstrip()

    def check_invariants(self) -> None:
        """Raise AssertionError if the records disagree; for tests."""
        seen = [partition.table.column("index") for partition in self.state.partitions.values()]
        together = np.concatenate(seen) if seen else np.empty(0)
        assert len(np.unique(together)) == len(together), "an index belongs to one partition"
        for partition in self.state.partitions.values():
            partition.check_invariants()
        serials = [partition.serial for partition in self.state.partitions.values()]
        assert serials == sorted(serials), "pages of statistics go by these"
        used = sum(partition.num_used for partition in self.state.partitions.values())
        assert used == self.state.allocator.num_used, "samples and reservations are counted"
        assert not self.state.dirty, "every dirty partition was served"

    def _serve_all_due(self, now: float) -> list[To]:
        """Also serve what is due at once: requests that don't wait, or producers that were lost long ago."""
        replies = self._serve_waiting(now)
        due = self._next_due()
        return replies if due is None or due > now else replies + self._expire(now)

    def _serve_waiting(self, now: float) -> list[To]:
        """End what waits for a cleared partition, admit parked writers, and serve every dirty partition.

        Without parked requests, only the first applies.
        """
        state = self.state
        some = state.cut_off[: max(1, state.budget.num_answers)]
        del state.cut_off[: len(some)]
        replies = [To(parked.client, p.Ended(parked.request.id, "cleared")) for parked in some]
        if not state.waiters:
            state.dirty.clear()
            state.runs.take_changed()
            return replies
        replies.extend(To(*answer) for answer in units.take_watchers(state))
        replies.extend(To(*answer) for answer in run_table.take_told(state))
        replies.extend(checkpoints.admit_freezes(state, now))
        replies.extend(writing.admit_rewriters(state, now))
        replies.extend(writing.admit_writers(state))
        while state.dirty:
            name = next(iter(state.dirty))
            replies.extend(self._serve(name, state.dirty.pop(name), now))
            replies.extend(key_waits.serve(state, name))
        return replies

    def _too_late(self, parked: Parked, now: float) -> p.Reply | None:
        """The last answer; None: it needs more turns, because its filter isn't compared with all samples yet."""
        request = parked.request
        if parked.queue == checkpoints.FREEZERS:
            return checkpoints.take(self.state, parked.client, request, now)
        if parked.queue == checkpoints.REWRITERS:
            return checkpoints.kept_waiting(request, now - parked.since)
        if parked.queue == units.WATCHERS:
            return units.listing(self.state, request)
        if isinstance(request, p.WatchRun):
            return p.Done(request.id)
        if parked.queue == writing.WRITERS:
            return writing.full(self.state, request, now - parked.since)
        if not isinstance(request, p.Fetch):
            return key_waits.too_late(self.state, request, now - parked.since)
        may_draw = self.state.waiters.is_first(parked.queue, line_of(request), parked.rank)
        reply = self._answer(parked.client, request, now, may_draw, waited=True)
        return reply or (None if self._is_comparing(request) else self._not_ready(request, now))

    # ---- consumers ----

    def _fetch(self, client: str, fetch: p.Fetch, now: float) -> p.Reply | None:
        """Try to answer at once. Waiting fetches are examined only if this answer may affect them."""
        state, queue, task, line = self.state, fetch.partition, fetch.task, line_of(fetch)
        check_fetch(fetch, state.tasks.get(task))
        order = math.inf if fetch.batch_index is None else float(fetch.batch_index)
        deadline = now + fetch.wait_s
        partition, before = state.partitions.get(queue), self._decided_by(queue, task)
        num_acked = fetch.acks and partition is not None and partition.consumer(task).ledger.ack(fetch.acks)
        if num_acked and not state.waiters.is_first(queue, line, LAST):
            state.waiters.unexamine(state.waiters.park(client, fetch, now, deadline, queue, order, line))
            state.mark_dirty(queue, task)  # earlier fetches may have waited for a batch that is acknowledged now
            return None
        due = deadline <= now
        may_draw = state.waiters.is_first(queue, line, (order, math.inf))
        reply = self._answer(client, fetch, now, may_draw, waited=due)
        if reply is not None or self._decided_by(queue, task) != before:  # rounds may be drawn without an own batch
            state.mark_dirty(queue, task)
        if reply is not None:
            return reply
        if due and not self._is_comparing(fetch):
            reply = self._not_ready(fetch, now)
        else:
            state.waiters.park(client, fetch, now, deadline, queue, order, line)
        return reply

    def _serve(self, queue: str, only: str | None, now: float) -> list[To]:
        """Answer what can be answered, in several turns if it is much."""
        replies: list[To] = []
        for line in (lines := self.state.waiters.lines_of(queue)):
            if only not in (None, line[0]):
                continue
            before = self._decided_by(queue, line[0])
            self._serve_line(queue, line, now, replies)
            if len(lines) > 1 and self._decided_by(queue, line[0]) != before:
                # What was drawn with one filter may be what a rank with another one waits for.
                self.state.mark_dirty(queue, line[0])
        return replies

    def _serve_line(self, queue: str, line: Line, now: float, replies: list[To]) -> None:
        """Answer fetches of a line. None draws past an earlier one that still waits.

        So those behind the first unanswered one are examined only if the ledger or an end may decide them.
        """
        state = self.state
        while (first := state.waiters.first_of(queue, line)) is not None:
            if state.budget.num_answers <= 0:
                state.budget.postpone(queue)
                return
            if not self._serve_parked(first, now, True, replies):
                break
        if first is None:
            return
        stamp = self._decided_by(queue, line[0])
        began, unexamined = state.waiters.unexamined(first, stamp)
        last = first
        for parked in unexamined:
            if state.budget.num_answers <= 0:
                state.waiters.interrupted(first, began, last.rank)
                state.budget.postpone(queue)
                return
            if self._serve_parked(parked, now, False, replies):
                # A repeated batch may have been the last one that the earlier fetches waited for.
                state.mark_dirty(queue, line[0])
            last = parked
        state.waiters.examined(first, began)
        if began != stamp:  # it changed in the course of the pass, and may decide those in front
            state.budget.postpone(queue)

    def _serve_parked(self, parked: Parked, now: float, may_draw: bool, replies: list[To]) -> bool:
        """Answer this fetch if that is possible now. Returns whether it was."""
        answer = partial(self._answer, parked.client, parked.request, now, may_draw=may_draw)
        reply = reply_or_error(parked.request.id, answer)
        self.state.budget.examined(reply is not None)
        if reply is None:
            return False
        self.state.waiters.remove(parked)
        replies.append(To(parked.client, reply))
        return True

    def _decided_by(self, queue: str, task: str) -> object:
        """While this stays equal, a fetch that waits behind another one can't be answered."""
        partition = self.state.partitions.get(queue)
        consumer = None if partition is None else partition.consumers.get(task)
        return self.state.upheavals, 0 if consumer is None else consumer.ledger.num_changes

    def _answer(self, client: str, fetch: p.Fetch, now: float, may_draw: bool, waited: bool = False) -> p.Reply | None:
        partition = self.state.partitions.get(fetch.partition)
        if fetch.after is not None and (partition is None or not partition.gave(fetch.after, fetch.task)):
            return p.Ended(fetch.id, "cleared")
        if partition is None:
            return self._producers_lost(fetch, now)
        served = self._served(fetch, partition)
        reply = served.answer(now, may_draw, waited)
        if isinstance(reply, p.Batch) and fetch.batch_index is None:
            self.state.calls.add(client, fetch.id, served.taken(self.state, reply))
        if reply is None and may_draw and self._is_comparing(fetch):
            return None
        return reply or self._producers_lost(fetch, now)

    def _served(self, fetch: p.Fetch, partition: Partition) -> ServedFetch:
        return ServedFetch(fetch, partition, self.state.tasks.get(fetch.task), self.state.budget)

    def _is_comparing(self, fetch: p.Fetch) -> bool:
        partition = self.state.partitions.get(fetch.partition)
        return (
            partition is not None and fetch.where is not None and not self._served(fetch, partition).finish_comparing()
        )

    def _producers_lost(self, fetch: p.Fetch, now: float) -> p.Failed | None:
        missing = self.state.producers.missing(fetch.fields, now)
        if missing is None:
            return None
        text = (
            f"task {fetch.task!r} waits for samples of partition {fetch.partition!r}, and every producer of field "
            f"{missing!r} has died. Look at the producers' output, restart them, then fetch again."
        )
        return p.Failed(fetch.id, ProducersGoneError.__name__, text)

    def _not_ready(self, fetch: p.Fetch, now: float) -> p.Reply:
        partition = self.state.partitions.get(fetch.partition)
        if partition is None:
            return p.NotReady(fetch.id, self.state.tasks.get(fetch.task).needed(fetch), 0, 0)
        reply = self._served(fetch, partition).not_ready(now)
        if not partition.num_reserved:
            return reply
        owed_by = writing.writers_of(self.state, partition, _MOST_NAMED)
        return msgspec.structs.replace(reply, reserved=partition.num_reserved, owed_by=owed_by)

    # ---- sessions ----

    def _evict(self, client: str, request: p.EvictClient, now: float) -> p.Reply:
        state = self.state
        held = bool(state.calls.of(request.client) or state.waiters.of(request.client))
        self._end_session(request.client, now, died=True)
        return p.Done(request.id, held)

    def _cancel(self, client: str, request: p.Cancel, now: float) -> p.Reply:
        parked = self.state.waiters.find(client, request.call)
        if parked is not None:
            self._remove(parked)
            return p.Done(request.id, "removed")
        record = self.state.calls.take(client, request.call)
        return p.Done(request.id, "undone" if record is not None and record.cancel() else "kept")


def _undone(record: Record) -> None:
    record.undo()


def _completes(known: Record, request: p.Request) -> bool:
    """Whether this is the last step of a call with an answered first step."""
    return isinstance(request, p.Publish) and request.completes == request.id and known.kind is not p.Publish


def _same_answer(known: Record, request: p.Request) -> p.Reply:
    if known.kind is type(request) and known.reply is not None:
        return known.reply
    raise ProtocolError(
        f"call {request.id} was {known.kind.__name__} before, now it is {type(request).__name__}. Numbers of calls are "
        f"never used again."
    )
