# SPDX-License-Identifier: Apache-2.0
"""Progress of a stream: delivered, trained, stepped and saved go in; where it resumes and what may be acked come out.

It is pure: it knows no Trainer, client or clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from lightning_tq.checks import list_names
from transfer_queue.errors import InvalidRequestError

if TYPE_CHECKING:
    from transfer_queue import BatchMeta

Ack = Literal["auto", "checkpoint", "step", "never"]
NewestBatches = dict[str, "BatchMeta"]
"""{partition: metadata of its newest batch}. An ack of a batch also covers those before it."""

_NEEDED = {"partition_id", "batch_index", "micro_batch"}
_SIZES = ("batch_size", "micro_batch_size", "dp_size", "groups")
_ALL_BATCHES = 2**53
_REMEDY = "Resume from the last checkpoint, or start a new queue from what TQCheckpoint saved next to this one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The next micro-batch of a stream. Optional fields are None in checkpoints that don't hold them."""

    partition_id: str
    batch_index: int = 0
    """Index of the next batch in the partition."""
    micro_batch: int = 0
    """Index of the next micro-batch in that batch."""
    epoch: int | None = None
    """Epoch in which the iterator started."""
    batch_size: int | None = None
    """Rows per batch; the four sizes decide how batches are numbered."""
    micro_batch_size: int | None = None
    """Rows per micro-batch."""
    dp_size: int | None = None
    """Data-parallel ranks."""
    groups: int | None = None
    """Groups per batch, where a GroupSampler draws them."""

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], label: str) -> Position:
        """Read a checkpoint's dict. Raises InvalidRequestError for a dict that is no position of a stream."""
        if not set(state) >= _NEEDED:
            raise InvalidRequestError(
                f"can't resume stream {label!r} from {dict(state)!r}: this is not a position in a stream. "
                f"It needs {', '.join(sorted(_NEEDED))}."
            )
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in state.items() if name in known})

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def check_sizes(self, now: Position, label: str, of_an_epoch: bool = False) -> None:
        """Raise InvalidRequestError where batches are numbered differently now than when this was saved.

        Args:
            of_an_epoch: Whether the next epoch reads another partition.
        """
        saved = {name: getattr(self, name) for name in _SIZES if getattr(self, name) is not None}
        changed = {name: value for name, value in saved.items() if getattr(now, name) != value}
        if (now.groups or 0) > (self.groups or 0):
            changed.pop("groups", None)  # fewer might have no slot besides those of a larger batch that was drawn
        if changed:
            was = ", ".join(f"{name}={value}" for name, value in changed.items())
            current = ", ".join(f"{name}={getattr(now, name)}" for name in changed)
            advice = (
                "Keep the sizes until the partition ends, or resume from the end of an epoch: in a new queue "
                "(TQCheckpoint), or before batches of the next partition were drawn."
                if of_an_epoch
                else "Keep the sizes, or begin a new run with its weights (load_from_checkpoint instead of ckpt_path)."
            )
            raise InvalidRequestError(
                f"the checkpoint is at batch {self.batch_index} of partition {self.partition_id!r} in stream "
                f"{label!r}, which was read with {was}. It is now read with {current}, which numbers batches "
                f"differently. {advice}"
            )

    def check_not_acked(self, acked: int) -> None:
        """Raise InvalidRequestError where the next batch was acknowledged. ``acked``: first batches that were."""
        if acked > self.batch_index:
            raise InvalidRequestError(
                f"the checkpoint is at batch {self.batch_index} of partition {self.partition_id!r}, but the batches "
                f"before {acked} were acknowledged since then and are gone. {_REMEDY}. "
                f"TQDataModule(ack='never') keeps every batch."
            )

    def check_partition_exists(self, existing: Mapping[str, int]) -> None:
        """Raise InvalidRequestError where the partition was cleared, or is another one of this name.

        Args:
            existing: Partitions in the queue before this run's producers started, with the number of batches that the
                stream's task had been given. Empty for a new queue.
        """
        started = self.batch_index + bool(self.micro_batch)
        if not existing or not started:
            return
        place = f"the checkpoint is at batch {self.batch_index} of partition {self.partition_id!r}"
        if self.partition_id not in existing:
            raise InvalidRequestError(
                f"{place}, which was cleared or never was in this queue. The queue holds {list_names(existing)}. "
                f"{_REMEDY}."
            )
        if existing[self.partition_id] < started:
            raise InvalidRequestError(
                f"{place}, but this queue has given the stream's task only {existing[self.partition_id]} batches of "
                f"it. If Stream(task=...) was renamed, use the old name. If the queue was filled anew, samples would "
                f"be trained twice: on a resume, put nothing before the fit, which restores the saved queue into an "
                f"empty one. Without a saved queue, put samples once the fit has started."
            )

    def check_next(self, following: Position, existing: Mapping[str, int], pattern: str) -> None:
        """Raise InvalidRequestError where the partition after this one was read since this was saved.

        Args:
            following: Its first batch that is not acknowledged.
            existing: See ``check_partition_exists``.
            pattern: Of the partitions that the stream reads.
        """
        replace(following, batch_index=0).check_not_acked(following.batch_index)
        later = [name for name, batches in existing.items() if batches and fnmatchcase(name, pattern)]
        if later and not existing.keys() & {self.partition_id, following.partition_id}:
            raise InvalidRequestError(
                f"the checkpoint is at batch {self.batch_index} of partition {self.partition_id!r}, and "
                f"{following.partition_id!r} comes next. Both are gone from the queue, and training has come to "
                f"{list_names(later)}. {_REMEDY}."
            )


@dataclass(frozen=True, slots=True)
class AckRule:
    """When a trained batch may be acknowledged: when no resumed run can need it."""

    ack: Ack
    """That of TQDataModule."""
    keeps_checkpoints: bool
    """Whether the run keeps checkpoints from its start. With ``ack="auto"``, a batch then waits for one."""
    in_background: bool = False
    """Whether a checkpoint may be incomplete until one of a later step is saved. Acks then wait for that."""


class Progress:
    """How far one stream is. A trained batch moves on: in an optimizer step, in a checkpoint, due for its ack.

    Lightning writes a checkpoint after its save hook. So what a checkpoint makes due is acknowledged at the next
    ``take_due``, and counts as written then.
    """

    def __init__(self, label: str, rule: AckRule | None = None, position: Position | None = None) -> None:
        """
        Args:
            rule: None: a stream that reports nothing as trained.
            position: Where an earlier run of this process has trained to.
        """
        self.label = label
        self.position = position
        """After the last micro-batch that is in an optimizer step."""
        self.partition: str | None = None
        """Partition of the newest iterator."""
        self.left_partitions: list[str] = []
        """Partitions that the stream has moved on from, until the run collects them."""
        self.epoch = 0
        """Epoch in which the newest iterator started. The Trainer's own number may still be the previous one."""
        self.taken = 0
        """Micro-batches of the current epoch that were delivered, including those before a resume with Fabric."""
        self.trained = 0
        """How many of those were trained (training stage only)."""
        self.unstepped = 0
        """Micro-batches that were trained since the last optimizer step."""
        self.batches_done = 0
        """Batches of the partition that were trained completely and are not acknowledged yet."""
        self.resumed = False
        """Whether the current iterator started at a checkpoint's position, so that its epoch is shorter."""
        self._carried: Position | None = None  # the last epoch trained to here, without a step
        self.draws_of_step = 0
        """Batches that ended in the last optimizer step."""
        self.kept = 0
        """Batches of all partitions that were trained completely and are not acknowledged yet."""
        self.saved = 0
        """Checkpoints that were saved; the last one may be incomplete. In the background, those of a step are one."""
        self.written = 0
        """Checkpoints that a resume can surely use."""
        self._holds_all = False
        """Whether a checkpoint holds every optimizer step so far."""
        self._rule = rule
        self._waits = rule is not None and rule.ack != "step" and rule.keeps_checkpoints
        self._restored = False
        self._taken_before = 0
        self._draws = 0  # that ended since the last optimizer step
        self._delivered: deque[tuple[Position, list[BatchMeta]]] = deque()
        self._trained_to: Position | None = None
        self._trained: NewestBatches = {}
        self._stepped: dict[int, NewestBatches] = {}
        """By the number of checkpoints that were saved before the step; -1 where it waits for none."""

    # ---- iterators ----

    def resumes_in(self, epoch: int) -> str | None:
        """The partition in which this epoch continues after a resume; None: it starts in the one of the template."""
        position = self.position
        if position is None or not self._restored or position.epoch != epoch:
            return None
        return position.partition_id  # the template may name another one after more steps

    def check_next(self, first: Position, existing: Mapping[str, int], pattern: str) -> None:
        """Before ``begin``, for a stream that never returns to a partition. See ``Position.check_next``."""
        position = self.position
        if self._restored and position is not None and position.partition_id != first.partition_id:
            position.check_next(first, existing, pattern)

    def begin(self, first: Position, replays: bool, existing: Mapping[str, int], of_an_epoch: bool = False) -> Position:
        """An iterator starts. Returns where: at ``first``, or after the last step.

        Args:
            first: The partition's first batch that is not acknowledged; with ``replays`` its first batch.
            existing: See ``Position.check_partition_exists``.
            of_an_epoch: Whether the next epoch reads another partition.
        Raises:
            InvalidRequestError: the stream can't continue where the checkpoint was.
        """
        assert first.epoch is not None, "an iterator knows its epoch"
        is_first, before = self.partition is None, self.partition
        if is_first and self._restored and self.position is not None:  # another fit of this process begins anew
            before = self.position.partition_id
        if before not in (None, first.partition_id):
            self.left_partitions.append(str(before))
        self.taken = 0 if self.resumes_in(first.epoch) is None else self._taken_before
        self.partition, self.epoch, self.resumed = first.partition_id, first.epoch, self._restored
        self.trained = self.unstepped = self.batches_done = self._draws = 0
        self._delivered.clear()
        carried, self._carried, self._trained_to = self._carried, None, None
        position = carried or self.position
        if replays or position is None or position.partition_id != first.partition_id:
            return first
        self._trained_to = carried
        if self._restored:
            position.check_sizes(first, self.label, of_an_epoch)
            position.check_partition_exists(existing)
        position.check_not_acked(first.batch_index)
        self.batches_done = position.batch_index - first.batch_index
        if is_first:
            self.kept = self.batches_done
        return position

    def restore(self, position: Position, taken: int = 0) -> None:
        """The next iterator starts at this position, if it reads that partition. What was trained after it is undone.

        Args:
            taken: Micro-batches of that epoch so far. Only Fabric needs it; a Trainer counts them itself.
        """
        self.position, self._trained_to, self._carried = position, None, None
        self._trained.clear()
        self._stepped.clear()  # the next iterator acknowledges those before the position
        self.taken = self._taken_before = taken
        self._restored = True

    # ---- batches ----

    def deliver(self, position: Position, completed: list[BatchMeta]) -> None:
        """A micro-batch was delivered.

        Args:
            position: Where the stream continues after it.
            completed: Last micro-batches of the batches that end here.
        """
        self.taken += 1
        if self._rule is not None:
            self._delivered.append((position, completed))

    def train(self, position: Position | None) -> None:
        """The micro-batch before this position was trained; None: the oldest one, because a hook replaced the batch."""
        self.trained += 1
        self._restored = False
        while self._delivered:
            delivered, completed = self._delivered.popleft()
            if position is None or delivered is position:
                self._trained_to = delivered
                self.unstepped += 1
                self.batches_done += len(completed)
                self.kept += len(completed)
                self._draws += len(completed)
                self._trained.update({meta.partition_ids[0]: meta for meta in completed})
                return

    def step(self) -> None:
        """An optimizer step included what was trained so far, or never will, because its epoch has ended."""
        if self._trained_to is not None:
            self.position, self._trained_to = self._trained_to, None
        self.unstepped = 0
        self.draws_of_step, self._draws = self._draws, 0
        self._holds_all = False
        trained, self._trained = self._trained, {}
        self._stepped.setdefault(self.saved if self._waits else -1, {}).update(trained)

    def carry(self) -> None:
        """The epoch has ended, and a step of the next one includes what was trained since the last step."""
        self._carried, self.unstepped = self._trained_to, 0

    def wait_for_checkpoints(self) -> None:
        """From now on a batch waits for a checkpoint, except with ``ack="step"``."""
        self._waits = self._rule is not None and self._rule.ack != "step"

    def save(self) -> None:
        """A checkpoint with every optimizer step so far is being written."""
        self.wait_for_checkpoints()  # also after a checkpoint that the user saves by hand
        if not (self._holds_all and self._rule is not None and self._rule.in_background):
            self.saved += 1  # once for all files of one step: a resume may need the one that is written last
        self._holds_all = True

    @property
    def waits_for_checkpoints(self) -> bool:
        """Whether a batch is acknowledged only once a checkpoint holds its step."""
        return self._waits and self._rule is not None and self._rule.ack != "never"

    @property
    def unsaved(self) -> bool:
        """Whether batches are in optimizer steps that no checkpoint holds."""
        return bool(self._stepped.get(self.saved))

    @property
    def unwritten(self) -> bool:
        """Whether batches are in a checkpoint that is written in the background and may still be incomplete."""
        incomplete = range(self.written, self.saved) if self._rule is not None and self._rule.in_background else ()
        return any(self._stepped.get(before) for before in incomplete)

    def note_written(self) -> None:
        """The last checkpoint that was saved is complete."""
        self.written = self.saved

    def take_due(self) -> NewestBatches:
        """Batches to acknowledge now; each is returned once."""
        assert self._rule is not None, "only a stream that trains acknowledges"
        self.written = max(self.written, self.saved - self._rule.in_background)
        due: NewestBatches = {}
        for before in [before for before in self._stepped if before < self.written]:
            due |= self._stepped.pop(before)
        return {} if self._rule.ack == "never" else due

    def unacknowledged(self) -> list[str]:
        """Partitions that the stream has moved on from, of which steps have batches that wait for an ack."""
        waits = [] if self._rule is None or self._rule.ack == "never" else self._stepped.values()
        stepped = dict.fromkeys(name for newest in waits for name in newest)
        return [name for name in stepped if name != self.partition]

    def held_by_checkpoint(self, left: Iterable[str]) -> dict[str, int]:
        """By partition, the batch below which all are in the checkpoint of a resume: they may be acknowledged.

        Args:
            left: Partitions that the stream moved on from before that, and never returns to.
        """
        position, rule = self.position, self._rule
        if not self.resumed or position is None or rule is None or rule.ack == "never":
            return {}
        return {**dict.fromkeys(left, _ALL_BATCHES), position.partition_id: position.batch_index}

    def note_acked(self, partition: str, count: int) -> None:
        """So many batches were acknowledged."""
        self.kept = max(0, self.kept - count)
        if partition == self.partition:
            self.batches_done = max(0, self.batches_done - count)


class LeftPartitions:
    """Partitions that streams have moved on from, until none reads them and no resumed run will.

    That is so once a checkpoint is written that was saved after they were left.
    """

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def take_over(self, names: Iterable[str]) -> None:
        """They were left before the checkpoint from which this run resumed."""
        self._left.update(dict.fromkeys(names, -1))

    def names(self, streams: Iterable[Progress]) -> list[str]:
        """All of them, with those that ``take_finished`` would take over."""
        return list(dict.fromkeys([*self._left, *(name for each in streams for name in each.left_partitions)]))

    def take_finished(self, streams: Collection[Progress], keeps_checkpoints: bool) -> list[str]:
        """Each is returned once. ``keeps_checkpoints``: whether a run can resume before the first one is saved."""
        saved = sum(each.saved for each in streams)
        for each in streams:
            self._left.update(dict.fromkeys(each.left_partitions, saved))
            each.left_partitions.clear()
        needs_one = keeps_checkpoints or saved > 0  # or one was saved by hand
        written = sum(each.written for each in streams) if needs_one else math.inf
        being_read = {each.partition for each in streams}
        finished = [name for name, before in self._left.items() if name not in being_read and written > before]
        for name in finished:
            del self._left[name]
        return finished
