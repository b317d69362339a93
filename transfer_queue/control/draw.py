# SPDX-License-Identifier: Apache-2.0
"""Tasks, and how they draw a round: the task's sampler picks one batch for every data-parallel rank, or for none."""

from __future__ import annotations

import inspect
import reprlib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from transfer_queue.control.consumer import Consumer, FieldNames
from transfer_queue.control.partition import Partition
from transfer_queue.control.ready import ReadySet, ReadyView
from transfer_queue.control.ready_groups import ReadyGroups
from transfer_queue.control.rows import Rows, RowState, all_of
from transfer_queue.control.whole_groups import WholeGroups, groups_in
from transfer_queue.errors import InvalidRequestError, SamplerError, TransferQueueError
from transfer_queue.protocol import Fetch, Indexes, RegisterTask, Tags
from transfer_queue.sampler.base import BaseSampler, Round, RoundSampler
from transfer_queue.sampler.group_sampler import GroupSampler
from transfer_queue.sampler.registry import resolve

TAIL_POLICIES = ("drop", "pad", "uneven_ok")
_OWN_FILES = __file__.removesuffix("control/draw.py")


# ---- tasks ----


@dataclass(frozen=True, slots=True)
class Task:
    """Settings of one task; None: not set."""

    name: str
    sampler: BaseSampler
    dp_size: int | None = None
    tail: str | None = None
    spec: Any = None
    follows: str | None = None

    def size_for(self, fetch: Fetch) -> int | None:
        """Number of data-parallel ranks of a round; None: every rank draws for itself, first come first served."""
        with foreign(self.sampler, self.name):
            return self.size_of_round(fetch)

    def size_of_round(self, fetch: Fetch) -> int | None:
        """``size_for`` inside of a guard."""
        own = self.sampler.dp_size
        sizes: set[Any] = {self.dp_size, fetch.dp_size, own}
        sizes.discard(None)
        if len(sizes) > 1:
            raise InvalidRequestError(
                f"task {self.name!r} is used with different numbers of data-parallel ranks: {sorted(sizes)} "
                f"(registered {self.dp_size}, fetch {fetch.dp_size}, sampler {own}). "
                f"Use one dp_size everywhere."
            )
        size = sizes.pop() if sizes else None
        is_nobodys = fetch.dp_rank is None and fetch.batch_index is None and not isinstance(self.sampler, GroupSampler)
        return None if size == 1 and is_nobodys else size  # no rank's next batch, just the next samples

    def needed(self, fetch: Fetch) -> int:
        """The number of ready samples for a round of this fetch, for all ranks together."""
        with foreign(self.sampler, self.name):
            return self.sampler.samples_needed(fetch.batch_size, self.size_of_round(fetch) or 1)

    def needed_yet(self, fetch: Fetch) -> int:
        """``needed`` where there is no partition; 0: only its groups would say."""
        return 0 if isinstance(self.sampler, GroupSampler) else self.needed(fetch)

    def tail_policy(self, dp_size: int | None) -> str:
        """The registered policy. By default one consumer loses nothing, and no rank is left alone in a collective."""
        return self.tail or ("uneven_ok" if (dp_size or 1) == 1 else "drop")


class Tasks:
    """Registered tasks. An unregistered task uses the queue's default sampler."""

    def __init__(self, default: BaseSampler, allowed_modules: Sequence[str]) -> None:
        self.default = default
        self._allowed_modules = allowed_modules
        self.by_name: dict[str, Task] = {}
        """The registered ones."""

    def get(self, name: str) -> Task:
        """Unregistered tasks are not stored, so names cost nothing."""
        return self.by_name.get(name) or Task(name, self.default)

    def register(self, request: RegisterTask) -> None:
        """Raises before anything changes. An equal sampler spec keeps the sampler and its state."""
        if request.dp_size is not None and request.dp_size < 1:
            raise InvalidRequestError(f"dp_size must be at least 1, got {request.dp_size}.")
        if request.tail is not None and request.tail not in TAIL_POLICIES:
            raise InvalidRequestError(f"tail must be one of {', '.join(TAIL_POLICIES)}, got {request.tail!r}.")
        if request.follows is not None and request.task in (request.follows, self.get(request.follows).follows):
            raise InvalidRequestError(f"task {request.task!r} can't follow {request.follows!r}: that is a circle.")
        task = self.get(request.task)
        if request.sampler is not None and request.sampler != task.spec:
            with foreign(f"the sampler of task {request.task!r}"):
                task = replace(task, sampler=resolve(request.sampler, self._allowed_modules), spec=request.sampler)
        tail, dp_size = request.tail or task.tail, request.dp_size or task.dp_size
        if isinstance(task.sampler, GroupSampler):
            task.sampler.check_tail(tail)
            task.sampler.check(0, dp_size)
        self.by_name[request.task] = replace(task, dp_size=dp_size, tail=tail, follows=request.follows or task.follows)

    def is_follower(self, name: str) -> bool:
        """Whether it draws nothing, and is given what another task is given."""
        return self.get(name).follows is not None

    def followers(self, name: str) -> list[str]:
        """The tasks that follow this one."""
        return [task.name for task in self.by_name.values() if task.follows == name]

    def samplers(self) -> list[BaseSampler]:
        """Every sampler once."""
        unique = {id(task.sampler): task.sampler for task in self.by_name.values()}
        unique[id(self.default)] = self.default
        return list(unique.values())


# ---- one round ----


@dataclass(slots=True)
class Share:
    """One rank's batch, as indexes and rows, and the samples of the partition that it consumes."""

    indexes: Indexes
    rows: Rows
    consumed: Rows
    padding: npt.NDArray[np.uint8] | None = None


class PartitionView:
    """What a sampler may read of a partition besides the ready samples: its ``partition`` argument."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    @property
    def partition_id(self) -> str:
        return self._partition.name

    @property
    def sealed(self) -> bool:
        return self._partition.is_final

    def group_queue(self, ready_indexes: ReadyView) -> ReadyGroups | None:
        """The groups that the task may draw; None where the partition has none."""
        follower = ready_indexes.ready.follower
        return follower if isinstance(follower, ReadyGroups) else None

    @property
    def custom_meta(self) -> Mapping[int, Tags]:
        return self._partition.tags

    @property
    def keys_mapping(self) -> dict[str, int]:
        return dict(self._partition.keys.items())

    def get_custom_meta(self, indexes: Iterable[int]) -> dict[int, Tags]:
        """Tags of samples; ``{}`` for a sample without tags."""
        wanted = np.fromiter(indexes, dtype=np.int64)
        rows, found = self._partition.table.find(wanted)
        known = self._partition.tags.of(wanted[found], rows[found])
        return {index: known.get(index, {}) for index in wanted.tolist()}

    def put_positions(self, indexes: Iterable[int]) -> list[tuple[int, int]]:
        """(offset within its put, samples of that put) for each sample, which keeps groups complete.

        Raises:
            KeyError: the partition has no such sample.
        """
        rows = self._rows(indexes)
        offsets, sizes = (self._partition.table.column(name)[rows].tolist() for name in ("put_offset", "put_size"))
        return list(zip(offsets, sizes, strict=True))

    def whole_groups(self, ready_indexes: Sequence[int], size: int, count: int | None = None) -> list[list[int]]:
        """The first ``count`` whole groups of ``size`` samples, oldest first; none if there are fewer. None: all.

        A group is ``size`` samples of one put, from a multiple of ``size`` on. A missing sample then never shifts later
        groups. A chain of smaller whole puts with consecutive indexes that adds up to ``size`` is a group, too.

        Raises:
            KeyError: the partition has no such sample.
        """
        table = self._partition.table
        if isinstance(ready_indexes, ReadyView):
            return groups_in(ready_indexes.ready, table, size).first(count)
        ready = ReadySet()
        ready.add(self._rows(ready_indexes))
        return WholeGroups(ready, table, size).first(count)

    def _rows(self, indexes: Iterable[int]) -> Rows:
        rows, found = self._partition.table.find(np.asarray(list(indexes), dtype=np.int64))
        if not all_of(found):
            raise KeyError(f"partition {self.partition_id!r} doesn't hold all of these samples")
        return rows


@dataclass(slots=True)
class Draw:
    """One attempt to draw batch ``batch_index`` for ``ranks`` from what is ready for ``fields``."""

    partition: Partition
    consumer: Consumer
    sampler: BaseSampler
    fields: FieldNames
    ready: ReadySet
    batch_size: int
    batch_index: int | None
    ranks: tuple[int | None, ...]
    dp_size: int | None
    sampler_args: Mapping[str, Any]

    def shares(self) -> list[Share] | None:
        """A share per rank; None if there are not enough samples for all ranks yet. It marks nothing."""
        with foreign(self.sampler, self.consumer.task):  # it may call functions of its user
            has_enough = self.ready.count >= self.sampler.samples_needed(self.batch_size, self.dp_size or 1)
            if self.sampler_args or not _draws_rounds(type(self.sampler)) or self._remembers():
                return self._by_rank() if has_enough or self._is_cached() else None
            sampler: Any = self.sampler
            return (self._round_by(sampler.round) or None) if has_enough else None

    def cut(self, shares: list[Share]) -> list[list[int]]:
        """By rank, the rows of its micro-batches, if the sampler says so."""
        if not isinstance(self.sampler, GroupSampler) or self.sampler.micro_batch_tokens is None:
            return []
        with foreign(self.sampler, self.consumer.task):
            return self.sampler.cut([share.indexes.tolist() for share in shares], PartitionView(self.partition))

    def _remembers(self) -> bool:
        """Whether the sampler has some memory of this task."""
        return bool(self.sampler._states.get(self.partition.name, {}).get(self.consumer.task))

    def _round_by(self, draw: Callable[[Round], list[list[int]]]) -> list[Share]:
        """The round in one step: a call per rank takes 40 us, which is too long for a thousand ranks in one turn."""
        column = self.partition.table.column("index")
        view, seen = ReadyView(self.ready, column), PartitionView(self.partition)
        batches = draw(Round(view, self.batch_size, self.ranks, self.batch_index, seen))
        if not batches:
            return []
        indexes = np.fromiter(chain.from_iterable(batches), dtype=np.int64)
        rows = column.searchsorted(indexes)
        # Copies, because a rank's batch may be kept long after those of the others.
        cuts = pairwise(accumulate(map(len, batches), initial=0))
        return [Share(indexes[start:end].copy(), own := rows[start:end], own) for start, end in cuts]

    def _by_rank(self) -> list[Share] | None:
        """Ask the sampler for one rank after the other."""
        taken: list[Share] = []
        try:
            for rank in self.ranks:
                share = self._share(rank)
                if share is None:
                    return None
                taken.append(share)
                if len(taken) < len(self.ranks):
                    self.ready.hide(share.consumed)  # the next rank must draw from the others
        finally:
            if len(self.ranks) > 1:
                self.ready.unhide()
            # The ledger will know this round, or it is no round.
            self.sampler.forget(self.partition.name, self.consumer.task, self.batch_index)
        return taken

    def _is_cached(self) -> bool:
        asked = getattr(self.sampler.has_cached_result, "__func__", None)
        if asked is BaseSampler.has_cached_result and not self._remembers():
            return False  # a thousand ranks needn't be asked about
        return any(
            self.sampler.has_cached_result(self.partition.name, self.consumer.task, self._arguments(rank))
            for rank in self.ranks
        )

    def _arguments(self, rank: int | None) -> dict[str, Any]:
        arguments = dict(self.sampler_args)
        arguments.update(task_name=self.consumer.task, partition_id=self.partition.name, dp_size=self.dp_size)
        if rank is not None or self.batch_index is not None:
            arguments.update(dp_rank=rank, batch_index=self.batch_index)
        return arguments

    def _share(self, rank: int | None) -> Share | None:
        offered: Any = ReadyView(self.ready, self.partition.table.column("index"))
        arguments = {**self._arguments(rank), "partition": PartitionView(self.partition)}
        own = _draws_rounds(type(self.sampler))
        if not own:  # users' samplers were promised a list, which they may change
            self.ready.listed = self.ready.listed or list(offered)
            offered = self.ready.listed.copy()
        answer = self.sampler(offered, self.batch_size, **_accepted(self.sampler, arguments))
        try:
            picked, consumed = answer
        except (TypeError, ValueError):
            raise self._unexpected(answer) from None
        same = type(picked) is list and type(consumed) is list and picked == consumed
        indexes = self._as_indexes(picked)
        if not len(indexes):
            return None
        rows = self._complete_rows(indexes)
        return Share(indexes, rows, rows if own and same else self._live_rows(self._as_indexes(consumed)))

    def _as_indexes(self, given: Any) -> Indexes:
        array: npt.NDArray[Any] = np.asarray(given)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise self._unexpected(given)
        return array.astype(np.int64, copy=array is given)

    def _unexpected(self, given: object) -> SamplerError:
        return SamplerError(
            f"{type(self.sampler).__name__} returned {reprlib.repr(given)}; expected (sampled, consumed), two lists of "
            f"indexes."
        )

    def _complete_rows(self, indexes: Indexes) -> Rows:
        table = self.partition.table
        rows, found = table.find(indexes)
        if all_of(found):
            found = (table.column("state")[rows] == RowState.LIVE) & self.partition.schema.complete(rows, self.fields)
        if not all_of(found):
            raise SamplerError(
                f"{type(self.sampler).__name__} picked samples {indexes[~found][:5].tolist()}, which partition "
                f"{self.partition.name!r} doesn't have with all of these fields: {', '.join(self.fields)}. "
                f"A sampler must pick from the ready indexes it is given."
            )
        return rows

    def _live_rows(self, indexes: Indexes) -> Rows:
        """Each live sample once. Other indexes can't be consumed here."""
        rows, found = self.partition.table.find(np.unique(indexes))
        rows = rows[found]
        live: Rows = rows[self.partition.table.column("state")[rows] == RowState.LIVE]
        return live

    def tail_shares(self, policy: str) -> list[Share]:
        """Distribute what is left by the tail policy; there may be fewer shares than ranks, or none."""
        if policy == "drop":
            return []
        with foreign(self.sampler, self.consumer.task):
            if isinstance(self.sampler, GroupSampler):
                return self._round_by(self.sampler.last_round)
            return self._tail(policy)

    def _tail(self, policy: str) -> list[Share]:
        view = ReadyView(self.ready, self.partition.table.column("index"))
        indexes = self._as_indexes(self.sampler.tail(view, self.batch_size, partition=PartitionView(self.partition)))
        if not len(indexes):
            return []
        if len(np.unique(indexes)) < len(indexes):
            raise SamplerError(f"{type(self.sampler).__name__}.tail returned a sample twice: {reprlib.repr(indexes)}.")
        self._complete_rows(indexes)
        if policy == "pad":
            return self._padded(indexes)
        parts = [indexes[i * self.batch_size : (i + 1) * self.batch_size] for i in range(len(self.ranks))]
        return [Share(part, own := self.partition.rows_of(part), own) for part in parts if len(part)]

    def _padded(self, left: Indexes) -> list[Share]:
        total = self.batch_size * len(self.ranks)
        left = left[:total]
        filled = np.resize(left, total)
        padding = (np.arange(total) >= len(left)).astype(np.uint8)
        shares = []
        for own, mask in zip(np.split(filled, len(self.ranks)), np.split(padding, len(self.ranks)), strict=True):
            rows = self.partition.rows_of(own)
            shares.append(Share(own, rows, rows[mask == 0], mask if mask.any() else None))
        return shares


# ---- calls of samplers ----

_running: list[foreign] = []
"""Calls that are guarded at this moment, for the plane of this process."""


def running() -> foreign | None:
    """The call of a sampler that is running. Any thread may call this."""
    last = _running[-1:]
    return last[0] if last else None


def _name(sampler: object) -> str:
    return sampler if isinstance(sampler, str) else type(sampler).__name__


class foreign:
    """Guards calls of samplers, which may be user code: an exception becomes the answer to the consumer."""

    # A class, because @contextmanager makes a generator each time, and fetches use this often.
    __slots__ = ("_what",)

    def __init__(self, sampler: BaseSampler | str, task: str | None = None) -> None:
        """``sampler``: the sampler, or the name of one that isn't built yet."""
        self._what = (sampler, task)

    def __str__(self) -> str:
        sampler, task = self._what
        return _name(sampler) if task is None else f"{_name(sampler)} of task {task!r}"

    def __enter__(self) -> None:
        _running.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _running.pop()
        if error is None or isinstance(error, TransferQueueError):
            return
        # Any exception, even SystemExit and CancelledError: a server has no other use for them, and ignores Ctrl-C.
        said = traceback.format_exception_only(error)[0].strip()  # works even if str(error) fails
        frames = traceback.extract_tb(error.__traceback__)
        at = next((each for each in frames if not each.filename.startswith(_OWN_FILES)), frames[-1])
        raise SamplerError(f"{_name(self._what[0])} failed: {said} ({at.filename}, line {at.lineno})") from error


@lru_cache(maxsize=256)
def _draws_rounds(sampler: type[BaseSampler]) -> bool:
    """Whether it is one of ours, or draws groups. Others were promised to be asked by ``sample``."""
    own = issubclass(sampler, RoundSampler) and sampler.__module__.startswith("transfer_queue.")
    return own or issubclass(sampler, GroupSampler)


def _accepted(sampler: BaseSampler, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that this sampler's ``sample`` takes; all of them if it has ``**kwargs``."""
    names = _parameters(type(sampler))
    return arguments if names is None else {name: value for name, value in arguments.items() if name in names}


@lru_cache(maxsize=256)
def _parameters(sampler: type[BaseSampler]) -> frozenset[str] | None:
    parameters = inspect.signature(sampler.sample).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)
