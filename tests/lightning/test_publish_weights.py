# SPDX-License-Identifier: Apache-2.0
"""PublishWeights: readers get versions in time, steps don't wait for puts, and the queue stays small."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from producing import fill
from recorders import Recorder

from lightning_tq import Producer, PublishWeights, TQDataModule, Weights, WeightsReader
from tests.lightning.conftest import stream
from tests.own_processes import SLOW
from transfer_queue import EndOfPartitionError
from transfer_queue.errors import InvalidRequestError, TransferQueueError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


class ReadsWeights(Callback):
    """Reads the weights when training begins and after each step. It follows PublishWeights in the list."""

    def __init__(self) -> None:
        self.seen: list[Weights] = []
        self.reader: WeightsReader | None = None

    def _read(self, trainer: Trainer, least: int) -> None:
        assert self.reader is not None
        self.seen.append(self.reader.latest(least=least, timeout_s=20))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reader = WeightsReader(trainer.datamodule.client)
        self._read(trainer, trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._read(trainer, trainer.global_step)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_weights_that_are_lost_with_a_storage_unit_come_again_although_the_trainer_makes_no_step(
    trainer: MakeTrainer,
) -> None:
    read = []

    class LosesThem(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            client = trainer.datamodule.client
            WeightsReader(client).latest(least=1, timeout_s=60 * SLOW)
            began_before = WeightsReader(client)
            meta = began_before._newest()
            assert meta is not None
            units = [name for name in client.get_stats()["clients"] if name.startswith("unit ")]
            while not client.get_lost_samples(PublishWeights().partition):
                client.evict_client(units.pop(), unit=True)
            read.append(WeightsReader(client).latest(least=1, timeout_s=60 * SLOW))
            assert same(read[0].state_dict, pl_module.state_dict())
            assert began_before._load(meta, time.monotonic() + 60 * SLOW)
            assert began_before.version == 1

    queue = {"server_processes": "each", "backend": {"SimpleStorage": {"num_data_storage_units": 4}}}
    with TQDataModule(train=stream("train", num_batches=1), queue=queue) as dm:
        fill(dm.client, "train", 4)
        trainer(callbacks=[PublishWeights(), LosesThem()]).fit(Recorder(), datamodule=dm)
    assert [weights.version for weights in read] == [1]


@pytest.mark.programs
def test_producers_that_wait_for_each_version_get_it_from_the_first_sample_on(data: Make, trainer: MakeTrainer) -> None:
    """Batch k is made after version k is published. A late or missing version would be a deadlock."""
    producer = Producer(target="producing:produce_on_policy", args={"partition": "train", "steps": 5})
    dm = data(train=stream("train", num_batches=5), producers=[producer])
    model = Recorder()
    fitted = trainer(callbacks=[PublishWeights()])
    fitted.fit(model, datamodule=dm)
    assert (fitted.global_step, len(model.indexes())) == (5, 20)
    tags = dm.client.get_meta(["x"], partition_id="train", mode="force_fetch").custom_meta
    assert [tag["policy_version"] for tag in tags] == [step for step in range(5) for _ in range(4)]


def test_a_version_holds_the_weights_of_its_step_and_later_ones_do_not_change_it(
    data: Make, trainer: MakeTrainer
) -> None:
    class Recording(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.own: list[dict[str, torch.Tensor]] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.own.append({name: value.clone() for name, value in self.state_dict().items()})

    dm = data(train=stream("train"))
    fill(dm.client, "train", 16)
    reading, model = ReadsWeights(), Recording()
    trainer(callbacks=[PublishWeights(), reading]).fit(model, datamodule=dm)
    assert [weights.version for weights in reading.seen] == [0, 1, 2, 3, 4]
    wanted = [*model.own, model.state_dict()]
    assert all(same(weights.state_dict, own) for weights, own in zip(reading.seen, wanted, strict=True))
    with pytest.raises(EndOfPartitionError):
        reading.reader.latest()  # type: ignore[union-attr]


def test_versions_come_every_n_steps_and_at_the_end_and_only_some_stay(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", batch_size=2))
    fill(dm.client, "train", 28)  # seven steps of two micro-batches
    versions: list[int | None] = []

    class Recording(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            versions.append(publish.version)

    publish = PublishWeights(every_n_steps=3, keep=1, when_busy="wait")
    trainer(callbacks=[publish, Recording()], accumulate_grad_batches=2).fit(Recorder(), datamodule=dm)
    assert versions == [0, 0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 6, 6, 6]
    assert publish.version == 7
    weights = dm.client.get_stats()["partitions"]["_weights"]
    assert (weights["samples"], weights["published"], weights["sealed"]) == (1, 4, True)
    assert WeightsReader(dm.client).latest().version == 7


def test_steps_never_wait_for_a_slow_put_and_the_last_version_still_arrives(data: Make, trainer: MakeTrainer) -> None:
    put_may_go_on = threading.Event()

    class Slow(PublishWeights):
        def _put(self, version: Any) -> None:
            assert put_may_go_on.wait(20)
            super()._put(version)

    class Opening(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 10:  # ten steps are done while the first version is being put
                put_may_go_on.set()

    dm = data(train=stream("train"))
    fill(dm.client, "train", 40)
    publish, model = Slow(), Recorder()
    trainer(callbacks=[publish, Opening()]).fit(model, datamodule=dm)
    # Version 0 was being put, and one other version waited at a time.
    assert publish.skipped in (8, 9)
    newest = WeightsReader(dm.client).latest()
    assert newest.version == 10
    assert same(newest.state_dict, dict(model.state_dict()))


def test_weights_can_be_selected_by_module_and_pattern_and_cast(data: Make, trainer: MakeTrainer) -> None:
    class Two(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.policy = torch.nn.ModuleDict({"lora_a": torch.nn.Linear(2, 2), "base": torch.nn.Linear(2, 2)})
            self.policy.register_buffer("steps", torch.tensor([3]))

        def info_of(self) -> int:
            return 5

    class WithInfo(PublishWeights):
        def info(self, trainer: Trainer, pl_module: Any, version: int) -> dict[str, Any]:
            return {"version": version, "five": pl_module.info_of()}

    dm = data(train=stream("train"))
    fill(dm.client, "train", 4)
    publish = WithInfo(module="policy", include=["lora_*", "steps"], dtype="bfloat16")
    trainer(callbacks=[publish]).fit(Two(), datamodule=dm)
    weights = WeightsReader(dm.client).latest()
    assert {name: (value.dtype, tuple(value.shape)) for name, value in weights.state_dict.items()} == {
        "lora_a.weight": (torch.bfloat16, (2, 2)),
        "lora_a.bias": (torch.bfloat16, (2,)),
        "steps": (torch.int64, (1,)),
    }
    assert weights.info == {"version": 1, "five": 5}


@pytest.mark.programs
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_names_of_a_compiled_module_are_those_of_the_module(data: Make, trainer: MakeTrainer) -> None:
    class Compiled(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.policy = torch.compile(torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 1), backend="eager")))

    dm = data(train=stream("train"))
    fill(dm.client, "train", 4)
    trainer(callbacks=[PublishWeights(module="policy")]).fit(Compiled(), datamodule=dm)
    assert list(WeightsReader(dm.client).latest().state_dict) == ["0.weight", "0.bias"]


def test_an_empty_selection_ends_the_fit_before_its_first_step(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 4)
    model = Recorder()
    with pytest.raises(InvalidRequestError, match=r"module='actor'.* selects none of the 2 weights: layer.weight"):
        trainer(callbacks=[PublishWeights(module="actor")]).fit(model, datamodule=dm)
    assert model.indexes() == []


def test_a_failed_put_ends_the_training(data: Make, trainer: MakeTrainer) -> None:
    class Sealing(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.datamodule.client.seal_partition("_weights")

    dm = data(train=stream("train"))
    fill(dm.client, "train", 16)
    with pytest.raises(TransferQueueError, match="sealed"):
        trainer(callbacks=[PublishWeights(), Sealing()]).fit(Recorder(), datamodule=dm)


def test_a_resumed_training_publishes_the_weights_of_its_checkpoint_first(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 40)
    first = trainer(callbacks=[PublishWeights()], max_epochs=-1, max_steps=3)
    first.fit(Recorder(), datamodule=dm)
    first.save_checkpoint(tmp_path / "at3.ckpt")
    kept = torch.load(tmp_path / "at3.ckpt", weights_only=True)["state_dict"]
    reading, model = ReadsWeights(), Recorder()
    trainer(callbacks=[PublishWeights(), reading], max_epochs=-1, max_steps=5).fit(
        model, datamodule=dm, ckpt_path=tmp_path / "at3.ckpt"
    )
    assert [weights.version for weights in reading.seen] == [3, 4, 5]
    assert same(reading.seen[0].state_dict, kept)


@pytest.mark.parametrize("options", [{"limit_train_batches": 0}, {"max_epochs": 0}], ids=["no batch", "no epoch"])
def test_an_empty_training_also_ends_readers(data: Make, trainer: MakeTrainer, options: dict[str, Any]) -> None:
    dm = data(train=stream("train"), keep_alive=False)
    fill(dm.client, "train", 8)
    sealed: dict[str, bool] = {}

    class Recording(Callback):
        def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            sealed.update({name: each["sealed"] for name, each in dm.client.get_stats()["partitions"].items()})

    model = Recorder()
    trainer(callbacks=[PublishWeights(), Recording()], **options).fit(model, datamodule=dm)
    assert (model.indexes(), sealed["_weights"]) == ([], True)


def test_invalid_publish_arguments_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="every_n_steps must be an int of at least 1, got 0"):
        PublishWeights(every_n_steps=0)
    with pytest.raises(InvalidRequestError, match="when_busy must be one of 'skip', 'wait', got 'drop'"):
        PublishWeights(when_busy="drop")  # type: ignore[arg-type]
    with pytest.raises(
        InvalidRequestError, match="dtype must be one of 'float32', 'bfloat16', 'float16', None, got 'int8'"
    ):
        PublishWeights(dtype="int8")  # type: ignore[arg-type]


@pytest.mark.slow  # the ranks of test_partition_switch publish, too
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("model_parallel", 4)])
def test_sharded_weights_arrive_whole(run_ranks: Any, strategy: str, devices: int, tmp_path: Path) -> None:
    code, output, _ = run_ranks("callbacks_script.py", "weights", strategy, str(devices), "LOGS")
    assert code == 0, output
    version, names, equal = eval((tmp_path / "logs" / "weights").read_text())
    assert (version, names, equal) == (6, ["layer.bias", "layer.weight"], True)
