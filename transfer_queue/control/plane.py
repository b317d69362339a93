# SPDX-License-Identifier: Apache-2.0
"""The control plane: one pure machine that turns requests into replies. No sockets, clocks, threads or torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from transfer_queue import protocol as p
from transfer_queue.calls import Call, Calls, Steps, Wait
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
    p.MoveOn: leasing.move_on,
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


class ControlPlane:
    """The state of the whole queue except the values. ``now`` is seconds of any monotonic clock, passed in."""

    def __init__(self, config: PlaneConfig | None = None) -> None:
        self.calls = Calls()
        """The room of calls of its process, which carries out ``verbs``."""
        self.state = PlaneState(config or PlaneConfig(), self.calls)
        self.state.leases.lost = partial(group_work.lost, self.state)
        self.verbs: dict[type[p.Request], PlaneVerb] = {
            kind: partial(verb, self.state) for kind, verb in _VERBS.items()
        }
        self.calls.steps.add(p.Publish)

    def read(self, client: str, numbers: Iterable[int]) -> None:
        """The client has read the batches of these calls, or can't read them any more: they may be cleared."""
        batches = [number for number in numbers if self.calls.held(client, number, Unread)]
        self.calls.received(client, batches)
        self.calls.done(client, batches)

    def take_unused(self) -> list[p.Indexes]:
        """The samples whose values became unused since the last call, and must be deleted: one array, or none."""
        unused, self.state.unused = self.state.unused, []
        return [np.concatenate(unused)] if unused else unused
