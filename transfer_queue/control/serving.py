# SPDX-License-Identifier: Apache-2.0
"""Answers one fetch: a batch from the ledger, a new round, "not yet" with reasons, or the end of the stream."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.calls import MORE, Holding, More, Until
from transfer_queue.control import following, group_work
from transfer_queue.control.adding import in_hand
from transfer_queue.control.consumer import IN_HAND, UNLEDGERED, Consumer, StreamEnd
from transfer_queue.control.draw import Draw, Share, Task, foreign
from transfer_queue.control.filtered import FilteredSet
from transfer_queue.control.group_record import Group
from transfer_queue.control.ledger import BatchKey, Entry
from transfer_queue.control.partition import Partition
from transfer_queue.control.ready import ReadySet
from transfer_queue.control.ready_groups import ReadyGroups
from transfer_queue.control.rows import Rows, all_of
from transfer_queue.control.state import PlaneState
from transfer_queue.control.tag_filter import parse_filter
from transfer_queue.errors import InvalidRequestError
from transfer_queue.protocol import (
    NO_INDEXES,
    Batch,
    Ended,
    Fetch,
    Indexes,
    NotReady,
    pack_indexes,
    pack_tags,
    unpack_indexes,
)
from transfer_queue.sampler.group_sampler import GroupSampler
from transfer_queue.sampler.micro_batches import cut_of_rest

_QUIET_S = 2.0
"""A finite unsealed stream ends with a short batch once nothing was published for this long."""

_ALL_RANKS = -1
_FROM_0 = ("dp_rank", "batch_index", "first_index", "skip", "pass_start")


def check_fetch(fetch: Fetch, task: Task) -> int | None:
    """The number of data-parallel ranks of its round, as ``Task.size_for`` gives it.

    Raises InvalidRequestError for a fetch that can never succeed, before anything is consumed.
    """
    if not fetch.fields:
        raise InvalidRequestError("a fetch must name at least one field, got data_fields=[].")
    if fetch.batch_size < 1 and not (fetch.batch_size == 0 and isinstance(task.sampler, GroupSampler)):
        raise InvalidRequestError(
            f"task {task.name!r} needs a batch_size: batch_size must be at least 1, got {fetch.batch_size}. Only a "
            f"task with a GroupSampler does without it."
        )
    if math.isnan(fetch.wait_s):
        raise InvalidRequestError("a fetch must say how many seconds it waits, got NaN.")
    for name in _FROM_0:
        number = getattr(fetch, name)
        if number is not None and number < 0:
            raise InvalidRequestError(f"{name} must be greater than or equal to 0, got {number}.")
    if fetch.dp_size is not None and fetch.dp_size < 1:
        raise InvalidRequestError(f"dp_size must be at least 1, got {fetch.dp_size}.")
    if fetch.where is not None:
        parse_filter(fetch.where)
    with foreign(task.sampler, task.name):
        dp_size = task.size_of_round(fetch)
        task.sampler.check(fetch.batch_size, dp_size)
    if dp_size is not None and fetch.dp_rank is not None and fetch.dp_rank >= dp_size:
        raise InvalidRequestError(
            f"dp_rank {fetch.dp_rank} asked for a batch of task {task.name!r}, which has dp_size {dp_size}: "
            f"ranks go from 0 to {dp_size - 1}."
        )
    if dp_size is not None and dp_size > 1 and fetch.dp_rank is None:
        raise InvalidRequestError(f"task {task.name!r} has dp_size {dp_size}: a fetch must name its dp_rank.")
    return dp_size


class Taken(Holding):
    """The batch of a fetch without batch_index: ``drawn`` samples without a ledger, or ledger entry ``batch``.

    If its client never gets it, it is given again.
    """

    def __init__(self, state: PlaneState, served: ServedFetch, batch: BatchKey | None, token: str | None) -> None:
        self._state, self._partition = state, served.partition.name
        self.consumer = served.consumer  # the object itself, because the task may be deleted and created again
        self._num_resets = served.consumer.ledger.num_resets
        self.drawn, self.batch, self._token = served.drawn, batch, token

    def undo(self) -> bool:
        partition = self._state.partitions.get(self._partition)
        if partition is not None:
            self._release(partition)
            self._state.changed(partition)
        return True

    def _release(self, partition: Partition) -> None:
        """Its samples are drawn again, or its rank gets the same share again."""
        consumer = partition.consumers.get(self.consumer.task)
        if consumer is None:
            return
        if self.batch is None:
            # Else the task has begun anew since, and others may have these samples.
            if consumer is self.consumer and consumer.ledger.num_resets == self._num_resets:
                _draw_again(self._state, partition, consumer, self.drawn, UNLEDGERED)
        else:
            entry = consumer.ledger.get(self.batch)
            if entry is None or entry.token != self._token:  # it has the same token if it was restored meanwhile
                return
            if (entry.dp_size or 1) > 1:
                consumer.ledger.missed(self.batch)
                return
            # The rank's next fetch may ask for other fields, or another number of samples.
            following.gave_back(self._state, partition, consumer.task, self.batch)
            consumer.ledger.close(entry)
            _draw_again(self._state, partition, consumer, entry.consumes, entry.number)


def _draw_again(state: PlaneState, partition: Partition, consumer: Consumer, drawn: Indexes, number: int) -> None:
    rows, found = partition.table.find(drawn)
    consumer.release(rows[found], number)
    if consumer.hands.counts:
        consumer.release(rows[found], IN_HAND)
    if partition.groups is not None and len(rows):
        group_work.undrew(state, partition, consumer.task, partition.groups.of_rows(rows[found]))


class Reading(Holding):
    """A batch without ledger entry, which is kept until its client has read it. Its values come with it."""

    def __init__(self, served: ServedFetch, packed: bytes) -> None:
        self._packed, self.serial, self.task = packed, served.partition.serial, served.consumer.task

    @property
    def indexes(self) -> Indexes:
        """All samples of the batch."""
        return unpack_indexes(self._packed)

    def undo(self) -> bool:
        return False  # received means never given to another reader


class Unread(Reading):
    """Its values come after it."""

    until = Until.DONE


class _Left(NamedTuple):
    """What is left of a batch. ``found``: which of its samples that are; None: all."""

    indexes: Indexes
    rows: Rows
    found: npt.NDArray[np.bool_] | None = None

    def of(self, by_sample: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """That of them alone."""
        return by_sample if self.found is None else by_sample[self.found]


class ServedFetch:
    """One fetch against one partition. ``answer`` may be called repeatedly until it is not None."""

    def __init__(self, state: PlaneState, fetch: Fetch, partition: Partition, task: Task, dp_size: int | None) -> None:
        self._state = state
        self._fetch = fetch
        self.client = ""
        """The session that gets the batch, where the task draws groups, or the session adds fields."""
        self.partition = partition
        self._task = task
        self._groups = partition.groups if isinstance(task.sampler, GroupSampler) else None
        self.consumer: Consumer = partition.consumer(fetch.task)
        self._dp_size = dp_size
        self.adds = tuple(fetch.adds)
        self.drawn = NO_INDEXES
        """The samples of a batch without ledger entry."""
        self.written: list[BatchKey] = []
        """Ledger entries that this fetch has made."""
        self.has_given = False
        """Samples count as consumed now that didn't before."""
        self._rank = 0 if fetch.dp_rank is None and dp_size is not None else fetch.dp_rank

    def _batch_index(self) -> int | None:
        if self._fetch.batch_index is not None:
            return self._fetch.batch_index
        if self._rank is None:
            return None
        ledger = self.consumer.ledger
        ledger.waits(self._rank)
        while self._groups is not None and (entry := ledger.get((self._rank, ledger.next_index(self._rank)))):
            if entry.owned or (entry.dp_size or 1) > 1:
                break
            ledger.close(entry)  # all its groups have left, so its reader goes on
        return ledger.next_index(self._rank)

    def answer(self, now: float, may_draw: bool) -> Batch | Ended | More | None:
        """The answer, or None if it is not decided yet."""
        if self.adds:
            self.consumer.hands.check(self.adds)
        batch_index = self._batch_index()
        if batch_index is not None:
            if self._is_past_end(batch_index):
                return Ended(self._fetch.id, "consumed")
            self._check_size(batch_index)
            entry = self._known((self._rank, batch_index))
            if entry is not None:
                return self._from_ledger(entry)
            for earlier in self._skipped((self._rank, batch_index)) if may_draw else ():
                reply = self._draw_earlier(earlier, now)
                if not isinstance(reply, Batch):
                    return reply
        known_end = self._known_end(batch_index)
        if known_end is not None or not may_draw:
            return known_end
        if not self.finish_comparing():
            return MORE
        draw = self._draw(batch_index)
        shares = None if self._is_early(draw) else draw.shares()
        if shares is not None:
            return self._hand_out(draw, shares)
        return self._end(draw, now)

    def _known_end(self, batch_index: int | None) -> Ended | None:
        """The end of stream, if an earlier fetch decided it."""
        end = self.consumer.end_of(self._fetch.where)
        if end is not None:
            return Ended(self._fetch.id, end.reason, end.dropped)
        if self._groups is not None and self._fetch.task in self._groups.left_by:
            return Ended(self._fetch.id, "consumed")
        if self.consumer.is_over(batch_index):
            return self._over(batch_index)
        if self._missed_by_tail(batch_index):
            return Ended(self._fetch.id, "sealed" if self.partition.sealed else "consumed")
        return None

    def ready(self) -> ReadySet:
        """What this fetch may draw from."""
        return self.consumer.ready(tuple(self._fetch.fields), self._fetch.where)

    def finish_comparing(self) -> bool:
        """Compare ready samples with the filter, as far as this turn allows. False: some are left."""
        return self._fetch.where is None or self.ready().finish(self._state.calls.turn)

    def _num_unmatched(self, ready: ReadySet) -> int:
        """Samples that would be ready without the filter."""
        if not isinstance(ready, FilteredSet):
            return 0
        return self.consumer.ready(tuple(self._fetch.fields)).count - ready.count - ready.num_unchecked

    def holdings(self, state: PlaneState, batch: Batch) -> list[Holding]:
        """What a fetch that did not name this batch holds."""
        if batch.batch_index is not None:
            return [Taken(state, self, (self._rank, batch.batch_index), batch.token)]
        taken: Holding = Taken(state, self, None, None)
        kind = Reading if self._fetch.with_values and batch.lies_in_front else Unread
        return [taken, kind(self, batch.indexes)]

    def _missed_by_tail(self, batch_index: int | None) -> bool:
        """Whether this round was a tail that did not reach this rank."""
        dp_size, ledger = self._dp_size or 1, self.consumer.ledger
        if batch_index is None or dp_size == 1 or self._task.tail_policy(dp_size) != "uneven_ok":
            return False
        entries = (ledger.get((rank, batch_index)) for rank in ledger.holding(range(dp_size), batch_index))
        return any(entry is None or entry.dp_size == dp_size for entry in entries)  # None: it is settled

    def _skipped(self, key: BatchKey) -> range:
        """Earlier batches that were not drawn yet. They must go first, because this batch could take their samples."""
        if self._fetch.first_index is None:
            return range(0)
        return range(self.consumer.ledger.first_undrawn(key, self._fetch.first_index), key[1])

    def _draw_earlier(self, batch_index: int, now: float) -> Batch | Ended | More | None:
        """Draw this batch for another worker of this rank. What this turn has no time for goes on in the next one."""
        if not self._state.calls.turn.has_time():
            return MORE
        fetch = msgspec.structs.replace(self._fetch, batch_index=batch_index, first_index=None)
        served = ServedFetch(self._state, fetch, self.partition, self._task, self._dp_size)
        served.client = self.client
        reply = served.answer(now, True)
        self.written += served.written
        self.has_given |= served.has_given
        return reply

    def _known(self, key: BatchKey) -> Entry | None:
        entry = self.consumer.ledger.get(key)
        if entry is None and self.consumer.ledger.holds(key):
            raise InvalidRequestError(
                f"batch {key[1]} of task {self._fetch.task!r}, dp_rank {key[0]}, partition {self.partition.name!r} is "
                f"settled: it was acknowledged, or its samples were cleared. Ask for a later batch_index, or reset "
                f"the task's consumption. Another Trainer or stream may read the same task: give it a task name of its "
                f"own."
            )
        if entry is not None and self._groups is not None:
            self._check_round(key[1], entry.dp_size or 1)
        return entry

    def _check_size(self, index: int) -> None:
        """Raises InvalidRequestError for a batch that was drawn for another number of ranks."""
        ledger, size = self.consumer.ledger, self._dp_size
        if index >= ledger.end or size is None:
            return
        own = (self._rank, index)
        keys = [own] if ledger.holds(own) else [(rank, index) for rank in ledger.holding(range(size), index)]
        if any(entry is not None and (entry.dp_size or 1) != size for entry in map(ledger.get, keys)):
            raise self._of_other_size(index)

    def _of_other_size(self, index: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"batch {index} of task {self._fetch.task!r}, partition {self.partition.name!r} was drawn when dp_size was "
            f"another one; it is {self._dp_size} now, and ranks would get other samples, or none. Keep one dp_size as "
            f"long as a partition lives, or read it as another task. To deal all of it anew, register the task with "
            f"this dp_size (register_task) and reset its consumption (reset_consumption)."
        )

    def _check_round(self, index: int, num_ranks: int) -> None:
        """Raises InvalidRequestError if a rank could not make a step with its share of this round.

        Then the shares that their ranks have not received are drawn again.
        """
        ledger = self.consumer.ledger
        rank = None if num_ranks == 1 else ledger.without_samples(index, num_ranks)
        if rank is None:
            return
        for entry in ledger.not_received(index, num_ranks):
            if entry.owned:
                following.gave_back(self._state, self.partition, self.consumer.task, entry.key)
                ledger.empty(entry)  # each rank that asks for it is to hear of this
                _draw_again(self._state, self.partition, self.consumer, entry.consumes, entry.number)
                self._state.changed(self.partition)
        raise InvalidRequestError(
            f"all groups that dp_rank {rank} was to train in batch {index} of task {self._fetch.task!r}, partition "
            f"{self.partition.name!r}, have left since the batch was drawn: they were rejected, maybe by a reader "
            f"of another task. Ranks must make equally many steps, so none of them gets this batch (again); what no "
            f"rank has received of it is drawn again. Go on at batch_index {index + 1} on all ranks, or reset the "
            f"task's consumption. To avoid it, reject groups before they are drawn: by a gate "
            f"(GroupSampler(gate=...)), or by their worker (lease.reject)."
        )

    def _draw(self, batch_index: int | None) -> Draw:
        fetch = self._fetch
        if self._groups is not None:
            group_work.before_draw(self._state, self.partition, fetch.task, self.ready)
        ranks: tuple[int | None, ...] = (self._rank,)
        if self._dp_size is not None:
            ranks = tuple(range(self._dp_size))
            # A round is drawn for all ranks, so none of them may already have this batch.
            if batch_index is not None and self.consumer.ledger.holding(range(self._dp_size), batch_index):
                raise self._of_other_size(batch_index)
        return Draw(
            self.partition, self.consumer, self._task.sampler, tuple(fetch.fields), self.ready(), fetch.batch_size,
            batch_index, ranks, self._dp_size, fetch.sampler_args,
        )  # fmt: skip

    def _is_early(self, draw: Draw) -> bool:
        """Whether what is ready may be drawn only once the next version trains."""
        queue = draw.ready.follower
        return isinstance(queue, ReadyGroups) and queue.is_early and draw.ready.count > 0

    def _hand_out(self, draw: Draw, shares: list[Share]) -> Batch | Ended:
        """Write the round to the ledger, and answer the requesting rank."""
        self.has_given = True
        if draw.batch_index is None:
            fresh = shares[0].consumed[self.consumer.given[shares[0].consumed] == 0]
            self.drawn = self.partition.table.column("index")[fresh]
            if self._groups is not None:
                group_work.drew(self._state, self.partition, self._fetch.task, [(self.client, None, shares[0].rows)])
            self.consumer.give(shares[0].consumed, UNLEDGERED)
            if self.adds:
                self.partition.adders[self._fetch.task] = None
                self.consumer.hand(self.client, np.intersect1d(fresh, shares[0].rows), self.adds)
            return self._batch(shares[0].indexes, shares[0].rows, padding=shares[0].padding)
        cuts = draw.cut(shares)
        entries = [self._write(rank, draw.batch_index, share) for rank, share in zip(draw.ranks, shares, strict=False)]
        for entry, cut in zip(entries, cuts, strict=False):
            entry.cut = cut
        if self._groups is not None:  # before their rows leave the ready set, which would make them closed once more
            drawn = [(*entry.key, share.rows) for entry, share in zip(entries, shares, strict=True)]
            group_work.drew(self._state, self.partition, self._fetch.task, drawn)
        self._give(entries, shares)
        for entry, share in zip(entries, shares, strict=True):
            if entry.key[0] == self._rank:
                return self._entry_batch(entry, _Left(entry.indexes, share.rows))
        end = self.consumer.end_of(self._fetch.where) or StreamEnd("consumed", 0)  # a tail that did not reach this rank
        return Ended(self._fetch.id, end.reason, end.dropped)

    def _write(self, rank: int | None, batch_index: int, share: Share) -> Entry:
        self.written.append((rank, batch_index))
        same = share.consumed is share.rows
        consumes = share.indexes if same else self.partition.table.column("index")[share.consumed]
        entry = self.consumer.ledger.write((rank, batch_index), share.indexes, consumes, share.padding, self._dp_size)
        entry.batch_size = self._fetch.batch_size
        return entry

    def _give(self, entries: list[Entry], shares: list[Share]) -> None:
        """Mark the samples of a round as consumed: in one step if each is consumed by the rank that gets it."""
        consumer = self.consumer
        if not all(share.consumed is share.rows for share in shares):
            for entry, share in zip(entries, shares, strict=True):
                entry.owned = int(np.count_nonzero(consumer.give(share.consumed, entry.number)))
            return
        sizes = [len(share.rows) for share in shares]
        numbers = np.repeat(np.array([entry.number for entry in entries], dtype=np.int32), sizes)
        is_fresh = consumer.give(np.concatenate([share.rows for share in shares]), numbers)
        starts = np.cumsum([0, *sizes[:-1]])
        for entry, count in zip(entries, np.add.reduceat(is_fresh, starts, dtype=np.int64).tolist(), strict=True):
            entry.owned = count

    def _over(self, batch_index: int | None, dropped: int = 0) -> Ended:
        """The current end of an unsealed stream."""
        start = self._fetch.pass_start
        if batch_index is not None and start is not None and start < batch_index:
            self.consumer.end_pass(self._readers(), batch_index)
        elif batch_index is not None and (self._dp_size or 1) > 1:
            self.consumer.record_over(batch_index, self._rank or 0, self._dp_size or 1)
        return Ended(self._fetch.id, "consumed", dropped)

    def _readers(self) -> int | None:
        """The readers that share a pass: all ranks if rounds are drawn, else a rank's own readers."""
        return self._rank if self._dp_size is None else _ALL_RANKS

    def _is_past_end(self, batch_index: int) -> bool:
        """Checked before the ledger, because a reader of the next pass may have drawn this batch already."""
        start = self._fetch.pass_start
        if not self._fetch.finite or start is None:
            return False
        return self.consumer.is_past_end(self._readers(), start, batch_index)

    def _from_ledger(self, entry: Entry) -> Batch | None:
        """None while its samples lack fields, because the fetch that drew it asked for others."""
        skip = self._fetch.skip  # rows that may be cleared
        left = self._left_of(entry.indexes[skip:] if skip else entry.indexes)
        if not all_of(self.partition.schema.complete(left.rows, self._fetch.fields)):
            self.consumer.ledger.lacks_fields = True
            return None
        if skip:
            consumed = left.rows[np.isin(left.indexes, entry.consumes)]
        else:
            consumed = left.rows if entry.consumes is entry.indexes else self._left_of(entry.consumes).rows
        if not all_of(self.consumer.consumed[consumed]):  # a replay after a reset of consumption
            self.consumer.give(consumed, entry.number)
            self.has_given = True
        return self._entry_batch(entry, left, skip)

    def _left_of(self, indexes: Indexes) -> _Left:
        """All of these samples. Where groups leave by themselves, those that have not: others still need them.

        Raises SampleClearedError.
        """
        if self.partition.groups is None:
            return _Left(indexes, self.partition.rows_of(indexes))
        rows, found = self.partition.table.find(indexes)
        return _Left(indexes, rows) if all_of(found) else _Left(indexes[found], rows[found], found)

    def _entry_batch(self, entry: Entry, left: _Left, skip: int = 0) -> Batch:
        ledger = self.consumer.ledger
        if left.found is not None and entry.cut and not ledger.was_received(entry):
            ledger.recut(entry, cut_of_rest(entry.cut, left.found.tolist()))
        ledger.took(entry.key)
        padding = None if entry.padding is None else left.of(entry.padding[skip:])
        batch = self._batch(left.indexes, left.rows, entry.token, entry.key[1], padding)
        if left.found is not None:
            batch = msgspec.structs.replace(batch, remains=left.found.astype(np.uint8).tobytes())
        if entry.cut:
            batch = msgspec.structs.replace(batch, cut=list(entry.cut))
        if self._dp_size in (None, 1) or self._groups is None or skip:
            return batch
        most = ledger.most_rows(entry.key[1], self._dp_size)
        return msgspec.structs.replace(batch, most_rows=most)

    def _end(self, draw: Draw, now: float) -> Batch | Ended | None:
        """Decide whether a round that can't be filled now will ever be.

        Samples that have all fields and don't match the filter count as not coming, although their tags may change.
        """
        if self._is_early(draw):
            return None
        if self._groups is not None:
            if self._fetch.finite and not self._groups.may_grow and self.partition.is_exhausted(self.consumer, 0):
                return self._over(draw.batch_index)
            if self._has_last_groups(draw):
                return self._tail(draw, 0)
            group_work.check_starved(self._state, self._fetch.task)
            return None
        ready, unmatched = draw.ready.count, self._num_unmatched(draw.ready)
        if self._fetch.finite and self.partition.is_exhausted(self.consumer, unmatched):
            return self._over(draw.batch_index)
        if not self._is_complete(now):
            return None
        lacking = self.consumer.num_undrawn - ready - unmatched
        coming = self.partition.num_reserved + lacking
        policy = self._task.tail_policy(self._dp_size)
        if coming and (policy != "drop" or ready + coming >= self._task.needed(self._fetch)):
            return None
        return self._tail(draw, coming)

    def _tail(self, draw: Draw, coming: int) -> Batch | Ended:
        """What is left of a stream in which no whole round will be. ``coming``: samples that will not be drawn."""
        shares = draw.tail_shares(self._task.tail_policy(self._dp_size))
        left = draw.ready.count + coming - sum(len(share.consumed) for share in shares)
        if self.partition.sealed and not (shares and left):
            self.consumer.end(self._fetch.where, "sealed", left)
        if shares:
            return self._hand_out(draw, shares)
        if self.partition.sealed and isinstance(draw.ready.follower, ReadyGroups):
            task, some = self._fetch.task, list(draw.ready.follower)
            why = f"too few groups for a last step of task {task!r}"
            group_work.left_over(self._state, self.partition, task, some, why)
        return Ended(self._fetch.id, "sealed", left) if self.partition.sealed else self._over(draw.batch_index, left)

    def _has_last_groups(self, draw: Draw) -> bool:
        """Whether no more groups will be, and all that are left are ready."""
        queue = draw.ready.follower
        assert isinstance(queue, ReadyGroups)
        return self.partition.is_final and all(
            group in queue or self._is_unmatched(group) for group in queue.unfinished()
        )

    def _is_unmatched(self, group: Group) -> bool:
        """Whether only the filter keeps it from being drawn: no gate is against it, and its rows have all fields."""
        if self._fetch.where is None or not group.passed:
            return False
        rows = self.partition.rows_of(np.array(group.all_members(), dtype=np.int64))
        return all_of(self.partition.schema.complete(rows, self._fetch.fields))

    def _is_complete(self, now: float) -> bool:
        partition = self.partition
        if partition.sealed:
            return partition.is_final
        if not self._fetch.finite or partition.num_samples is not None or partition.num_reserved:
            return False
        return partition.num_live > 0 and (partition.all_inserted() or now >= self._quiet_at())

    def _quiet_at(self) -> float:
        last = self.partition.last_published
        return math.inf if last is None else last + _QUIET_S

    def decided_by_time(self, now: float) -> float | None:
        """When the stream may end without another request; None: only a request can end it."""
        at = self._quiet_at()
        return at if self._fetch.finite and not self.partition.sealed and now < at < math.inf else None

    def _batch(
        self, indexes: Indexes, rows: Rows, token: str | None = None, batch_index: int | None = None,
        padding: npt.NDArray[np.uint8] | None = None,
    ) -> Batch:  # fmt: skip
        """The reply that describes these samples for this fetch's fields."""
        described = describe(self._fetch.id, self.partition, indexes, self._fetch.fields, rows)
        mask = None if padding is None else padding.tobytes()
        return msgspec.structs.replace(described, token=token, batch_index=batch_index, padding=mask)

    def not_ready(self, now: float) -> NotReady:
        """Why there is no batch yet, in numbers of undrawn samples, or of a batch that lacks fields."""
        partition, fetch = self.partition, self._fetch
        batch_index = self._batch_index()
        entry = None if batch_index is None else self.consumer.ledger.get((self._rank, batch_index))
        unmatched = 0
        if entry is not None:
            rows = self._left_of(entry.indexes).rows
            wanted = samples = len(rows)
            ready = int(np.count_nonzero(partition.schema.complete(rows, fetch.fields)))
            lacking = {n: int(np.count_nonzero(~partition.schema.complete(rows, [n]))) for n in fetch.fields}
        else:
            wanted, samples = self._task.needed(fetch), self.consumer.num_undrawn
            matching = self.ready()
            ready, unmatched = matching.count, self._num_unmatched(matching)
            lacking = {name: self.consumer.lacking(name) for name in fetch.fields} if samples > ready else {}
        lacking = {name: count for name, count in lacking.items() if count}
        last, held = partition.last_published, in_hand(partition, [*lacking, *self.adds])
        if self.adds:
            held.pop(self.client, None)  # it waits for others
        return NotReady(
            fetch.id, wanted, ready, samples, lacking, None if last is None else now - last, partition.schema.written(),
            unmatched=unmatched, sealed=partition.sealed, in_hand=held,
            lost={n: len(own) for n, own in partition.lost().items() if n in fetch.fields},
        )  # fmt: skip


def describe(request_id: int, partition: Partition, indexes: Indexes, fields: list[str], rows: Rows) -> Batch:
    """Describe these samples, which have these rows. Fields that the partition doesn't know are left out."""
    schema = partition.schema
    status = schema.complete(rows, fields)
    heads, versions = (None, {}) if partition.groups is None else partition.groups.described(rows)
    specs = {name: schema.spec(name, rows) for name in fields if name in schema.counts}
    return Batch(
        request_id, partition.name, pack_indexes(indexes), specs, status.tobytes(),
        pack_tags(partition.tags.packed(rows)), heads=heads, versions=versions,
        committing=partition.commits.first_for(indexes) if partition.commits else [],
    )  # fmt: skip
