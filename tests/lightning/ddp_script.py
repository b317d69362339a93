# SPDX-License-Identifier: Apache-2.0
"""Fits on two gloo ranks. Arguments: strategy, directory for the ranks' records, and options for a failure."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import producing
from lightning.pytorch import Trainer
from recorders import Recorder

from lightning_tq import PartitionSwitch, Producer, QueueMonitor, Stream, TQDataModule


class FailsOnOneRank(Recorder):
    """Fails on the given rank, in its third step."""

    def __init__(self, rank: int, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.rank = rank

    def setup(self, stage: str) -> None:
        if self.global_rank != self.rank:
            self.fail_at = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("log_dir", type=Path)
    parser.add_argument("--tail", default=None)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--fail-rank", type=int, default=-1)
    parser.add_argument("--how", default="raise")
    parser.add_argument("--test", action="store_true")
    options = parser.parse_args()

    def stream(partition: str, task: str) -> Stream:
        return Stream(partition=partition, task=task, fields=producing.FIELDS, batch_size=4, tail=options.tail,
                      num_workers=options.num_workers)  # fmt: skip

    datamodule = TQDataModule(
        train=stream("train@{epoch}", "learn"),
        val=stream("val@{epoch}", "evaluate"),
        test=stream("val@1", "examine"),
        queue={"units": 1},
        producers=[Producer(target="producing:produce_epochs", args={"epochs": 2, "train": 22, "val": 9})],
    )
    model = FailsOnOneRank(
        options.fail_rank, log_dir=str(options.log_dir), fail_at=2 if options.fail_rank >= 0 else None, how=options.how
    )
    trainer = Trainer(
        strategy=options.strategy, devices=2, accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[PartitionSwitch(), QueueMonitor()],
        num_sanity_val_steps=0,
    )  # fmt: skip
    if options.strategy != "ddp":  # ranks are child processes, and the queue must outlive them
        datamodule.open()
    trainer.fit(model, datamodule=datamodule)
    if options.test:
        trainer.test(model, datamodule=datamodule, verbose=False)
    if trainer.is_global_zero:
        (options.log_dir / "finished").write_text(str(trainer.global_step))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
