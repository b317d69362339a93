# SPDX-License-Identifier: Apache-2.0
"""Groups of one partition: what is made of each head, from waiting for its first lease until it is trained or left."""

# The record of a group is its head's row: reserved tags hold its state, so that filters, watches and checkpoints know
# it. A member's row names its head and its part. From its first lease until it is done, a group is an object here, too.
# It is built anew from these rows after a restore. Groups that wait for their first lease are bits of a set.

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, Protocol
from weakref import ref

import numpy as np

from transfer_queue.control.group_record import (
    CLOSED,
    COMPLETE,
    DRAWABLE,
    DRAWN,
    LEFT,
    READY,
    REJECTED,
    RESERVED,
    RUNNING,
    TRAINED,
    UNDER_WORK,
    WAITING,
    Group,
    check_tags,
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
_MOST_REASONS = 8
_REASON_LENGTH = 200
Reader = tuple[str, Hashable]
"""(task, rank, or the client of a reader without one)"""
_NONE: Indexes = np.empty(0, dtype=np.int64)
_IS_HEAD = one_of(RowState.HEAD)


class Samples(Protocol):
    """The partition, as far as its groups need it."""

    table: RowTable
    tags: TagStore

    def rows_of(self, indexes: Indexes) -> Rows: ...
    def set_tags(self, tags: Mapping[int, Tags], merge: bool) -> None: ...
    def clear(self, indexes: Indexes) -> Indexes: ...


class Groups:
    """The groups of one partition. A call of ``flush`` ends each change, and makes it visible in the tags."""

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
        self.counts: Counter[str] = Counter()
        """Groups by state, without those that wait for their first lease; of those that left, all that ever did."""
        self.arrivals = itertools.count()
        """Places in the order in which groups became ready."""
        self.rejected: Counter[str] = Counter()
        """By gate, or other reason, how many were."""
        self.member_fields: set[str] = set()
        """Fields that members were put with. Who leases a group is about to put them."""
        self.batches: dict[Reader, dict[int, list[Group]]] = {}
        """What was drawn and not trained: by task and reader, and by batch."""
        self.overtaking: dict[str, list[int]] = {}
        """By task, places of drawn groups that may lie behind undrawn ones in the order of first leases, ascending."""
        self.followers: list[ref[Any]] = []
        """The ``ReadyGroups`` of tasks."""
        self._dirty: dict[int, Group] = {}
        """Those whose tags don't say yet what has become of them."""
        for name, dtype in COLUMNS:
            self._table.ensure_column(name, np.dtype(dtype))

    # ---- questions ----

    @property
    def may_grow(self) -> bool:
        """Whether members may still come."""
        return not self.numbers().keys().isdisjoint(UNDER_WORK)

    def numbers(self) -> dict[str, int]:
        """How many groups are in each state; of those that have left, all that ever did."""
        return dict(self.counts + Counter({WAITING: sum(fresh.count for fresh in self.fresh.values())}))

    def heads_of(self, rows: Rows) -> Indexes:
        """[len(rows)] By member's row the index of its head, -1 for other rows."""
        heads: Indexes = self._table.column(HEAD)[rows] - 1
        return heads

    def of_rows(self, rows: Rows) -> list[Group]:
        """The live groups of these members' rows, each once, in order of first appearance."""
        heads = dict.fromkeys(self.heads_of(rows).tolist())
        return [group for head in heads if (group := self.live.get(head)) is not None]

    def described(self, rows: Rows) -> tuple[bytes | None, dict[int, int]]:
        """(packed heads by row, version by head), for a reply; (None, {}) if none of the rows has a group."""
        heads = self.heads_of(rows)
        if not (heads >= 0).any():
            return None, {}
        versions = {group.index: group.version for group in self.of_rows(rows) if group.version is not None}
        return pack_indexes(heads), versions

    def emptied(self) -> list[Group]:
        """Groups that are complete, and all of whose rows were deleted by others since the last ``flush``."""
        return [group for group in self._dirty.values() if group.state in COMPLETE and not group.num_members]

    def tags_of_members(self, group: Group) -> list[Tags]:
        indexes = np.array(group.all_members(), dtype=np.int64)
        rows = self.partition.rows_of(indexes)
        return [unpacked_tags(packed) for packed in self.partition.tags.packed(rows)]

    # ---- new groups ----

    def add(self, rows: Rows, terms: Terms) -> None:
        """These heads wait for their first lease."""
        self._touch()
        self.fresh.setdefault(terms, ReadySet()).add(rows)
        self._table.column(TERMS)[rows] = 1 + list(self.fresh).index(terms)
        waiting: Tags = {"group.state": WAITING, "group.parts": terms.parts}
        self.partition.set_tags(dict.fromkeys(self._table.column("index")[rows].tolist(), waiting), merge=True)

    def with_reserved(self, tags: Mapping[int, Tags], merge: bool) -> Mapping[int, Tags]:
        """Tags from a client. Those that replace the tags of heads keep what the queue has set.

        Raises InvalidRequestError for reserved ones.
        """
        check_tags(tags.values())
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

    # ---- work begins ----

    def have_begun(self, rows: Rows) -> None:
        """These heads do not wait for their first lease any more."""
        self._touch()
        for fresh in self.fresh.values():
            fresh.discard(rows)
        self._table.column(TERMS)[rows] *= -1

    def enter(self, group: Group) -> None:
        """Work on it has begun, here or before a restore."""
        self._dirty[group.index] = group
        self.live[group.index] = self.unfinished[group.index] = group
        self.counts[group.state] += 1
        if group.state in UNDER_WORK:
            self.with_free_parts[group.index] = group

    def take(self, group: Group, parts: Sequence[int], token: int, keep: str) -> Indexes:
        """A lease has these parts now. Returns the rows of earlier holders that it doesn't go on with: they are gone.

        ``keep`` "all": it goes on with all of them.
        """
        gone = [] if keep == "all" else [index for part in parts for index in group.members.get(part, ())]
        group.tokens.update(dict.fromkeys(parts, token))
        return self._clear(gone)

    def begin_anew(self, group: Group) -> Indexes:
        """Forget what its parts hold, closed ones, too."""
        group.closed.clear()
        return self._clear(group.all_members())

    def held(self, group: Group, has_holder: bool, has_free: bool) -> None:
        """Whether a lease has a part of it now, and whether it has an open part that none has."""
        self._set(group, RUNNING if has_holder else WAITING)
        if has_free:
            self.with_free_parts[group.index] = group
        else:
            self.with_free_parts.pop(group.index, None)

    # ---- members ----

    def check(self, members: Members, count: int) -> Group:
        """The group, if this lease may add so many rows to these parts of it.

        Raises:
            LeaseLostError: another lease has a part, or the group is not worked on any more.
            GroupStateError: the lease has closed a part before.
            InvalidRequestError: the rows can't be dealt to the parts.
        """
        group = self.live.get(members.head)
        if group is None or group.state not in UNDER_WORK:
            state = (self.partition.tags.get(members.head) or {}).get("group.state", "gone")
            raise LeaseLostError(f"the lease has ended, and nothing was written: its group is {state}.")
        for part in members.parts:
            if group.tokens.get(part) != members.lease:
                raise LeaseLostError(
                    f"this lease does not have part {part} of the group: it was lost or released, or never had it; "
                    f"nothing was written. Drop the work, and lease again."
                )
            if part in group.closed:
                raise GroupStateError(f"part {part} of this group was closed by this lease; nothing can follow.")
        if not members.parts or count % len(members.parts):
            raise InvalidRequestError(
                f"{count} rows can't be dealt evenly to {len(members.parts)} parts: name the part of each put, or give "
                f"each part the same number of rows."
            )
        return group

    def mark(self, members: Members, indexes: Indexes) -> None:
        """New rows are about to be published as members."""
        self._touch()
        rows = self.partition.rows_of(indexes)
        self._table.column(HEAD)[rows] = 1 + members.head
        self._table.column(PART)[rows] = 1 + np.repeat(np.array(members.parts), len(rows) // len(members.parts))

    def join(self, group: Group, members: Members, indexes: list[int]) -> None:
        """New rows, which were just published, belong to these parts."""
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
        self._set(group, CLOSED if len(group.closed) == group.terms.parts else group.state)

    # ---- work ends without rows ----

    def released(self, group: Group, reason: str, blame: str | None) -> bool:
        """A lease has ended without closing its parts. Returns whether the group fails.

        ``blame``: whose attempt it counts as, "worker" or "sample"; None: nobody's.
        """
        if blame is not None and reason:
            self._note(group, reason)
        group.attempts += blame == "sample"
        group.worker_attempts += blame == "worker"
        self._dirty[group.index] = group
        return group.attempts >= group.terms.attempts or group.worker_attempts >= group.terms.worker_attempts

    def _note(self, group: Group, reason: str) -> None:
        group.reasons = [*group.reasons, reason[:_REASON_LENGTH]][-_MOST_REASONS:]

    def late(self, group: Group) -> Indexes:
        """Its deadline is over, and enough parts are closed. Returns the rows of the others, which are gone."""
        gone = [index for part in group.open_parts() for index in group.members.get(part, ())]
        self._set(group, CLOSED)
        return self._clear(gone)

    def leave(self, group: Group, state: str, reason: str) -> Indexes:
        """It is not trained any more, and its rows are gone. The head stays. Returns them."""
        if group.reasons[-1:] != [reason[:_REASON_LENGTH]]:  # the last attempt may have said so
            self._note(group, reason)
        self.count_rejected(state, reason)
        members = group.all_members()
        self._set(group, state)
        del self.live[group.index]
        return self._clear(members)

    def count_rejected(self, state: str, reason: str) -> None:
        """A group has left, maybe because a gate or somebody rejected it."""
        if state == REJECTED:
            reason = reason[:_REASON_LENGTH]
            self.rejected[reason if reason in self.rejected or len(self.rejected) < _MOST_REASONS else "others"] += 1

    def retry(self, row: int) -> bool:
        """A group that has left waits again, as if it were new. Returns whether it had left."""
        index, number = self._table.column("index").item(row), self._table.column(TERMS).item(row)
        if number >= 0 or index in self.live:
            return False
        before = self.partition.tags[index]
        self.counts[before["group.state"]] -= 1
        own = {name: value for name, value in before.items() if not name.startswith(RESERVED)}
        self.partition.set_tags({index: own}, merge=False)
        self.add(np.array([row], dtype=np.intp), list(self.fresh)[-number - 1])
        return True

    # ---- draws ----

    def drawable(self, group: Group, can: bool) -> None:
        """All its rows have the fields of a task that draws groups, or not any more."""
        if group.state in DRAWABLE:
            can = can or any(group in follower for each in self.followers if (follower := each()) is not None)
            self._set(group, READY if can else CLOSED)

    def drawn(self, group: Group, task: str) -> None:
        """It was given to a task that draws groups."""
        group.drawn_by |= {task}
        if group.is_done_by_all(group.drawn_by):
            self.unfinished.pop(group.index, None)
        if group.state in DRAWABLE:
            self._set(group, DRAWN)

    def keep_batch(self, reader: Reader, batch: int | None, own: list[Group]) -> None:
        """What a reader was given, until it is trained. ``batch`` None: its next one."""
        batches = self.batches.setdefault(reader, {})
        batches[max(batches, default=-1) + 1 if batch is None else batch] = own

    def take_trained(self, reader: Reader, before: int | None) -> list[Group]:
        """What this reader was given in its batches before this one; None: in all."""
        batches = self.batches.get(reader, {})
        over = [number for number in batches if before is None or number < before]
        drawn = [group for number in over for group in batches.pop(number)]
        if not batches:
            self.batches.pop(reader, None)
        return drawn

    def undrawn(self, group: Group, task: str) -> None:
        """Nobody got it, so this task may draw it again."""
        for (reads_for, _), batches in self.batches.items():
            for own in batches.values() if reads_for == task else ():
                if group in own:
                    own.remove(group)
        if group.seq in self.overtaking.get(task, ()):
            self.overtaking[task].remove(group.seq)
        group.drawn_by -= {task}
        group.trained_by -= {task}
        group.acked_by -= {task}
        if group.index not in self.unfinished and not group.is_done_by_all(group.drawn_by):
            self.unfinished[group.index] = group
            self.order()
        if group.state in (DRAWN, TRAINED):
            is_trained = group.is_done_by_all(group.trained_by)
            self._set(group, CLOSED if not group.drawn_by else TRAINED if is_trained else DRAWN)
        self.changed(group)

    def order(self) -> None:
        """Sort those that are unfinished by their first leases."""
        self.unfinished = dict(sorted(self.unfinished.items(), key=lambda item: item[1].seq))

    def trained(self, group: Group, task: str) -> bool:
        """A task has trained it. Returns whether all its tasks have, by now."""
        group.trained_by |= {task}
        is_over = group.state == DRAWN and group.is_done_by_all(group.trained_by)
        if is_over:
            self._set(group, TRAINED)
        return is_over

    def acked(self, group: Group, task: str) -> bool:
        """A task asks for it no more. Returns whether it is done: each of its tasks has trained and acknowledged it."""
        group.acked_by |= {task}
        return group.state == TRAINED and bool(group.terms.tasks) and group.is_done_by_all(group.acked_by)

    def forget(self, group: Group) -> None:
        """Its rows are about to be deleted."""
        self.live.pop(group.index, None)
        self.counts[group.state] -= 1
        group.state = "gone"
        self.changed(group)
        for table in (self.unfinished, self.with_free_parts, self._dirty):
            table.pop(group.index, None)

    def _set(self, group: Group, state: str) -> None:
        before, group.state = group.state, state
        self._dirty[group.index] = group
        if before == state:
            return
        self.counts[before] -= 1
        self.counts[state] += 1
        if state not in UNDER_WORK:
            self.with_free_parts.pop(group.index, None)
        if state in LEFT:
            self.unfinished.pop(group.index, None)
        if (before in COMPLETE) != (state in COMPLETE):  # no other change makes a group ready, or ends that
            self.changed(group)

    def changed(self, group: Group) -> None:
        """Its tags are to be written, and tasks that follow it look at it again."""
        self._dirty[group.index] = group
        for follower in [found for each in self.followers if (found := each()) is not None]:
            follower.group_changed(group)

    def _touch(self) -> None:
        """Columns are about to change."""
        if self._table.copies:
            self._table.copies.make()

    def flush(self) -> None:
        """Write the reserved tags of what has changed."""
        if self._dirty:
            tags = {index: group.tags() for index, group in self._dirty.items()}
            self._dirty.clear()
            self.partition.set_tags(tags, merge=True)

    # ---- rows that go ----

    def _clear(self, indexes: list[int]) -> Indexes:
        return self.partition.clear(np.array(indexes, dtype=np.int64)) if indexes else _NONE

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
            self.changed(group)

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
            assert group.state not in LEFT, "what has left is not live"
            assert (group.index in self.unfinished) == (not group.is_done_by_all(group.drawn_by)), group.state
            if not self._dirty:
                assert self.partition.tags[group.index]["group.state"] == group.state, "tags say the state"
        seqs = [group.seq for group in self.unfinished.values()]
        assert seqs == sorted(seqs), "unfinished groups are in the order of their first leases"
        assert set(self.with_free_parts) <= set(self.live), "only live groups have free parts"
