# SPDX-License-Identifier: Apache-2.0
"""Weights through a real queue: which version a reader gets, when it waits, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import transfer_queue as tq
from lightning_tq import TQDataModule, WeightsReader
from lightning_tq.producers.model_weights import WEIGHTS_PARTITION, WeightsSnapshot, check_dense
from tests.lightning.conftest import ROOT
from tests.warm_python import run_python
from transfer_queue.errors import InvalidRequestError

Make = Callable[..., TQDataModule]


@pytest.fixture
def client(data: Make) -> tq.TransferQueueClient:
    return data().client


def put(version: int, **tensors: torch.Tensor) -> None:
    """Put a version. By default its weights are filled with its number."""
    tensors = tensors or {"weight": torch.full((3, 2), float(version)), "bias": torch.full((2,), float(version))}
    snapshot = WeightsSnapshot()
    for name, view in snapshot.prepare(tensors, None, pinned=False).items():
        view.copy_(tensors[name])
    snapshot.put(WEIGHTS_PARTITION, version, {"epoch": 7})


def test_a_reader_gets_the_newest_version_with_its_info(client: tq.TransferQueueClient) -> None:
    for version in range(3):
        put(version)
    reader = WeightsReader(client)
    weights = reader.latest()
    assert (weights.version, weights.info, reader.version) == (2, {"epoch": 7}, 2)
    assert {name: value.tolist() for name, value in weights.state_dict.items()} == {
        "weight": [[2.0, 2.0]] * 3,
        "bias": [2.0, 2.0],
    }
    assert reader.latest() is weights


def test_shapes_and_types_survive_and_readers_do_not_share_memory(client: tq.TransferQueueClient) -> None:
    tensors = {
        "scalar": torch.tensor(5, dtype=torch.int64),
        "none": torch.zeros(0, 4),
        "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
        "flags": torch.tensor([True, False]),
    }
    put(0, **tensors)
    first, second = (WeightsReader(client).latest().state_dict for _ in range(2))
    first["half"].zero_()
    assert {name: (value.dtype, value.tolist()) for name, value in second.items()} == {
        name: (value.dtype, value.tolist()) for name, value in tensors.items()
    }


def test_a_reader_waits_for_a_version_that_is_new_enough(client: tq.TransferQueueClient) -> None:
    put(0)
    reader = WeightsReader(client)
    reader.latest()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.latest, least=2)
        put(1)
        put(2)
        assert waiting.result(timeout=20).version == 2


def test_a_timeout_names_the_version_it_waited_for(client: tq.TransferQueueClient) -> None:
    put(0)
    with pytest.raises(tq.BatchTimeoutError, match="version 3 or later; the newest is 0"):
        WeightsReader(client).latest(least=3, timeout_s=0.2)


def test_a_timeout_before_the_first_version_says_that_there_is_none(client: tq.TransferQueueClient) -> None:
    with pytest.raises(tq.BatchTimeoutError, match="version 0 or later; none was published yet"):
        WeightsReader(client).latest(timeout_s=0.2)


def test_a_version_cleared_while_it_was_fetched_is_skipped_for_the_next(client: tq.TransferQueueClient) -> None:
    put(0)
    reader = WeightsReader(client)
    stale = reader._newest()
    assert stale is not None
    client.clear_samples(stale)
    reader._load(stale, time.monotonic() + 20)
    assert reader.version == -1
    put(1)
    assert reader.latest().version == 1


KILLED_TRAINER = """
import os, signal, torch
from lightning_tq.producers.model_weights import WEIGHTS_PARTITION, WeightsSnapshot
snapshot = WeightsSnapshot()
snapshot.prepare({"weight": torch.zeros(2)}, None, pinned=False)
snapshot.put(WEIGHTS_PARTITION, 0, {})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.programs
def test_a_reader_waits_for_the_trainer_that_resumes_after_one_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(KILLED_TRAINER)
    with TQDataModule(queue={"units": 1, "producer_grace_s": 0.0}) as dm:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TQ_ADDRESS": dm.address}
        killed = run_python(tmp_path / "trainer.py", env=environment, timeout=60)
        assert killed.returncode == -signal.SIGKILL
        reader = WeightsReader(dm.client)
        assert reader.latest().version == 0
        with pytest.raises(tq.BatchTimeoutError, match="The trainer has died; one that resumes in this queue will"):
            reader.latest(least=1, timeout_s=0.2)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.latest, least=1)
            put(0)
            put(1)
            assert waiting.result(timeout=60).version == 1


def test_sealed_weights_tell_a_waiting_reader_that_training_has_ended(client: tq.TransferQueueClient) -> None:
    put(0)
    reader = WeightsReader(client)
    reader.latest()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.latest, least=1)
        client.seal_partition(WEIGHTS_PARTITION)
        with pytest.raises(tq.EndOfPartitionError):
            waiting.result(timeout=20)


def test_a_late_reader_gets_the_last_version_of_a_training_that_has_ended(client: tq.TransferQueueClient) -> None:
    put(4)
    client.seal_partition(WEIGHTS_PARTITION)
    assert WeightsReader(client).latest().version == 4


def test_entries_that_are_not_dense_tensors_are_refused_by_name() -> None:
    state = {"fine": torch.zeros(2), "extra_state": {"step": 3}}
    with pytest.raises(InvalidRequestError, match="entry 'extra_state' of the state dict is a dict"):
        check_dense(state)
