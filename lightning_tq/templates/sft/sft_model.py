"""The model that is fine-tuned. Replace its layers by your language model."""

import lightning as L
import torch
from sft_data import VOCABULARY
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric


class Model(L.LightningModule):
    def __init__(self, learning_rate: float = 1e-2, width: int = 32):
        super().__init__()
        torch.set_num_threads(1)  # so small a model gains nothing from more, and the producers need the cores
        self.learning_rate = learning_rate
        self.val_loss = MeanMetric()  # over all rows of all ranks
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, width),
            torch.nn.Linear(width, 2 * width),
            torch.nn.ReLU(),
            torch.nn.Linear(2 * width, VOCABULARY),
        )

    def loss(self, data):
        """Of the next token. Rows have different lengths: padding is -1, and counts for nothing."""
        tokens = data["tokens"].to_padded_tensor(-1)  # [rows, longest]
        logits = self.layers(tokens[:, :-1].clamp(min=0))
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=-1)

    def training_step(self, batch, batch_idx):
        data, _ = batch  # the second part is the handle to the samples
        loss = self.loss(data)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.val_loss.update(self.loss(batch.data), weight=batch.meta.size)
        self.log("val_loss", self.val_loss, prog_bar=True)

    def on_validation_epoch_end(self):
        loss = self.trainer.callback_metrics["val_loss"]
        self.print(f"step {self.global_step}: loss {loss:.3f} on the held-out samples", flush=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
