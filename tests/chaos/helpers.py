# SPDX-License-Identifier: Apache-2.0
"""Roles that every world needs: one restores the queue, one puts lost values again, one looks at what is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from typing import Any

import transfer_queue as tq
from tests.chaos.actor import Role
from tests.chaos.rows import rows_of
from tests.integration.soak_left import is_empty, is_idle, units, unsettled
from tests.own_processes import SLOW
from transfer_queue.errors import CheckpointNotFoundError, SampleClearedError, StorageFullError, UnknownPartitionError

SETTLE_S = 40.0 * SLOW


class Restorer(Role):
    """At the begin of a life: the last checkpoint, or an empty queue with its tasks."""

    def run(self) -> None:
        path = self.directory / "disk" / "queue"
        world = import_module(f"tests.chaos.{self.shape['world']}")
        try:
            began = tq.describe_checkpoint(path)["metadata"]["began"]
            self.client.load_checkpoint(path)
        except CheckpointNotFoundError:
            began = None
            world.prepare(self.client, self.counts, self.shape)
        self.note("restored", began=began)


def _few_by_few(indexes: list[int]) -> Iterator[set[int]]:
    """Memory is tight, and what is trained first makes room for the rest."""
    for start in range(0, len(indexes), 8):
        yield set(indexes[start : start + 8])


class Mender(Role):
    """Values that were lost with a storage unit are put again, as often as it takes."""

    def run(self) -> None:
        while not (self.directory / "enough").exists():
            for partition in self.client.get_partition_list():
                try:
                    lost = self.client.get_lost_samples(partition)
                    every = self.client.get_meta(None, None, partition, mode="force_fetch") if lost else None
                    for some in _few_by_few(sorted(set(chain.from_iterable(lost.values())))):
                        for name, indexes in lost.items():
                            self._mend(every, partition, name, some.intersection(indexes))
                except (UnknownPartitionError, SampleClearedError, StorageFullError) as error:
                    self.note("not mended", text=str(error)[:200])
            time.sleep(0.1)

    def _mend(self, every: Any, partition: str, field: str, wanted: set[int]) -> None:
        if not wanted:
            return
        self._put(every.select_samples([at for at, index in enumerate(every.global_indexes) if index in wanted]), field)
        keys = [key for key in self.client.kv_retrieve_keys(sorted(wanted), partition) if key is not None]
        if keys:  # heads of groups are no samples that a task could get
            self._put(self.client.kv_retrieve_meta(keys, partition, create=False), field)

    def _put(self, some: Any, field: str) -> None:
        if some.size:
            numbers = [tags["n"] for tags in some.custom_meta]
            self.client.put(rows_of(numbers, self.shape["width"], [field]), metadata=some)
            self.note("mended", part=some.partition_ids[0], field=field, count=some.size)


class Auditor(Role):
    """At the end: who is there still, what does the queue keep for them, and do all values go?"""

    def run(self) -> None:
        client = self.client
        self._until("nobody waits or is there", lambda: unsettled(client.get_stats()))
        for name in client.get_partition_list():
            keys = client.kv_list(name).get(name, {})
            states = {key: tags["group.state"] for key, tags in keys.items() if "group.state" in tags}
            self.note("left", part=name, states=states, samples=client.get_stats()["partitions"][name]["samples"])
            client.clear_partition(name)
        self._until("idle units", lambda: [unit for unit in units(client) if not is_idle(unit)])
        self._until("empty units", lambda: [unit for unit in units(client) if not is_empty(unit)])

    def _until(self, wanted: str, left: Any) -> None:
        deadline = time.monotonic() + SETTLE_S
        while rest := left():
            if time.monotonic() > deadline:
                self.note("problem", text=f"wanted: {wanted}; there is {rest}")
                return
            time.sleep(0.05)


ROLES: dict[str, type[Role]] = {"restorer": Restorer, "mender": Mender, "auditor": Auditor}
