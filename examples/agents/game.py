# SPDX-License-Identifier: Apache-2.0
"""GuessTheNumber of textarena: the agent guesses a number from 1 to 20, and hears "higher" or "lower"."""

from __future__ import annotations

from collections.abc import Iterable

import textarena
import torch
from torch import Tensor

NUMBERS = 20
TURN_PRICE = 0.9


class Episode:
    """One game. Equal seeds have the same number, so that a game can be played again from its guesses."""

    def __init__(self, seed: int, guesses: Iterable[int] = ()) -> None:
        """``guesses``: turns that were played before, by a worker that died."""
        self._game = textarena.make("GuessTheNumber-v0-train")
        self._game.reset(num_players=1, seed=seed)
        self._low, self._high, self._guessed = 1, NUMBERS, set[int]()
        self.turns, self.is_over, self.won = 0, False, False
        for guess in guesses:
            self.play(guess)

    @property
    def state(self) -> Tensor:
        """[2] The lowest and the highest number that the answers so far allow, counted from 0."""
        return torch.tensor([self._low - 1, self._high - 1])

    def play(self, guess: int) -> None:
        """One turn. ``guess`` counts from 0."""
        number = guess + 1
        self.is_over, _ = self._game.step(f"[{number}]")
        self.turns += 1
        if self.is_over:
            rewards, _ = self._game.close()
            self.won = rewards[0] == 1
        if self.is_over or number in self._guessed:  # a game refuses a number that it has heard, and ends at the second
            return
        self._guessed.add(number)
        _, text = self._game.get_observation()
        if text.endswith("higher."):  # "The target number is higher."
            self._low = max(self._low, number + 1)
        else:
            self._high = min(self._high, number - 1)

    @property
    def reward(self) -> float:
        """1 for a win in no time, less for each turn that it took; 0 for a game that was lost."""
        return TURN_PRICE**self.turns if self.won else 0.0
