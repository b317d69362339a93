# SPDX-License-Identifier: Apache-2.0
"""Pacing: leave to generate. A trainer grants it, a sample at a time; producers wait for it before they begin."""

# A grant is a sample of a partition of its own, so that all the queue knows of samples holds for it: each is given
# once, whoever asks; who asks waits parked in the controller, in order of arrival; sealing ends the wait of all.

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue import BatchMeta, BatchTimeoutError, EndOfPartitionError, TransferQueueClient
from transfer_queue.errors import InvalidRequestError

logger = logging.getLogger(__name__)

PARTITION = "grants"
TASK = "pacer"
_FIELDS = ["version", "number"]
_REPORT_EVERY_S = 30.0


class Pacer:
    """Makes a producer wait while it would run further ahead of the trainer than its StalenessGuard allows.

    With several producers each puts within ``turn()``, so that samples come in the order of their leave: else a slow
    one is overtaken by what others were allowed later, and its samples are trained too late.
    """

    def __init__(self, client: TransferQueueClient | None = None, partition: str = PARTITION) -> None:
        """Args:
        client: Default: this process' client (``transfer_queue.get_client()``).
        partition: As StalenessGuard has it.
        """
        self._client = client if client is not None else tq.get_client()
        self._partition = partition
        self._ranges: deque[tuple[int, int]] = deque()  # of leave that was taken and not put yet

    def admit(self, count: int, timeout_s: float | None = None) -> int:
        """Wait until ``count`` more samples may be generated. Returns the least policy version that may make them.

        What is admitted must be put: the trainer waits for it. Ask for what one put holds, and take the weights after.

        Args:
            timeout_s: Longest wait. Default: wait, and report every 30 s.
        Raises:
            EndOfPartitionError: training has ended.
            BatchTimeoutError: not in time.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidRequestError(f"admit needs a number of samples of at least 1, got {count!r}.")
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (meta := self._take(count, _slice(deadline))) is None:
            said = (
                f"leave for {count} samples: the trainer is behind, or grants fewer at once ((max_staleness + 1) steps "
                f"of samples in all)."
            )
            if time.monotonic() >= deadline:
                raise BatchTimeoutError(f"waited {timeout_s:.1f} s in vain for {said}")
            logger.warning("waiting for %s", said)
        try:
            taken = self._client.get_data(meta)
        except KeyError as gone:
            raise EndOfPartitionError(
                f"leave for {count} samples is void: the training that gave it has ended."
            ) from gone
        self._client.clear_samples(meta)
        self._ranges.append((int(taken["number"].min()), int(taken["number"].max()) + 1))
        return int(taken["version"].max())

    @contextmanager
    def turn(self, timeout_s: float | None = None) -> Iterator[None]:
        """Put what the oldest leave was taken for: ``with pacer.turn(): client.put(...)``. All producers do, or none.

        Left by an exception it is still this producer's turn: put again, within the next ``turn()``. The others wait.

        Args:
            timeout_s: Longest wait for those whose leave is older. Default: wait, and report every 30 s.
        Raises:
            BatchTimeoutError: not in time; one of them may be gone. The turn is still to come.
            InvalidRequestError: there is no leave that wasn't used.
        """
        if not self._ranges:
            raise InvalidRequestError("turn() is for what admit() gave leave for, and nothing of that is left.")
        first, end = self._ranges[0]
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not _wait_for_turn(self._client, self._partition, first, _slice(deadline)):
            said = f"its turn: whoever has the leave before number {first} hasn't put its samples yet."
            if time.monotonic() >= deadline:
                raise BatchTimeoutError(f"waited {timeout_s:.1f} s in vain for {said} Is that producer still alive?")
            logger.warning("waiting for %s", said)
        yield
        self._ranges.popleft()
        _open_turn(self._client, self._partition, end)
        self._client.clear_partition(_turn(self._partition, first))

    def _take(self, count: int, wait_s: float) -> BatchMeta | None:
        try:
            meta = self._client.get_meta(_FIELDS, count, self._partition, task_name=TASK, timeout_s=wait_s)
        except BatchTimeoutError:
            return None
        return meta if meta.size else None  # empty where the queue is configured to be polled


class Grants:
    """The trainer's side: how much leave was given so far. One process at a time uses it."""

    def __init__(self, client: TransferQueueClient, partition: str = PARTITION) -> None:
        self._client = client
        self._partition = partition
        self.given = 0
        """Samples that leave was given for, by earlier trainers of the same producers, too."""

    def begin(self) -> None:
        """Go on where an earlier trainer stopped, unless it told its producers that it had ended."""
        self._client.register_task(TASK, "SequentialSampler", tail="drop")
        known = self._client.get_stats()["partitions"].get(self._partition)
        if known is not None and known["sealed"]:
            for name in self._client.get_partition_list():
                if name == self._partition or name.startswith(_turn(self._partition, "")):
                    self._client.clear_partition(name)
            known = None
        if known is None:
            _open_turn(self._client, self._partition, 0)
        self.given = 0 if known is None else int(known["published"])

    def give(self, up_to: int, version: int) -> None:
        """Leave for so many samples in all, those from now on by policies of at least this version."""
        count = up_to - self.given
        if count > 0:
            columns = {"version": torch.full((count,), version), "number": torch.arange(self.given, up_to)}
            self._client.put(TensorDict(columns, batch_size=[count]), partition_id=self._partition)
            self.given = up_to

    def end(self) -> None:
        """Tell the producers that training has ended; leave that nobody took yet is void."""
        self._client.seal_partition(self._partition)
        # More than there is: from now on nobody is given any, but what somebody took and gave back.
        with suppress(EndOfPartitionError, BatchTimeoutError):
            self._client.get_meta(_FIELDS, self.given + 1, self._partition, task_name=TASK, timeout_s=0)
        # A producer that was just given its leave still reads it.
        indexes, consumed = self._client.get_consumption_status(TASK, self._partition)
        if indexes is None or consumed is None:  # somebody has cleared the partition
            return
        taken = set(indexes[consumed == 1].tolist())
        leave = self._client.get_meta(partition_id=self._partition, mode="force_fetch")
        left = [position for position, index in enumerate(leave.global_indexes) if index not in taken]
        self._client.clear_samples(leave.select_samples(left))


# Whose turn it is: a partition for each number where leave begins. It is sealed once all before that number is put, and
# holds nothing: a full queue must not keep anybody's turn from coming.


def _turn(partition: str, number: int | str) -> str:
    return f"{partition}@{number}"


def _open_turn(client: TransferQueueClient, partition: str, number: int) -> None:
    client.seal_partition(_turn(partition, number))


def _wait_for_turn(client: TransferQueueClient, partition: str, number: int, wait_s: float) -> bool:
    try:
        client.get_meta(["turn"], 1, _turn(partition, number), task_name=TASK, timeout_s=wait_s)
    except EndOfPartitionError:
        return True
    except BatchTimeoutError:
        pass
    return False


def _slice(deadline: float) -> float:
    return max(0.0, min(deadline - time.monotonic(), _REPORT_EVERY_S))
