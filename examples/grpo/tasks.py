# SPDX-License-Identifier: Apache-2.0
"""Verifiable tasks: `chain_sum` of reasoning-gym in disjoint splits, with its own scorer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Literal

from .vocabulary import encode_prompts

Split = Literal["train", "validation"]

VALIDATION_SHARE = 5
"""One in this many problems is held out for validation."""

# The dataset seeds entry i with seed + i, so closer seeds would share entries.
_SEED_STRIDE = 1_000_000_007
_ENDLESS = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Difficulty:
    """Number of terms in a problem, and digits per term."""

    terms: int = 3
    digits: int = 1

    @property
    def prompt_width(self) -> int:
        """Tokens of a prompt: BOS, the terms, the signs between them, and the equals sign."""
        return 1 + self.terms * self.digits + self.terms

    @property
    def response_width(self) -> int:
        """Tokens of the longest right answer: sign, digits of the largest sum, EOS."""
        return 2 + len(str(self.terms * (10**self.digits - 1)))


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: the prompt, the right answer, and the entry for the scorer."""

    prompt: str
    answer: str
    entry: dict[str, Any]


def make_tasks(split: Split, count: int, seed: int, difficulty: Difficulty | None = None) -> list[Task]:
    """Draw tasks of one split. Equal arguments give equal tasks in every process.

    The text of a problem decides its split, so no seed moves a problem to the other one. Validation tasks are distinct,
    and training tasks are drawn with replacement.

    Raises:
        ValueError: the split does not hold ``count`` distinct validation problems.
    """
    difficulty = difficulty or Difficulty()
    drawn = (task for task in _draw(seed, difficulty) if split_of(task.prompt) == split)
    if split == "train":
        return list(islice(drawn, count))
    # The hash holds out roughly its share of the problems, and certainly half of it.
    available = _count_problems(difficulty) // (2 * VALIDATION_SHARE)
    if count > available:
        raise ValueError(
            f"{count} distinct validation tasks requested, but {difficulty} has only {available}. "
            "Request fewer, or more terms or digits."
        )
    return list(islice(_distinct(drawn), count))


def training_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Endless training tasks for ``lightning_tq.prompts:feed``: the encoded prompt, and the entry for the scorer."""
    difficulty = Difficulty()
    for task in _draw(seed, difficulty):
        if split_of(task.prompt) == "train":
            yield {"prompt": encode_prompts([task.prompt], difficulty.prompt_width)[0], "entry": task.entry}


def split_of(prompt: str) -> Split:
    """The split of a problem, decided by its text."""
    # hash() differs between processes.
    return "validation" if zlib.crc32(prompt.encode()) % VALIDATION_SHARE == 0 else "train"


def score(entry: dict[str, Any], text: str) -> float:
    """Reward in [0, 1] from the dataset's scorer: 1 if right, slightly above 0 if it contains the right answer."""
    return float(_dataset(0, Difficulty()).score_answer(text, entry))


def _draw(seed: int, difficulty: Difficulty) -> Iterator[Task]:
    dataset = _dataset(seed, difficulty)
    for position in range(_ENDLESS):
        entry = dataset[position]
        prompt = entry["metadata"]["expression"].replace(" ", "") + "="
        yield Task(prompt, entry["answer"], entry)


def _distinct(tasks: Iterator[Task]) -> Iterator[Task]:
    seen: set[str] = set()
    for task in tasks:
        if task.prompt not in seen:
            seen.add(task.prompt)
            yield task


def _count_problems(difficulty: Difficulty) -> int:
    values = 10 if difficulty.digits == 1 else 9 * int(10 ** (difficulty.digits - 1))
    signs = 2
    return int(values**difficulty.terms * signs ** (difficulty.terms - 1))


@cache
def _dataset(seed: int, difficulty: Difficulty) -> Any:
    # The import takes a second, which only processes with tasks should pay.
    import reasoning_gym

    return reasoning_gym.create_dataset(
        "chain_sum",
        seed=seed * _SEED_STRIDE,
        size=_ENDLESS,
        min_terms=difficulty.terms,
        max_terms=difficulty.terms,
        min_digits=difficulty.digits,
        max_digits=difficulty.digits,
    )
