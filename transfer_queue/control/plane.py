# SPDX-License-Identifier: Apache-2.0
"""The control plane: one pure machine that turns requests into replies. No sockets, clocks, threads or torch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transfer_queue import protocol as p
from transfer_queue.control import checkpoints, lifecycle, queries, writing
from transfer_queue.control.calls import Record
from transfer_queue.control.draw import running
from transfer_queue.control.serving import Service, check_fetch
from transfer_queue.control.state import Chore, PlaneConfig, PlaneState
from transfer_queue.control.waiters import Parked
from transfer_queue.errors import ProducersGoneError, ProtocolError, to_wire


class To(NamedTuple):
    """A reply and the client it goes to."""

    client: str
    reply: p.Reply


_LAST = (math.inf, math.inf)
_MOST_NAMED = 5
Verb = Callable[[str, Any, float], p.Reply | None]


class ControlPlane:
    """The state of the whole queue except the values. ``now`` is seconds of any monotonic clock, passed in."""

    def __init__(self, config: PlaneConfig | None = None) -> None:
        self._state = state = PlaneState(config or PlaneConfig())
        self._verdicts: list[float] = []
        self._verbs: dict[type[p.Request], Verb] = {
            p.Hello: self._hello,
            p.Goodbye: self._goodbye,
            p.CreatePartition: lambda client, request, now: lifecycle.create(state, request),
            p.SealPartition: lambda client, request, now: lifecycle.seal(state, request),
            p.RegisterTask: self._register_task,
            p.Reserve: self._write,
            p.Insert: self._write,
            p.ResolveKeys: self._rewrite,
            p.CheckFields: self._rewrite,
            p.Publish: lambda client, request, now: writing.publish(state, client, request, now),
            p.Fetch: self._fetch,
            p.Cancel: self._cancel,
            p.Ack: self._ack,
            p.Describe: lambda client, request, now: queries.describe(state, request),
            p.ConsumptionStatus: lambda client, request, now: queries.consumption_status(state, request),
            p.FieldStatus: lambda client, request, now: queries.production_status(state, request),
            p.ResetConsumption: self._reset_consumption,
            p.SetTags: lambda client, request, now: lifecycle.set_tags(state, request),
            p.ClearSamples: lambda client, request, now: lifecycle.clear_samples(state, client, request),
            p.ClearConsumed: lambda client, request, now: lifecycle.clear_consumed(state, client, request),
            p.ClearPartition: lambda client, request, now: lifecycle.clear_partition(state, client, request),
            p.ListPartitions: lambda client, request, now: p.Names(request.id, list(state.partitions)),
            p.KeysOf: lambda client, request, now: queries.keys_of(state, request),
            p.ListKeys: lambda client, request, now: queries.list_keys(state, request),
            p.ForgetTask: lambda client, request, now: lifecycle.forget_task(state, request),
            p.EvictClient: self._evict,
            p.GetStats: lambda client, request, now: queries.stats(state, request, now),
            p.Freeze: lambda client, request, now: checkpoints.freeze(state, client, request, now),
            p.ReadFrozen: lambda client, request, now: checkpoints.read_frozen(state, client, request),
            p.Thaw: lambda client, request, now: checkpoints.thaw(state, client, request),
            p.Stage: lambda client, request, now: checkpoints.stage(state, client, request),
            p.RestorePart: lambda client, request, now: checkpoints.restore_part(state, client, request, now),
            p.Restore: lambda client, request, now: checkpoints.restore(state, client, request, now),
        }

    @property
    def state(self) -> PlaneState:
        return self._state

    # ---- entry points ----

    def handle(self, client: str, request: p.Request, now: float) -> list[To]:
        """Serve one request. Returns its reply, unless it is parked, and replies to requests that it decides.

        An answered but not received call gets the same answer again; a call that is already parked gets none.
        """
        if self._state.waiters.find(client, request.id) is not None:
            return []
        reply = _guarded(request.id, partial(self._carry_out, client, request, now))
        own = [] if reply is None else [To(client, reply)]
        return own + self._settle_all(now)

    def _carry_out(self, client: str, request: p.Request, now: float) -> p.Reply | None:
        known = self._state.calls.get(client, request.id)
        if known is not None and not _completes(known, request):
            return _same_answer(known, request)
        verb = self._verbs.get(type(request))
        if verb is None:
            raise ProtocolError(f"the control plane has no verb {type(request).__name__}.")
        return verb(client, request, now)

    @property
    def running(self) -> str | None:
        """The sampler that is running and its task, for a watchdog in another thread."""
        return running()

    def received(self, client: str, calls: Iterable[int]) -> None:
        """The client has these calls' answers or no longer needs them: no cancel will undo them."""
        self._state.calls.received(client, calls)

    def settle(self, client: str, call: int) -> None:
        """The caller's remaining work for this call is done: values that it cleared are deleted."""
        self._state.calls.received(client, [call])

    def answered(self, client: str, call: int) -> p.Reply | None:
        """This call's answer, until the client has confirmed receipt."""
        record = self._state.calls.get(client, call)
        return None if record is None else record.reply

    def expire(self, now: float) -> list[To]:
        """Answer parked requests past their deadline or with lost producers, and free a little memory."""
        replies = []
        self._state.tidy()
        for parked in self._state.waiters.expired(now):
            reply = _guarded(parked.request.id, partial(self._too_late, parked, now))
            self._make_way(parked)
            if reply is not None:
                replies.append(To(parked.client, reply))
        if self._verdicts and self._verdicts[0] <= now:
            while self._verdicts and self._verdicts[0] <= now:
                heapq.heappop(self._verdicts)
            self._touch_all()
        return replies + self._settle(now)

    def next_deadline(self) -> float | None:
        """When ``expire`` has work: minus infinity for at once, None for never."""
        return self._next_due() if self._state.is_tidy else -math.inf

    def _next_due(self) -> float | None:
        parked = self._state.waiters.next_deadline()
        if not self._verdicts:
            return parked
        verdict = self._verdicts[0]
        return verdict if parked is None else min(parked, verdict)

    def client_gone(self, client: str, now: float, died: bool = True) -> list[To]:
        """The session has ended: its parked calls are removed, and its answered but not received calls are undone.

        A death may leave consumers without a producer.
        """
        self._end_session(client, now, died)
        return self._settle_all(now)

    def _end_session(self, client: str, now: float, died: bool) -> None:
        state = self._state
        for parked in state.waiters.of(client):
            self._remove(parked)
        for record in state.calls.end(client):
            record.undo()
        for verdict in state.producers.gone(client, died, now):
            heapq.heappush(self._verdicts, verdict)

    def _remove(self, parked: Parked) -> None:
        self._state.waiters.remove(parked)
        self._make_way(parked)

    def _touch_all(self, task: str | None = None) -> None:
        """Examine all fetches again, of this task or of all tasks."""
        for lane in self._state.waiters.lanes():
            if not lane.startswith("\0"):
                self._state.touch(lane, task)

    def _make_way(self, parked: Parked) -> None:
        """Examine the requests behind a removed one. Writers are examined after every request anyway."""
        if isinstance(parked.request, p.Fetch):
            self._state.touch(parked.lane, parked.request.task)
        elif parked.lane == writing.WRITERS:
            self._state.writers.remove(parked)

    def take_chores(self) -> list[Chore]:
        """Return the values that became unused since the last call and must be deleted."""
        chores, self._state.chores = self._state.chores, []
        return chores

    def held_up_by(self) -> str:
        """A sentence that names the tasks that keep the queue full; empty if there are none."""
        return writing.held_up_by(self._state).rstrip()

    def check_invariants(self) -> None:
        """Raise AssertionError if the records disagree; for tests."""
        seen = [partition.table.column("index") for partition in self._state.partitions.values()]
        together = np.concatenate(seen) if seen else np.empty(0)
        assert len(np.unique(together)) == len(together), "an index belongs to one partition"
        for partition in self._state.partitions.values():
            partition.check_invariants()
        used = sum(partition.num_used for partition in self._state.partitions.values())
        assert used == self._state.allocator.num_used, "samples and reservations are counted"
        assert not self._state.touched, "every touched lane was served"

    def _settle_all(self, now: float) -> list[To]:
        """Also serve what is due at once: requests that don't wait, or producers that were lost long ago."""
        replies = self._settle(now)
        due = self._next_due()
        return replies if due is None or due > now else replies + self.expire(now)

    def _settle(self, now: float) -> list[To]:
        """End fetches of a cleared partition, admit parked writers, and serve every dirty partition.

        Without parked requests, only the first applies.
        """
        state = self._state
        replies = [To(parked.client, p.Ended(parked.request.id, "cleared")) for parked in state.cut_off]
        state.cut_off.clear()
        if not state.waiters:
            state.touched.clear()
            return replies
        replies.extend(self._admit_freezers(now))
        replies.extend(self._admit_rewriters(now))
        replies.extend(self._admit_writers(now))
        while state.touched:
            name = next(iter(state.touched))
            replies.extend(self._serve(name, state.touched.pop(name), now))
        return replies

    def _too_late(self, parked: Parked, now: float) -> p.Reply:
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
        """Try to answer at once. Waiting fetches are examined only if this answer may affect them."""
        state, lane, task = self._state, fetch.partition, fetch.task
        check_fetch(fetch, state.tasks.get(task))
        order = math.inf if fetch.batch_index is None else float(fetch.batch_index)
        deadline = now + fetch.wait_s
        partition = state.partitions.get(lane)
        settled = fetch.acks and partition is not None and partition.consumer(task).ledger.ack(fetch.acks)
        if settled and not state.waiters.is_first(lane, task, _LAST):
            state.waiters.park(client, fetch, now, deadline, lane, order)
            state.touch(lane, task)  # earlier fetches may have waited for a batch that is acknowledged now
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
        """Answer what can be answered. Within a task no fetch draws past an earlier one that still waits."""
        replies = []
        waiting: set[str] = set()
        for parked in self._state.waiters.lane(lane):
            task = parked.request.task
            if only not in (None, task):
                continue
            answer = partial(self._answer, parked.client, parked.request, now, may_draw=task not in waiting)
            reply = _guarded(parked.request.id, answer)
            if reply is None:
                waiting.add(task)
                continue
            if task in waiting:
                # A repeated batch may have been the last one that the earlier fetches waited for.
                self._state.touch(lane, task)
            self._state.waiters.remove(parked)
            replies.append(To(parked.client, reply))
        return replies

    def _answer(self, client: str, fetch: p.Fetch, now: float, may_draw: bool, waited: bool = False) -> p.Reply | None:
        partition = self._state.partitions.get(fetch.partition)
        if fetch.after is not None and (partition is None or not partition.gave(fetch.after, fetch.task)):
            return p.Ended(fetch.id, "cleared")
        if partition is None:
            return self._abandoned(fetch, now)
        service = Service(fetch, partition, self._state.tasks.get(fetch.task))
        reply = service.answer(now, may_draw, waited)
        if isinstance(reply, p.Batch) and fetch.batch_index is None:
            self._state.calls.add(client, fetch.id, service.taken(self._state, reply))
        return reply or self._abandoned(fetch, now)

    def _abandoned(self, fetch: p.Fetch, now: float) -> p.Failed | None:
        missing = self._state.producers.missing(fetch.fields, now)
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
        if partition is None:
            return p.NotReady(fetch.id, task.needed(fetch), 0, 0)
        reply = Service(fetch, partition, task).not_ready(now)
        if not partition.num_held:
            return reply
        owed_by = writing.writers_of(self._state, partition)[:_MOST_NAMED]
        return msgspec.structs.replace(reply, reserved=partition.num_held, owed_by=owed_by)

    # ---- sessions ----

    def _hello(self, client: str, request: p.Hello, now: float) -> p.Reply:
        p.check_version(request)
        return p.Done(request.id)

    def _goodbye(self, client: str, request: p.Goodbye, now: float) -> p.Reply:
        self._end_session(client, now, died=False)
        return p.Done(request.id)

    def _evict(self, client: str, request: p.EvictClient, now: float) -> p.Reply:
        state = self._state
        held = bool(state.calls.of(request.client) or state.waiters.of(request.client))
        self._end_session(request.client, now, died=True)
        return p.Done(request.id, held)

    def _cancel(self, client: str, request: p.Cancel, now: float) -> p.Reply:
        parked = self._state.waiters.find(client, request.call)
        if parked is not None:
            self._remove(parked)
            return p.Done(request.id, "removed")
        record = self._state.calls.take(client, request.call)
        return p.Done(request.id, "undone" if record is not None and record.undo() else "kept")

    # ---- acks and settings ----

    def _ack(self, client: str, request: p.Ack, now: float) -> p.Reply:
        partition = self._state.partitions.get(request.partition)
        consumer = None if partition is None else partition.consumers.get(request.task)
        settled = 0 if consumer is None else consumer.ledger.ack(request.tokens, request.earlier)
        if settled:
            self._state.touch(request.partition, request.task)  # a reader may wait for fields of this batch
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
        self._touch_all(request.task)
        return p.Done(request.id)

    # ---- producers ----

    def _write(self, client: str, request: writing.Writer, now: float) -> p.Reply | None:
        """Serve a writer at once if no other waits or it needs no room; otherwise park it."""
        state, count = self._state, writing.count_of(self._state, request)
        reply = None
        if count and len(state.writers):
            writing.check(state, request)
        else:
            reply = writing.admit(state, client, request)
        if reply is None:
            deadline = now + request.wait_s
            state.writers.add(state.waiters.park(client, request, now, deadline, writing.WRITERS, 0.0), count, deadline)
        return reply

    def _admit_writers(self, now: float) -> list[To]:
        """Answer writers that fit, as the wait queue allows, and writers that can no longer succeed."""
        state, replies = self._state, []
        while True:
            for parked in state.writers.items():
                refused = _guarded(parked.request.id, partial(writing.check, state, parked.request))
                if refused is not None:
                    replies.append(self._answer_writer(parked, refused))
                elif isinstance(parked.request, p.ResolveKeys):  # its keys may have been created or cleared
                    state.writers.resize(parked, writing.count_of(state, parked.request))
            room = state.room()
            admitted = state.writers.admit(2**62 if room is None else room)
            if not admitted:
                return replies
            for parked in admitted:  # one of them may seal the partition that others wait for
                reply = _guarded(parked.request.id, partial(writing.admit, state, parked.client, parked.request))
                assert reply is not None, "there is room for what the queue of writers admits"
                replies.append(self._answer_writer(parked, reply))

    def _answer_writer(self, parked: Parked, reply: p.Reply) -> To:
        self._state.waiters.remove(parked)
        self._state.writers.remove(parked)
        return To(parked.client, reply)

    # ---- checkpoints ----

    def _admit_freezers(self, now: float) -> list[To]:
        """Answer freezes once their writers are done."""
        state, replies = self._state, []
        while not state.frozen.has_leaves and (parked := state.waiters.first_come(checkpoints.FREEZERS)) is not None:
            state.waiters.remove(parked)
            reply = _guarded(parked.request.id, partial(checkpoints.take, state, parked.client, parked.request, now))
            if reply is not None:
                replies.append(To(parked.client, reply))
        return replies

    def _rewrite(self, client: str, request: checkpoints.Rewrite, now: float) -> p.Reply | None:
        if checkpoints.park_rewrite(self._state, client, request, now):
            return None
        if isinstance(request, p.CheckFields):
            return writing.check_fields(self._state, client, request)
        return self._write(client, request, now)

    def _admit_rewriters(self, now: float) -> list[To]:
        """Serve writers that no longer wait for a checkpoint; they may then wait for room."""
        replies = []
        for client, request in checkpoints.take_rewriters(self._state):
            reply = _guarded(request.id, partial(self._rewrite, client, request, now))
            if reply is not None:
                replies.append(To(client, reply))
        return replies


def _guarded(call: int, answer: Callable[[], p.Reply | None]) -> p.Reply | None:
    """An error of one request is the answer to that request only."""
    try:
        return answer()
    except Exception as error:  # the only place: neither user code nor a bug of ours may end the queue
        return p.Failed(call, *to_wire(error))


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
