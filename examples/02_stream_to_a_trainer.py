# SPDX-License-Identifier: Apache-2.0
"""A producer process fills the queue while a Trainer trains from it."""

import lightning as L
import torch
from tensordict import TensorDict
from torch.nn.functional import mse_loss

import transfer_queue as tq
from lightning_tq import Producer, QueueMonitor, Stream, TQDataModule


def produce(puts: int) -> None:
    """Runs in a process of its own. Puts inputs, and then the target of each."""
    client = tq.get_client()
    for _ in range(puts):
        x = torch.randn(32, 8)
        meta = client.put(TensorDict({"x": x}, batch_size=[32]), partition_id="train")
        y = x.sum(dim=1, keepdim=True)  # in your program: a reward model, a teacher, an environment
        client.put(TensorDict({"y": y}, batch_size=[32]), metadata=meta)
    client.seal_partition("train")  # no more samples: the epoch ends with the last batch


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        data, _ = batch  # the second part is the handle to the samples
        loss = mse_loss(self.layer(data["x"]), data["y"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    dm = TQDataModule(
        train=Stream(partition="train", task="learn", fields=["x", "y"], batch_size=64),
        producers=[Producer(target=produce, args={"puts": 100})],
    )
    trainer = L.Trainer(max_epochs=1, callbacks=[QueueMonitor()], logger=False, enable_checkpointing=False)
    trainer.fit(Model(), dm)


if __name__ == "__main__":
    main()
