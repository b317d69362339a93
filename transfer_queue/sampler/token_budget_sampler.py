# SPDX-License-Identifier: Apache-2.0
"""TokenBudgetSampler: batches bounded by tokens rather than by count, one per data-parallel rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

from transfer_queue.errors import SamplerError
from transfer_queue.sampler.base import Picked, Round, RoundSampler, Weight, in_index_order, sample_weights
from transfer_queue.sampler.karmarkar_karp import karmarkar_karp

_CHUNK = 256  # tags read at a time: a budget may be full long before batch_size samples


class TokenBudgetSampler(RoundSampler):
    """As many of the oldest ready samples as fit into ``max_tokens`` per rank, balanced over the ranks.

    A round is a prefix of the ready samples, so none is passed over. It is drawn when a further sample wouldn't fit, or
    when the partition is sealed. Every rank gets at least one sample and at most ``batch_size``.

    Args:
        max_tokens: Upper bound of a rank's batch.
        weight: Tag with the tokens of a sample, or an importable function of its tags.
        dp_size: Data-parallel ranks; None: as the task was registered, else every rank draws for itself.
    Raises:
        SamplerError: a number that is not positive, or a sample that weighs more than ``max_tokens`` or has no tag.
    Examples:
        >>> client.register_task("packed", sampler=tq.TokenBudgetSampler(max_tokens=100))
        >>> tags = [{"total_lengths": tokens} for tokens in (60, 30, 50)]
        >>> meta = client.put({"x": torch.tensor([60, 30, 50])}, partition_id="train", tags=tags)
        >>> client.get_data(client.get_meta(["x"], 8, "train", task_name="packed"))["x"]  # 8 at most
        tensor([60, 30])
    """

    _unnumbered = 0

    def __init__(self, max_tokens: float, weight: Weight = "total_lengths", dp_size: int | None = None) -> None:
        super().__init__()
        if not max_tokens > 0:
            raise SamplerError(f"max_tokens must be positive, got {max_tokens}.")
        if dp_size is not None and dp_size <= 0:
            raise SamplerError(f"dp_size must be positive, got {dp_size}.")
        self.max_tokens = max_tokens
        self.weight = weight
        self.dp_size = dp_size

    def samples_needed(self, batch_size: int, dp_size: int | None) -> int:
        return self.dp_size or dp_size or 1

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, task_name: str = "", partition_id: str = "", *args: Any,
        partition: Any = None, dp_rank: int | None = None, batch_index: int | None = None, dp_size: int | None = None,
        **kwargs: Any,
    ) -> Picked:  # fmt: skip
        """This rank's share of round ``batch_index`` (None: 0), or ([], []) while more samples would fit."""
        self.check(batch_size, dp_size)
        num_ranks = self.dp_size or dp_size
        rank = self._rank(dp_rank, num_ranks)
        if num_ranks is not None and rank >= num_ranks:
            raise SamplerError(f"dp_rank {rank} is outside 0..{num_ranks - 1}: the task has dp_size {num_ranks}.")
        ranks = (rank,) if num_ranks is None else tuple(range(num_ranks))
        wanted = Round(in_index_order(ready_indexes), batch_size, ranks, batch_index, partition)
        if len(ranks) > 1 or None not in (dp_rank, batch_index):
            return self._share(wanted, rank, task_name, partition_id)
        # A single rank without batch numbers remembers nothing, or it would get the same batch forever.
        sampled = next(iter(self.round(wanted)), [])
        return sampled, list(sampled)

    def round(self, wanted: Round) -> list[list[int]]:
        num_ranks, view = len(wanted.ranks), wanted.partition
        if view is None:
            raise SamplerError("TokenBudgetSampler reads tags and needs the partition= argument, got None.")
        indexes, weights = self._prefix(wanted.ready, num_ranks * wanted.batch_size, num_ranks * self.max_tokens, view)
        if len(indexes) < num_ranks:
            return []
        packing = _Packing(weights, num_ranks, wanted.batch_size, self.max_tokens)
        count = packing.longest_prefix()
        left = len(wanted.ready) - count
        sealed = getattr(view, "sealed", False) is True
        if left == 0 and not sealed and packing.has_room(count):
            return []
        if sealed and 0 < left < num_ranks:
            # Keep one sample per rank for a last round, because a smaller tail can't be dealt out.
            shorter = len(wanted.ready) - num_ranks
            count = shorter if shorter >= num_ranks and packing.fits(shorter) else count
        return [[indexes[position] for position in part] for part in packing.balanced(count)]

    def _prefix(
        self, ready: Sequence[int], most_samples: int, most_tokens: float, view: Any
    ) -> tuple[list[int], list[float]]:
        """The oldest samples, at most as many as fit into all ranks together, and their weights."""
        indexes: list[int] = []
        weights: list[float] = []
        tokens: float = 0
        waiting = iter(ready)
        while chunk := list(islice(waiting, min(_CHUNK, most_samples - len(indexes)))):
            for index, weight in zip(chunk, sample_weights(chunk, self.weight, view), strict=True):
                if weight > self.max_tokens:
                    raise SamplerError(
                        f"sample {index} alone weighs {weight}, more than max_tokens ({self.max_tokens}). "
                        f"Raise max_tokens, or clear the sample."
                    )
                tokens += weight
                if tokens > most_tokens:
                    return indexes, weights
                indexes.append(index)
                weights.append(weight)
        return indexes, weights


class _Packing:
    """Packs prefixes of a list of weights into bins: none empty, none over either bound."""

    def __init__(self, weights: list[float], num_bins: int, most_items: int, most_weight: float) -> None:
        self._weights = weights
        self._num_bins = num_bins
        self._most_items = most_items
        self._most_weight = most_weight
        self._packed: dict[int, list[list[int]] | None] = {}  # by length of the prefix

    def longest_prefix(self) -> int:
        """The number of items in the longest prefix found to fit: at least one per bin, which always fits.

        Finding the longest prefix is bin packing, so this answer is good rather than optimal.
        """
        low, high, step = self._num_bins, len(self._weights), 1
        if self.fits(high):
            return high
        # A prefix little shorter than the bounds nearly always fits: look close to the end first.
        while high - step > low and not self.fits(high - step):
            high, step = high - step, 2 * step
        low = max(low, high - step)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low

    def fits(self, count: int) -> bool:
        return self._pack(count) is not None

    def balanced(self, count: int) -> list[list[int]]:
        """The best balanced packing of a prefix that fits."""
        bins = karmarkar_karp(self._weights[:count], self._num_bins, equal_size=False)
        return bins if all(map(self._allows, bins)) else self._pack(count) or []

    def has_room(self, count: int) -> bool:
        """Whether any further item, however light, would fit after a prefix that fits."""
        bins = self._pack(count) or []
        return any(len(each) < self._most_items and self._weight(each) < self._most_weight for each in bins)

    def _allows(self, items: list[int]) -> bool:
        return 0 < len(items) <= self._most_items and self._weight(items) <= self._most_weight

    def _weight(self, items: list[int]) -> float:
        return sum(self._weights[item] for item in items)

    def _pack(self, count: int) -> list[list[int]] | None:
        if count not in self._packed:
            heaviest_first = sorted(range(count), key=self._weights.__getitem__, reverse=True)
            self._packed[count] = self._filled(heaviest_first, True) or self._filled(heaviest_first, False)
        return self._packed[count]

    def _filled(self, items: list[int], evenly: bool) -> list[list[int]] | None:
        """Put each item into the lightest bin: even, but the gaps become too small for the last items. Or into the
        fullest bin that takes it, which fills gaps.
        """
        bins: list[list[int]] = [[] for _ in range(self._num_bins)]
        room = [(self._most_weight, 0, number) for number in range(self._num_bins)]  # what is left, -items, number
        for item in items:
            weight = self._weights[item]
            at = len(room) - 1 if evenly else bisect_left(room, weight, key=itemgetter(0))
            if not 0 <= at < len(room) or room[at][0] < weight:
                return None
            left, length, number = room.pop(at)
            bins[number].append(item)
            if 1 - length < self._most_items:
                insort(room, (left - weight, length - 1, number))
        for empty in bins:
            if not empty:
                empty.append(max(bins, key=len).pop())
        return sorted(sorted(each) for each in bins)
