# SPDX-License-Identifier: Apache-2.0
"""What each (dp_rank, batch_index) of one task in one partition was given, until it is acknowledged."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from transfer_queue.control.rows import PendingCopies
from transfer_queue.control.saved import SavedBatch, SavedLedger, SavedRank
from transfer_queue.protocol import NO_INDEXES, Indexes, pack_indexes, unpack_indexes

BatchKey = tuple[int | None, int]
"""(dp_rank, batch_index)"""

_MAX_DIGITS = 20
"""Clients send tokens: a longer number can't be ours, and Python refuses to parse very long ones."""


@dataclass(slots=True)
class Entry:
    """One batch. ``consumes``: its samples that no other batch gets; ``owned`` counts those not cleared yet, once
    they were given.

    ``dp_size``: of the round that it is a share of; None if its rank drew alone. ``batch_size``: of the fetch that drew
    it, 0 for whole groups; None in older checkpoints. ``cut``: rows of each micro-batch, if the sampler says so.
    """

    key: BatchKey
    number: int
    indexes: Indexes
    consumes: Indexes
    token: str
    padding: npt.NDArray[np.uint8] | None = None
    dp_size: int | None = None
    owned: int = 0
    batch_size: int | None = None
    cut: Sequence[int] = ()


@dataclass(slots=True)
class _Rank:
    """The batches of one rank. Each is in one state: not drawn, drawn, given, or settled.

    ``drawn``: all that were drawn. Those of them that are not ``open`` are settled. Of the open ones, those below
    ``next`` were given to the rank: received, or on their way. ``missed``: some below it that never arrived, so they
    count as drawn again. ``next`` itself is not settled. ``waits``: a fetch that names no batch may wait.
    """

    drawn: Runs
    open: dict[int, Entry] = field(default_factory=dict)
    next: int = 0
    missed: set[int] = field(default_factory=set)
    waits: bool = False

    @property
    def next_index(self) -> int:
        return min(self.missed, default=self.next)

    def pass_settled(self) -> None:
        while self.next in self.drawn and self.next not in self.open:
            self.next += 1


class Ledger:
    """Entries by batch and by number. Settled batches stay known as drawn, compactly, as runs of numbers."""

    def __init__(self, name: str, copies: PendingCopies) -> None:
        self.name = name
        """The prefix of the tokens of later batches."""
        self._copies = copies  # to be made before anything that is saved changes
        self.num_changes = 0
        """Changes that may answer a waiting fetch which must not draw, besides the entry that it waits for."""
        self._ranks: defaultdict[int | None, _Rank] = defaultdict(lambda: _Rank(Runs()))
        self._by_number: dict[int, Entry] = {}
        self.end = 0
        """No rank has drawn this batch or a later one."""
        self.lacks_fields = False
        """A fetch waits for fields of an open batch."""
        self._count = 0
        self.num_resets = 0

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def num_open_samples(self) -> int:
        """The number of samples that open batches consume and that aren't cleared."""
        return sum(entry.owned for entry in self._by_number.values())

    def get(self, key: BatchKey) -> Entry | None:
        own = self._ranks.get(key[0])
        return None if own is None else own.open.get(key[1])

    def holds(self, key: BatchKey) -> bool:
        """Whether this batch was drawn, acknowledged or not."""
        own = self._ranks.get(key[0])
        return own is not None and key[1] in own.drawn

    def holding(self, ranks: Iterable[int], batch_index: int) -> list[int]:
        """Those of these ranks for which this batch was drawn."""
        return [] if batch_index >= self.end else [rank for rank in ranks if self.holds((rank, batch_index))]

    def most_rows(self, batch_index: int, num_ranks: int) -> int:
        """The largest share of this round; 0 if none of these ranks has one."""
        shares = [self.get((rank, batch_index)) for rank in range(num_ranks)]
        return max((len(share.indexes) for share in shares if share is not None), default=0)

    def without_samples(self, batch_index: int, num_ranks: int) -> int | None:
        """The first of these ranks whose share of this round, which it consumes alone, has all been cleared."""
        shares = [self.get((rank, batch_index)) for rank in range(num_ranks)]
        return next((rank for rank, share in enumerate(shares) if share is not None and not share.owned), None)

    def not_received(self, batch_index: int, num_ranks: int) -> list[Entry]:
        """The open shares of this round that their ranks have not received."""
        shares = [self.get((rank, batch_index)) for rank in range(num_ranks)]
        return [share for share in shares if share is not None and not self.was_received(share)]

    def was_received(self, entry: Entry) -> bool:
        """Whether its rank was given it, as far as is known."""
        rank, index = entry.key
        return index < self._ranks[rank].next and index not in self._ranks[rank].missed

    def recut(self, entry: Entry, cut: Sequence[int]) -> None:
        """Its micro-batches are others."""
        self._copies.make()
        entry.cut = cut

    def empty(self, entry: Entry) -> None:
        """Its samples are for other batches. It stays open without any."""
        self._copies.make()
        self._add(replace(entry, indexes=NO_INDEXES, consumes=NO_INDEXES, padding=None, owned=0))

    def dp_sizes(self) -> list[int]:
        """The numbers of ranks for which open batches were drawn; 1 if a rank drew alone."""
        return sorted({entry.dp_size or 1 for entry in self._by_number.values()})

    def first_undrawn(self, key: BatchKey, first: int) -> int:
        """The first batch, at least ``first``, after the last one drawn for this rank before this batch."""
        own = self._ranks.get(key[0])
        return first if own is None else max(first, own.drawn.below(key[1]))

    def next_index(self, dp_rank: int | None) -> int:
        """The batch for a fetch without batch_index: one that never arrived, or the one after the last one given."""
        own = self._ranks.get(dp_rank)
        return 0 if own is None else own.next_index

    def took(self, key: BatchKey) -> None:
        """The rank was given this batch, so its next fetch without batch_index gets a later one."""
        if self._copies:
            self._copies.make()
        own = self._ranks[key[0]]
        own.next = max(own.next, key[1] + 1)
        own.pass_settled()
        own.missed.discard(key[1])
        if own.waits and own.next_index in own.open:
            own.waits = False
            self.num_changes += 1

    def missed(self, key: BatchKey) -> None:
        """The rank never received this batch, so its next fetch without batch_index gets it."""
        self._copies.make()
        own = self._ranks[key[0]]
        if key[1] < own.next:  # else it counts as drawn already, since a load
            own.missed.add(key[1])
        self.num_changes += 1

    def waits(self, dp_rank: int | None) -> None:
        """A fetch of this rank that names no batch may wait from now on."""
        self._ranks[dp_rank].waits = True

    def samples_changed(self) -> None:
        """Some samples got fields, or were cleared: a fetch that waits for fields may be answered."""
        self.num_changes += self.lacks_fields
        self.lacks_fields = False

    def write(
        self, key: BatchKey, indexes: Indexes, consumes: Indexes, padding: npt.NDArray[np.uint8] | None = None,
        dp_size: int | None = None,
    ) -> Entry:  # fmt: skip
        """Add an entry. The key must be free."""
        if self._copies:
            self._copies.make()
        self._count += 1
        entry = Entry(key, self._count, indexes, consumes, self._token(self._count), padding, dp_size)
        self._add(entry)
        self._mark_drawn(key)
        return entry

    def _add(self, entry: Entry) -> None:
        rank, index = entry.key
        self._ranks[rank].open[index] = self._by_number[entry.number] = entry

    def _mark_drawn(self, key: BatchKey) -> None:
        self._ranks[key[0]].drawn.add(key[1])
        self.end = max(self.end, key[1] + 1)

    def _token(self, number: int) -> str:
        return f"{self.name}/{self.num_resets}#{number}"

    def ack(self, tokens: Iterable[str], earlier: bool = False) -> list[Entry]:
        """Acknowledge the batches of these tokens; unknown or old tokens are ignored. Returns these batches.

        ``earlier``: also acknowledge earlier batches of the same rank, if their acks are missing.
        """
        acked: list[Entry] = []
        for token in tokens:
            number = token.rpartition("#")[2]
            entry = self._by_number.get(int(number)) if number.isdecimal() and len(number) < _MAX_DIGITS else None
            if entry is not None and entry.token == token:
                rank, index = entry.key
                self.close(entry)
                acked += [entry, *(self.ack_before(rank, index) if earlier else ())]
        return acked

    def ack_before(self, dp_rank: int | None, batch_index: int) -> list[Entry]:
        """Acknowledge all batches of this rank before this one. Returns them."""
        own = self._ranks.get(dp_rank)
        entries = [] if own is None else [each for index, each in own.open.items() if index < batch_index]
        for each in entries:
            self.close(each)
        return entries

    def is_open(self, number: int) -> bool:
        """Whether the batch of this number is not settled."""
        return number in self._by_number

    def first_open(self) -> int:
        """Where a reader without a position begins: no rank has acknowledged this batch or a later one."""
        return max((min(own.open, default=own.drawn.end()) for own in self._ranks.values()), default=0)

    def open_indexes(self) -> Indexes:
        """Samples of open batches, including padding."""
        return np.concatenate([NO_INDEXES, *(entry.indexes for entry in self._by_number.values())])

    def samples_cleared(self, numbers: npt.NDArray[np.int32], settles: bool = True) -> None:
        """Samples of these entries were cleared, one number per sample.

        ``settles``: an entry without samples is acknowledged.
        """
        if not self._by_number:
            return
        given, counts = np.unique(numbers[numbers > 0], return_counts=True)
        for number, count in zip(given.tolist(), counts.tolist(), strict=True):
            entry = self._by_number.get(number)
            if entry is None:
                continue
            entry.owned -= count
            if entry.owned <= 0 and settles:
                self.close(entry)

    def close(self, entry: Entry) -> None:
        """Delete the entry, which no client will request again."""
        self._copies.make()
        own, index = self._ranks[entry.key[0]], entry.key[1]
        del own.open[index], self._by_number[entry.number]
        own.missed.discard(index)
        own.pass_settled()
        self.samples_changed()  # a fetch that waits for its fields is refused now

    def reset(self, dp_size: int | None) -> list[int]:
        """After a reset of consumption, acknowledged batches may be drawn again. Returns the numbers of the remaining
        entries.

        A round that some ranks have acknowledged is deleted, because it can only be drawn again for all ranks. So is
        one of another number of ranks than ``dp_size`` (None: not known).
        """
        rounds = {entry.key[1] for entry in self._by_number.values() if entry.dp_size is not None}
        ranks = self._ranks.values()
        torn = {index for index in rounds if any(index in own.drawn and index not in own.open for own in ranks)}
        for entry in self.open_entries():
            is_of_others = dp_size is not None and (entry.dp_size or 1) != dp_size
            if is_of_others or (entry.dp_size is not None and entry.key[1] in torn):
                self.close(entry)
        for own in ranks:
            own.drawn, own.next, own.missed = Runs(), 0, set()
        self.end = 0
        self.num_changes += 1
        self.num_resets += 1  # acks from before the reset must not match
        for entry in self._by_number.values():
            self._mark_drawn(entry.key)
            entry.token = self._token(entry.number)
        return list(self._by_number)

    # ---- checkpoints ----

    def save(self) -> SavedLedger:
        """Save everything except the entries."""
        ranks = [
            SavedRank(rank, own.drawn.edges[::2], own.drawn.edges[1::2], own.next or None, sorted(own.missed))
            for rank, own in self._ranks.items()
            if own.drawn.edges
        ]
        return SavedLedger([], ranks, self._count, self.num_resets)

    def open_entries(self) -> list[Entry]:
        """All batches that are not settled."""
        return list(self._by_number.values())

    def load(self, saved: SavedLedger, shift: int) -> None:
        """Load what was saved, or the next slice of it. The samples' indexes are greater by ``shift``."""
        self._count, self.num_resets = saved.count, saved.resets
        for rank in saved.ranks:
            self._ranks[rank.rank] = own = _Rank(_runs_of(rank), next=rank.next_index or 0, missed=set(rank.missed))
            self.end = max(self.end, own.drawn.end())
        for batch in saved.entries:
            indexes = unpack_indexes(batch.indexes) + shift
            consumes = indexes if batch.consumes is None else unpack_indexes(batch.consumes) + shift
            padding = None if batch.padding is None else np.frombuffer(batch.padding, dtype=np.uint8)
            key = (batch.rank, batch.batch_index)
            if self.get(key) is not None or batch.number in self._by_number or not self.holds(key):
                raise ValueError(f"batch {key} is there twice, or was never drawn")
            entry = Entry(
                key, batch.number, indexes, consumes, batch.token, padding, batch.dp_size, batch.owned,
                batch.batch_size, batch.cut,
            )  # fmt: skip
            self._add(entry)

    def finish_loading(self, counts: Mapping[int, int]) -> bool:
        """All slices are in. Returns whether they agree.

        Each batch must own as many samples as were given under its number, and what was missed must be open.
        """
        ranks = self._ranks.values()
        for own in ranks:
            own.pass_settled()
        return all(own.missed <= own.open.keys() and max(own.missed, default=-1) < own.next for own in ranks) and all(
            entry.owned == counts.get(number, 0) for number, entry in self._by_number.items()
        )

    def check_invariants(self, given: npt.NDArray[np.int32]) -> None:
        """``given``: the entry number of each live sample. Raises AssertionError; for tests."""
        filed = {(rank, index): entry for rank, own in self._ranks.items() for index, entry in own.open.items()}
        assert {id(entry) for entry in filed.values()} == set(map(id, self._by_number.values())), "known both ways"
        numbers, counts = np.unique(given[given > 0], return_counts=True)
        owned = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        assert self.end == max((own.drawn.end() for own in self._ranks.values()), default=0), "the last batch is known"
        for own in self._ranks.values():
            assert own.missed <= own.open.keys(), "what was missed is open"
            assert own.missed <= set(range(own.next)), "what was missed was given"
            assert own.next in own.open or own.next not in own.drawn, "the next batch is not settled"
        for key, entry in filed.items():
            assert entry.key == key, f"{key} is filed under its key"
            assert self.holds(key), f"{key} is known as drawn"
            assert entry.owned == owned.get(entry.number, 0), f"{key} owns its live samples"


def save_entry(entry: Entry, token: str, owned: int) -> SavedBatch:
    """A batch as it was when it had this token."""
    return SavedBatch(
        entry.key[0], entry.key[1], entry.number, pack_indexes(entry.indexes), token, owned,
        None if entry.consumes is entry.indexes else pack_indexes(entry.consumes),
        None if entry.padding is None else entry.padding.tobytes(), entry.dp_size, entry.batch_size,
        list(entry.cut),
    )  # fmt: skip


class Runs:
    """A set of numbers from 0 on. Its size depends on the number of gaps, not of members."""

    def __init__(self, edges: Iterable[int] = ()) -> None:
        """``edges``: ascending, by turns where a run of members starts and where it stops."""
        self.edges = list(edges)

    def __contains__(self, number: int) -> bool:
        return bisect_right(self.edges, number) % 2 == 1

    def below(self, number: int) -> int:
        """One more than the largest member below ``number``; 0 if there is none."""
        at = bisect_left(self.edges, number)
        if at % 2:
            return number
        return self.edges[at - 1] if at else 0

    def end(self) -> int:
        """One more than the largest member; 0 if there is none."""
        return self.edges[-1] if self.edges else 0

    def add(self, number: int) -> None:
        """Where a run starts or stops beside the number, that edge is gone; elsewhere there is a new one."""
        if number in self:
            return
        for edge in (number, number + 1):
            at = bisect_left(self.edges, edge)
            if self.edges[at : at + 1] == [edge]:
                del self.edges[at]
            else:
                self.edges.insert(at, edge)


def _runs_of(saved: SavedRank) -> Runs:
    """Raises ValueError unless the runs are disjoint, ascending and not touching."""
    edges = [edge for run in zip(saved.starts, saved.stops, strict=True) for edge in run]
    if edges and (edges[0] < 0 or any(left >= right for left, right in pairwise(edges))):
        raise ValueError(f"runs of numbers must ascend, got {edges[:10]}")
    return Runs(edges)
