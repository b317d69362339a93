# SPDX-License-Identifier: Apache-2.0
"""Pacing: a trainer issues permits, one per sample, and producers wait for them before they generate."""

# A permit is a sample of its own partition, so the queue's guarantees apply. Each permit is given out once. Requests
# wait in the controller in order of arrival. Sealing the partition ends all waits.

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal

import torch
from tensordict import TensorDict

import transfer_queue as tq
from lightning_tq.checks import check_int
from lightning_tq.producers import deadline_after, next_samples, wait_until
from transfer_queue import BatchTimeoutError, EndOfPartitionError, TransferQueueClient
from transfer_queue.errors import InvalidRequestError

PERMITS_PARTITION = "permits"
PACER_TASK = "pacer"
_FIELDS = ["version", "number"]


class Pacer:
    """Makes a producer wait while it would run further ahead of the trainer than its StalenessGuard allows.

    Several producers must put within ``turn()``, so that samples arrive in the order of their permits. Otherwise the
    samples of a slow producer come after those of later permits, and are trained too late.
    """

    def __init__(self, client: TransferQueueClient | None = None, partition: str = PERMITS_PARTITION) -> None:
        """Args:
        client: Default: this process's client (``transfer_queue.get_client()``).
        partition: That of StalenessGuard.
        """
        self._client = client if client is not None else tq.get_client()
        self._partition = partition
        self._ranges: deque[tuple[int, int]] = deque()  # permits that were taken and not used yet

    def admit(self, count: int, timeout_s: float | None = None) -> int:
        """Wait until ``count`` more samples may be generated. Returns the oldest policy version that may make them.

        Ask for as many as one put holds, and read the weights afterwards. The trainer waits for every admitted sample.

        Args:
            timeout_s: Longest wait. Default: no limit, with a report every 30 s.
        Raises:
            EndOfPartitionError: training has ended.
            BatchTimeoutError: not enough permits in time.
        """
        check_int("count", count, 1)
        meta = wait_until(
            deadline_after(timeout_s),
            partial(
                next_samples, partial(self._client.get_meta, _FIELDS, count, self._partition, task_name=PACER_TASK)
            ),
            f"permits for {count} samples: the trainer is behind, or issues fewer at once (at most "
            f"(max_staleness + 1) steps of samples).",
        )
        try:
            taken = self._client.get_data(meta)
        except KeyError as gone:
            raise EndOfPartitionError(
                f"the permits for {count} samples are void, because the training that issued them has ended."
            ) from gone
        self._client.clear_samples(meta)
        self._ranges.append((int(taken["number"].min()), int(taken["number"].max()) + 1))
        return int(taken["version"].max())

    @contextmanager
    def turn(self, timeout_s: float | None = None) -> Iterator[None]:
        """Wait for this producer's turn, then put: ``with pacer.turn(): client.put(...)``. All producers do, or none.

        After an exception it is still this producer's turn: put again within the next ``turn()``. The others wait.

        Args:
            timeout_s: Longest wait for producers with earlier permits. Default: no limit, with a report every 30 s.
        Raises:
            BatchTimeoutError: one of those may have died. The turn is still to come.
            InvalidRequestError: all permits were used.
        """
        if not self._ranges:
            raise InvalidRequestError("turn() needs permits from admit(), and all of them are used.")
        first, end = self._ranges[0]
        wait_until(
            deadline_after(timeout_s),
            partial(_wait_for_turn, self._client, self._partition, first),
            f"its turn: the samples of the permits before number {first} were not put yet.",
            " Check that their producer is alive.",
        )
        yield
        self._ranges.popleft()
        _open_turn(self._client, self._partition, end)
        self._client.clear_partition(_turn_partition(self._partition, first))


class Permits:
    """The trainer's side of pacing. One process at a time uses it."""

    def __init__(self, client: TransferQueueClient, partition: str = PERMITS_PARTITION) -> None:
        self._client = client
        self._partition = partition
        self.issued = 0
        """Permits issued so far, including those by earlier trainers of the same producers."""

    def begin(self) -> None:
        """Continue after an earlier trainer, or start again if that one had sealed the partition."""
        self._client.register_task(PACER_TASK, "SequentialSampler", tail="drop")
        known = self._client.get_stats()["partitions"].get(self._partition)
        if known is not None and known["sealed"]:
            for name in self._client.get_partition_list():
                if name == self._partition or name.startswith(_turn_partition(self._partition, "")):
                    self._client.clear_partition(name)
            known = None
        if known is None:
            _open_turn(self._client, self._partition, 0)
        self.issued = 0 if known is None else int(known["published"])

    def issue(self, up_to: int, version: int) -> None:
        """Issue permits up to this total number. The new ones need a policy of at least this version."""
        count = up_to - self.issued
        if count > 0:
            columns = {"version": torch.full((count,), version), "number": torch.arange(self.issued, up_to)}
            self._client.put(TensorDict(columns, batch_size=[count]), partition_id=self._partition)
            self.issued = up_to

    def end(self) -> None:
        """Seal the partition, so that producers end. Permits that no producer took are void."""
        self._client.seal_partition(self._partition)
        # Asking for more than there are ends the task: from now on, only a repeated request gets permits.
        with suppress(EndOfPartitionError, BatchTimeoutError):
            self._client.get_meta(_FIELDS, self.issued + 1, self._partition, task_name=PACER_TASK, timeout_s=0)
        # Keep the permits that a producer has just taken and still reads.
        indexes, consumed = self._client.get_consumption_status(PACER_TASK, self._partition)
        if indexes is None or consumed is None:  # the partition was cleared
            return
        taken = set(indexes[consumed == 1].tolist())
        permits = self._client.get_meta(partition_id=self._partition, mode="force_fetch")
        left = [position for position, index in enumerate(permits.global_indexes) if index not in taken]
        self._client.clear_samples(permits.select_samples(left))


# Turns: each range of permits has a partition named after its first number. It is sealed once everything before that
# number was put, and holds no samples, so that turns also work in a full queue.


def _turn_partition(partition: str, number: int | str) -> str:
    return f"{partition}@{number}"


def _open_turn(client: TransferQueueClient, partition: str, number: int) -> None:
    client.seal_partition(_turn_partition(partition, number))


def _wait_for_turn(client: TransferQueueClient, partition: str, number: int, wait_s: float) -> Literal[True] | None:
    try:
        client.get_meta(["turn"], 1, _turn_partition(partition, number), task_name=PACER_TASK, timeout_s=wait_s)
    except BatchTimeoutError:
        return None
    except EndOfPartitionError:
        return True
    return None
