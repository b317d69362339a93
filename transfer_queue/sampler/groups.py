# SPDX-License-Identifier: Apache-2.0
"""A group is the set of responses to one prompt. This module finds complete groups among the ready samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

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
