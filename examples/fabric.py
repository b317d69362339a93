# SPDX-License-Identifier: Apache-2.0
"""Your own training loop on Fabric, fed by a queue: python examples/fabric.py [number of processes]"""

from __future__ import annotations

import sys

import torch
from lightning.fabric import Fabric
from tensordict import TensorDict

import transfer_queue as tq
from lightning_tq import FabricLoader, Producer, Stream


def produce(epochs: int) -> None:
    """The producer process: puts rows of eight numbers, then their sum as a second field."""
    client = tq.get_client()
    for epoch in range(epochs):
        for _ in range(16):
            x = torch.randn(64, 8)
            meta = client.put(TensorDict({"x": x}, [64]), partition_id=f"train@{epoch}")
            client.put(TensorDict({"y": x.sum(dim=1, keepdim=True)}, [64]), metadata=meta)
        client.seal_partition(f"train@{epoch}")


def main(devices: int = 1, epochs: int = 3) -> None:
    fabric = Fabric(accelerator="cpu", devices=devices)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    stream = Stream(partition="train@{epoch}", task="fit", fields=["x", "y"], batch_size=64, micro_batch_size=32)
    with FabricLoader(fabric, stream, producers=[Producer(target=produce, args={"epochs": epochs})]) as loader:
        for epoch in range(epochs):
            for data, _ in loader:
                loss = torch.nn.functional.mse_loss(model(data["x"]), data["y"])
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            fabric.print(f"epoch {epoch}: loss {loss.item():.5f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
