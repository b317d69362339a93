# SPDX-License-Identifier: Apache-2.0
"""SeqlenBalancedSampler: one global batch, split so that every data-parallel rank has about the same work."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

from transfer_queue.errors import SamplerError
from transfer_queue.sampler.base import Picked, Round, Weight, sample_weights
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.karmarkar_karp import get_seqlen_balanced_partitions, karmarkar_karp

__all__ = ["SeqlenBalancedSampler", "get_seqlen_balanced_partitions", "karmarkar_karp"]

logger = logging.getLogger(__name__)
_LENGTHS = "total_lengths"


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Draws ``batch_size * dp_size`` samples at once and gives each rank the same number of groups, of similar weight.

    Args:
        n_samples_per_prompt: Responses per prompt; a group never spans two ranks.
        dp_size: Data-parallel ranks. ``batch_size`` is per rank.
        weight: Tag with the tokens of a sample, or an importable function of its tags. A sample without the tag
            "total_lengths" counts as 1; one without a tag of another name is an error.
    Raises:
        SamplerError: a number below 1, ``batch_size`` no multiple of a group, or a sample without the tag.
    Examples:
        >>> client.register_task("balanced", sampler=tq.SeqlenBalancedSampler(dp_size=2), dp_size=2)
        >>> tags = [{"total_lengths": tokens} for tokens in (40, 10, 30, 20)]
        >>> meta = client.put({"x": torch.tensor([40, 10, 30, 20])}, partition_id="train", tags=tags)
        >>> first = {"dp_rank": 0, "batch_index": 0}
        >>> client.get_data(client.get_meta(["x"], 2, "train", task_name="balanced", sampling_config=first))["x"]
        tensor([30, 20])
    """

    _unnumbered = 0
    _has_warned = False
    """Of samples without a length."""

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1, weight: Weight = _LENGTHS) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size <= 0:
            raise SamplerError(f"dp_size must be positive, got {dp_size}.")
        self.dp_size: int = dp_size
        self.weight = weight

    @property
    def _balanced_cache(self) -> dict[tuple[str, str, int], list[list[int]]]:
        """By partition, task and batch: the shares of all ranks that are remembered. Checkpoints have them, too."""
        found: dict[tuple[str, str, int], list[list[int]]] = {}
        for partition, tasks in self._states.items():
            for task, ranks in tasks.items():
                for batch, (share, _) in chain.from_iterable(batches.items() for batches in ranks.values()):
                    found.setdefault((partition, task, batch), []).append(share)
        return found

    def samples_needed(self, batch_size: int, dp_size: int | None) -> int:
        return batch_size * self.dp_size

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, task_name: str = "", partition_id: str = "", *args: Any,
        partition: Any = None, dp_rank: int | None = None, batch_index: int | None = None, dp_size: int | None = None,
        **kwargs: Any,
    ) -> Picked:  # fmt: skip
        """This rank's share of global batch ``batch_index`` (None: 0). The first rank to ask draws for all ranks."""
        rank = self._rank(dp_rank, self.dp_size)
        self._check_ranks(dp_size)
        if rank >= self.dp_size:
            return [], []
        wanted = Round(ready_indexes, batch_size, tuple(range(self.dp_size)), batch_index, partition)
        return self._share(wanted, rank, task_name, partition_id)

    def round(self, wanted: Round) -> list[list[int]]:
        # ``batch_size`` must be a multiple per rank, otherwise groups couldn't be dealt out equally.
        self._check_multiple(wanted.batch_size)
        groups = self._groups(wanted.ready, wanted.batch_size * self.dp_size, wanted.partition)
        return self._split(groups, wanted.partition) if groups else []

    def save_checkpoint(self) -> dict[str, Any]:
        return {**super().save_checkpoint(), "_balanced_cache": copy.deepcopy(self._balanced_cache)}

    def _split(self, groups: list[list[int]], view: Any) -> list[list[int]]:
        """One list of samples per rank."""
        if view is None:
            logger.warning("SeqlenBalancedSampler was called without a partition: split by count, not by weight.")
            per_rank = len(groups) // self.dp_size
            parts = [list(range(rank * per_rank, (rank + 1) * per_rank)) for rank in range(self.dp_size)]
        else:
            weights = self._weights([index for group in groups for index in group], view)
            size = self.n_samples_per_prompt
            totals = [sum(weights[start : start + size]) for start in range(0, len(weights), size)]
            parts = get_seqlen_balanced_partitions(totals, self.dp_size, equal_size=True)
        return [[index for position in part for index in groups[position]] for part in parts]

    def _weights(self, samples: list[int], view: Any) -> list[float]:
        if self.weight != _LENGTHS:
            return sample_weights(samples, self.weight, view)
        tags = view.get_custom_meta(samples)
        if not self._has_warned and any(_LENGTHS not in (tags.get(index) or {}) for index in samples):
            self._has_warned = True
            logger.warning("samples without the tag %r count as 1 where batches are balanced by it.", _LENGTHS)
        return sample_weights(samples, self.weight, view, missing=1)
