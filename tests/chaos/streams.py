# SPDX-License-Identifier: Apache-2.0
"""The world of plain streams: producers, a task that adds a field, ranks that train, and readers without a name.

Each producer has a partition. Its rows are numbered from ``producer * BASE`` on, and come in chunks of one put each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import transfer_queue as tq
from tests.chaos.actor import Role, check_settled
from tests.chaos.rows import SCORED, check_rows, rows_of
from transfer_queue.errors import CheckpointError, InvalidRequestError

BASE = 1_000_000
READ = 4
"""Samples of one batch of a reader."""
TASKS = ("score", "train", "watch")
_WAIT_S = 1.0


def partition_of(producer: int) -> str:
    return f"part-{producer}"


def prepare(client: Any, counts: dict[str, int], shape: dict[str, Any]) -> None:
    """In a new queue, before anybody reads."""
    for task, role in (("score", "scorer"), ("train", "trainer")):
        client.register_task(task, dp_size=counts[role], tail="uneven_ok")


def expected(counts: dict[str, int], shape: dict[str, Any]) -> set[int]:
    """The numbers of all samples."""
    each = range(shape["chunks"] * shape["chunk"])
    return {producer * BASE + at for producer in range(counts["producer"]) for at in each}


class Producer(Role):
    """Goes on after what the queue was given of its partition: a put is there as a whole, or not at all."""

    def run(self) -> None:
        self.await_end_of_predecessors()
        name, size = partition_of(self.number), self.shape["chunk"]
        known = self.client.get_stats()["partitions"].get(name, {})
        done, rest = divmod(known.get("published", 0), size)
        assert not rest, f"{rest} rows of a put of {size} are visible"
        if known.get("sealed"):
            return
        for chunk in range(done, self.shape["chunks"]):
            first = self.number * BASE + chunk * size
            numbers = list(range(first, first + size))
            self.note("putting", first=first, count=size)
            self._put(name, numbers)
            self.note("put", first=first, count=size)
        self.client.seal_partition(name)

    def _put(self, name: str, numbers: list[int]) -> None:
        rows = rows_of(numbers, self.shape["width"])
        while True:
            try:
                self.at_risk()
                self.client.put(rows, partition_id=name, tags=[{"n": number} for number in numbers])
                return
            except tq.errors.StorageFullError as error:
                self.note("full", text=str(error)[:200])


class Consumer(Role):
    """Takes the batches of its rank by name, of all partitions in turn."""

    task: str
    fields: tuple[str, ...]

    def run(self) -> None:
        open_ones = {partition_of(number): 0 for number in range(self.counts["producer"])}
        while open_ones:
            for name in list(open_ones):
                meta = self.fetch(name, open_ones[name], _WAIT_S)
                if meta == "ended":
                    del open_ones[name]
                elif meta is not None:
                    if meta != "settled":
                        self.work(name, open_ones[name], self.client.get_data(meta, layout="dense"), meta)
                    open_ones[name] += 1
        self.finish()

    def fetch(self, name: str, batch: int, wait_s: float) -> Any:
        """Metadata of this batch; None: not yet; "ended": there is none; "settled": it was acknowledged."""
        self.at_risk()
        at = {"dp_rank": self.number, "batch_index": batch}
        fields, size = list(self.fields), self.shape["batch"]
        try:
            return self.client.get_meta(
                fields, size, name, task_name=self.task, sampling_config=at, timeout_s=wait_s
            )  # fmt: skip
        except tq.BatchTimeoutError:
            return None
        except tq.EndOfPartitionError:
            return "ended"
        except InvalidRequestError as error:
            check_settled(error)
            return "settled"

    def work(self, name: str, batch: int, data: Any, meta: Any) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """At the end of all partitions."""


class Scorer(Consumer):
    task, fields = "score", ("number", "tokens")

    def work(self, name: str, batch: int, data: Any, meta: Any) -> None:
        numbers = check_rows(data, self.shape["width"], self.fields)
        while True:
            try:
                self.client.put(rows_of(numbers, self.shape["width"], ["score"]), metadata=meta)
                break
            except tq.errors.StorageFullError as error:
                self.note("full", text=str(error)[:200])
        self.note("scored", part=name, batch=batch, numbers=numbers)
        self.client.ack(meta, self.task)


class Trainer(Consumer):
    """Acknowledges what it has trained where it would save a checkpoint. Rank 0 also clears, and saves the queue."""

    task, fields = "train", SCORED

    def run(self) -> None:
        self._steps, self._unsaved = 0, dict[str, tuple[int, Any]]()
        if not self.shape["loader"]:
            super().run()
            return
        streams = {name: self._stream(name) for name in map(partition_of, range(self.counts["producer"]))}
        while streams:
            for name in list(streams):
                found = next(streams[name], None)
                if found is None:
                    del streams[name]
                else:
                    self.work(name, *found)
        self.finish()

    def _stream(self, name: str) -> Iterator[tuple[int, Any, Any]]:
        """The same by a dataset, which asks ahead, from the first batch on that is not acknowledged."""
        first = 0
        while self.fetch(name, first, 0.0) == "settled":
            first += 1
        size = self.shape["batch"]
        data = tq.StreamingDataset(
            None, size, size, list(self.fields), name, self.task, self.number, dp_size=self.counts["trainer"],
            layout="dense", report_every_s=5.0,
        )  # fmt: skip
        data.load_state_dict({"partition_id": name, "batch_index": first, "micro_batch": 0})
        for at, (values, meta) in enumerate(data):
            yield first + at, values, meta
        data.close()

    def work(self, name: str, batch: int, data: Any, meta: Any) -> None:
        self.at_risk()
        numbers = check_rows(data, self.shape["width"], self.fields)
        self.note("trained", part=name, batch=batch, numbers=numbers)
        self._unsaved[name] = (batch, meta)
        self._steps += 1
        if self._steps % self.shape["save_every"] == 0:
            self._save()

    def finish(self) -> None:
        self._save()

    def _save(self) -> None:
        for name, (batch, meta) in self._unsaved.items():
            self.note("acking", part=name, batch=batch)
            self.client.ack(meta, self.task, earlier=True)
        self._unsaved.clear()
        if self.number:
            return
        for number in range(self.counts["producer"]):
            self._clear(partition_of(number))
        if self._steps % (4 * self.shape["save_every"]) == 0:
            save_queue(self)

    def _clear(self, name: str) -> None:
        with suppress(tq.errors.UnknownPartitionError):  # its producer has put nothing yet
            self.client.clear_consumed(name, list(TASKS))


def save_queue(role: Role) -> None:
    """The whole queue, to where the next life looks for it."""
    began, path = time.monotonic(), role.directory / "disk" / "queue"
    role.note("saving", began=began)
    try:
        role.client.save_checkpoint(path, metadata={"began": began})
    except CheckpointError as error:  # the earlier one is still whole
        role.note("unsaved", text=str(error)[:300])
    else:
        role.note("saved", began=began)


class Reader(Role):
    """Takes samples without naming a rank: each is given once, and lost if its reader dies with it."""

    def run(self) -> None:
        open_ones = [partition_of(number) for number in range(self.counts["producer"])]
        while open_ones:
            for name in list(open_ones):
                try:
                    self.at_risk()
                    meta = self.client.get_meta(["number", "text"], READ, name, task_name="watch", timeout_s=_WAIT_S)
                except tq.BatchTimeoutError:
                    continue
                except tq.EndOfPartitionError:
                    open_ones.remove(name)
                    continue
                numbers = check_rows(self.client.get_data(meta), self.shape["width"], ["number", "text"])
                self.note("read", part=name, numbers=numbers)


ROLES: dict[str, type[Role]] = {"producer": Producer, "scorer": Scorer, "trainer": Trainer, "reader": Reader}


def size(counts: dict[str, int], shape: dict[str, Any]) -> int:
    """How many samples are to be trained."""
    return len(expected(counts, shape))
