# SPDX-License-Identifier: Apache-2.0
"""GRPOGroupNSampler: batches of complete groups, so that an advantage can be computed within each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from transfer_queue.errors import SamplerError
from transfer_queue.sampler.base import BaseSampler, Picked, in_index_order


class GRPOGroupNSampler(BaseSampler):
    """Picks complete groups of ``n_samples_per_prompt`` responses, oldest first; ``whole_groups`` defines a group.

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

    def tail(self, ready_indexes: Sequence[int], batch_size: int, *, partition: Any = None) -> list[int]:
        """Only complete groups, because an advantage can't be computed from a part."""
        ready = in_index_order(ready_indexes)
        if self.n_samples_per_prompt == 1 or not ready:
            return list(ready)
        groups = whole_groups(ready, self.n_samples_per_prompt, partition, batch_size)
        return [index for group in groups for index in group]

    def _groups(self, ready_indexes: Sequence[int], num_samples: int, view: Any) -> list[list[int]]:
        """Return exactly the groups that make ``num_samples``, or none."""
        size = self.n_samples_per_prompt
        ready = in_index_order(ready_indexes)
        if num_samples <= 0 or len(ready) < num_samples:
            return []
        if size == 1:
            return [[index] for index in ready[:num_samples]]
        wanted = num_samples // size
        groups = list(islice(whole_groups(ready, size, view, num_samples), wanted))
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


_PutPositions = Callable[[list[int]], list[tuple[int, int]]]
_MAX_CHUNK = 4096


def whole_groups(ready: Sequence[int], size: int, view: Any, expected: int) -> Iterator[list[int]]:
    """Yield complete groups of ``size`` samples in index order, lazily.

    If ``view`` has ``put_positions``, a group is ``size`` samples of one put, from a multiple of ``size`` on.
    A chain of smaller complete puts with consecutive indexes that adds up to ``size`` is a group, too.
    A missing sample then never shifts later groups. Otherwise any ``size`` consecutive indexes are a group.

    Args:
        ready: Ascending.
        view: A PartitionView, or anything without ``put_positions``, or None.
        expected: How many samples the caller will probably need; the first look-up asks for that many.
    """
    indexes = iter(ready)
    put_positions = getattr(view, "put_positions", None)
    if put_positions is None:
        return _runs(indexes, size)
    head = list(islice(indexes, max(expected, size)))
    positions = put_positions(head)
    if not isinstance(positions, list):  # a Mock as the partition answers any call
        return _runs(chain(head, indexes), size)
    return _put_groups(_located(head, positions, indexes, put_positions), size, view)


def _runs(indexes: Iterable[int], size: int) -> Iterator[list[int]]:
    run: list[int] = []
    for index in indexes:
        if run and index != run[-1] + 1:
            run = []
        run.append(index)
        if len(run) == size:
            yield run
            run = []


def _located(
    head: list[int], positions: list[tuple[int, int]], rest: Iterator[int], put_positions: _PutPositions
) -> Iterator[tuple[int, int, int]]:
    """Yield (index, offset in its put, size of that put), looked up in chunks that grow while no batch is complete."""
    while head:
        for index, (offset, put_size) in zip(head, positions, strict=True):
            yield index, offset, put_size
        head = list(islice(rest, min(2 * len(head), _MAX_CHUNK)))
        positions = put_positions(head) if head else []


def _put_groups(samples: Iterable[tuple[int, int, int]], size: int, view: Any) -> Iterator[list[int]]:
    block: list[int] = []  # samples of one put, from a multiple of ``size`` on
    short_puts: list[int] = []  # complete puts of fewer than ``size`` samples, with consecutive indexes
    last = (-1, -1, -1)
    for sample in samples:
        index, offset, put_size = sample
        if offset % size == 0:
            block = []
        elif not block or not _same_put(last, sample, view):
            block, last = [], sample
            continue
        block.append(index)
        last = sample
        if len(block) < min(size, put_size):
            continue
        if put_size < size:
            short_puts = block = _linked(short_puts, block, size)
        if len(block) == size:
            yield block
            short_puts = []
        block = []


def _linked(chain_so_far: list[int], put: list[int], size: int) -> list[int]:
    follows = bool(chain_so_far) and put[0] == chain_so_far[-1] + 1
    return chain_so_far + put if follows and len(chain_so_far) + len(put) <= size else put


def _same_put(last: tuple[int, int, int], sample: tuple[int, int, int], view: Any) -> bool:
    if (sample[1], sample[2]) != (last[1] + 1, last[2]):
        return False
    if sample[0] == last[0] + 1:
        return True
    # After a gap in the indexes, the first half of one put and the second half of an equally large one look alike.
    put_numbers = getattr(view, "put_numbers", None)
    if put_numbers is not None:
        first, second = put_numbers([last[0], sample[0]])
        return bool(first == second)
    # They are two puts if the next index continues the first put and just isn't ready.
    try:
        return bool(view.put_positions([last[0] + 1]) != [(last[1] + 1, last[2])])
    except (LookupError, ValueError):  # that index is in another partition or was cleared
        return True
