# SPDX-License-Identifier: Apache-2.0
"""Workers and trainers of groups on a plane, in short words."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tests.local_plane import LocalPlane, To
from transfer_queue import GroupSampler
from transfer_queue import protocol as p

SPEC = p.FieldSpec("int64", ())
PART = "train"
FEEDER, WORKER, TRAINER = "feeder", "worker", "trainer"


def placed(unit: int, num_rows: int) -> p.FieldSpec:
    return msgspec.structs.replace(SPEC, units=[(unit, num_rows)] if unit else None)


class Queue:
    """A plane with its clock. Each call is confirmed at once, unless it is to be cancelled."""

    def __init__(self, check: bool = True, **config: Any) -> None:
        self.plane = LocalPlane(**config)
        self.now = 0.0
        self.check = check
        self.inbox: list[To] = []
        """Replies to calls that waited."""
        self._ids = itertools.count(1)

    # ---- calls ----

    def ask(self, client: str, kind: Any, *args: Any, confirm: bool = True, **more: Any) -> Any:
        """The reply; None while it waits."""
        return self.send(client, kind(next(self._ids), *args, **more), confirm)

    def number(self) -> int:
        return next(self._ids)

    def send(self, client: str, request: p.Request, confirm: bool = True) -> Any:
        own = None
        for to in self.plane.handle(client, request, self.now):
            if (to.client, to.reply.id) == (client, request.id):
                own = to.reply
            else:
                self._keep(to)
        self._settle()
        if own is not None and confirm:
            self.confirm(client, own.id)
        return own

    def confirm(self, client: str, number: int) -> None:
        self.plane.received(client, [number])
        self.plane.read(client, [number])

    def _keep(self, to: To) -> None:
        self.inbox.append(to)
        self.confirm(to.client, to.reply.id)

    def _settle(self) -> None:
        while (due := self.plane.next_deadline()) is not None and due == -float("inf"):
            for to in self.plane.expire(self.now):
                self._keep(to)
        if self.check:
            self.plane.check_invariants()

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.plane.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            for to in self.plane.expire(self.now):
                self._keep(to)
            self._settle()
        self.now = end

    def gone(self, client: str, died: bool = True) -> None:
        for to in self.plane.client_gone(client, self.now, died):
            self._keep(to)
        self._settle()

    def done(self, reply: Any) -> Any:
        assert not isinstance(reply, p.Failed), reply
        return reply

    # ---- heads and tasks ----

    def register(self, task: str, sampler: GroupSampler, **more: Any) -> Any:
        return self.done(self.ask(TRAINER, p.RegisterTask, task, sampler.spec(), **more))

    def add(
        self, count: int, tasks: Sequence[str] = (), partition: str = PART, keys: list[str] | None = None,
        tags: Mapping[int, Any] | None = None, **terms: Any,
    ) -> list[int]:  # fmt: skip
        """The heads' indexes."""
        asked = p.Terms(tasks=tuple(tasks), **terms)
        number = next(self._ids)
        keys = [f"{partition}-{number}-{at}" for at in range(count)] if keys is None else keys
        begin = p.ResolveKeys(number, partition, keys, True, True, {"prompt": SPEC}, 0.0, ["prompt"], asked)
        batch = self.done(self.send(FEEDER, begin, confirm=False))
        own = p.unpack_indexes(batch.indexes).tolist()
        tagged = {own[at]: dict(tag) for at, tag in (tags or {}).items()}
        publish = p.Publish(
            next(self._ids), partition, batch.indexes, {"prompt": SPEC}, tagged, False, number, role=asked
        )
        self.done(self.send(FEEDER, publish))
        return own

    # ---- workers ----

    def lease(self, worker: str = WORKER, count: int = 1, partition: str | list[str] = PART, **more: Any) -> Any:
        """The leases; None while it waits; or what else came."""
        names = [partition] if isinstance(partition, str) else partition
        reply = self.ask(worker, p.LeaseGroups, names, count, **more)
        return reply.leases if isinstance(reply, p.LeasedGroups) else reply

    def put(
        self, lease: Any, rows: int = 1, tags: Sequence[Mapping[str, Any]] = (), closes: bool = True,
        worker: str = WORKER, parts: list[int] | None = None, fields: Sequence[str] = ("resp",), unit: int = 0,
    ) -> Any:  # fmt: skip
        """Rows per part, in this storage unit. The indexes, or the error."""
        parts = list(lease.parts) if parts is None else parts
        members = p.Members(lease.token, lease.head, parts, closes)
        specs, number = dict.fromkeys(fields, placed(unit, rows * len(parts))), next(self._ids)
        begin = p.Reserve(number, lease.partition, rows * len(parts), specs, 0.0, members)
        reserved = self.send(worker, begin, confirm=False)
        if isinstance(reserved, p.Failed):
            return reserved
        own = p.unpack_indexes(reserved.indexes).tolist()
        tagged = {index: dict(tag) for index, tag in zip(own, tags, strict=False)}
        publish = p.Publish(
            next(self._ids), lease.partition, reserved.indexes, specs, tagged, False, number, role=members
        )
        reply = self.send(worker, publish)
        if isinstance(reply, p.Failed):
            self.ask(worker, p.Cancel, number)
            return reply
        return own

    def end(self, lease: Any, how: str, reason: str = "", blame: str = "worker", worker: str = WORKER) -> Any:
        members = p.Members(lease.token, lease.head, list(lease.parts))
        return self.ask(worker, p.EndLease, lease.partition, members, how, reason, blame)

    def work(
        self, count: int = 1, rows: int = 1, reward: float | None = None, worker: str = WORKER, **more: Any
    ) -> list[int]:
        """Lease up to so many groups and close them. Their heads."""
        leases = self.lease(worker, count, **more)
        if not isinstance(leases, list):
            return []
        for lease in leases:
            num_rows = rows * len(lease.parts)
            tags = [] if reward is None else [{"reward": reward}] * num_rows
            assert isinstance(self.put(lease, rows, tags, worker=worker), list)
        return [lease.head for lease in leases]

    # ---- trainers ----

    def fetch(
        self, task: str, batch: int | None = None, rank: int | None = None, client: str = TRAINER,
        partition: str = PART, wait_s: float = 0.0, fields: Sequence[str] = ("resp",), **more: Any,
    ) -> Any:  # fmt: skip
        return self.ask(client, p.Fetch, partition, task, list(fields), 1, rank, batch, wait_s=wait_s, **more)

    def heads(self, batch: Any) -> list[int]:
        """Of a batch, each once."""
        assert isinstance(batch, p.Batch), batch
        return list(dict.fromkeys(p.unpack_indexes(batch.heads).tolist()))

    def draw(self, task: str, **more: Any) -> list[int]:
        """The heads of the next batch; [] if there is none."""
        reply = self.fetch(task, **more)
        return self.heads(reply) if isinstance(reply, p.Batch) else []

    def advance(self, version: int, partition: str = PART, **more: Any) -> Any:
        return self.ask(TRAINER, p.Advance, partition, version, **more)

    def reject(self, heads: list[int], partition: str = PART, reason: str = "no use") -> Any:
        members = [index for head in heads for index in self.members(head, partition)]
        packed = p.pack_indexes(np.array(members, dtype=np.int64))
        return self.ask(TRAINER, p.RejectGroups, partition, packed, reason)

    # ---- what is seen ----

    def members(self, head: int, partition: str = PART) -> list[int]:
        groups = self.plane.state.partitions[partition].groups
        assert groups is not None
        return groups.live[head].all_members() if head in groups.live else []

    def states(self, partition: str = PART) -> dict[int, str]:
        """By head."""
        found = self.plane.state.partitions.get(partition)
        if found is None or found.groups is None:
            return {}
        known = {index: found.tags.get(index) or {} for _, index in found.keys.items()}
        return {index: tags["group.state"] for index, tags in known.items() if "group.state" in tags}

    def tags(self, index: int, partition: str = PART) -> Mapping[str, Any]:
        return self.plane.state.partitions[partition].tags.get(index) or {}

    def charged(self, task: str) -> int:
        return self.plane.state.leases.trainers[task].charged

    def check_nothing_held(self) -> None:
        """Nothing waits, and no session holds anything."""
        assert self.plane.state.waits.count == 0
        assert self.plane.calls.clients() == []
        assert not self.plane.state.leases.workers
