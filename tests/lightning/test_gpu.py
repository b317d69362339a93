# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: slow copies are never read early, and memory in use is never reused.

``python -m pytest -m gpu -n0`` runs it. Kernels that only spend time hold a stream up, so that a missing wait gives
wrong values. Whole runs are also done on the CPU, without delays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from producing import fill, rows
from recorders import Recorder
from tensordict import TensorDict

from lightning_tq import FabricLoader, PublishWeights, TQBatch, TQDataModule, Weights, WeightsReader
from lightning_tq.device_copies import DeviceCopy, SideStream
from tests.lightning.conftest import stream
from transfer_queue import BatchMeta, TransferQueueClient

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CYCLES = 500_000_000
"""About 0.3 s of a GPU."""
NUMBERS = 4 << 20
"""In a large tensor: 16 MiB."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=[pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    torch.cuda.set_device(0)
    return torch.device(request.param, 0)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=GPU)])
def accelerator(request: pytest.FixtureRequest) -> str:
    """Of a Trainer or Fabric."""
    return str(request.param)


def spend_time(share: float = 1.0) -> None:
    """On the current stream."""
    if torch.cuda.is_available():
        torch.cuda._sleep(int(CYCLES * share))


def hold_up(side: SideStream, share: float = 1.0) -> None:
    """All that starts on this stream from now on."""
    with side.copies():
        spend_time(share)


class Late(SideStream):
    """Each copy starts late."""

    share = 1.0

    def start(self, data: TensorDict) -> DeviceCopy | None:
        hold_up(self, self.share)
        return super().start(data)


# ---- one copy ----


def values(seed: int) -> TensorDict:
    """Four rows in pageable memory."""
    numbers = torch.arange(NUMBERS, dtype=torch.int32).add_(seed).reshape(4, -1)
    return TensorDict({"x": numbers, "small": torch.full((4,), seed)}, batch_size=[4])


def pinned(seed: int) -> TQBatch:
    return TQBatch(values(seed), BatchMeta([0, 1, 2, 3], ["train"] * 4)).pin_memory()


def warm_up(device: torch.device, count: int) -> None:
    """Leave memory for so many batches to torch's allocators, because making more may wait for the device."""
    batches = [pinned(0) for _ in range(count)]
    moved = [batch.to(device) for batch in batches]
    del batches, moved
    torch.cuda.synchronize()


def test_a_late_copy_is_waited_for_by_the_device(device: torch.device) -> None:
    copies, wanted, batch = Late(device), values(7).to(device), pinned(7)
    assert batch.data["x"].is_pinned()
    torch.cuda.synchronize()
    batch.copy_ahead(copies)
    data, _ = batch.to(device)
    assert [torch.equal(data[name], wanted[name]) for name in ("x", "small")] == [True, True]


def test_the_host_does_not_wait_for_a_copy(device: torch.device) -> None:
    copies, batch = Late(device), pinned(3)
    copies.start(batch.data)  # its memory is there now
    torch.cuda.synchronize()
    batch.copy_ahead(copies)
    copy = batch._copies[0]
    assert copy is not None
    data, _ = batch.to(device)
    total = data["small"].sum()
    assert not copy.done.query(), "it has not even begun"
    assert int(total) == 12


def test_pinned_memory_is_copied_without_waiting_for_the_step_before(device: torch.device) -> None:
    warm_up(device, 1)
    batch = pinned(5)
    torch.cuda.synchronize()
    spend_time()
    data, _ = batch.to(device)
    assert not torch.cuda.current_stream().query(), "that step still runs"
    assert torch.equal(data["x"].cpu(), values(5)["x"])


def test_a_pinned_buffer_is_reused_after_its_copy_and_not_before(device: torch.device) -> None:
    warm_up(device, 9)
    copies, batch = Late(device), pinned(11)
    address = batch.data["x"].data_ptr()
    torch.cuda.synchronize()
    copy = copies.start(batch.data)
    assert copy is not None
    del batch
    others = [pinned(-seed) for seed in range(1, 9)]
    assert address not in {other.data["x"].data_ptr() for other in others}
    assert torch.equal(copy.finish()["x"].cpu(), values(11)["x"])
    del others
    torch.cuda.synchronize()
    again = [pinned(seed) for seed in range(12)]
    assert address in {each.data["x"].data_ptr() for each in again}


def test_memory_of_the_device_is_not_reused_while_a_step_reads_it(device: torch.device) -> None:
    """The host drops each batch long before the step has read it, and the next copy wants as much memory."""
    copies, batches, sums = SideStream(device), [pinned(seed) for seed in range(8)], []
    for _ in range(2):  # the second time, no memory has to be made
        for batch in batches:
            batch.copy_ahead(copies)
            data, _ = batch.to(device)
            spend_time(0.1)
            sums.append(data["x"].sum(dtype=torch.int64))
            del data
    first = int(torch.arange(NUMBERS, dtype=torch.int64).sum())
    assert [int(total) for total in sums] == [first + seed * NUMBERS for seed in range(8)] * 2


def test_copies_that_nobody_wants_do_no_harm(device: torch.device) -> None:
    copies = Late(device)
    for seed in range(4):
        copies.start(pinned(seed).data)
    copy = copies.start(pinned(9).data)
    assert copy is not None
    assert torch.equal(copy.finish()["x"].cpu(), values(9)["x"])


# ---- batches of whole runs ----


class SlowSteps(Recorder):
    """Keeps the values of its batches as they were when a step, which the device does later, read them."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        data, meta = batch
        assert data["x"].device == self.device
        spend_time(0.1)
        self.read.append(data["x"].clone())
        self.seen["train"].append((meta.partition_ids[0], list(meta.global_indexes)))
        assert list(data["text"]) == [f"row {index}" for index in meta.global_indexes]
        loss: torch.Tensor = self.layer(data["x"] / 100).square().mean()
        return loss


class LateCopies(Callback):
    """Holds up each copy to the device."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reader = trainer.datamodule.train_reader()
        on_gpu = trainer.strategy.root_device.type == "cuda"
        assert (reader.device_copies is not None) == on_gpu, "pin_memory=True"
        reader.device_copies = Late(trainer.strategy.root_device)
        reader.device_copies.share = 0.2


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("length", [10, None])
def test_a_fit_reads_every_value_once_and_in_order(
    data: Make, trainer: MakeTrainer, accelerator: str, length: int | None, workers: int, late: bool
) -> None:
    dm = data(train=stream("train", micro_batch_size=2, num_batches=length, num_workers=workers, pin_memory=True))
    fill(dm.client, "train", 20)
    model = SlowSteps()
    trainer(accelerator=accelerator, devices=1, callbacks=[LateCopies()] if late else []).fit(model, datamodule=dm)
    assert model.indexes() == list(range(20))
    assert torch.equal(torch.cat(model.read).cpu(), rows(20)["x"])


def test_a_fit_with_jagged_fields_reads_every_value(data: Make, trainer: MakeTrainer, accelerator: str) -> None:
    class Jagged(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            read.extend(row.tolist() for row in batch.data["x"].unbind())
            loss: torch.Tensor = self.layer(batch.data["x"].values()[:4].float()).sum()
            return loss

    read: list[list[int]] = []
    own = [torch.full((1 + number % 5,), number) for number in range(16)]
    dm = data(train=stream("train", num_batches=4, pin_memory=True, layout="jagged"))
    ragged = torch.nested.nested_tensor(own, layout=torch.jagged)
    text = [f"row {number}" for number in range(16)]
    dm.client.put(TensorDict({"x": ragged, "text": text}, batch_size=[16]), partition_id="train")
    trainer(accelerator=accelerator, devices=1).fit(Jagged(), datamodule=dm)
    assert read == [row.tolist() for row in own]


def test_a_pass_of_fabric_reads_every_value(accelerator: str) -> None:
    fabric, read = Fabric(accelerator=accelerator, devices=1), []
    with FabricLoader(fabric, stream("train", num_batches=5, pin_memory=True), {"units": 1}) as loader:
        fill(loader.client, "train", 20)
        for batch, _ in loader:
            spend_time(0.1)
            read.append(batch["x"].clone())
    assert torch.equal(torch.cat(read).cpu(), rows(20)["x"])


# ---- weights ----


class LateWeights(PublishWeights):
    """The copy of each version but the first one starts late, while the next step runs."""

    def _copy(self, *args: Any) -> Any:
        if self._side is not None:
            hold_up(self._side)
        return super()._copy(*args)


class OwnWeights(Callback):
    """Keeps the weights of each version."""

    def __init__(self) -> None:
        self.kept: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._keep(pl_module)

    def _keep(self, pl_module: LightningModule) -> None:
        self.kept.append({name: value.clone() for name, value in pl_module.state_dict().items()})


class Wide(Recorder):
    """Weights of 16 MiB that every step changes, and a buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.ones(NUMBERS))
        self.register_buffer("passes", torch.zeros(NUMBERS))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.passes.add_(1)
        loss: torch.Tensor = self.layer(batch.data["x"] / 100).square().mean() + self.wide.square().sum() / 2
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OtherWeightsAtValidation(Callback):
    """As callbacks do that validate averaged weights."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.wide.data.mul_(-1)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.wide.data.mul_(-1)


def versions(client: TransferQueueClient) -> list[Weights]:
    """What the queue holds."""
    found = []
    metas = client.get_meta(["values", "layout"], partition_id="_weights", mode="force_fetch")
    for row in range(metas.size):
        reader = WeightsReader(client)
        assert reader._load(metas.select_samples([row]), time.monotonic())
        assert reader._weights is not None
        found.append(reader._weights)
    return found


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_version_holds_the_weights_of_its_step_however_late_they_are_copied(
    data: Make, trainer: MakeTrainer, accelerator: str, dtype: Any
) -> None:
    dm = data(train=stream("train", num_batches=4), val=stream("val", task="val", num_batches=1))
    fill(dm.client, "train", 16)
    fill(dm.client, "val", 4)
    own, publish = OwnWeights(), LateWeights(when_busy="wait", keep=9, dtype=dtype)
    callbacks = [publish, OtherWeightsAtValidation(), own]
    trainer(accelerator=accelerator, devices=1, callbacks=callbacks, val_check_interval=2).fit(Wide(), datamodule=dm)
    found = versions(dm.client)
    assert [weights.version for weights in found] == [0, 1, 2, 3, 4]
    assert len({float(weights.state_dict["wide"][0]) for weights in found}) == 5, "each step changes them"
    for weights, kept in zip(found, own.kept, strict=True):
        cast = {name: value.to(getattr(torch, dtype)) if dtype else value for name, value in kept.items()}
        assert {
            name: torch.equal(weights.state_dict[name], value.cpu()) for name, value in cast.items()
        } == dict.fromkeys(weights.state_dict, True)


def test_snapshots_are_pinned_on_a_gpu_also_after_a_resume(
    data: Make, trainer: MakeTrainer, accelerator: str, tmp_path: Path
) -> None:
    """The weights of a checkpoint are published before the model is on the GPU."""

    class Noting(PublishWeights):
        def _put(self, version: Any) -> None:
            found.append(version.snapshot._buffer.is_pinned())
            super()._put(version)

    found: list[bool] = []
    dm = data(train=stream("train", num_batches=4))
    fill(dm.client, "train", 16)
    first = trainer(accelerator=accelerator, devices=1, max_epochs=-1, max_steps=2)
    first.fit(Recorder(), datamodule=dm)
    first.save_checkpoint(tmp_path / "a.ckpt")
    publish = Noting(when_busy="wait")
    second = trainer(accelerator=accelerator, devices=1, max_epochs=-1, max_steps=4, callbacks=[publish])
    second.fit(Recorder(), datamodule=dm, ckpt_path=tmp_path / "a.ckpt")
    assert found[-2:] == [accelerator == "gpu"] * 2
