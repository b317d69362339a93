# SPDX-License-Identifier: Apache-2.0
"""The task of both examples: questions that a number answers. Replace this file for a task of your own."""

from __future__ import annotations

import random
from typing import Any

_NUMBERS = 100


def make_questions(count: int, generator: random.Random) -> list[tuple[str, str]]:
    """Draw questions, each with its right answer."""
    numbers = [generator.randrange(_NUMBERS) for _ in range(count)]
    return [(f"Which number comes after {number}?", str(number + 1)) for number in numbers]


def all_texts() -> list[str]:
    """What the tokenizer of the tiny model is trained on."""
    return [f"Which number comes after {number}?\n{number + 1}" for number in range(_NUMBERS)]


def encode_question(tokenizer: Any, question: str) -> list[int]:
    """Token ids of a prompt. A model that has a chat template gets the question as a message of its user."""
    text = f"{question}\n"
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": f"{question} Answer with the number only."}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def reward_of(answer: str) -> float:
    """Share of the answer's characters that are digits, from 0 to 1. So "42" has 1.0, and "it is 42" has 0.25."""
    characters = answer.strip()
    return sum(character in "0123456789" for character in characters) / max(1, len(characters))
