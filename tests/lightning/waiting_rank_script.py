# SPDX-License-Identifier: Apache-2.0
"""One of two ranks of a user's launcher. It joins a queue, trains what is there and waits for more."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from producing import FIELDS
from recorders import Recorder

from lightning_tq import Stream, TQDataModule


class ReportsItsWait(Callback):
    def __init__(self, datamodule: TQDataModule, folder: Path) -> None:
        self.datamodule = datamodule
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = self.folder / f"waits{trainer.global_rank}"
        threading.Thread(target=self._report, args=[path], daemon=True).start()

    def _report(self, path: Path) -> None:
        never = threading.Event()
        while self.datamodule.train_reader().waiting_s() < 0.3:
            never.wait(0.05)
        path.touch()


def main(address: str, folder: str) -> None:
    train = Stream(partition="train", task="learn", fields=FIELDS, batch_size=4)
    datamodule = TQDataModule(train=train, queue=address)
    trainer = Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ReportsItsWait(datamodule, Path(folder))],
    )  # fmt: skip
    trainer.fit(Recorder(), datamodule=datamodule)


if __name__ == "__main__":
    main(*sys.argv[1:])
