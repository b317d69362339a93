# SPDX-License-Identifier: Apache-2.0
"""WaitHints: why a stream that waits long may wait forever, and what to do. Also why a stream had no batch at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import Trainer

from lightning_tq.checks import counted, list_names
from lightning_tq.loader import StreamReader
from lightning_tq.producers.group import ProducerProcess
from lightning_tq.trainer_compat import callbacks_of, fetches_ahead
from transfer_queue import Finding, GroupSampler, TransferQueueClient, diagnose
from transfer_queue.errors import InvalidRequestError, TransferQueueError

_LOOK_EVERY_S = 10.0
_REPEAT_EVERY = 3
"""Looks. Any wait is reported so often, whether it has a hint or not."""
_LOOKS_AT_A_START = 30
"""Looks. A process that has not joined after them may do without the queue, and the next hint counts."""
_TOO_LATE = ("on_train_start", "on_train_epoch_start")
"""Hooks of a fit that come after the request for the first batch, where the length is unknown."""

Found = tuple[str, str] | None
"""A hint: its key, for each of which one text is logged, and the text."""


@dataclass(eq=False, repr=False, slots=True)
class WaitHints:
    """Looks at each wait every 10 s. It asks the queue then, in the watchdog's thread."""

    trainer: Trainer
    client: TransferQueueClient
    running: Callable[[], Sequence[ProducerProcess] | None]
    """This run's producer processes that have not ended; None: none was started here."""
    clears_finished: bool
    """Whether the run clears finished partitions."""
    warn: Callable[[str | None, str], None]
    """Takes a key and a text, and logs one text per key, or each without a key."""
    note: str = ""
    """A sentence for waits for a partition that is not in the queue: why no producer of this run fills it."""
    _looks: dict[str, int] = field(default_factory=dict)
    """During the current wait, by label of the reader."""

    def look(self, readers: Iterable[StreamReader]) -> InvalidRequestError | None:
        """Warn of readers that wait for too long. Returns what to raise where one will wait for ever."""
        error = None
        for reader in readers:
            due, before = int(reader.waiting_s() / _LOOK_EVERY_S), self._looks.get(reader.label, 0)
            if due > before and reader.progress.partition is not None:
                repeats = due // _REPEAT_EVERY > before // _REPEAT_EVERY
                error = self._explain(reader, reader.progress.partition, due, repeats) or error
            self._looks[reader.label] = due
        return error

    def _explain(self, reader: StreamReader, partition: str, due: int, repeats: bool) -> InvalidRequestError | None:
        running = self.running()  # before the statistics, which then have all that ended producers have put
        try:
            stats, units = self.client.get_stats(), []
            with suppress(TransferQueueError):  # a unit may be gone
                units = self.client.get_storage_stats()
        except TransferQueueError:  # the stream itself reports that
            return None
        stream = reader.stream
        asked = {"task": stream.task, "partition": partition, "fields": stream.fields, "writer": False}
        stats["waiting"].append({**asked, "waited_s": 0.0, "client": ""})  # it may be between two requests
        findings = diagnose(stats, units)
        own = next((each for each in findings if each.kind == "fetch" and each.names == (stream.task, partition)), None)
        if own is None:  # no finding is of a partition of the queue's own, which a PartitionSwitch may name
            return None
        age_s = reader.waiting_s() if repeats else None
        rank = self.trainer.global_rank
        what = f"rank {rank}'s stream {reader.label!r}" if rank else f"stream {reader.label!r}"
        # The first rank advises first. Without: to wait longer.
        own = replace(own, what=what, age_s=age_s, to_do=() if rank and not repeats else own.to_do[:-1])
        puts = [each for each in findings if each.kind == "put" and each.to_do]
        reader.waited_full_s += _LOOK_EVERY_S * bool(puts)
        starting = [each for each in running or () if due <= _LOOKS_AT_A_START and each.is_starting(stats["clients"])]
        hints = _HINTS if self.trainer.is_global_zero else _HINTS_OF_THE_QUEUE
        wait = StreamWait(self, reader, partition, own, puts, stats["partitions"], running, starting)
        if needed := _never_has_slots(wait):
            return InvalidRequestError(needed)
        key, text = next(filter(None, (hint(wait) for hint in hints)), ("", str(own)))
        if key or repeats:
            self.warn(None if repeats else key, text)
        return None


@dataclass(frozen=True, slots=True)
class StreamWait:
    """A stream that waits, and what the queue and the run were like when it was looked at."""

    run: WaitHints
    reader: StreamReader
    partition: str
    finding: Finding
    """What the queue says of this wait."""
    puts: list[Finding]
    """Puts that wait for room."""
    partitions: dict[str, dict[str, Any]]
    """Statistics of the partitions in the queue."""
    running: Sequence[ProducerProcess] | None
    """Those of this run's producers that have not ended; None: none was started here."""
    starting: list[ProducerProcess]
    """Those that have not joined the queue yet."""

    @property
    def about(self) -> dict[str, Any]:
        """Statistics of this partition; empty if it is not in the queue."""
        return self.partitions.get(self.partition, {})

    @property
    def is_fetched_ahead(self) -> bool:
        """Whether Lightning asks for the batch before it has trained the one before."""
        return self.reader.stage == "train" and fetches_ahead(self.run.trainer, self.reader.stream)

    def then(self, *sentences: str) -> str:
        """What the queue says, and what follows from it for this run."""
        return " ".join(filter(None, (f"{self.finding.statement}.", *sentences)))


def _never_has_slots(wait: StreamWait) -> str | None:
    """Where draws that no optimizer step has trained hold so many slots that the next one can't have enough."""
    sampler, groups = wait.reader.stream.sampler, wait.about.get("groups", {})
    slots = groups.get("slots", {}).get(wait.reader.stream.task)
    held = wait.reader.untrained_draws()
    if not isinstance(sampler, GroupSampler) or slots is None or not groups["states"].get("waiting"):
        return None
    if slots["used"] < slots["budget"] or (held + 1) * sampler.groups <= slots["budget"]:
        return None
    return (
        f"stream {wait.reader.label!r} would wait for ever: {counted(held, 'draw')} without an optimizer step "
        f"{'hold' if held > 1 else 'holds'} {held * sampler.groups} of the {slots['budget']} slots of its "
        f"GroupSampler, and the next one needs {sampler.groups}. Make a step after fewer draws "
        f"(accumulate_grad_batches is {wait.run.trainer.accumulate_grad_batches}), or raise "
        f"{' and '.join(sampler.limits)}."
    )


# ---- hints: the first one that says something is logged ----


def _queue_is_full(wait: StreamWait) -> Found:
    if not wait.puts:
        return None
    first, more = wait.puts[0], len(wait.puts) - 1
    what = first.what + (f", the first of {more + 1} puts," if more else "")
    if wait.reader.stage != "train" and not wait.about.get("put_total"):  # nor is anything trained meanwhile
        without = ("set Trainer(num_sanity_val_steps=0)",) if wait.run.trainer.sanity_checking else ()
        to_do = (f"put {wait.partition!r} before what fills the queue", *without, first.to_do[-2])
    else:
        to_do = first.to_do if _is_for_a_follower(first) else (*_clearing(wait), *first.to_do[-2:])
    put = replace(first, what=what, age_s=None, to_do=to_do)
    if kept := _kept(wait):
        put = replace(put, held_up_by=(*first.held_up_by, f"among them {kept:,} trained batch{'es' * (kept != 1)}"))
    return "full", f"{wait.finding.statement}, and the queue is full: {put}"


def _is_for_a_follower(put: Finding) -> bool:
    """Whether a task such as a recorder's, which follows another one, keeps most samples. Then this run frees none."""
    return any("forget-task" in advice for advice in put.to_do)


def _kept(wait: StreamWait) -> int:
    """Batches that would be cleared, were they acknowledged."""
    return wait.reader.progress.kept if wait.reader.stream.acks_free_room else 0


def _clearing(wait: StreamWait) -> Iterator[str]:
    """What would clear samples and is not in use."""
    if _kept(wait):
        if wait.reader.progress.waits_for_checkpoints:
            yield "save checkpoints more often (ModelCheckpoint(every_n_train_steps=...))"
            yield "acknowledge without a checkpoint (TQDataModule(ack='step'))"
        return  # the next step acknowledges the others
    if wait.reader.stream.variables and not wait.run.clears_finished:  # else no partition is finished while it trains
        yield "add the callback PartitionSwitch(), which clears finished partitions"
    if not wait.reader.stream.acks_free_room:
        yield "set Stream(clear_consumed=True)"


def _partition_is_sealed(wait: StreamWait) -> Found:
    states = wait.about.get("groups", {}).get("states", {})
    may_come = states.get("waiting") or states.get("running")  # work goes on in sealed partitions
    return (f"sealed {wait.partition}", str(wait.finding)) if wait.about.get("sealed") and not may_come else None


def _producers_have_ended(wait: StreamWait) -> Found:
    if wait.running is None or wait.running:
        return None
    epoch, stream = wait.run.trainer.current_epoch, wait.reader.stream
    advice = "Compare the names in Stream(partition=...) and the producers."
    if wait.about:
        seal = f"client.seal_partition({wait.partition!r})"
        advice = f"None has sealed the partition. If nothing else fills it, seal it when it is complete: {seal}."
    elif wait.reader.stage == "train" and epoch and "epoch" in stream.variables:
        advice = f"Make samples for epoch {epoch} as well, or lower max_epochs."
    return f"done {wait.partition}", wait.then("All producers of this run have ended.", advice)


def _producers_start(wait: StreamWait) -> Found:
    if not wait.starting:
        return None
    first, more = wait.starting[0].start_text(), len(wait.starting) - 1
    others = f", nor have {counted(more, 'other')}" if more else ""
    sentence = f"{first[0].upper()}{first[1:]}, has not joined the queue yet{others}: it may still be importing."
    return "starting", wait.then(sentence)


def _sanity_check(wait: StreamWait) -> Found:
    if not wait.run.trainer.sanity_checking or (wait.running and not wait.partitions):  # producers are at work
        return None
    return "sanity check", wait.then(
        "" if wait.partitions else wait.run.note,
        "This is the sanity check, which runs before training. If what it lacks is made later, this is a deadlock: set "
        "Trainer(num_sanity_val_steps=0).",
    )


def _fetched_one_ahead(wait: StreamWait) -> Found:
    progress = wait.reader.progress
    if not wait.is_fetched_ahead or progress.taken <= progress.trained:
        return None
    return "ahead", wait.then(
        _no_worker(wait),
        f"This is batch {progress.taken} while batch {progress.trained} is untrained, because Lightning fetches one "
        "batch ahead when the length is unknown. If producers wait for that step (for new weights), this is a "
        "deadlock: set Stream(num_batches=...) or Trainer(limit_train_batches=...).",
        "" if wait.about.get("sealed") else
        f"If no more samples come, seal the partition: client.seal_partition({wait.partition!r}).",
    )  # fmt: skip


def _no_worker(wait: StreamWait) -> str:
    advice = "start workers that lease groups"
    return f"No group is worked on: if none run, {advice}." if advice in wait.finding.to_do else ""


def _fetched_before_hooks(wait: StreamWait) -> Found:
    hooks = _own_hooks(wait.run.trainer)
    if not wait.is_fetched_ahead or wait.reader.waited_s or not hooks:  # it has waited: it got a batch in this run
        return None
    return "first", wait.then(
        "Lightning fetches the first batch before on_train_start and on_train_epoch_start when the length is unknown. "
        f"If {' or '.join(hooks)} makes what is missing, this is a deadlock: make it in on_fit_start, or set "
        "Stream(num_batches=...)."
    )


def _nothing_was_put(wait: StreamWait) -> Found:
    if wait.about.get("put_total"):
        return None
    advice = "If it should be there, compare the names in Stream(partition=...) and the producers."
    count = len(wait.running or ())
    sentences = [f"{counted(count, 'producer')} {'is' if count == 1 else 'are'} running." if count else ""]
    if not wait.about:
        sentences += [wait.run.note, advice if wait.partitions else ""]
    return f"nothing {wait.partition} {not wait.about}", wait.then(*sentences)


def _no_sample_has_the_field(wait: StreamWait) -> Found:
    has_all = set(wait.reader.stream.fields) <= set(wait.about["fields"])
    return None if has_all else (f"unknown {wait.partition}", str(wait.finding))


_HINTS = (
    _queue_is_full, _partition_is_sealed, _producers_have_ended, _producers_start, _sanity_check, _fetched_one_ahead,
    _fetched_before_hooks, _nothing_was_put, _no_sample_has_the_field,
)  # fmt: skip
_HINTS_OF_THE_QUEUE = (_queue_is_full, _partition_is_sealed)
"""Those of other ranks: only the first knows whether producers are still at their start."""


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
        if reader.reads_queue and (text := _why_empty(client, reader)):
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
