# SPDX-License-Identifier: Apache-2.0
"""The world of groups: a feeder, workers that lease, a process that writes rewards, and ranks that train whole groups.

A group's number says what must become of it, see ``FATES``. A group has two parts of some rows each.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import transfer_queue as tq
from tests.chaos.actor import Role, check_settled
from tests.chaos.rows import WrongValueError, check_rows, rows_of
from tests.chaos.streams import save_queue
from transfer_queue.errors import InvalidRequestError, LeaseLostError, SampleClearedError, StorageFullError

PARTITION, TASK, PARTS = "groups", "actor", 2
FATES = {3: "rejected", 5: "failed", 7: "rejected", 9: "expired"}
"""By the last digit of its number: 3 a worker rejects, 5 fails because of the sample, the gate refuses 7, 9 is slow."""
FIELDS = ("number", "tokens", "vector", "text")
_SLOW, _WAIT_S, _DEADLINE_S = 9, 1.0, 1.5
_MANY = 1000


def fate_of(number: int) -> str:
    """How this group ends where nothing is too old."""
    return FATES.get(number % 10, "trained")


def numbers_of(group: int, part: int, rows: int) -> list[int]:
    """Of the rows of a part."""
    first = group * _MANY + part * rows
    return list(range(first, first + rows))


def reward_of(row: int) -> float:
    """The rewards of a group differ, but for those that the gate is to refuse."""
    return 0.0 if row // _MANY % 10 == 7 else float(row % 2)


def prepare(client: Any, counts: dict[str, int], shape: dict[str, Any]) -> None:
    """In a new queue, before anybody reads."""
    sampler = tq.GroupSampler(
        groups=shape["groups"], ahead=shape["ahead"], gate="std(reward) > 0", stale=shape["stale"],
        max_staleness=shape["max_staleness"],
    )  # fmt: skip
    client.register_task(TASK, sampler, dp_size=counts["trainer"], tail="uneven_ok")
    if counts.get("rewarder"):
        client.register_task("reward", dp_size=counts["rewarder"], tail="uneven_ok")
    client.create_partition(PARTITION)


def size(counts: dict[str, int], shape: dict[str, Any]) -> int:
    """How many groups are to be trained."""
    return sum(fate_of(number) == "trained" for number in range(shape["count"]))


class Feeder(Role):
    """Goes on after the groups that the queue was given."""

    def run(self) -> None:
        self.await_end_of_predecessors()
        known = self.client.get_stats()["partitions"][PARTITION]
        number = known.get("groups", {}).get("added", 0)
        while number < self.shape["count"] and not known["sealed"]:
            heads = self._next(number)
            slow = {"deadline_s": _DEADLINE_S} if heads[0] % 10 == _SLOW else {}
            self.at_risk()
            try:
                self.client.add_groups(
                    rows_of(heads, self.shape["width"]), PARTITION, keys=[f"g{head}" for head in heads], parts=PARTS,
                    tasks=[TASK], worker_attempts=1000, tags=[{"n": head} for head in heads], **slow,
                )  # fmt: skip
            except StorageFullError as error:
                self.note("full", text=str(error)[:200])
                continue
            self.note("added", first=heads[0], count=len(heads))
            number += len(heads)
        self.client.seal_partition(PARTITION)

    def _next(self, number: int) -> list[int]:
        """Slow groups have terms of their own, so they are added alone."""
        if number % 10 == _SLOW:
            return [number]
        tens = number - number % 10
        return list(range(number, min(tens + _SLOW, self.shape["count"])))


class Worker(Role):
    def run(self) -> None:
        self._rng = random.Random(f"{self.number}/{len(self.before)}")
        leases = self.client.leases(
            PARTITION, self._rng.choice((1, 3)), lease_s=self.shape["lease_s"], keep=self.shape["keep"]
        )
        for lease in leases:
            [number] = check_rows(lease.head, self.shape["width"])
            self.note("leased", group=number, attempt=lease.attempt, parts=lease.parts)
            try:
                self.at_risk()
                self._work(number, lease)
            except (LeaseLostError, SampleClearedError) as error:  # the latter for rows of earlier holders
                self.note("lease lost", group=number, text=str(error)[:200])
            except StorageFullError as error:
                self.note("full", text=str(error)[:200])
                self._give_back(lease)

    def _give_back(self, lease: Any) -> None:
        with suppress(LeaseLostError):
            lease.release("the queue is full", blame="nobody")

    def _work(self, number: int, lease: Any) -> None:
        kind, rows = number % 10, self.shape["rows"]
        if kind == 3:
            lease.reject("a worker has no use for it")
        elif kind == 5:
            lease.release("it is too long", blame="sample")
        elif kind == _SLOW:
            lease.put(*self._rows(number, lease.parts[:1], rows), part=lease.parts[0])  # and never closes it
        else:
            self._make(number, lease, rows)
            self.note("closed", group=number, attempt=lease.attempt)

    def _make(self, number: int, lease: Any, rows: int) -> None:
        """In one message, or part by part, or a row at a time."""
        there = {int(n) for n in self._members(lease)}
        if there or self._rng.random() < 0.5:
            for part in lease.parts:
                missing = [n for n in numbers_of(number, part, rows) if n not in there]
                for row in missing[:-1]:
                    self.at_risk()
                    lease.put(*self._columns([row]), part=part)
                lease.close(*(self._columns(missing[-1:]) if missing else (None, None)), part=part)
        else:
            lease.close(*self._rows(number, lease.parts, rows))

    def _members(self, lease: Any) -> list[int]:
        members = lease.members
        return self.client.get_data(members)["number"].tolist() if members.size else []

    def _rows(self, number: int, parts: list[int], rows: int) -> tuple[Any, Any]:
        return self._columns([row for part in parts for row in numbers_of(number, part, rows)])

    def _columns(self, numbers: list[int]) -> tuple[Any, Any]:
        apart = self.counts.get("rewarder")
        tags = [{"n": n, **({} if apart else {"reward": reward_of(n)})} for n in numbers]
        return rows_of(numbers, self.shape["width"]), tags


class Rewarder(Role):
    """Writes the tag that the gate waits for, row by row where some of a batch are gone."""

    def run(self) -> None:
        batch = 0
        while True:
            self.at_risk()
            at = {"dp_rank": self.number, "batch_index": batch}
            try:
                meta = self.client.get_meta(
                    ["number"], 4, PARTITION, task_name="reward", sampling_config=at, timeout_s=_WAIT_S
                )  # fmt: skip
                self._reward(meta)
                self.note("scored", numbers=list(meta.global_indexes))
                self.client.ack(meta, "reward")
            except tq.BatchTimeoutError:
                continue
            except tq.EndOfPartitionError:
                return
            except InvalidRequestError as error:
                check_settled(error)
            batch += 1

    def _reward(self, meta: Any) -> None:
        try:
            numbers = self.client.get_data(meta)["number"].tolist()
            self._write(meta, numbers)
        except SampleClearedError:  # its group has left meanwhile
            if meta.size > 1:
                for at in range(meta.size):
                    self._reward(meta.select_samples([at]))

    def _write(self, meta: Any, numbers: list[int]) -> None:
        meta.update_custom_meta([{"reward": reward_of(number)} for number in numbers])
        self.client.set_custom_meta(meta)


class Trainer(Role):
    """Rank 0 says which version trains, and saves the queue."""

    def run(self) -> None:
        batch, unsaved = 0, None
        while True:
            self.at_risk()
            at = {"dp_rank": self.number, "batch_index": batch}
            try:
                meta = self.client.get_meta(
                    list(FIELDS), partition_id=PARTITION, task_name=TASK, sampling_config=at, timeout_s=_WAIT_S
                )  # fmt: skip
            except tq.BatchTimeoutError:
                continue
            except tq.EndOfPartitionError:
                break
            except InvalidRequestError as error:
                check_settled(error)
                batch += 1
                continue
            self._train(batch, meta)
            unsaved, batch = (batch, meta), batch + 1
            if batch % self.shape["save_every"] == 0:
                self._save(*unsaved)
                unsaved = None
        if unsaved is not None:
            self._save(*unsaved)

    def _train(self, batch: int, meta: Any) -> None:
        width = self.shape["width"]
        numbers = check_rows(self.client.get_data(meta, layout="dense"), width)
        heads = check_rows(self.client.get_heads(meta, list(FIELDS), layout="dense"), width)
        for at, group in enumerate(heads):
            mine = [number for number, owner in zip(numbers, meta.group_index, strict=True) if owner == at]
            wanted = [n for part in range(PARTS) for n in numbers_of(group, part, self.shape["rows"])]
            if mine != wanted:
                raise WrongValueError(f"group {group} came with rows {mine}, and {wanted} belong to it")
        self.note("trained", batch=batch, numbers=heads, versions=list(meta.group_versions.values()))
        if self.number == 0 and self.shape["max_staleness"] is not None:
            self.client.advance(PARTITION, batch + 1, resumed=True)

    def _save(self, batch: int, meta: Any) -> None:
        self.note("acking", batch=batch)
        self.client.ack(meta, TASK, earlier=True)
        if self.number == 0 and batch % (2 * self.shape["save_every"]) == self.shape["save_every"] - 1:
            save_queue(self)


ROLES: dict[str, type[Role]] = {"feeder": Feeder, "worker": Worker, "rewarder": Rewarder, "trainer": Trainer}
