"""A model that reads batches from an endless stream."""

import lightning as L
import torch
from torch.nn.functional import mse_loss
from torchmetrics import MeanMetric


class Model(L.LightningModule):
    def __init__(self, learning_rate: float = 0.05):
        super().__init__()
        torch.set_num_threads(1)  # so small a model gains nothing from more, and the producers need the cores
        self.layer, self.learning_rate = torch.nn.Linear(8, 1), learning_rate
        self.val_loss = MeanMetric()  # over all rows of all ranks

    def training_step(self, batch, batch_idx):
        data, _ = batch  # the second part is the handle to the samples
        loss = mse_loss(self.layer(data["x"]), data["y"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        data, meta = batch
        self.val_loss.update(mse_loss(self.layer(data["x"]), data["y"]), weight=meta.size)
        self.log("val_loss", self.val_loss, prog_bar=True)

    def on_validation_epoch_end(self):
        loss = self.trainer.callback_metrics["val_loss"]
        self.print(f"step {self.global_step}: loss {loss:.4f} on the held-out samples", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)
