# SPDX-License-Identifier: Apache-2.0
"""The GRPO loss: advantages within a group of answers, and the clipped policy loss over their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What the policy loss weighs and bounds."""

    clip_low: float = 0.2
    """The ratio of new to old probability stops counting below 1 - clip_low."""
    clip_high: float = 0.28
    """... and above 1 + clip_high. It is higher than clip_low, so that rare right answers grow faster."""
    entropy_weight: float = 0.0
    """Weight of the entropy, which keeps the answers of a group from becoming equal."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss, and detached metrics of the step."""

    loss: Tensor
    metrics: dict[str, Tensor]


def group_advantages(rewards: Tensor, num_answers: int, epsilon: float = 1e-4) -> Tensor:
    """How much better each answer is than its group: zero mean per group, unit deviation, zero if all are equal.

    Args:
        rewards: [B] float, whole groups of ``num_answers`` consecutive rows.
    Raises:
        ValueError: B is not a multiple of ``num_answers``.
    Source: DeepSeekMath (arxiv.org/abs/2402.03300), section 4.1.
    """
    if num_answers < 2 or rewards.ndim != 1 or len(rewards) % num_answers:
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} are not whole groups of {num_answers} answers. "
            "Use a sampler that keeps groups whole, with n_samples_per_prompt of at least 2."
        )
    groups = rewards.view(-1, num_answers)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + epsilon)).flatten()


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    entropy: Tensor,
    config: LossConfig | None = None,
) -> PolicyLoss:
    """Clipped policy loss, averaged over the tokens of the batch.

    Args:
        log_probs: [B, R] under the policy that learns, with gradient.
        old_log_probs: [B, R] under the policy that sampled, however many versions ago.
        advantages: [B], one per answer.
        mask: [B, R] bool, True for tokens of the answer.
        entropy: [B, R] of the policy that learns.
    Source: PPO (arxiv.org/abs/1707.06347); unequal bounds from DAPO (arxiv.org/abs/2503.14476).
    """
    config = config or LossConfig()
    # Padding has a meaningless ratio that may overflow: out before exp, not after.
    log_ratio = (log_probs - old_log_probs).masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    mean_entropy = masked_mean(entropy, mask)
    loss = -masked_mean(gain, mask) - config.entropy_weight * mean_entropy
    with torch.no_grad():
        metrics = {
            "clip_fraction": masked_mean((ratio != clipped).float(), mask),
            "ratio": masked_mean(ratio, mask),
            "kl": masked_mean(ratio - 1.0 - log_ratio, mask),
            "entropy": mean_entropy,
        }
    return PolicyLoss(loss, {name: value.detach() for name, value in metrics.items()})


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions where the mask is True; zero if there is none."""
    return (values * mask).sum() / mask.sum().clamp(min=1)
