# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning of a Hugging Face model from a stream: python -m examples.hf.sft [--model Qwen/…]"""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import torch
from jsonargparse import auto_cli
from torch import Tensor

import transfer_queue as tq
from lightning_tq import Producer, QueueMonitor, Stream, TQDataModule

from .models import TINY, jagged, load_model, load_tokenizer, token_log_probs
from .questions import encode_question, make_questions


def produce(model: str, puts: int, rows: int) -> None:
    """Runs in a process of its own. Writes questions and answers as tokens, and ends the stream."""
    client, tokenizer, generator = tq.get_client(), load_tokenizer(model), random.Random(0)
    for _ in range(puts):
        questions = make_questions(rows, generator)
        prompts = [torch.tensor(encode_question(tokenizer, question)) for question, _ in questions]
        answers = [
            torch.tensor([*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
            for _, answer in questions
        ]
        client.put({"prompts": jagged(prompts), "answers": jagged(answers)}, partition_id="train")
    client.seal_partition("train")


class FineTuning(L.LightningModule):
    """Minimises the loss of the answers' tokens. The tokens of the prompts don't count."""

    def __init__(self, model: str, lora: bool, learning_rate: float) -> None:
        super().__init__()
        self.tokenizer = load_tokenizer(model)
        self.model = load_model(model, self.tokenizer, lora)
        self.learning_rate = learning_rate
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        data, _ = batch
        loss = -token_log_probs(self.model, data["prompts"].unbind(), data["answers"].unbind()).mean()
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)

    @torch.no_grad()
    def answer(self, question: str) -> str:
        """The model's likeliest answer."""
        prompt = torch.tensor([encode_question(self.tokenizer, question)], device=self.device)
        tokens = self.model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
        )
        return self.tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)


def main(
    model: str = TINY,
    lora: bool = False,
    steps: int = 150,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
    save: str | None = None,
) -> None:
    """Fine-tune a model on questions and answers that a process writes meanwhile.

    Args:
        model: Name of a model of the hub, a folder, or "tiny".
        lora: Train low-rank adapters.
        steps: Optimizer steps.
        batch_size: Samples per step.
        learning_rate: For a downloaded model take about 1e-5, or 2e-4 with adapters.
        save: Folder for the trained model, which "--model" then takes.
    """
    module = FineTuning(model, lora, learning_rate)
    dm = TQDataModule(
        train=Stream(partition="train", task="sft", fields=["prompts", "answers"], batch_size=batch_size),
        producers=[Producer(target=produce, args={"model": model, "puts": steps, "rows": batch_size})],
    )
    trainer = L.Trainer(max_epochs=1, callbacks=[QueueMonitor()], logger=False, enable_checkpointing=False)
    trainer.fit(module, dm)
    print(f"loss {module.losses[0]:.3f} -> {module.losses[-1]:.3f} in {trainer.global_step} steps")
    for question, _ in make_questions(3, random.Random(1)):
        print(question, module.answer(question))
    if save is not None:
        trained = module.model.merge_and_unload() if lora else module.model
        trained.save_pretrained(save)
        module.tokenizer.save_pretrained(save)


if __name__ == "__main__":
    auto_cli(main)
