# SPDX-License-Identifier: Apache-2.0
"""The world of Lightning: a Trainer fits while others put samples and add a field. It resumes from its checkpoints.

Each producer has a partition, and each epoch trains one. The model counts how often each sample was trained. Its counts
are saved and restored with its weights, so at the end they must be one everywhere.
"""

from __future__ import annotations

import errno
import logging
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_tq import PartitionSwitch, Stream, TQCheckpoint, TQDataModule
from tests.chaos import streams
from tests.chaos.actor import Role
from tests.chaos.rows import SCORED, check_rows
from transfer_queue.errors import CheckpointError

BASE = streams.BASE


def newest(directory: Path) -> Path | None:
    """The last checkpoint; one that is saved early, because the queue is full, has a name of its own.

    Lightning moves it from TMPDIR, which a full disk cuts.
    """
    whole = filter(zipfile.is_zipfile, (directory / "disk").glob("*.ckpt"))
    return max(whole, key=lambda path: path.stat().st_mtime_ns, default=None)


def prepare(client: Any, counts: dict[str, int], shape: dict[str, Any]) -> None:
    """A fit restores its queue only if that is empty; the saved one knows the task."""


def size(counts: dict[str, int], shape: dict[str, Any]) -> int:
    """How many samples are to be trained."""
    return len(streams.expected(counts, shape))


def await_fit(role: Role) -> None:
    """Until a fit of this life has begun, which may have restored the queue."""
    while not (role.directory / f"fit-{role.life}").exists():
        role.client.get_partition_list()  # notices the end of the queue
        time.sleep(0.05)


def is_over(role: Role, partition: str) -> bool:
    """Whether all of it was put, and maybe trained and cleared: the next one is made after its last row."""
    number = int(partition.rpartition("-")[2])
    is_last = number + 1 == role.counts["producer"]
    if is_last:
        return (role.directory / "fitted").exists()
    return streams.partition_of(number + 1) in role.client.get_partition_list()


class Producer(streams.Producer):
    """It begins once the one before it is done, because what is trained first needs the room."""

    def run(self) -> None:
        await_fit(self)
        while self.number and streams.partition_of(self.number) not in self.client.get_partition_list():
            time.sleep(0.05)
        if not is_over(self, streams.partition_of(self.number)):
            super().run()
            if self.number + 1 < self.count:
                self.client.create_partition(streams.partition_of(self.number + 1))


class Scorer(streams.Scorer):
    def run(self) -> None:
        await_fit(self)
        super().run()

    def fetch(self, name: str, batch: int, wait_s: float) -> Any:
        found = super().fetch(name, batch, wait_s)
        is_gone = found is None and name not in self.client.get_partition_list()
        return "ended" if is_gone and is_over(self, name) else found


class Counting(LightningModule):
    """``times``: how often each sample was trained, partition by partition."""

    def __init__(self, role: FitRole, total: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.register_buffer("times", torch.zeros(total, dtype=torch.int64))
        self.role = role

    def setup(self, stage: str) -> None:
        """After that of the data module, which has restored the queue if it was empty."""
        (self.role.directory / f"fit-{self.role.life}").touch()

    def on_train_start(self) -> None:
        self.role.note("fitting", step=self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        data, meta = batch
        self.role.at_risk()
        numbers = check_rows(data, self.role.shape["width"], SCORED)
        self.role.note("trained", part=meta.partition_ids[0], numbers=numbers, step=self.global_step)
        each = self.role.shape["chunks"] * self.role.shape["chunk"]
        for number in numbers:
            self.times[number // BASE * each + number % BASE] += 1
        loss: torch.Tensor = self.layer(data["score"].float().reshape(-1, 1)).square().mean()
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.role.at_risk()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class FitRole(Role):
    """One fit, from the newest checkpoint on."""

    def run(self) -> None:
        warnings.simplefilter("ignore")  # Lightning's, of few workers
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self.await_end_of_predecessors()
        shape = self.shape
        stream = Stream(
            partition="part-{epoch}", task="train", fields=list(SCORED), batch_size=shape["batch"],
            micro_batch_size=shape["micro_batch"], clear_consumed=["score"] if shape["clear_consumed"] else False,
        )  # fmt: skip
        saves = ModelCheckpoint(
            self.directory / "disk", "{step}", every_n_train_steps=shape["save_every"], save_top_k=1
        )
        trainer = Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            max_epochs=self.counts["producer"], accumulate_grad_batches=shape["accumulate"],
            callbacks=[PartitionSwitch(clear_finished=shape["clear_consumed"]), TQCheckpoint(), saves],
        )  # fmt: skip
        model = Counting(self, size(self.counts, shape))
        try:
            trainer.fit(model, datamodule=TQDataModule(train=stream), ckpt_path=newest(self.directory))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise CheckpointError(str(error)) from error
        (self.directory / "fitted").touch()
        self.note("model", steps=trainer.global_step, wrong=(model.times != 1).nonzero().flatten().tolist())


ROLES: dict[str, type[Role]] = {"producer": Producer, "scorer": Scorer, "trainer": FitRole}
