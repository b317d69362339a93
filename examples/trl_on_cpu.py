# SPDX-License-Identifier: Apache-2.0
"""The two places where TRL's AsyncGRPOTrainer insists on a GPU, replaced for trl_async.py. Not needed on a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def let_trl_run_on_cpu() -> None:
    """Call it before the trainer is made. It was written for trl 1.16."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks CUDA for the device's name, for a metric
    packing.tree_attention = tree_attention  # TRL's own calls the kernel flash-attn3, which is for Hopper GPUs


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor, tree_cu_seqlens_k: Tensor, scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention in a row of several samples, which is a tree: samples share the tokens that they begin with.

    The row is cut into parts without a branch. A token sees those before it in its part, and all on the way there.

    Args:
        module: As are the next four, what transformers gives any attention; [1, heads, tokens, size] each.
        tree_kv_index: For each part in turn, where the tokens of its way from the root are in the row, its own last.
        tree_cu_seqlens_q: Where each part begins in the row, and the end.
        tree_cu_seqlens_k: Where each part begins in ``tree_kv_index``, and the end.
    """
    sees = torch.zeros(query.shape[2], key.shape[2], dtype=torch.bool)
    parts, ways = pairwise(tree_cu_seqlens_q.tolist()), pairwise(tree_cu_seqlens_k.tolist())
    for (first, end), (start, stop) in zip(parts, ways, strict=True):
        sees[first:end, tree_kv_index[start:stop]] = True
    # A row begins with the root, and each part lies behind those on its way.
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=sees.tril(), scale=scaling, enable_gqa=True
    )
    return found.transpose(1, 2), None
