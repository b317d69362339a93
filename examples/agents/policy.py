# SPDX-License-Identifier: Apache-2.0
"""The agent: a small network from what the game has said to the next guess, and its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from examples.agents.game import NUMBERS


class Policy(nn.Module):
    """Reads states [B, 2] and gives log-probabilities [B, NUMBERS] of the guesses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * NUMBERS, 64), nn.Tanh(), nn.Linear(64, NUMBERS))

    def forward(self, states: Tensor) -> Tensor:
        return self.layers(one_hot(states, NUMBERS).flatten(1).float()).log_softmax(-1)


def episode_advantages(rewards: Tensor, groups: Tensor, parts: Tensor) -> Tensor:
    """Per turn: by how much its episode was better than the mean of its group, in standard deviations.

    Args:
        rewards: [B] That of the episode in its last turn; 0 in all others.
        groups: [B] The number of each turn's group.
        parts: [B] The number of its episode within the group.
    """
    num_parts = int(parts.max()) + 1
    episodes, of_turn = torch.unique(groups * num_parts + parts, return_inverse=True)
    returns = torch.zeros(len(episodes)).index_add(0, of_turn, rewards)
    group = episodes // num_parts
    advantages = torch.empty_like(returns)
    for number in group.unique():
        own = returns[group == number]
        advantages[group == number] = (own - own.mean()) / (own.std(correction=0) + 1e-4)
    return advantages[of_turn]


def policy_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """The clipped loss of PPO (arxiv.org/abs/1707.06347), per turn."""
    ratio = (log_probs - old_log_probs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()
