# SPDX-License-Identifier: Apache-2.0
"""Does a long training over one partition without end take bounded memory in the queue? Prints one JSON line."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.common import arguments, in_fresh_process, joined_client, report
from lightning_tq import Stream, TQDataModule
from lightning_tq.queue_report import take_snapshot

SIZE, WIDTH, AHEAD = 32, 64, 16  # 32 samples of 256 B; a producer 16 batches ahead at most
SAVED_EVERY = 100
LOOKS = 10
DEADLINE_S = 900.0
VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {"ack": "never"},
    "acks": {"ack": "step"},
    "acks_and_clearing": {"ack": "step", "clear": True},
    "at_checkpoints": {"ack": "checkpoint", "clear": True},
}
"""What is released: nothing; the ledger; the ledger and the samples, at each step or once a checkpoint holds it."""


class Small(LightningModule):
    """As little as a training step can be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        data, _ = batch
        loss: torch.Tensor = self.layer(data["x"]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Producer(threading.Thread):
    """Stays so far ahead of the trainer, so that what is held tells what is released."""

    def __init__(self, conf: Any, steps: int) -> None:
        super().__init__(daemon=True)
        self._client = joined_client(conf)
        self._steps = steps
        self._room = threading.Semaphore(AHEAD)
        self.end = threading.Event()

    def run(self) -> None:
        data = TensorDict({"x": torch.ones(SIZE, WIDTH)}, batch_size=[SIZE])
        for _ in range(self._steps + AHEAD):
            self._room.acquire()
            if self.end.is_set():
                return
            self._client.put(data, partition_id="train")

    def trained(self) -> None:
        self._room.release()

    def stop(self) -> None:
        self.end.set()
        self._room.release()
        self.join()
        self._client.close()


class Snapshots(Callback):
    """Notes what the queue holds, at equal distances."""

    def __init__(self, dm: TQDataModule, controller: psutil.Process, producer: Producer, steps: int) -> None:
        self.dm = dm
        self.controller = controller
        self.producer = producer
        self.every = max(1, steps // LOOKS)
        self.batches = 0
        self.open: list[int] = []
        self.samples: list[int] = []
        self.held_mib: list[float] = []
        self.controller_mib: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.producer.trained()
        self.batches += 1
        if self.batches % self.every == 0:
            snapshot = asyncio.run(take_snapshot(self.dm.client))
            partition = snapshot.stats["partitions"]["train"]
            self.open.append(partition["tasks"]["learn"]["in_flight"])
            self.samples.append(partition["samples"])
            self.held_mib.append(sum(unit["held_nbytes"] for unit in snapshot.units) / 2**20)
            self.controller_mib.append(self.controller.memory_info().rss / 2**20)


def train(steps: int, ack: str, clear: bool = False) -> dict[str, Any]:
    """One run in a process of its own. What the queue held after a tenth of the steps, and at the end."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    stream = Stream(partition="train", task="learn", fields=["x"], batch_size=SIZE, clear_consumed=clear)
    # In a process of its own the controller's memory can be told from the values'.
    queue = {"units": 1, "options": {"server_processes": "each"}}
    dm = TQDataModule(train=stream, queue=queue, ack=ack)  # type: ignore[arg-type]
    with dm, tempfile.TemporaryDirectory() as folder:
        conf = tq.init()
        producer = Producer(conf, steps)
        snapshots = Snapshots(dm, psutil.Process(conf.controller.zmq_info.pid), producer, steps)
        saves = ModelCheckpoint(Path(folder), every_n_train_steps=SAVED_EVERY)
        checkpoints = ack == "checkpoint"
        trainer = Trainer(
            accelerator="cpu", logger=False, max_steps=steps, max_epochs=-1, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=checkpoints, default_root_dir=folder,
            callbacks=[snapshots, saves] if checkpoints else [snapshots],
        )  # fmt: skip
        producer.start()
        started = time.perf_counter()
        trainer.fit(Small(), datamodule=dm)
        elapsed = time.perf_counter() - started
        producer.stop()
    return {
        "open_batches": [snapshots.open[0], snapshots.open[-1]],
        "samples_held": [snapshots.samples[0], snapshots.samples[-1]],
        "held_mib": [snapshots.held_mib[0], snapshots.held_mib[-1]],
        "controller_mib": [snapshots.controller_mib[0], snapshots.controller_mib[-1]],
        "steps_per_s": steps / elapsed,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args(argv)
    names, steps = (["acks_and_clearing"], 40) if args.quick else (list(VARIANTS), args.steps)
    figures = {name: in_fresh_process(train, steps, *VARIANTS[name].values(), deadline_s=DEADLINE_S) for name in names}
    report("long run", steps=steps, batch_size=SIZE, batches_ahead=AHEAD, saved_every=SAVED_EVERY, **figures)


if __name__ == "__main__":
    main()
