# SPDX-License-Identifier: Apache-2.0
"""Groups of one partition: what is made of each head, from waiting for its first lease until it is trained or left."""

# The record of a group is its head's row: reserved tags hold its state, so that filters, watches and checkpoints know
# it. A member's row names its head and its part. From its first lease until it is done, a group is an object here, too.
# It is built anew from these rows after a restore. Groups that wait for their first lease are bits of a set.

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol
from weakref import WeakSet

import numpy as np

from transfer_queue.calls import Alarm
from transfer_queue.control.group_record import (
    GONE,
    LEFT,
    LONGEST_REASON,
    MOST_REASONS,
    RESERVED,
    UNDER_WORK,
    WAITING,
    Drawn,
    Group,
    HeldLease,
)
from transfer_queue.control.keys_and_tags import TagStore, unpacked_tags
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.rows import Rows, RowState, RowTable, one_of
from transfer_queue.errors import GroupStateError, InvalidRequestError, LeaseLostError
from transfer_queue.protocol import Indexes, Members, Role, Tags, Terms, pack_indexes

TERMS, HEAD, PART = "group:terms", "group:head", "group:part"
"""Columns. By head's row: 1 + the number of its terms, negative from its first lease on. By member's row: 1 + the index
of its head; 1 + its part."""
COLUMNS: Final = ((TERMS, "<i4"), (HEAD, "<i8"), (PART, "<i4"))
_IS_HEAD = one_of(RowState.HEAD)
FEW = 32
"""Groups that one piece of work handles."""


class Samples(Protocol):
    """The partition, as far as its groups need it."""

    table: RowTable
    tags: TagStore

    def rows_of(self, indexes: Indexes) -> Rows: ...
    def set_tags(self, tags: Mapping[int, Tags], merge: bool) -> None: ...


class Queue(Protocol):
    """The groups that a task may draw: see ``ReadyGroups``."""

    def __contains__(self, group: Group, /) -> bool: ...
    def look_at(self, some: Iterable[Group]) -> None: ...


class Groups:
    """The groups of one partition. A change of a group's record is followed by ``update``, which changes its state."""

    def __init__(self, partition: Samples) -> None:
        self.partition = partition
        self._table = partition.table
        self.fresh: dict[Terms, ReadySet] = {}
        """By terms, in the order of their numbers, the heads that wait for their first lease."""
        self.live: dict[int, Group] = {}
        """Those that work has begun on, until they are done or have left; by the index of the head."""
        self.unfinished: dict[int, Group] = {}
        """Those of them that some task has still to draw, in the order of their first leases."""
        self.with_free_parts: dict[int, Group] = {}
        """Those with an open part that no lease has."""
        self.touched: dict[int, Group] = {}
        """Those of them whose record has changed, so that more may follow from it."""
        self.counts: Counter[str] = Counter()
        """Groups by state, without those that wait for their first lease; of those that left, all that ever did."""
        self.arrivals = itertools.count()
        """Places in the order in which groups became ready."""
        self.why_left: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By state, and by gate or other reason, how many have left."""
        self.member_fields: set[str] = set()
        """Fields that members were put with. Who leases a group is about to put them."""
        self.overtaking: defaultdict[str, list[int]] = defaultdict(list)
        """By task, places of drawn groups that may lie behind undrawn ones in the order of first leases, ascending."""
        self.left_by: set[str] = set()
        """Tasks that draw no more here. A group whose tasks have all left is not worked on."""
        self.alarm: Alarm | None = None
        """At the next end of patience; made by the first group whose terms give it one."""
        self._patience: list[tuple[float, int]] = []
        """A heap of ends of patience and heads. What a group's own record does not say any more is passed over."""
        self.has_ended = False
        """Whether a worker has heard that there is no more to work on."""
        self.queues: WeakSet[Queue] = WeakSet()
        """Of tasks: they learn which groups may be drawn."""
        self.unwritten: dict[int, Group] = {}
        """Those whose tags don't say yet what has become of them."""
        self.is_writing = False
        """Whether ``writing`` is under way."""
        partition.tags.late = self.write_tags
        for name, dtype in COLUMNS:
            self._table.ensure_column(name, np.dtype(dtype))

    # ---- questions ----

    @property
    def may_grow(self) -> bool:
        """Whether members may still come."""
        return not self.numbers().keys().isdisjoint(UNDER_WORK)

    def tasks(self) -> set[str]:
        """Those that are named to train its groups."""
        return {task for terms in self.fresh for task in terms.tasks}

    def numbers(self) -> dict[str, int]:
        """How many groups are in each state; of those that have left, all that ever did."""
        return dict(self.counts + Counter({WAITING: self.num_fresh}))

    @property
    def num_fresh(self) -> int:
        """The number of groups that wait for their first lease."""
        return sum(fresh.count for fresh in self.fresh.values())

    def heads_of(self, rows: Rows) -> Indexes:
        """[len(rows)] By member's row the index of its head, -1 for other rows."""
        heads: Indexes = self._table.column(HEAD)[rows] - 1
        return heads

    def of_rows(self, rows: Rows) -> list[Group]:
        """The live groups of these members' rows, each once, in order of first appearance."""
        heads = dict.fromkeys(self.heads_of(rows).tolist())
        return [group for head in heads if (group := self.live.get(head)) is not None]

    def of(self, indexes: Indexes) -> list[Group]:
        """The live groups of these members, like ``of_rows``."""
        rows, found = self._table.find(indexes)
        return self.of_rows(rows[found])

    def have_heads(self, indexes: Indexes) -> bool:
        """Whether one of these is a head."""
        rows, found = self._table.find(indexes)
        return bool(_IS_HEAD[self._table.column("state")[rows[found]]].any())

    def described(self, rows: Rows) -> tuple[bytes | None, dict[int, int]]:
        """(packed heads by row, version by head), for a reply; (None, {}) if none of the rows has a group."""
        heads = self.heads_of(rows)
        if not (heads >= 0).any():
            return None, {}
        versions = {group.index: group.version for group in self.of_rows(rows) if group.version is not None}
        return pack_indexes(heads), versions

    def tags_of_members(self, group: Group) -> list[Tags]:
        indexes = np.array(group.all_members(), dtype=np.int64)
        rows = self.partition.rows_of(indexes)
        return [unpacked_tags(packed) for packed in self.partition.tags.packed(rows)]

    # ---- new groups ----

    def are_left(self, terms: Terms) -> bool:
        """Whether none of their tasks will draw such groups."""
        return bool(terms.tasks) and self.left_by.issuperset(terms.tasks)

    def add(self, rows: Rows, terms: Terms) -> None:
        """These heads wait for their first lease."""
        self._table.copies.make()
        self.fresh.setdefault(terms, ReadySet()).add(rows)
        self._table.column(TERMS)[rows] = 1 + list(self.fresh).index(terms)
        waiting: Tags = {"group.state": WAITING, "group.parts": terms.parts}
        self.partition.set_tags(dict.fromkeys(self._table.column("index")[rows].tolist(), waiting), merge=True)

    def with_reserved(self, tags: Mapping[int, Tags], merge: bool) -> Mapping[int, Tags]:
        """Tags from a client. Those that replace the tags of heads keep what the queue has set."""
        if merge:
            return tags
        found = {}
        for index, own in tags.items():
            known = self.partition.tags.get(index) or {}
            found[index] = {name: value for name, value in known.items() if name.startswith(RESERVED)} | own
        return found

    def may_undo(self, role: Role, indexes: Indexes) -> bool:
        """Whether all of these heads wait for their first lease, or these members' lease may still put such ones."""
        if isinstance(role, Terms):
            rows, found = self._table.find(indexes)
            return bool(found.all() and (self._table.column(TERMS)[rows] > 0).all())
        try:
            self.check(role, 0)
        except (LeaseLostError, ValueError):
            return False
        return True

    def terms_of_left(self, row: int) -> Terms | None:
        """The terms of the group that has left its head here; None for other rows."""
        index, number = self._table.column("index").item(row), self._table.column(TERMS).item(row)
        return None if number >= 0 or index in self.live else list(self.fresh)[-number - 1]

    def retry(self, row: int, terms: Terms) -> None:
        """The group that has left its head here waits again, as if it were new."""
        index = self._table.column("index").item(row)
        before = self.partition.tags[index]
        self.counts[before["group.state"]] -= 1
        own = {name: value for name, value in before.items() if not name.startswith(RESERVED)}
        self.partition.set_tags({index: own}, merge=False)
        self.add(np.array([row], dtype=np.intp), terms)

    # ---- changes ----

    def be_patient(self, group: Group, until: float) -> None:
        """This group has time until then."""
        if len(self._patience) > 2 * len(self.live) + FEW:  # most are of groups that were done in time
            self._patience = [(each.patience_ends, each.index) for each in self.live.values() if not each.passed]
            heapq.heapify(self._patience)
        group.patience_ends = until
        heapq.heappush(self._patience, (until, group.index))

    def next_patience(self) -> float:
        """When the patience with a group ends next; infinite if it never does."""
        while self._patience:
            until, index = self._patience[0]
            group = self.live.get(index)
            if group is not None and group.patience_ends == until and not group.passed:
                return until
            heapq.heappop(self._patience)
        return math.inf

    def out_of_patience(self, now: float) -> Group | None:
        """A group whose time is over; each is returned once."""
        if self.next_patience() > now:
            return None
        group = self.live[heapq.heappop(self._patience)[1]]
        group.patience_ends = math.inf
        return group

    def have_begun(self, rows: Rows) -> None:
        """These heads do not wait for their first lease any more."""
        self._table.copies.make()
        for fresh in self.fresh.values():
            fresh.discard(rows)
        self._table.column(TERMS)[rows] *= -1

    def enter(self, group: Group) -> None:
        """Work on it has begun, here or before a restore. An ``update`` follows."""
        self.live[group.index] = self.unfinished[group.index] = group
        self.counts[group.state] += 1

    def update(self, group: Group) -> None:
        """Its record has changed: so may its state, what is kept by state, and its tags."""
        before, now = group.state, group.next_state()
        self.touched[group.index] = self.unwritten[group.index] = group
        if now in UNDER_WORK and group.has_free_part:
            self.with_free_parts[group.index] = group
        elif before in UNDER_WORK:
            self.with_free_parts.pop(group.index, None)
        if before != now:
            group.state = now
            self.counts[before] -= 1
            self.counts[now] += now != GONE

    def offer(self, some: Iterable[Group]) -> None:
        """Whether these groups may be drawn has changed."""
        for queue in list(self.queues):
            queue.look_at(some)

    def drop(self, group: Group, into: str, reason: str = "") -> None:
        """It is not live any more: it has left, or is about to be deleted."""
        reason = reason[:LONGEST_REASON]
        if into in LEFT and group.reasons[-1:] != [reason]:  # the last attempt may have said so
            group.note(reason)
        self.count_left(into, reason)
        group.left, group.passed = into, False
        self.update(group)
        self.offer([group])
        for table in (self.live, self.unfinished, self.touched, *([self.unwritten] if into == GONE else [])):
            table.pop(group.index, None)

    def count_left(self, state: str, reason: str) -> None:
        """A group is in this state now, maybe because it has left."""
        if state in LEFT:
            known = self.why_left[state]
            known[reason if reason in known or len(known) < MOST_REASONS else "others"] += 1

    # ---- members ----

    def check(self, members: Members, count: int) -> HeldLease:
        """The lease, if it may add so many rows to these parts of its group. It may have been lost.

        Raises:
            LeaseLostError: another lease has a part, or the group is not worked on any more.
            GroupStateError: the lease has closed a part before.
            InvalidRequestError: the rows can't be dealt to the parts.
        """
        group = self.live.get(members.head)
        if group is None or not group.is_under_work:
            state = (self.partition.tags.get(members.head) or {}).get("group.state", GONE)
            holders = group.holders if group is not None and group.is_complete else {}
            own = [part for part in members.parts if part in holders and holders[part].token == members.lease]
            if group is not None and group.closed.intersection(own):
                raise LeaseLostError(
                    f"this lease has closed its group already, so those rows are stored, and this call wrote nothing: "
                    f"the group is {state}. A call that was cancelled, or timed out, may have had its effect."
                )
            raise LeaseLostError(f"the lease has ended, and nothing was written: its group is {state}.")
        lease = None
        for part in members.parts:
            lease = group.holders.get(part)
            if lease is None or lease.token != members.lease:
                raise LeaseLostError(
                    f"this lease does not have part {part} of the group: it was lost or released, or never had it; "
                    f"nothing was written. Drop the work, and lease again."
                )
            if part in group.closed:
                raise GroupStateError(f"part {part} of this group was closed by this lease; nothing can follow.")
        if lease is None or count % len(members.parts):
            raise InvalidRequestError(
                f"{count} row{'s' * (count != 1)} can't be dealt evenly to {len(members.parts)} parts: name the part "
                "of each put, or give each part the same number of rows."
            )
        return lease

    def mark(self, members: Members, rows: Rows | slice, count: int, fields: Iterable[str]) -> None:
        """So many new rows are about to be published as members, with these fields."""
        if self._table.copies:
            self._table.copies.make()
        self.member_fields.update(fields)
        parts = members.parts
        self._table.column(HEAD)[rows] = 1 + members.head
        self._table.column(PART)[rows] = 1 + (parts[0] if len(parts) == 1 else np.repeat(parts, count // len(parts)))

    def join(self, group: Group, members: Members, indexes: list[int]) -> None:
        """New rows, which were just published, belong to these parts. Those that this closes must have some."""
        if indexes:
            size = len(indexes) // len(members.parts)
            for at, part in enumerate(members.parts):
                group.members.setdefault(part, []).extend(indexes[at * size : (at + 1) * size])
            group.num_members += len(indexes)
        if not members.closes:
            return
        for part in members.parts:
            if not group.members.get(part):
                raise GroupStateError(
                    f"part {part} of this group has no rows, so it can't be closed. Close it with rows, release it, or "
                    f"reject the group."
                )
        group.closed.update(members.parts)
        group.is_complete = len(group.closed) == group.terms.parts

    def begin_anew(self, group: Group) -> None:
        """All of it is to be made again, by other leases. Its rows are about to be deleted."""
        group.closed.clear()
        group.holders.clear()
        group.is_complete = group.passed = group.is_ready = False
        self.update(group)

    # ---- draws ----

    def drawn(self, task: str, some: Iterable[Group], batch: Drawn | None) -> None:
        """They were given to a task that draws groups; None: it has trained them."""
        for group in some:
            group.drawn[task] = batch
            if group.is_done_by_all(group.drawn):
                self.unfinished.pop(group.index, None)
            self.update(group)

    def acked(self, task: str, some: Sequence[Group]) -> None:
        """The task has trained them, and asks for them no more."""
        for group in some:
            group.acked |= {task}
        self.drawn(task, some, None)

    def undrawn(self, task: str, some: Sequence[Group]) -> None:
        """Nobody got them, so this task may draw them again."""
        for group in some:
            if group.seq in self.overtaking[task]:
                self.overtaking[task].remove(group.seq)
            del group.drawn[task]
            group.acked -= {task}
            group.skipped -= {task}
            if not group.is_done_by_all(group.drawn):
                self.unfinished[group.index] = group
            self.update(group)
        self.order()
        self.offer(some)

    def order(self) -> None:
        """Sort those that are unfinished by their first leases."""
        self.unfinished = dict(sorted(self.unfinished.items(), key=lambda item: item[1].seq))

    # ---- tags and rows ----

    def write_tags(self, most: int | None = None) -> None:
        """Write the reserved tags of what has changed since the last time, or of so many of these groups."""
        if self.unwritten:
            tags = {index: group.tags() for index, group in itertools.islice(self.unwritten.items(), most)}
            for index in tags:
                del self.unwritten[index]
            self.partition.set_tags(tags, merge=True)

    def writing(self) -> Iterator[None]:
        """Writes all of them bit by bit, or the next reader of tags would wait for that."""
        try:
            while self.unwritten:
                self.write_tags(FEW)
                yield
        finally:
            self.is_writing = False

    def removing(self, rows: Rows) -> None:
        """These rows are about to be deleted."""
        heads = rows[_IS_HEAD[self._table.column("state")[rows]]]
        for fresh in self.fresh.values() if len(heads) else ():
            fresh.discard(heads)
        touched: dict[int, Group] = {}
        members = rows[self.heads_of(rows) >= 0]
        columns = (self._table.column("index")[members], self.heads_of(members), self._table.column(PART)[members] - 1)
        for index, head, part in zip(*(column.tolist() for column in columns), strict=True):
            group = self.live.get(head)
            if group is not None and index in group.members.get(part, ()):
                group.members[part].remove(index)
                group.num_members -= 1
                touched[head] = group
        for group in touched.values():
            self.update(group)
        self.offer(touched.values())

    def rebuild(self) -> None:
        """Row numbers have changed."""
        numbers = self._table.column(TERMS)
        self.fresh = {terms: ReadySet(numbers == number) for number, terms in enumerate(self.fresh, 1)}

    def check_invariants(self) -> None:
        """Raise AssertionError if the records disagree; for tests."""
        table = self._table
        heads = (table.column("state") == RowState.HEAD).nonzero()[0]
        numbers = table.column(TERMS)
        assert set((numbers != 0).nonzero()[0].tolist()) >= set(heads.tolist()), "each head has terms"
        for number, fresh in enumerate(self.fresh.values(), 1):
            expected = [row for row in heads.tolist() if numbers[row] == number]
            assert fresh.all_rows().tolist() == expected, "heads that wait are known"
        assert all(self._table.find(np.array([index]))[1].all() for index in self.live), "heads of live groups are here"
        for group in self.live.values():
            members = group.all_members()
            assert group.num_members == len(members), "members are counted"
            rows, found = table.find(np.array(members, dtype=np.int64))
            assert found.all(), "members are here"
            assert (self.heads_of(rows) == group.index).all(), "members name their head"
            assert not group.left, "what has left is not live"
            assert group.state == group.next_state(), "its state is what its record says"
            assert (group.index in self.unfinished) == (not group.is_done_by_all(group.drawn)), group.state
            has_free = group.state in UNDER_WORK and bool(group.free_parts())
            assert (group.index in self.with_free_parts) == has_free, "free parts are known"
            assert self.partition.tags[group.index]["group.state"] == group.state, "tags say the state"
        counts = {name: count for name, count in self.counts.items() if count and name not in LEFT}
        assert counts == Counter(group.state for group in self.live.values()), "live groups are counted"
        seqs = [group.seq for group in self.unfinished.values()]
        assert seqs == sorted(seqs), "unfinished groups are in the order of their first leases"
        assert set(self.with_free_parts) <= set(self.live), "only live groups have free parts"
