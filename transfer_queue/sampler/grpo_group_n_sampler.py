# SPDX-License-Identifier: Apache-2.0
"""GRPOGroupNSampler: batches of complete groups, so that an advantage can be computed within each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from transfer_queue.errors import SamplerError
from transfer_queue.sampler.base import Picked, Round, RoundSampler, dealt, in_index_order


class GRPOGroupNSampler(RoundSampler):
    """Picks complete groups of ``n_samples_per_prompt`` responses, oldest first: ``PartitionView.whole_groups``.

    Args:
        n_samples_per_prompt: Responses per prompt. ``batch_size`` must be a multiple of it.
    Raises:
        SamplerError: ``n_samples_per_prompt`` is below 1, or ``batch_size`` no multiple of it.
    Examples:
        >>> client.register_task("pairs", sampler=tq.GRPOGroupNSampler(n_samples_per_prompt=2))
        >>> meta = client.put({"x": torch.arange(6)}, partition_id="train")  # the answers to three prompts
        >>> client.clear_samples(meta[0])
        >>> client.get_data(client.get_meta(["x"], 4, "train", task_name="pairs"))["x"]
        tensor([2, 3, 4, 5])
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise SamplerError(f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}.")
        self.n_samples_per_prompt = n_samples_per_prompt

    def check(self, batch_size: int, dp_size: int | None) -> None:
        super().check(batch_size, dp_size)
        self._check_multiple(batch_size)

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, task_name: str = "", partition_id: str = "", *args: Any,
        partition: Any = None, dp_rank: int | None = None, batch_index: int | None = None, dp_size: int | None = None,
        **kwargs: Any,
    ) -> Picked:  # fmt: skip
        """Return complete groups with ``batch_size`` samples in all, or ([], []).

        With both ``dp_rank`` and ``batch_index`` the answer is remembered and returned again.
        """
        # With the rank alone, it would get the same batch forever.
        name = None if dp_rank is None or batch_index is None else (dp_rank, batch_index)
        if name and (cached := self._recall(partition_id, task_name, *name)) is not None:
            return cached
        self._check_multiple(batch_size)
        # Rank 0 checks that there is a batch for every rank, so that every round that begins can be completed.
        num_ranks = dp_size if dp_size and dp_rank == 0 else 1
        groups = self._groups(ready_indexes, batch_size * num_ranks, partition)
        sampled = [index for group in groups for index in group][:batch_size]
        if sampled and name:
            self._remember(partition_id, task_name, *name, sampled)
        return sampled, list(sampled)

    def round(self, wanted: Round) -> list[list[int]]:
        self._check_multiple(wanted.batch_size)
        groups = self._groups(wanted.ready, wanted.batch_size * len(wanted.ranks), wanted.partition)
        return dealt([index for group in groups for index in group], wanted.batch_size)

    def tail(self, ready_indexes: Sequence[int], batch_size: int, *, partition: Any = None) -> list[int]:
        """Only complete groups, because an advantage can't be computed from a part."""
        ready = in_index_order(ready_indexes)
        return [index for group in whole_groups(ready, self.n_samples_per_prompt, partition) for index in group]

    def _groups(self, ready_indexes: Sequence[int], num_samples: int, view: Any) -> list[list[int]]:
        """Return exactly the groups that make ``num_samples``, or none."""
        size = self.n_samples_per_prompt
        ready = in_index_order(ready_indexes)
        if num_samples <= 0 or len(ready) < num_samples:
            return []
        if size == 1:
            return [[index] for index in ready[:num_samples]]
        wanted = num_samples // size
        groups = whole_groups(ready, size, view, wanted)
        return groups if len(groups) == wanted else []

    def _check_multiple(self, batch_size: int) -> None:
        size = self.n_samples_per_prompt
        if batch_size % size:
            below = batch_size // size * size
            nearest = f"{below} or {below + size}" if below > 0 else f"{size}"
            raise SamplerError(
                f"batch_size ({batch_size}, per rank) must be a multiple of n_samples_per_prompt ({size}), "
                f"since groups are never split. Nearest that works: {nearest}."
            )


def whole_groups(ready: Sequence[int], size: int, view: Any, count: int | None = None) -> list[list[int]]:
    """The first ``count`` whole groups, as ``PartitionView.whole_groups`` finds them; fewer if there are fewer.

    Without such a view any ``size`` consecutive indexes are a group.
    """
    find = getattr(view, "whole_groups", None)
    groups = None if find is None else find(ready, size, count)
    # A Mock as the partition answers any call.
    return groups if isinstance(groups, list) else list(islice(_runs(ready, size), count))


def _runs(indexes: Iterable[int], size: int) -> Iterator[list[int]]:
    run: list[int] = []
    for index in indexes:
        if run and index != run[-1] + 1:
            run = []
        run.append(index)
        if len(run) == size:
            yield run
            run = []
