# SPDX-License-Identifier: Apache-2.0
"""Verifiable tasks: `chain_sum` of reasoning-gym, cut into disjoint splits and scored by its own scorer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Literal

Split = Literal["train", "validation"]

VALIDATION_SHARE = 5
"""One in this many problems is held out for validation."""

# The dataset seeds entry i with seed + i: seeds closer than this would share entries.
_SEED_STRIDE = 1_000_000_007
_ENDLESS = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Difficulty:
    """What a problem looks like: so many terms, each of so many digits."""

    terms: int = 3
    digits: int = 1

    @property
    def prompt_width(self) -> int:
        """Tokens of a prompt: BOS, the terms with a sign between two, and the equals sign."""
        return 1 + self.terms * self.digits + self.terms

    @property
    def response_width(self) -> int:
        """Tokens of the longest right answer: sign, digits of the largest sum, EOS."""
        return 2 + len(str(self.terms * (10**self.digits - 1)))


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: what the model reads, what it should write, and the entry that the scorer wants."""

    prompt: str
    answer: str
    entry: dict[str, Any]


def make_tasks(split: Split, count: int, seed: int, difficulty: Difficulty | None = None) -> list[Task]:
    """Draw tasks of one split; equal arguments give equal tasks, in every process.

    Which split a problem belongs to follows from its text alone, so no seed moves a problem across.
    Validation tasks are distinct; training tasks are drawn with replacement, as a stream of any length.
    Raises:
        ValueError: the split does not hold ``count`` distinct validation problems.
    """
    difficulty = difficulty or Difficulty()
    drawn = (task for task in _draw(seed, difficulty) if split_of(task.prompt) == split)
    if split == "train":
        return list(islice(drawn, count))
    # Which problems the hash holds out varies around its share: half of it is there for certain.
    available = _count_problems(difficulty) // (2 * VALIDATION_SHARE)
    if count > available:
        raise ValueError(
            f"{count} distinct validation tasks asked for, {difficulty} is good for {available}. "
            "Ask for fewer, or for more terms or digits."
        )
    return list(islice(_distinct(drawn), count))


def split_of(prompt: str) -> Split:
    """The split that owns a problem, from its text alone."""
    # Not hash(): it differs between processes.
    return "validation" if zlib.crc32(prompt.encode()) % VALIDATION_SHARE == 0 else "train"


def score(entry: dict[str, Any], text: str) -> float:
    """Reward of an answer in [0, 1] by the dataset's scorer: 1 if right, a little if the right one is part of it."""
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
    # Takes a second: only the processes that make or score tasks should pay for it.
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
