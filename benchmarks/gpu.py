# SPDX-License-Identifier: Apache-2.0
"""How much slower is a step that gets its batch from a queue than one whose batch already lies on the GPU?

Prints one JSON line. Without a GPU it says so; ``--device cpu`` runs the same program on the CPU.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
from tensordict import TensorDict

from benchmarks import cases
from benchmarks.common import arguments, median_ms, report
from lightning_tq import Stream, TQBatch, TQDataModule
from transfer_queue import BatchMeta

QUESTION = "step with batches of a queue, beside a batch on the device"
GOAL_PERCENT = 2.0
EARLY = 3  # steps before the clock starts
STREAMS: dict[str, dict[str, Any]] = {
    "pinned": {"pin_memory": True},
    "pinned_1_worker": {"pin_memory": True, "num_workers": 1},
    "pageable": {},
}


class Model(L.LightningModule):
    """A step that multiplies so many matrices, reads every value of its batch, and changes one number."""

    def __init__(self, width: int, products: int, host_waits: bool) -> None:
        """``host_waits``: for the loss of each step, as a progress bar makes it do."""
        super().__init__()
        self.products = products
        self.host_waits = host_waits
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("work", torch.zeros(width, width))
        self.started = self.ended = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == EARLY:
            torch.get_device_module(self.device).synchronize()
            self.started = time.perf_counter()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        data, _ = batch
        read = [value.sum(dtype=torch.float32) for value in data.values()]
        for _ in range(self.products):
            self.work = self.work @ self.work
        loss: torch.Tensor = self.weight * torch.stack(read).sum()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.host_waits:
            outputs["loss"].item()

    def on_train_end(self) -> None:
        torch.get_device_module(self.device).synchronize()
        self.ended = time.perf_counter()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class Resident:
    """A loader that yields one batch again and again."""

    def __init__(self, batch: TQBatch, steps: int) -> None:
        self.batches = [batch] * steps

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[TQBatch]:
        return iter(self.batches)


def products_in(target_ms: float, width: int, device: torch.device) -> int:
    """How many products of matrices take so long."""
    work, module = torch.zeros(width, width, device=device), torch.get_device_module(device)

    def several() -> None:
        for _ in range(8):
            work @ work
        module.synchronize()

    return math.ceil(target_ms / (median_ms(several, 5) / 8))


def step_ms(model: Model, steps: int, device: torch.device, source: TQDataModule | Resident) -> float:
    """Mean time of a step."""
    trainer = L.Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu", devices=1, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, **{"datamodule" if isinstance(source, TQDataModule) else "train_dataloaders": source})
    return (model.ended - model.started) / (steps - EARLY) * 1e3


def with_queue(
    model: Model, steps: int, device: torch.device, batch: TensorDict, options: dict[str, Any], memory: str
) -> float:
    """All batches are put before the first step."""
    stream = Stream(partition="train", task="learn", fields=list(batch.keys()), batch_size=len(batch), **options)
    with TQDataModule(train=stream, queue={"units": 1, "memory": memory}) as data:
        for _ in range(steps):
            data.client.put(batch, partition_id="train")
        data.client.seal_partition("train")
        return step_ms(model, steps, device, data)


def measured(steps: int, rounds: int, work: tuple[int, int], device: torch.device, batch: TensorDict) -> dict[str, Any]:
    """Medians over rounds, for a host that runs ahead of the device and for one that waits for it in each step."""
    memory = f"{max(256, 2 * steps * cases.nbytes(batch) >> 20)}MiB"
    meta = BatchMeta(list(range(len(batch))), ["train"] * len(batch))
    resident = Resident(TQBatch(batch.to(device), meta), steps)
    figures: dict[str, Any] = {}
    for label, host_waits in (("host_runs_ahead", False), ("host_waits", True)):
        times: dict[str, list[float]] = {name: [] for name in ("resident", *STREAMS)}
        for _ in range(rounds):
            times["resident"].append(step_ms(Model(*work, host_waits), steps, device, resident))
            for name, options in STREAMS.items():
                model = Model(*work, host_waits)
                times[name].append(with_queue(model, steps, device, batch, options, memory))
        medians = {name: statistics.median(found) for name, found in times.items()}
        slower = {name: (medians[name] / medians["resident"] - 1) * 100 for name in STREAMS}
        figures[label] = {"step_ms": medians, "slower_percent": slower}
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--step-ms", type=float, default=100.0, help="about how long a step computes")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        report(QUESTION, device=None, measured="nothing: there is no GPU here; --device cpu runs the program")
        return
    warnings.filterwarnings("ignore", category=FutureWarning)  # Lightning and torch
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    steps, rounds, target_ms = (6, 1, 1.0) if args.quick else (args.steps, args.rounds, args.step_ms)
    width = 128 if args.quick else 2048
    batch = cases.rl_batch(*((8, 16) if args.quick else ()))
    figures = measured(steps, rounds, (width, products_in(target_ms, width, device)), device, batch)
    report(
        QUESTION,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        batch_mib=cases.nbytes(batch) / 2**20,
        steps=steps,
        rounds=rounds,
        goal_percent=GOAL_PERCENT,
        **figures,
    )


if __name__ == "__main__":
    main()
