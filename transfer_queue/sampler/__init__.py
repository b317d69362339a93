# SPDX-License-Identifier: Apache-2.0
"""Samplers: classes that pick which ready samples a batch gets."""

from __future__ import annotations

from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.group_sampler import GroupSampler
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.rank_aware_sampler import RankAwareSampler
from transfer_queue.sampler.registry import as_sampler, resolve
from transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler
from transfer_queue.sampler.sequential_sampler import SequentialSampler
from transfer_queue.sampler.token_budget_sampler import TokenBudgetSampler

__all__ = [
    "BaseSampler",
    "GRPOGroupNSampler",
    "GroupSampler",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "TokenBudgetSampler",
    "as_sampler",
    "resolve",
]
