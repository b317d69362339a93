# SPDX-License-Identifier: Apache-2.0
"""The control plane: one pure machine that turns requests into replies. No sockets, clocks, threads or torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from transfer_queue import protocol as p
from transfer_queue.calls import Answer, Call, Calls, Steps, Wait
from transfer_queue.control import (
    checkpoints,
    fetches,
    group_work,
    key_waits,
    leasing,
    lifecycle,
    memberships,
    queries,
    writing,
)
from transfer_queue.control.serving import Unread
from transfer_queue.control.state import PlaneConfig, PlaneState

PlaneVerb = Callable[[Call, Any], "p.Reply | Wait | Steps"]
"""A verb of the control plane, which always replies."""
_VERBS: dict[type[p.Request], Callable[[PlaneState, Call, Any], p.Reply | Wait | Steps]] = {
    p.CreatePartition: lifecycle.create,
    p.SealPartition: lifecycle.seal,
    p.RegisterTask: lifecycle.register_task,
    p.Reserve: writing.write,
    p.Insert: writing.write,
    p.ResolveKeys: writing.rewrite,
    p.CheckFields: writing.rewrite,
    p.Publish: writing.publish,
    p.Fetch: fetches.fetch,
    p.Ack: lifecycle.ack,
    p.Describe: queries.describe,
    p.ConsumptionStatus: queries.consumption_status,
    p.FieldStatus: queries.production_status,
    p.ResetConsumption: lifecycle.reset_consumption,
    p.SetTags: lifecycle.set_tags,
    p.ClearSamples: lifecycle.clear_samples,
    p.ClearConsumed: lifecycle.clear_consumed,
    p.ClearPartition: lifecycle.clear_partition,
    p.ListPartitions: queries.list_partitions,
    p.KeysOf: queries.keys_of,
    p.ListKeys: queries.list_keys,
    p.WatchKeys: key_waits.wait_for_keys,
    p.WaitKeys: key_waits.wait_for_keys,
    p.ForgetTask: lifecycle.forget_task,
    p.ExpectProducers: lifecycle.expect_producers,
    p.NoteExit: lifecycle.note_exit,
    p.LeaseGroups: leasing.lease,
    p.EndLease: leasing.end_lease,
    p.RenewLeases: leasing.renew,
    p.Advance: leasing.advance,
    p.Trained: leasing.trained,
    p.RetryGroups: leasing.retry,
    p.RejectGroups: leasing.reject,
    p.GetStats: queries.stats,
    p.JoinUnit: memberships.join_unit,
    p.ListLost: queries.list_lost,
    p.ListUnits: memberships.list_units,
    p.WatchRun: memberships.watch_run,
    p.LeaveRun: memberships.leave_run,
    p.Freeze: checkpoints.freeze,
    p.ReadFrozen: checkpoints.read_frozen,
    p.Thaw: checkpoints.thaw,
    p.Stage: checkpoints.stage,
    p.RestorePart: checkpoints.restore_part,
    p.Restore: checkpoints.restore,
}


class To(NamedTuple):
    """A reply and the client it goes to."""

    client: str
    reply: p.Reply


class ControlPlane:
    """The state of the whole queue except the values. ``now`` is seconds of any monotonic clock, passed in."""

    def __init__(self, config: PlaneConfig | None = None, calls: Calls | None = None) -> None:
        """``calls``: the room of its process; None: one of its own."""
        self.calls = calls or Calls()
        self.state = PlaneState(config or PlaneConfig(), self.calls)
        self.state.leases.lost = partial(group_work.lost, self.state)
        self.verbs: dict[type[p.Request], PlaneVerb] = {
            kind: partial(verb, self.state) for kind, verb in _VERBS.items()
        }
        self.verbs |= {p.Cancel: self._cancel, p.EvictClient: self._evict}
        self.calls.verbs |= self.verbs
        self.calls.steps.add(p.Publish)

    # ---- entry points of a plane without a server ----

    def handle(self, client: str, request: p.Request, now: float) -> list[To]:
        """Serve one request. Returns its reply, unless it waits, and replies to requests that it decides."""
        return _to(self.calls.handle(Call(client, request, now), now))

    def expire(self, now: float) -> list[To]:
        """Answer waiting requests past their deadline or with lost producers, and do a little of what takes long."""
        return _to(self.calls.expire(now))

    def next_deadline(self) -> float | None:
        """When ``expire`` has work: minus infinity for at once, None for never."""
        return self.calls.next_deadline()

    def client_gone(self, client: str, now: float, died: bool = True) -> list[To]:
        """The session has ended. A death may leave consumers without a producer."""
        return _to(self.calls.client_gone(client, now, died))

    def received(self, client: str, numbers: Iterable[int]) -> None:
        """The client has these calls' answers, or no longer needs them: no cancel will undo them."""
        self.calls.received(client, numbers)

    def read(self, client: str, numbers: Iterable[int]) -> None:
        """The client has read the batches of these calls, or can't read them any more: they may be cleared."""
        batches = [number for number in numbers if self.calls.held(client, number, Unread)]
        self.calls.received(client, batches)
        self.calls.done(client, batches)

    # ---- verbs about calls ----

    def _cancel(self, call: Call, request: p.Cancel) -> p.Reply:
        return p.Done(request.id, self.calls.cancel(call.client, request.call))

    def _evict(self, call: Call, request: p.EvictClient) -> p.Reply:
        memberships.check_evict(self.state, call, request)
        held = bool(self.calls.of(request.client))
        self.calls.end(request.client, died=True)
        return p.Done(request.id, held)

    # ---- what its process does ----

    def take_unused(self) -> list[p.Indexes]:
        """The samples whose values became unused since the last call, and must be deleted."""
        unused, self.state.unused = self.state.unused, []
        return unused

    def held_up_by(self) -> str:
        """A sentence that names the tasks that keep the queue full; empty if there are none."""
        return writing.held_up_by(self.state).rstrip()

    def check_invariants(self) -> None:
        """Raise AssertionError if the tables disagree; for tests."""
        seen = [partition.table.column("index") for partition in self.state.partitions.values()]
        together = np.concatenate(seen) if seen else np.empty(0)
        assert len(np.unique(together)) == len(together), "an index belongs to one partition"
        for partition in self.state.partitions.values():
            partition.check_invariants()
        serials = [partition.serial for partition in self.state.partitions.values()]
        assert serials == sorted(serials), "pages of statistics go by these"
        used = sum(partition.num_used for partition in self.state.partitions.values())
        assert used == self.state.allocator.num_used, "samples and reservations are counted"
        self.calls.check_invariants()


def _to(answers: list[Answer]) -> list[To]:
    return [To(answer.call.client, answer.reply) for answer in answers]
