# SPDX-License-Identifier: Apache-2.0
"""Groups that one task may draw: they follow what becomes ready, in the order in which its sampler takes them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from transfer_queue.control.group_record import Group
from transfer_queue.control.groups import Groups
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.rows import Rows
from transfer_queue.sampler.group_sampler import GroupSampler

Key = tuple[int, int]
Order = Callable[[Group], Key]


def ready_groups(ready: ReadySet, groups: Groups, sampler: GroupSampler, task: str) -> ReadyGroups:
    """The groups of this set, which follow it from their first use on. Those in another order are forgotten."""
    known = ready.follower
    if not isinstance(known, ReadyGroups) or known.order is not sampler.order_key:
        known = ready.follower = ReadyGroups(ready, groups, sampler.order_key, task)
    return known


class ReadyGroups:
    """The groups that a task may draw, as its sampler sees them: see ``DrawableGroups``. They follow a ready set.

    A group is ready once it is closed, no gate is against it, and all its rows are in the set. ``order``: the key by
    which groups are drawn; None: as they became ready.
    """

    def __init__(self, ready: ReadySet, groups: Groups, order: Order | None, task: str) -> None:
        self.groups = groups
        self._task = task
        self.order = order
        self.step: int | None = None
        self.is_early = False
        """Whether even the newest version is too old for the next draw's step, so that it waits for the next one."""
        self._num_ready: dict[int, int] = {}
        self._sorted: list[tuple[Key, int]] = []
        self._start = 0
        """Where it begins: what is drawn lies in front, and to move all others 32 times a draw takes milliseconds."""
        self._keys: dict[int, Key] = {}
        groups.queues.add(self)
        for rows in ready.blocks():
            self.changed(rows, True)

    def __iter__(self) -> Iterator[Group]:
        live = self.groups.live
        return (live[self._sorted[at][1]] for at in range(self._start, len(self._sorted)))

    def __contains__(self, group: Group) -> bool:
        return group.index in self._keys

    def unfinished(self) -> Iterator[Group]:
        """See ``DrawableGroups``."""
        return (
            group for group in self.groups.unfinished.values()
            if self._task not in group.drawn and group.is_for(self._task)
        )  # fmt: skip

    def overtook(self, group: Group) -> list[int]:
        """See ``DrawableGroups``. Places in front of this group are forgotten."""
        places = self.groups.overtaking[self._task]
        places[:] = [at for at in places if at > group.seq]
        return places

    def changed(self, rows: Rows, present: bool) -> None:
        """These rows are ready now, or not any more."""
        heads = self.groups.heads_of(rows)
        live, found = self.groups.live, []
        for head, count in sorted(Counter(heads[heads >= 0].tolist()).items()):
            left = self._num_ready.get(head, 0) + (count if present else -count)
            if left:
                self._num_ready[head] = left
            else:
                del self._num_ready[head]
            if head in live:
                found.append(live[head])
        self.look_at(found)

    def look_at(self, some: Iterable[Group]) -> None:
        """Whether these groups may be drawn, or their rows, have changed."""
        num_ready, keys = self._num_ready, self._keys
        for group in some:
            index = group.index
            is_ready = group.passed and num_ready.get(index) == group.num_members and group.is_for(self._task)
            if is_ready == (index in keys):
                continue
            if is_ready:
                self._insert(group)
            else:
                self._remove((keys.pop(index), index))
            group.is_ready = is_ready or (not group.drawn and any(group in each for each in self.groups.queues))
            if not group.drawn:
                self.groups.update(group)

    def _insert(self, group: Group) -> None:
        if self.order is not None:
            key = self.order(group)
        else:  # it outlives this object: a ready set is made anew when rows move
            key = (group.arrivals.setdefault(self._task, next(self.groups.arrivals)), 0)
        self._keys[group.index] = key
        insort(self._sorted, (key, group.index), lo=self._start)

    def _remove(self, entry: tuple[Key, int]) -> None:
        if self._sorted[self._start] != entry:  # a draw takes the first ones: to look for each takes longer among more
            del self._sorted[bisect_left(self._sorted, entry, lo=self._start)]
            return
        self._start += 1
        if 2 * self._start > len(self._sorted):
            del self._sorted[: self._start]
            self._start = 0
