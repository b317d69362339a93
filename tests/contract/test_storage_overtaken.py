# SPDX-License-Identifier: Apache-2.0
"""Writes that were given up and arrive all the same, after what was sent later over another line."""

from __future__ import annotations

import itertools

import pytest
import torch
from tensordict import TensorDict
from transfer_queue.storage.simple.manager import SimpleStorageManager
from transfer_queue.storage.simple.unit import StorageUnit
from transfer_queue.transport.inproc_channel import InprocCaller

from tests.contract.storage_kit import meta
from transfer_queue.errors import QueueUnreachableError
from transfer_queue.transport.modes import run_blocking

UNITS = {"units": [{"name": f"u{n}", "address": f"inproc://u{n}"} for n in range(2)]}


class SlowLine:
    """A caller that gives up at once while it is ``slow``; the calls it ``takes`` (None: all) come with ``deliver``."""

    def __init__(self, caller: InprocCaller) -> None:
        self._caller = caller
        self._late = []
        self.slow, self.takes = False, None

    async def call_many(self, calls, timeout_s):
        if not self.slow:
            return await self._caller.call_many(calls, timeout_s)
        self._late += itertools.islice(calls, self.takes)
        raise QueueUnreachableError("no answer in time")

    def deliver(self) -> None:
        for call in self._late:
            run_blocking(self._caller.call_many([call], 10.0))


@pytest.fixture
def line() -> SlowLine:
    return SlowLine(InprocCaller({f"u{n}": StorageUnit(f"u{n}") for n in range(2)}, "me"))


@pytest.fixture
def manager(line) -> SimpleStorageManager:
    return SimpleStorageManager(line, UNITS)


def rows(value: int) -> TensorDict:
    return TensorDict({"x": torch.full((128, 2), value)}, batch_size=[128])


def stored(manager) -> list[int]:
    return [unit.values for unit in run_blocking(manager.stats())]


@pytest.mark.parametrize("takes", [None, 1], ids=["all shares sent", "one share sent"])
def test_a_put_that_got_no_answer_stores_nothing_once_its_samples_are_cleared(manager, line, takes):
    line.slow, line.takes = True, takes
    with pytest.raises(QueueUnreachableError):
        run_blocking(manager.put_data(rows(1), meta(range(128))))
    line.slow = False
    run_blocking(manager.clear_rows(range(128)))
    line.deliver()
    assert stored(manager) == [0, 0]


def test_an_update_that_got_no_answer_does_not_replace_what_is_put_later(manager, line):
    line.slow = True
    with pytest.raises(QueueUnreachableError):
        run_blocking(manager.update_data(rows(1), meta(range(128))))
    line.slow = False
    run_blocking(manager.update_data(rows(2), meta(range(128))))
    line.deliver()
    assert run_blocking(manager.get_rows(range(128), ["x"], "dense"))["x"].unique().tolist() == [2]
