# SPDX-License-Identifier: Apache-2.0
"""Streams of whole groups for these tests, workers that lease their groups, and a model that records them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from producing import rows
from recorders import Recorder

import transfer_queue as tq
from lightning_tq import Stream, TQDataModule
from tests.integration.clients import connect
from transfer_queue import GroupSampler

FIELDS = ["x", "text"]
Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


def groups_of(groups: int = 2, partition: str = "train", task: str = "learn", **options: Any) -> Stream:
    """A stream of whole groups; options of its sampler begin with ``of_``."""
    own = {name.removeprefix("of_"): options.pop(name) for name in list(options) if name.startswith("of_")}
    sampler = GroupSampler(groups=groups, **own)
    return Stream(partition=partition, task=task, fields=FIELDS, sampler=sampler, **options)


def add(client: tq.TransferQueueClient, count: int, partition: str = "train", seal: bool = True, **terms: Any) -> None:
    """Groups q0, q1, ... whose heads have an "image" and a "prompt"."""
    heads = {
        "image": torch.arange(count * 3.0).view(count, 3),
        "prompt": [f"prompt {number}" for number in range(count)],
    }
    client.add_groups(heads, partition, keys=[f"q{n}" for n in range(count)], **{"tasks": ["learn"], **terms})
    if seal:
        client.seal_partition(partition)


def members(key: str, count: int) -> Any:
    """Rows with the number of their group, so that a test sees whose they are."""
    return rows(count, start=100 * int(key[1:]))


@contextmanager
def worker(
    sizes: Callable[[int], int] = lambda number: 2, has_all: bool = True, **asked: Any
) -> Iterator[list[tuple[str, Any]]]:
    """A thread that leases each group and closes it with so many rows of length 10. Gives (key, version) of its leases.

    ``has_all``: whether it leases all groups, however long after the body. Else it ends with the body.
    """
    client, leased, failed = connect("worker", tq.init()), list[tuple[str, Any]](), list[BaseException]()
    on_lease = asked.pop("on_lease", lambda: None)

    def work() -> None:
        try:
            for lease in client.leases(asked.pop("partition", "train"), timeout_s=30, **asked):
                with lease:  # a group that is left over meanwhile ends the block
                    on_lease()
                    leased.append((lease.key, lease.version))
                    rows = members(lease.key, sizes(int(lease.key[1:])))
                    lease.close(rows, tags=[{"length": 10}] * len(rows))
        except BaseException as error:
            if has_all:
                failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield leased
    finally:
        if has_all:
            thread.join(30)
        client.close()
        thread.join(30)
    assert (failed, thread.is_alive()) == ([], False)


class Steps(Recorder):
    """Also records the groups of each batch, and what it was given of their heads."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[list[int]] = []
        self.heads: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.groups.append((batch.data["x"][:, 0] / 100).int().tolist())
        self.heads.append(batch.heads)
        return super().training_step(batch, batch_idx)
