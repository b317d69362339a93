# SPDX-License-Identifier: Apache-2.0
"""WaitHints: why a stream that waits long may wait forever, and what to do. Also why a stream had no batch at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn

from lightning_tq.checks import byte_text, counted, lacking_text, list_names
from lightning_tq.loader import StreamReader
from lightning_tq.trainer_compat import callbacks_of, fetches_ahead
from transfer_queue import TransferQueueClient
from transfer_queue.errors import TransferQueueError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_LOOK_EVERY_S = 10.0
_REPEAT_EVERY = 3
"""Looks. While no producer runs in this entry point, a missing partition is reported as often as any other wait."""
_TOO_LATE = ("on_train_start", "on_train_epoch_start")
"""Hooks of a fit that come after the request for the first batch, where the length is unknown."""
_MOST_LISTED = 4

Found = tuple[str, str] | None
"""A hint: its key, for each of which one text is logged, and the text."""


class WaitHints:
    """Looks at each wait every 10 s. It asks the queue then, in the watchdog's thread."""

    def __init__(
        self,
        trainer: Trainer,
        client: TransferQueueClient,
        num_running: Callable[[], int | None],
        clears_finished: bool,
        warn_once: Callable[[str, str], None],
    ) -> None:
        """Args:
        num_running: Number of this run's producer processes that have not ended; None: none was started here.
        clears_finished: Whether the run clears finished partitions.
        warn_once: Takes a key and a text, and logs one text per key.
        """
        self.note = ""
        """A sentence for waits for a partition that is not in the queue: why no producer of this run fills it."""
        self._trainer = trainer
        self._client = client
        self._num_running = num_running
        self._clears_finished = clears_finished
        self._warn_once = warn_once
        self._looks: dict[str, int] = {}  # during the current wait, by label of the reader

    def look(self, readers: Iterable[StreamReader]) -> None:
        """Warn of readers that wait for too long."""
        for reader in readers:
            due = int(reader.waiting_s() / _LOOK_EVERY_S)
            if due > self._looks.get(reader.label, 0) and reader.progress.partition is not None:
                self._explain(reader, reader.progress.partition, due)
            self._looks[reader.label] = due

    def _explain(self, reader: StreamReader, partition: str, due: int) -> None:
        num_running = self._num_running()  # before the statistics, which then have all that ended producers have put
        try:
            stats, units = self._client.get_stats(), []
            with suppress(TransferQueueError):  # a unit may be gone
                units = self._client.get_storage_stats()
        except TransferQueueError:  # the stream itself reports that
            return
        wait = Wait(
            self._trainer, reader, partition, stats, units, num_running, self._clears_finished, self.note
        )  # fmt: skip
        repeats = wait.is_missing and self._trainer.state.fn != TrainerFn.FITTING and due >= _REPEAT_EVERY
        for key, text in islice(filter(None, (hint(wait) for hint in _HINTS)), 1):
            self._warn_once(f"{key} {due // _REPEAT_EVERY}" if repeats else key, text)


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream that waits, and what the queue and the run were like when it was looked at."""

    trainer: Trainer
    reader: StreamReader
    partition: str
    stats: dict[str, Any]
    units: list[dict[str, Any]]
    """Statistics of the storage units."""
    num_running: int | None
    """Of this run's producers; None: none was started here."""
    clears_finished: bool
    """Whether the run clears finished partitions."""
    note: str
    """Why no producer of this run fills the partition; "" if that isn't known."""

    @property
    def is_missing(self) -> bool:
        """Whether the partition is not in the queue."""
        return self.partition not in self.stats["partitions"]

    @property
    def is_sealed(self) -> bool:
        return bool(self.stats["partitions"].get(self.partition, {}).get("sealed"))

    def unknown_fields(self) -> list[str]:
        """Fields of the stream that no sample has, where there are samples."""
        known = self.stats["partitions"].get(self.partition, {}).get("fields", [])
        return [name for name in self.reader.stream.fields if known and name not in known]

    def lacks(self) -> str:
        """What the samples for this fetch lack; "" for nothing."""
        for each in self.stats["waiting"]:
            if (each.get("task"), each["partition"]) == (self.reader.stream.task, self.partition):
                return lacking_text(each)
        return ""

    def seen(self) -> str:
        """A sentence on what the stream waits for, and what is there."""
        stream = f"stream {self.reader.label!r}"
        if self.is_missing:
            return f"{stream} waits for partition {self.partition!r}, which is not in the queue; {self._holds()}."
        partition = self.stats["partitions"][self.partition]
        if not partition["put_total"]:
            return f"{stream} waits for partition {self.partition!r}, which has no sample yet."
        waits = f"{stream} waits for more of partition {self.partition!r}"
        if unknown := self.unknown_fields():
            known = ", ".join(map(repr, partition["fields"]))
            return f"{waits}, but none of its samples has {' or '.join(map(repr, unknown))} so far; they have {known}."
        lacks = self.lacks()
        return f"{waits}; so far {lacks}." if lacks else f"{waits}."

    def _holds(self) -> str:
        """What is in the queue instead."""
        partitions = self.stats["partitions"]
        listed = [
            f"{name!r} ({counted(partitions[name]['samples'], 'sample')}{', sealed' * partitions[name]['sealed']})"
            for name in sorted(partitions)[:_MOST_LISTED]
        ]
        more = f" and {len(partitions) - _MOST_LISTED} more" if len(partitions) > _MOST_LISTED else ""
        return f"it holds {', '.join(listed)}{more}" if listed else "the queue is empty"


# ---- hints: the first one that says something is logged ----


def _queue_is_full(wait: Wait) -> Found:
    puts = [each for each in wait.stats["waiting"] if each["writer"]]
    bytes_wanted = any(unit.get("parked") for unit in wait.units)
    if not puts and not bytes_wanted:
        return None
    if bytes_wanted:
        size, setting = byte_text(sum(unit.get("capacity_bytes") or 0 for unit in wait.units)), "memory"
    else:
        size, setting = counted(wait.stats["capacity"] or 0, "sample"), "total_storage_size"
    clients = {each["client"].rpartition("_")[0] or each["client"] for each in puts}  # without process and session
    writers = f"a put of {list_names(clients)} waits" if clients else "a put waits"
    remedies = [*_clearing(wait), f"raise QueueConfig({setting}=...)"]
    advice = ", or ".join(filter(None, [", ".join(remedies[:-1]), remedies[-1]]))
    return "full", (
        f"stream {wait.reader.label!r} waits for partition {wait.partition!r}, and the queue is full ({size}): "
        f"{writers} for room. {advice[0].upper()}{advice[1:]}."
    )


def _clearing(wait: Wait) -> Iterator[str]:
    """What would clear samples and is not in use."""
    if not wait.clears_finished:
        yield "add the callback PartitionSwitch(), which clears finished partitions"
    if not wait.reader.stream.clear_consumed:
        yield "set Stream(clear_consumed=True)"


def _sealed_partition_lacks_fields(wait: Wait) -> Found:
    lacks = wait.lacks()
    if not wait.is_sealed or not lacks:
        return None
    return f"lacks {wait.partition}", (
        f"stream {wait.reader.label!r} waits for more of partition {wait.partition!r}, but it is sealed and {lacks}. "
        f"Put what is missing, or clear those samples."
    )


def _producers_have_ended(wait: Wait) -> Found:
    if wait.num_running != 0 or wait.is_sealed:
        return None
    if not wait.is_missing:
        return f"done {wait.partition}", (
            f"{wait.seen()} All producers of this run have ended and none has sealed it. If nothing else fills it, "
            f"seal it when it is complete: client.seal_partition({wait.partition!r})."
        )
    epoch, stream = wait.trainer.current_epoch, wait.reader.stream
    if wait.reader.stage == "train" and epoch and "epoch" in stream.variables:
        advice = f"Make samples for epoch {epoch} as well, or lower max_epochs."
    else:
        advice = "Compare the names in Stream(partition=...) and the producers."
    return f"done {wait.partition}", f"{wait.seen()} All producers of this run have ended. {advice}"


def _sanity_check(wait: Wait) -> Found:
    if not wait.trainer.sanity_checking or (wait.num_running and not wait.stats["partitions"]):  # producers still start
        return None
    return "sanity check", _joined(
        wait.seen(),
        "" if wait.stats["partitions"] else wait.note,
        "This is the sanity check, which runs before training. If what it lacks is made later, this is a deadlock: set "
        "Trainer(num_sanity_val_steps=0).",
    )


def _fetched_one_ahead(wait: Wait) -> Found:
    progress = wait.reader.progress
    if not _fetches_ahead(wait) or progress.taken <= progress.trained:
        return None
    return "ahead", (
        f"stream {progress.label!r} waits for batch {progress.taken} while batch {progress.trained} is untrained, "
        f"because Lightning fetches one batch ahead when the length is unknown. If producers wait for that step (for "
        f"new weights), this is a deadlock: set Stream(num_batches=...) or Trainer(limit_train_batches=...). If no "
        f"more samples come, seal the partition: client.seal_partition({wait.partition!r})."
    )


def _fetched_before_hooks(wait: Wait) -> Found:
    hooks = _own_hooks(wait.trainer)
    if not _fetches_ahead(wait) or wait.reader.waited_s or not hooks:  # it has waited: it got a batch in this run
        return None
    return "first", (
        f"{wait.seen()} Lightning fetches the first batch before on_train_start and on_train_epoch_start when the "
        f"length is unknown. If {' or '.join(hooks)} makes what is missing, this is a deadlock: make it in "
        f"on_fit_start, or set Stream(num_batches=...)."
    )


def _partition_is_missing(wait: Wait) -> Found:
    if not wait.is_missing:
        return None
    advice = "If it should be there, compare the names in Stream(partition=...) and the producers."
    advice = advice if wait.stats["partitions"] else ""
    return f"missing {wait.partition}", _joined(wait.seen(), _running(wait), wait.note, advice)


def _nothing_was_put(wait: Wait) -> Found:
    if wait.is_missing or wait.stats["partitions"][wait.partition]["put_total"]:
        return None
    return f"nothing {wait.partition}", _joined(wait.seen(), _running(wait))


def _running(wait: Wait) -> str:
    if not wait.num_running:
        return ""
    return f"{counted(wait.num_running, 'producer')} {'is' if wait.num_running == 1 else 'are'} running."


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _no_sample_has_the_field(wait: Wait) -> Found:
    if not wait.unknown_fields():
        return None
    return f"unknown {wait.partition}", f"{wait.seen()} Check the name in Stream(fields=...), and who puts it."


_HINTS = (
    _queue_is_full, _sealed_partition_lacks_fields, _producers_have_ended, _sanity_check, _fetched_one_ahead,
    _fetched_before_hooks, _partition_is_missing, _nothing_was_put, _no_sample_has_the_field,
)  # fmt: skip


def _fetches_ahead(wait: Wait) -> bool:
    return wait.reader.stage == "train" and fetches_ahead(wait.trainer, wait.reader.stream)


def _own_hooks(trainer: Trainer) -> list[str]:
    """The user's own hooks that come too late to make the first batch, such as "Rollout.on_train_start"."""
    return [
        f"{type(owner).__name__}.{name}"
        for owner in (trainer.lightning_module, *callbacks_of(trainer))
        for name in _TOO_LATE
        if getattr(owner, name).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning", "lightning_tq")
    ]


def why_nothing(client: TransferQueueClient, reader: StreamReader) -> str:
    """Why a stream came to the end of its partition without a batch."""
    with suppress(TransferQueueError):  # the queue may end now, or the partition be cleared
        if text := _why_empty(client, reader):
            return text
    return (
        f"partition {reader.progress.partition!r} has no untrained batch for task {reader.stream.task!r}. Its samples "
        f"were trained before, or fill no batch. To train them again, set Stream(replay=True) or another task."
    )


def _why_empty(client: TransferQueueClient, reader: StreamReader) -> str:
    """Why there is no sample for the stream; "" if there are or were some."""
    name, stream = reader.progress.partition, reader.stream
    partition = client.get_stats()["partitions"].get(name)
    if partition is None:
        return f"partition {name!r} was cleared."
    if not partition["put_total"]:
        return f"partition {name!r} is empty. Compare the names in Stream(partition=...) and the producers."
    task = partition["tasks"].get(stream.task, {"ready": {}, "consumed": 0})
    if stream.where and not task["consumed"] and not any(n for of, n in task["ready"].items() if " where " in of):
        described = client.get_meta([], partition_id=str(name), mode="force_fetch")
        tags = {tag for own in described.get_all_custom_meta() for tag in own}
        return (
            f"none of the {counted(partition['samples'], 'sample')} of partition {name!r} matches "
            f"where={stream.where!r}. {f'Their tags are {list_names(tags)}' if tags else 'They have no tags'}."
        )
    return ""
