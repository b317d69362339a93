# SPDX-License-Identifier: Apache-2.0
"""Groups of one partition: what is made of each head, from waiting for its first lease until it is trained or left."""

# The record of a group is its head's row: reserved tags hold its state, so that filters, watches and checkpoints know
# it. A member's row names its head and its part. From its first lease until it is done, a group is an object here, too.
# It is built anew from these rows after a restore. Groups that wait for their first lease are bits of a set.

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, Protocol
from weakref import ref

import numpy as np

from transfer_queue.control.consumer import Consumer
from transfer_queue.control.group_record import (
    CLOSED,
    COMPLETE,
    DRAWABLE,
    DRAWN,
    FAILED,
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
from transfer_queue.control.keys_and_tags import KeyMap, TagStore, unpacked_tags
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.rows import Rows, RowState, RowTable, one_of
from transfer_queue.errors import GroupStateError, InvalidRequestError, LeaseLostError
from transfer_queue.protocol import Indexes, Members, Tags, Terms, pack_indexes

TERMS, HEAD, PART = "group:terms", "group:head", "group:part"
"""Columns. By head's row: 1 + the number of its terms, negative from its first lease on. By member's row: 1 + the index
of its head; 1 + its part, negative once that is closed."""
COLUMNS: Final = ((TERMS, "<i4"), (HEAD, "<i8"), (PART, "<i4"))
_MOST_REASONS = 8
_REASON_LENGTH = 200
_NONE: Indexes = np.empty(0, dtype=np.int64)
_IS_HEAD = one_of(RowState.HEAD)


class Samples(Protocol):
    """The partition, as far as its groups need it."""

    name: str
    serial: int
    table: RowTable
    tags: TagStore
    keys: KeyMap
    consumers: dict[str, Consumer]

    def rows_of(self, indexes: Indexes) -> Rows: ...
    def set_tags(self, tags: Mapping[int, Tags], merge: bool) -> None: ...
    def clear(self, indexes: Indexes) -> Indexes: ...


class GroupFollower(Protocol):
    """What a task may draw."""

    def group_changed(self, group: Group) -> None: ...
    def __contains__(self, group: Group, /) -> bool: ...


class Work(Protocol):
    """What the plane does around a task's draw of groups."""

    def before_draw(self, task: str) -> None:
        """Gates of a new reader judge what nobody has judged, and what is too old leaves."""

    def step_of(self, task: str) -> int | None:
        """The step for which the task draws next; None: nobody has said which version trains."""

    def overtook(self, task: str, seq: int) -> list[int]:
        """Places behind this one, in the order of first leases, that the task has drawn. Earlier ones are forgotten."""

    def drew(self, task: str, batches: Sequence[tuple[Hashable, int | None, list[Group]]]) -> None:
        """A round of the task: by reader and batch, its groups. ``batch`` None: the reader's next one."""

    def gave_back(self, task: str, heads: list[int]) -> None:
        """It never got them."""


class Groups:
    """The groups of one partition. A call of ``flush`` ends each change, and makes it visible in the tags."""

    def __init__(self, partition: Samples, work: Work) -> None:
        self.work = work
        self.partition = partition
        self._table = partition.table
        self.terms: list[Terms] = []
        self._fresh: dict[Terms, ReadySet] = {}
        """By terms, the heads that wait for their first lease."""
        self.live: dict[int, Group] = {}
        """Those that work has begun on, until they are done or have left; by the index of the head."""
        self.unfinished: dict[int, Group] = {}
        """Those of them that some task has still to draw, in the order of their first leases."""
        self.with_free_parts: dict[int, Group] = {}
        """Those with an open part that no lease has."""
        self.counts: Counter[str] = Counter()
        """Groups by state, without those that wait for their first lease; of those that left, all that ever did."""
        self.num_arrivals = 0
        self.rejected: Counter[str] = Counter()
        """By gate, or other reason, how many were."""
        self.num_under_work = 0
        """Groups whose members are not complete, without those that wait for their first lease."""
        self.member_fields: set[str] = set()
        """Fields that members were put with. Who leases a group is about to put them."""
        self.unjudged: dict[int, Group] = {}
        """Closed groups that no gate has judged."""
        self.emptied: dict[int, Group] = {}
        """Groups all of whose rows were deleted by others."""
        self.followers: list[ref[GroupFollower]] = []
        self._dirty: dict[int, Group] = {}
        for name, dtype in COLUMNS:
            self._table.ensure_column(name, np.dtype(dtype))

    # ---- questions ----

    @property
    def num_fresh(self) -> int:
        return sum(fresh.count for fresh in self._fresh.values())

    @property
    def may_grow(self) -> bool:
        """Whether members may still come."""
        return bool(self.num_under_work or self.num_fresh)

    def numbers(self) -> dict[str, int]:
        """How many groups are in each state; of those that have left, all that ever did."""
        found = Counter(self.counts)
        found[WAITING] += self.num_fresh
        return {state: count for state, count in found.items() if count}

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

    def tags_of_members(self, group: Group) -> list[Tags]:
        indexes = np.array(group.all_members(), dtype=np.int64)
        rows = self.partition.rows_of(indexes)
        return [unpacked_tags(packed) for packed in self.partition.tags.packed(rows)]

    # ---- new groups ----

    def add(self, rows: Rows, terms: Terms) -> None:
        """These heads, which were just published, wait for their first lease."""
        waiting = self._wait_for_first(rows, terms)
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

    def _wait_for_first(self, rows: Rows, terms: Terms) -> Tags:
        """Returns the reserved tags of such heads."""
        self._touch()
        if terms not in self.terms:
            self.terms.append(terms)
        self._table.column(TERMS)[rows] = 1 + self.terms.index(terms)
        self.fresh(terms).add(rows)
        return {"group.state": WAITING, "group.parts": terms.parts}

    def are_fresh(self, indexes: Indexes) -> bool:
        """Whether all of these heads are here and wait for their first lease."""
        rows, found = self._table.find(indexes)
        return bool(found.all() and (self._table.column(TERMS)[rows] > 0).all())

    # ---- work begins ----

    def fresh(self, terms: Terms) -> ReadySet:
        """The heads with these terms that wait for their first lease."""
        return self._fresh.setdefault(terms, ReadySet())

    def first_fresh(self, terms: Iterable[Terms], count: int, among: ReadySet | None) -> list[tuple[int, Terms]]:
        """(row, terms) of the first heads of each of these terms that wait for their first lease, oldest ones first.

        ``among``: only heads of this set.
        """
        found: list[tuple[int, Terms]] = []
        for each in terms:
            fresh = self._fresh[each]
            if among is None:
                rows = fresh.first(count).tolist()
            else:
                rows = [row for block in among.blocks() for row in block[fresh.contains(block)].tolist()][:count]
            found += [(row, each) for row in rows]
        return sorted(found, key=lambda entry: entry[0])

    def terms_waiting(self) -> list[Terms]:
        """The terms of groups that wait for their first lease."""
        return [terms for terms, fresh in self._fresh.items() if fresh.count]

    def begin(self, row: int, terms: Terms, seq: int, version: int | None) -> Group:
        """A group gets its first lease. ``have_begun`` follows, for all groups of the same request."""
        group = Group(self._table.column("index").item(row), terms, seq, version)
        self.enter(group)
        return group

    def have_begun(self, rows: Rows) -> None:
        """These heads do not wait for their first lease any more."""
        self._touch()
        for fresh in self._fresh.values():
            fresh.discard(rows)
        self._table.column(TERMS)[rows] *= -1

    def enter(self, group: Group) -> None:
        """Work on it has begun, here or before a restore."""
        self._dirty[group.index] = group
        self.live[group.index] = self.unfinished[group.index] = group
        self.counts[group.state] += 1
        self.num_under_work += group.state in UNDER_WORK
        if group.state in UNDER_WORK:
            self.with_free_parts[group.index] = group
        elif group.state == CLOSED and not group.passed:
            self.unjudged[group.index] = group

    def take(self, group: Group, parts: Sequence[int], token: int, keep: str) -> Indexes:
        """A lease has these parts now. Returns the rows of earlier holders that it doesn't go on with: they are gone.

        ``keep`` "all": it goes on with all of them.
        """
        dropped = group.members if keep != "all" else {}
        gone = [index for part in parts for index in dropped.get(part, ())] if dropped else []
        group.tokens.update(dict.fromkeys(parts, token))
        self._set(group, RUNNING)
        return self._clear(gone)

    def begin_anew(self, group: Group) -> Indexes:
        """Forget what its parts hold, closed ones, too."""
        group.closed.clear()
        return self._clear(group.all_members())

    def note_free_parts(self, group: Group, has_free: bool) -> None:
        """Whether it has an open part that no lease has."""
        if has_free and group.state in UNDER_WORK:
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
            state = self._state_of(members.head) or "gone"
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

    def _state_of(self, index: int) -> str:
        tags = self.partition.tags.get(index) or {}
        return str(tags.get("group.state", ""))

    def mark(self, members: Members, indexes: Indexes) -> None:
        """New rows are about to be published as members."""
        self._touch()
        rows = self.partition.rows_of(indexes)
        parts = 1 + np.repeat(np.array(members.parts), len(rows) // len(members.parts))
        self._table.column(HEAD)[rows] = 1 + members.head
        self._table.column(PART)[rows] = -parts if members.closes else parts

    def join(self, group: Group, members: Members, indexes: list[int]) -> None:
        """New rows, which were just published, belong to these parts."""
        earlier = [index for part in members.parts for index in group.members.get(part, ())] if members.closes else []
        if indexes:
            size = len(indexes) // len(members.parts)
            for at, part in enumerate(members.parts):
                group.members.setdefault(part, []).extend(indexes[at * size : (at + 1) * size])
            group.num_members += len(indexes)
        if members.closes:
            self._close(group, members.parts, earlier)

    def _close(self, group: Group, parts: Sequence[int], earlier: list[int]) -> None:
        """``earlier``: the rows of these parts that are still marked as rows of open parts."""
        for part in parts:
            if not group.members.get(part):
                raise GroupStateError(
                    f"part {part} of this group has no rows, so it can't be closed. Close it with rows, release it, or "
                    f"reject the group."
                )
        if earlier:
            self._touch()
            rows = self.partition.rows_of(np.array(earlier, dtype=np.int64))
            self._table.column(PART)[rows] *= -1
        group.closed.update(parts)
        self._set(group, CLOSED if len(group.closed) == group.terms.parts else group.state)

    # ---- work ends without rows ----

    def released(self, group: Group, reason: str, blame: str | None) -> str | None:
        """A lease has ended without closing its parts. Returns why the group fails, if it does.

        ``blame``: whose attempt it counts as, "worker" or "sample"; None: nobody's.
        """
        if blame is not None and reason:
            self._note(group, reason)
        group.attempts += blame == "sample"
        group.worker_attempts += blame == "worker"
        if group.attempts >= group.terms.attempts or group.worker_attempts >= group.terms.worker_attempts:
            return FAILED
        self._dirty[group.index] = group
        return None

    def void(self, group: Group, token: int) -> None:
        """The lease has been given up: nothing can come of it any more."""
        group.tokens = {part: own for part, own in group.tokens.items() if own != token or part in group.closed}

    def _note(self, group: Group, reason: str) -> None:
        group.reasons = [*group.reasons, reason[:_REASON_LENGTH]][-_MOST_REASONS:]

    def rest(self, group: Group, has_holder: bool) -> None:
        """Whether a lease has a part of it now."""
        if group.state in UNDER_WORK:
            self._set(group, RUNNING if has_holder else WAITING)

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
        rows = np.array([row], dtype=np.intp)
        before = self.partition.tags[index]
        self.counts[before["group.state"]] -= 1
        tags = {name: own for name, own in before.items() if not name.startswith(RESERVED)}
        tags |= self._wait_for_first(rows, self.terms[-number - 1])
        self.partition.set_tags({index: tags}, merge=False)
        return True

    # ---- draws ----

    def passes(self, group: Group) -> None:
        """No gate is against it."""
        group.passed = True
        self.unjudged.pop(group.index, None)
        self._dirty[group.index] = group
        self._changed(group)

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

    def undrawn(self, group: Group, task: str) -> None:
        """Nobody got it, so this task may draw it again."""
        group.drawn_by -= {task}
        group.trained_by -= {task}
        group.acked_by -= {task}
        if group.index not in self.unfinished and not group.is_done_by_all(group.drawn_by):
            self.unfinished[group.index] = group
            self.order()
        if group.state in (DRAWN, TRAINED):
            is_trained = group.is_done_by_all(group.trained_by)
            self._set(group, CLOSED if not group.drawn_by else TRAINED if is_trained else DRAWN)
        self._changed(group)

    def drew(self, task: str, batches: Iterable[tuple[Hashable, int | None, Rows]]) -> None:
        """A round of the task: by reader and batch, the rows."""
        self.work.drew(task, [(reader, batch, self.of_rows(rows)) for reader, batch, rows in batches])

    def gave_back(self, task: str, rows: Rows) -> None:
        """Nobody got these rows."""
        self.work.gave_back(task, list(dict.fromkeys(self.heads_of(rows).tolist())))

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
        self.num_under_work -= group.state in UNDER_WORK
        self.unfinished.pop(group.index, None)
        self.with_free_parts.pop(group.index, None)
        for table in (self._dirty, self.unjudged, self.emptied):
            table.pop(group.index, None)
        group.state = "gone"
        self._changed(group)

    def _set(self, group: Group, state: str) -> None:
        before, group.state = group.state, state
        self._dirty[group.index] = group
        if before == state:
            return
        self.counts[before] -= 1
        self.counts[state] += 1
        self.num_under_work += (state in UNDER_WORK) - (before in UNDER_WORK)
        if state not in UNDER_WORK:
            self.with_free_parts.pop(group.index, None)
        if state in LEFT:
            self.unfinished.pop(group.index, None)
        if state == CLOSED and not group.passed:
            self.unjudged[group.index] = group
        elif state != READY:
            self.unjudged.pop(group.index, None)
        if (before in COMPLETE) != (state in COMPLETE):  # no other change makes a group ready, or ends that
            self._changed(group)

    def _changed(self, group: Group) -> None:
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
        state = self._table.column("state")[rows]
        for row in rows[_IS_HEAD[state]].tolist():
            number = self._table.column(TERMS).item(row)
            if number > 0:
                self._fresh[self.terms[number - 1]].discard(np.array([row], dtype=np.intp))
        touched: dict[int, Group] = {}
        members = rows[self.heads_of(rows) >= 0]
        indexes, parts = self._table.column("index")[members], np.abs(self._table.column(PART)[members]) - 1
        heads = self.heads_of(members)
        for index, head, part in zip(indexes.tolist(), heads.tolist(), parts.tolist(), strict=True):
            group = self.live.get(head)
            if group is not None and index in group.members.get(part, ()):
                group.members[part].remove(index)
                group.num_members -= 1
                touched[head] = group
        for group in touched.values():
            self._changed(group)
            if not group.num_members and group.state not in UNDER_WORK:
                self.emptied[group.index] = group

    def rebuild(self) -> None:
        """Row numbers have changed."""
        numbers = self._table.column(TERMS)
        self._fresh = {}
        for number, terms in enumerate(self.terms, 1):
            ready = ReadySet()
            ready.add((numbers == number).nonzero()[0])
            self._fresh[terms] = ready

    def check_invariants(self) -> None:
        """Raise AssertionError if the records disagree; for tests."""
        table = self._table
        heads = (table.column("state") == RowState.HEAD).nonzero()[0]
        numbers = table.column(TERMS)
        assert set((numbers != 0).nonzero()[0].tolist()) >= set(heads.tolist()), "each head has terms"
        for number, terms in enumerate(self.terms, 1):
            expected = [row for row in heads.tolist() if numbers[row] == number]
            assert self._fresh.get(terms, ReadySet()).all_rows().tolist() == expected, "heads that wait are known"
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
        assert self.num_under_work == sum(group.state in UNDER_WORK for group in self.live.values())
        seqs = [group.seq for group in self.unfinished.values()]
        assert seqs == sorted(seqs), "unfinished groups are in the order of their first leases"
        assert set(self.with_free_parts) <= set(self.live), "only live groups have free parts"
