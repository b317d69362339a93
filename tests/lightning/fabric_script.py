# SPDX-License-Identifier: Apache-2.0
"""A Fabric loop on four gloo ranks, 2 x 2 model parallel. Each rank records its topology and batches."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import producing
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy

from lightning_tq import FabricLoader, Producer, Stream


def main(log_dir: str) -> None:
    strategy = ModelParallelStrategy(lambda model, mesh: model, data_parallel_size=2, tensor_parallel_size=2)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
    fabric.launch()
    stream = Stream(partition="train@{epoch}", task="learn", fields=producing.FIELDS, batch_size=2, micro_batch_size=1)
    producer = Producer(target="producing:produce_epochs", args={"epochs": 2, "train": 24, "val": 1})
    with FabricLoader(fabric, stream, {"units": 1}, [producer]) as loader:
        found = loader.topology
        topology = [found.dp_rank, found.dp_size, found.is_reader]
        Path(log_dir, f"topology{fabric.global_rank}.json").write_text(json.dumps(topology))
        with Path(log_dir, f"rank{fabric.global_rank}.jsonl").open("w") as file:
            for _ in range(2):
                for _, meta in loader:
                    if fabric.global_rank == 1:
                        threading.Event().wait(0.05)  # slower than the peer that acknowledges for both
                    file.write(json.dumps(["train", meta.partition_ids[0], list(meta.global_indexes)]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
