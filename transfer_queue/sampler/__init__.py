# SPDX-License-Identifier: Apache-2.0
"""Samplers: classes that pick which ready samples a batch gets."""

from __future__ import annotations

from transfer_queue.sampler.base import BaseSampler as BaseSampler
from transfer_queue.sampler.group_sampler import GroupSampler as GroupSampler
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler as GRPOGroupNSampler
from transfer_queue.sampler.rank_aware_sampler import RankAwareSampler as RankAwareSampler
from transfer_queue.sampler.registry import as_sampler as as_sampler
from transfer_queue.sampler.registry import resolve as resolve
from transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler as SeqlenBalancedSampler
from transfer_queue.sampler.sequential_sampler import SequentialSampler as SequentialSampler
from transfer_queue.sampler.token_budget_sampler import TokenBudgetSampler as TokenBudgetSampler
