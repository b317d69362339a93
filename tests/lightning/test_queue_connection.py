# SPDX-License-Identifier: Apache-2.0
"""Data modules of one process share their queue, which ends with the last one. Without a queue, they say what to do."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from lightning.pytorch import Trainer
from producing import fill
from recorders import Recorder

import transfer_queue as tq
from lightning_tq import TQDataModule
from tests.lightning.conftest import stream
from tests.own_processes import own_processes
from transfer_queue.errors import NotInitializedError

MakeTrainer = Callable[..., Trainer]


@pytest.mark.parametrize("first_closed", [0, 1])
def test_a_queue_of_two_data_modules_ends_with_the_last_one(trainer: MakeTrainer, first_closed: int) -> None:
    modules = [TQDataModule(train=stream(task="a"), queue={"units": 1})]
    modules[0].open()
    indexes = fill(modules[0].client, "train", 8)
    modules.append(TQDataModule(train=stream(task="b"), queue={"address": modules[0].address}))
    modules[1].open()
    modules.pop(first_closed).close()
    model = Recorder()
    trainer().fit(model, datamodule=modules[0])
    assert model.indexes() == indexes
    modules[0].close()
    assert own_processes() == []
    with pytest.raises(NotInitializedError):
        tq.get_client()


def test_a_data_module_is_pickled_for_ranks_that_are_spawned() -> None:
    with TQDataModule(train=stream(), queue={"units": 1}) as dm:
        assert pickle.loads(pickle.dumps(dm)).address == dm.address


def test_a_failed_fit_leaves_the_queue_to_another_data_module(trainer: MakeTrainer) -> None:
    with TQDataModule(train=stream(task="b"), queue={"units": 1}) as other:
        fill(other.client, "train", 8)
        with pytest.raises(ValueError, match="on request"):
            trainer().fit(Recorder(fail_at=1), datamodule=TQDataModule(train=stream(task="a")))
        assert other.client.get_partition_list() == ["train"]


def test_a_forgotten_data_module_does_not_keep_the_queue() -> None:
    TQDataModule(train=stream(task="a"), queue={"units": 1}).open()
    TQDataModule(train=stream(task="b")).__enter__().close()
    assert own_processes() == []


@pytest.mark.parametrize("name", ["client", "address"])
def test_before_a_run_a_data_module_says_how_to_open_its_queue(name: str) -> None:
    dm = TQDataModule(train=stream(), queue={"units": 1})
    with pytest.raises(NotInitializedError, match=r"no queue in this process yet.*dm\.open\(\)"):
        getattr(dm, name)
    with dm:
        assert getattr(dm, name) is not None


@pytest.mark.parametrize("served", [True, False])
def test_a_run_prints_where_its_metrics_are(
    trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, served: bool
) -> None:
    if served:
        pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")
    with TQDataModule(train=stream(), queue={"units": 1, "metrics": {"enabled": served}}) as dm:
        fill(dm.client, "train", 8)
        with caplog.at_level("INFO"):
            trainer().fit(Recorder(), datamodule=dm)
        said = [text for text in caplog.messages if text.startswith("Metrics: ")]
        assert said == ([f"Metrics: http://{tq.get_metrics_endpoint()}/metrics"] if served else [])
