# SPDX-License-Identifier: Apache-2.0
"""Copies to the device ahead of a step: their order, and that nothing else changes.

These run everywhere: on the CPU, torch's stand-ins for streams and events take the same path. test_gpu.py needs a GPU.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from producing import fill, rows
from recorders import Recorder
from tensordict import TensorDict

from lightning_tq import TQBatch, TQDataModule
from lightning_tq.device_copies import DeviceCopy, SideStream, device_copies
from lightning_tq.trainer_compat import changes_batches
from tests.lightning.conftest import stream
from transfer_queue import BatchMeta

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]
CPU = torch.device("cpu")


# ---- the order of copies, waits and uses ----


class WrittenDown:
    """Streams and events of a device that does nothing but write down what it is told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = self.Stream("main")
        self.numbers = iter(range(9))

    def Stream(self, device: object) -> Any:
        log = self.log

        class Stream:
            def wait_stream(self, other: Any) -> None:
                log.append(f"{self} waits for {other}")

            def __str__(self) -> str:
                return "main" if device == "main" else "side"

        return Stream()

    def Event(self) -> Any:
        name, log = f"event {next(self.numbers)}", self.log

        class Event:
            def record(self, on: Any) -> None:
                log.append(f"{name} on {on}")

            def wait(self, on: Any) -> None:
                log.append(f"{on} waits for {name}")

        return Event()

    @contextmanager
    def stream(self, chosen: Any) -> Any:
        self.log.append(f"on {chosen}")
        yield
        self.log.append("on main")

    def current_stream(self, device: torch.device) -> Any:
        return self.current


class Noted:
    """A tensor that writes down who keeps it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def record_stream(self, stream: Any) -> None:
        self.log.append(f"{stream} keeps {self.name}")


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> tuple[SideStream, list[str]]:
    """A side stream of a device that writes down, and what it wrote."""
    device = WrittenDown()
    monkeypatch.setattr(torch, "privateuseone", device, raising=False)
    return SideStream(torch.device("privateuseone")), device.log


def test_what_reads_a_copy_waits_for_it_and_keeps_its_memory(side: tuple[SideStream, list[str]]) -> None:
    stream_of_copies, log = side
    with stream_of_copies.copies() as done:
        log.append("copy")
    log.append("step")
    stream_of_copies.lead(done, [Noted(log, "values")])  # type: ignore[list-item]
    assert log == [
        "on side", "copy", "event 0 on side", "on main", "step", "main waits for event 0", "main keeps values",
    ]  # fmt: skip


def test_a_copy_of_what_the_device_wrote_waits_for_that_and_keeps_it(side: tuple[SideStream, list[str]]) -> None:
    stream_of_copies, log = side
    stream_of_copies.follow([Noted(log, "weights")])  # type: ignore[list-item]
    with stream_of_copies.copies():
        log.append("copy")
    assert log == ["side waits for main", "side keeps weights", "on side", "copy", "event 0 on side", "on main"]


def test_a_failed_copy_has_no_event_and_leaves_the_stream(side: tuple[SideStream, list[str]]) -> None:
    stream_of_copies, log = side
    with pytest.raises(RuntimeError, match="out of memory"), stream_of_copies.copies():
        raise RuntimeError("out of memory")
    assert "event 0 on side" not in log


@pytest.mark.parametrize("device", ["cpu", "xla", "meta"])
def test_a_device_without_streams_gets_stand_ins_and_nothing_is_copied_ahead(device: str) -> None:
    assert not SideStream(torch.device(device)).is_real
    assert device_copies(torch.device(device)) is None


# ---- a batch ----


@pytest.fixture
def batch() -> TQBatch:
    return TQBatch(rows(3), BatchMeta([5, 6, 7], ["train"] * 3))


def test_a_batch_gives_the_copy_that_was_started_once_and_only_for_its_device(batch: TQBatch) -> None:
    copies = Counting()
    batch.copy_ahead(copies)
    batch.copy_ahead(copies)
    (copy,) = copies.made
    assert batch.to("cpu").data is copy.data
    assert batch.to("cpu").data is not copy.data
    batch.copy_ahead(copies)
    assert batch.to("meta").data.device.type == "meta"
    assert list(copy.data["text"]) == ["row 0", "row 1", "row 2"]
    assert torch.equal(copy.data["x"], batch.data["x"])


def test_a_batch_travels_between_processes_without_its_copy(batch: TQBatch) -> None:
    batch.copy_ahead(SideStream(CPU))
    again = pickle.loads(pickle.dumps(batch))
    assert torch.equal(again.to("cpu").data["x"], batch.data["x"])


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_ragged_and_nested_fields_are_not_copied_ahead(layout: Any) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    copies = SideStream(CPU)
    assert copies.start(TensorDict({"x": ragged}, batch_size=[2])) is None
    assert copies.start(TensorDict({"x": {"y": torch.ones(2)}}, batch_size=[2])) is None
    batch = TQBatch(TensorDict({"x": ragged}, batch_size=[2]), BatchMeta([0, 1], ["train"] * 2))
    batch.copy_ahead(copies)
    assert [row.tolist() for row in batch.to("cpu").data["x"].unbind()] == [[1.0] * 2, [1.0] * 3]


# ---- a fit with copies ahead is the same fit ----


class Counting(SideStream):
    """Copies to the CPU. Writes down the first row of each batch."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.made: list[DeviceCopy] = []
        self.log: list[str] = []

    def start(self, data: TensorDict) -> DeviceCopy | None:
        self.log.append(f"copy {int(data['x'][0, 0])}")
        copy = super().start(data)
        assert copy is not None
        self.made.append(copy)
        return copy


class CopiesAhead(Callback):
    """Gives the train stream copies to the CPU, as it has them to an accelerator."""

    def __init__(self, copies: SideStream | None = None) -> None:
        self.copies = copies or Counting()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reader = trainer.datamodule.train_reader()
        assert reader.device_copies is None, "the CPU has no streams"
        reader.device_copies = self.copies


class Noting(Recorder):
    """Writes down its steps."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.events.append(f"step {int(batch.data['x'][0, 0])}")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("length", "events"),
    [
        (None, ["copy 0", "copy 4", "step 0", "copy 8", "step 4", "step 8"]),
        (3, ["copy 0", "step 0", "copy 4", "step 4", "copy 8", "step 8"]),
    ],
)
def test_a_copy_starts_when_lightning_fetches_the_batch(
    data: Make, trainer: MakeTrainer, length: int | None, events: list[str]
) -> None:
    dm = data(train=stream("train", num_batches=length))
    fill(dm.client, "train", 12)
    copies = Counting()
    model = Noting(copies.log)
    trainer(callbacks=[CopiesAhead(copies)]).fit(model, datamodule=dm)
    assert copies.log == events
    assert model.indexes() == list(range(12))


@pytest.mark.parametrize("options", [{}, {"prefetch": False}, {"num_workers": 1}], ids=str)
def test_every_batch_comes_once_in_order_with_its_values(
    data: Make, trainer: MakeTrainer, options: dict[str, Any]
) -> None:
    dm = data(train=stream("train", micro_batch_size=2, **options))
    fill(dm.client, "train", 12)
    model = Recorder()  # compares the fields of each row
    trainer(callbacks=[CopiesAhead()], accumulate_grad_batches=2).fit(model, datamodule=dm)
    assert model.indexes() == list(range(12))
    assert dm.client.get_stats()["partitions"]["train"]["tasks"]["learn"]["consumed"] == 12


# ---- where it stays off ----


def test_without_pinned_memory_or_a_device_with_streams_nothing_is_copied_ahead(
    data: Make, trainer: MakeTrainer
) -> None:
    class Found(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            found.append(trainer.datamodule.train_reader().device_copies)

    found: list[Any] = []
    for options in ({"pin_memory": True}, {}):
        dm = data(train=stream("train", **options))
        fill(dm.client, "train", 4)
        trainer(callbacks=[Found()]).fit(Recorder(), datamodule=dm)
        dm.close()
    assert found == [None, None]


@pytest.mark.filterwarnings("ignore:You have overridden:UserWarning")
def test_a_hook_that_may_change_a_batch_before_its_transfer_is_noticed(data: Make, trainer: MakeTrainer) -> None:
    class Halves(Recorder):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    class Own(TQDataModule):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return batch

    class Found(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            found.append(changes_batches(trainer))

    found: list[bool] = []
    for kind, model in ((TQDataModule, Recorder()), (TQDataModule, Halves()), (Own, Recorder())):
        with kind(train=stream("train"), queue={"units": 1}) as dm:
            fill(dm.client, "train", 4)
            trainer(callbacks=[Found()]).fit(model, datamodule=dm)
    assert found == [False, True, True]
