# SPDX-License-Identifier: Apache-2.0
"""The rollout process of grpo.py: answers questions with the newest weights, by ``model.generate``."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import NonTensorStack
from torch import Tensor

import transfer_queue as tq
from lightning_tq import WeightsReader, feed_groups

from .models import jagged, load_model, load_tokenizer, token_log_probs
from .questions import encode_question, make_questions


class Answers(NamedTuple):
    """Answers to prompts, ``group`` consecutive ones for each."""

    tokens: list[Tensor]
    """[R] int64 each, with the token that ends it."""
    log_probs: list[Tensor]
    """[R] float32 each, under the weights that answered."""


class Engine(Protocol):
    """What a rollout needs of a model. vllm_rollout.py has another one."""

    def load(self, state_dict: dict[str, Tensor]) -> None: ...
    def answer(self, prompts: list[list[int]], group: int) -> Answers: ...


class GenerateEngine:
    """``model.generate`` of transformers."""

    def __init__(self, model: str, lora: bool, max_tokens: int) -> None:
        self._tokenizer = load_tokenizer(model)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = load_model(model, self._tokenizer, lora).to(self._device).eval()
        self._max_tokens = max_tokens
        ends = self._model.generation_config.eos_token_id
        self._ends = torch.tensor(ends, device=self._device).flatten()
        self._strict = not lora

    def load(self, state_dict: dict[str, Tensor]) -> None:
        self._model.load_state_dict(state_dict, strict=self._strict)  # with adapters, only those are published

    @torch.no_grad()
    def answer(self, prompts: list[list[int]], group: int) -> Answers:
        repeated = [tokens for tokens in prompts for _ in range(group)]
        inputs = self._tokenizer.pad({"input_ids": repeated}, padding_side="left", return_tensors="pt")
        inputs = {name: inputs[name].to(self._device) for name in ("input_ids", "attention_mask")}
        sequences = self._model.generate(**inputs, max_new_tokens=self._max_tokens)
        responses = [self._until_end(row) for row in sequences[:, inputs["input_ids"].shape[1] :]]
        # generate() could return these, too. The trainer's own function makes ratios that start at exactly one.
        rows = [torch.tensor(tokens, device=self._device) for tokens in repeated]
        log_probs = token_log_probs(self._model, rows, responses)
        lengths = [len(response) for response in responses]
        return Answers([row.cpu() for row in responses], list(log_probs.cpu().split(lengths)))

    def _until_end(self, tokens: Tensor) -> Tensor:
        ends = torch.isin(tokens, self._ends).nonzero()
        return tokens if len(ends) == 0 else tokens[: int(ends[0]) + 1]


def rollout(model: str, lora: bool, prompts: int, group: int, max_tokens: int, worker: int = 0) -> None:
    """Runs in a process of its own, until training ends."""
    fill(GenerateEngine(model, lora, max_tokens), load_tokenizer(model), prompts, group, worker)


def feed(model: str, count: int) -> None:
    """Questions, as prompts of groups. Runs in a process of its own."""
    tokenizer = load_tokenizer(model)
    questions = [question for question, _ in make_questions(count, random.Random(0))]
    rows = ({"prompt": torch.tensor(encode_question(tokenizer, question))} for question in questions)
    feed_groups(rows, "train", tasks=["update_actor"])


def fill(engine: Engine, tokenizer: Any, prompts: int, group: int, worker: int) -> None:
    """Answer up to ``prompts`` questions at a time, ``group`` times each, for as long as the trainer wants answers."""
    client, weights, version = tq.get_client(), WeightsReader(), -1
    torch.manual_seed(worker)
    with suppress(tq.EndOfPartitionError):  # the training is over
        while True:
            leases = client.lease("train", prompts)
            newest = weights.latest(least=leases[-1].version or 0)
            if newest.version != version:
                engine.load(newest.state_dict)
                version = newest.version
            questions = [lease.head["prompt"].unbind()[0].tolist() for lease in leases]
            answers = engine.answer(questions, group)
            texts = tokenizer.batch_decode(answers.tokens, skip_special_tokens=True)
            for at, lease in enumerate(leases):
                own = slice(at * group, (at + 1) * group)
                with lease:
                    lease.close({
                        "prompts": jagged([torch.tensor(questions[at])] * group),
                        "responses": jagged(answers.tokens[own]),
                        "old_log_probs": jagged(answers.log_probs[own]),
                        "answers": NonTensorStack(*texts[own]),
                    })  # fmt: skip
