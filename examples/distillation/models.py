# SPDX-License-Identifier: Apache-2.0
"""The language model of teacher and student. It predicts the next token from the last few."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY = 16
"""Number of different tokens."""
PROMPT_TOKENS = 24

_START = VOCABULARY  # comes before the first token
_TEACHER_GAIN = 20.0  # sharpens the distributions of random weights


class WindowModel(nn.Module):
    """An MLP over the embeddings of the last ``window`` tokens."""

    def __init__(self, width: int, window: int = 3, gain: float = 1.0) -> None:
        super().__init__()
        self.window = window
        self.gain = gain
        self.embedding = nn.Embedding(VOCABULARY + 1, width // 2)
        self.layers = nn.Sequential(
            nn.Linear(window * width // 2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, VOCABULARY),
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] tokens -> [B, T, VOCABULARY] logits of the token after each of them."""
        padded = nn.functional.pad(tokens, (self.window - 1, 0), value=_START)
        last = self.embedding(padded.unfold(1, self.window, 1))  # [B, T, window, width / 2]
        logits: Tensor = self.gain * self.layers(last.flatten(start_dim=2))
        return logits


def make_teacher(seed: int = 0, width: int = 128) -> WindowModel:
    """Equal seeds give equal weights in every teacher process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        teacher = WindowModel(width, gain=_TEACHER_GAIN)
    return teacher.eval().requires_grad_(False)
