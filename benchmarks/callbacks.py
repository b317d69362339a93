# SPDX-License-Identifier: Apache-2.0
"""How much longer is a training step that hands out its weights, or writes fields back? Prints one JSON line."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.common import arguments, memcpy, report
from lightning_tq import PublishWeights, Stream, TQDataModule, WriteBack

ROWS, WIDTH = 32, 1024
MIB = 1 << 20


class Model(L.LightningModule):
    """Weights of so many MiB of which a step moves a few, and per row a field of ``WIDTH`` numbers to write back."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.small = torch.nn.Parameter(torch.ones(WIDTH))
        self.large = torch.nn.Parameter(torch.ones(nbytes // 4), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        data, _ = batch
        scored = data["x"] * self.small
        return {"loss": scored.mean(), "scored": scored}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.small], lr=1e-3)


class TimedPublish(PublishWeights):
    """Notes what the step pays, and what the thread does meanwhile."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.in_step: list[float] = []
        self.in_thread: list[float] = []

    def _publish(self, *args: Any) -> None:
        started = time.perf_counter()
        super()._publish(*args)
        self.in_step.append(time.perf_counter() - started)

    def _put(self, version: Any) -> None:
        started = time.perf_counter()
        super()._put(version)
        self.in_thread.append(time.perf_counter() - started)


class TimedWriteBack(WriteBack):
    """Notes what the step pays."""

    def __init__(self) -> None:
        super().__init__(["scored"], "train")
        self.in_step: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        started = time.perf_counter()
        super().on_train_batch_end(*args)
        self.in_step.append(time.perf_counter() - started)


def fit(callback: L.Callback, steps: int, nbytes: int) -> None:
    stream = Stream(partition="train", task="learn", fields=["x"], batch_size=ROWS, num_batches=steps)
    with TQDataModule(train=stream, queue={"units": 1, "memory": f"{max(256, 8 * nbytes // MIB)}MiB"}) as data:
        rows = TensorDict({"x": torch.rand(ROWS * steps, WIDTH)}, batch_size=[ROWS * steps])
        data.client.put(rows, partition_id="train")
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Model(nbytes), datamodule=data)


def median_of(seconds: list[float]) -> float:
    """In milliseconds, the first ones left out."""
    return statistics.median(seconds[len(seconds) // 5 :]) * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--weights-mib", type=int, default=256)
    args = parser.parse_args(argv)
    steps, nbytes = (6, MIB) if args.quick else (args.steps, args.weights_mib * MIB)
    warnings.filterwarnings("ignore", category=FutureWarning)  # Lightning and torch
    write_back, publish = TimedWriteBack(), TimedPublish(when_busy="wait")
    fit(write_back, steps, MIB)
    fit(publish, steps, nbytes)
    report(
        "step with WriteBack or PublishWeights",
        steps=steps,
        weights_mib=nbytes // MIB,
        rows=ROWS,
        row_bytes=4 * WIDTH,
        write_back_ms=median_of(write_back.in_step),
        publish_in_step_ms=median_of(publish.in_step),
        publish_in_thread_ms=median_of(publish.in_thread),
        memcpy_ms=memcpy(nbytes).torch_ms,
    )


if __name__ == "__main__":
    main()
