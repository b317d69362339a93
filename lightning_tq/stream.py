# SPDX-License-Identifier: Apache-2.0
"""Stream: what one loader of a Trainer reads from the queue, and checks of a Trainer's streams together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from functools import cached_property
from numbers import Real
from os import PathLike
from string import Formatter
from typing import Any, Literal

import transfer_queue as tq
from lightning_tq.checks import are_names, check_choice, check_int, did_you_mean, list_names
from transfer_queue import BaseSampler, GroupSampler, RecordedBatches, TransferQueueClient, parse_filter
from transfer_queue.errors import InvalidRequestError

VARIABLES = ("epoch", "global_step", "policy_version", "stage")
"""Variables of a partition template."""
_TAILS = ("drop", "pad", "uneven_ok", None)
_START_METHODS = ("fork", "spawn", "forkserver", None)


def _is_a(kinds: Any) -> Callable[[Any], object]:
    return lambda value: isinstance(value, kinds)


_VALUES: dict[str, tuple[Callable[[Any], object], str]] = {
    **dict.fromkeys(("partition", "task"), (lambda value: isinstance(value, str) and value, "a name")),
    **dict.fromkeys(("fields", "head_fields"), (are_names, "a list of field names, at least one")),
    "sampler": (_is_a(BaseSampler | str), "a sampler, the name of a built-in one"),
    "where": (_is_a(str), "a filter over tags"),
    "timeout_s": (lambda value: isinstance(value, Real) and float(value) > 0, "a number of seconds above 0"),
    "sampling_config": (_is_a(Mapping), "a mapping of arguments"),
    "replay_from": (_is_a(str | PathLike), "a directory"),
    **dict.fromkeys(("replay", "persistent_workers", "prefetch", "pin_memory"), (_is_a(bool), "true or false")),
}
"""By option without a check of its own, what it may be. None may be where it is the default."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Batches for one task, from the partitions that a template names.

    Args:
        partition: Partition, or a template such as "train@{epoch}". Variables: {epoch}, {global_step}, {policy_version}
            (of the weights that PublishWeights published last, else the global step) and {stage} ("train", "val", ...).
            They are resolved when an iterator starts; a running iterator never changes partition.
        task: Name of the consumer. Each task sees every sample of a partition, independently of other tasks.
        fields: Fields to read. A sample is ready when it has all of them.
        batch_size: Samples per data-parallel rank and batch, which the sampler picks at once. With a GroupSampler leave
            it out: a batch is this rank's share of its whole groups.
        micro_batch_size: Rows that the loader yields at once. Default: the whole batch, or micro-batches of up to so
            many tokens with ``GroupSampler(micro_batch_tokens=...)``.
        head_fields: Fields of the groups' heads, such as an image that all rows of a group share. They are read once
            per batch; ``batch.heads`` has a row per group, and ``meta.group_index`` says which one is a row's.
        sampler: How ready samples form a batch: class_path and init_args, or the name of a built-in sampler. Default:
            RankAwareSampler with the number of data-parallel ranks.
        tail: What happens to samples that can't fill the last round of a sealed partition: drop (counted), pad (repeat
            samples, marked in BatchMeta.padding_mask) or uneven_ok. Default: uneven_ok for one rank, drop for more.
        num_batches: Micro-batches per epoch and rank, if known. The loader then has a length, and Lightning fetches no
            batch ahead. Set it when producers wait for step k before they make batch k+1.
        replay: Whether an iterator that returns to its partition starts at the first batch (true) or after the trained
            ones (false). Default: false for training. Other stages always replay.
        clear_consumed: Training only: delete samples once they are trained and every task that reads the partition is
            done with them. A partition without end then takes bounded memory. A list adds tasks that may start later.
            False: samples stay until their partition is cleared.
        num_workers: DataLoader worker processes. 0 is right for most streams, because batches are requested ahead
            anyway.
        persistent_workers: Keep the workers from one epoch to the next. Needs num_workers of 1 or more.
        multiprocessing_context: How workers start. Needs num_workers of 1 or more. Default: torch's choice on this
            system.
        prefetch: Request the next batch while the loop is busy with this one. False: request it when the loop asks for
            it.
        layout: Tensor fields are dense where the rows' shapes agree ("dense"), or always jagged nested tensors
            ("jagged").
        timeout_s: Longest wait for one batch before BatchTimeoutError. Default: no limit, with a report every 30 s.
        pin_memory: Copy batches into page-locked memory, and from there to an accelerator as soon as they are fetched.
            That takes the accelerator's memory for one more batch. No effect without one.
        sampling_config: More keyword arguments for the sampler, sent with every fetch.
        replay_from: A directory that ``lightning-tq record`` wrote: train the recorded batches again, in their order,
            without producers. Fields, partition, batch_size and data-parallel ranks must be as they were, without
            ``where``.
        where: Read only samples whose tags match, such as "policy_version >= 7 and env == 'math'". The others stay for
            other streams, and clear_consumed never deletes them. Default: all samples.
    Raises:
        InvalidRequestError: an impossible value; the text names the option. It is a ValueError.
    Examples:
        >>> stream = Stream(partition="{stage}@{epoch}", task="sft", fields=["x"], batch_size=32, micro_batch_size=8)
        >>> stream.partition_at(epoch=2, global_step=100, stage="train")
        'train@2'
    """

    partition: str
    task: str
    fields: list[str]
    batch_size: int | None = None
    micro_batch_size: int | None = None
    head_fields: list[str] | None = None
    sampler: BaseSampler | str | None = None
    tail: Literal["drop", "pad", "uneven_ok"] | None = None
    num_batches: int | None = None
    replay: bool | None = None
    clear_consumed: bool | list[str] = False
    num_workers: int = 0
    persistent_workers: bool = False
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    prefetch: bool = True
    layout: Literal["dense", "jagged"] = "dense"
    timeout_s: float | None = None
    pin_memory: bool = False
    sampling_config: dict[str, Any] | None = None
    replay_from: str | None = None
    where: str | None = None

    def __post_init__(self) -> None:
        for name, (is_possible, text) in _VALUES.items():
            value, optional = getattr(self, name), getattr(Stream, name, "") is None
            if not (is_possible(value) or (optional and value is None)):
                raise InvalidRequestError(f"{name} must be {text}{' or None' if optional else ''}, got {value!r}.")
        self._check_template()
        self._check_sizes()
        check_choice("tail", self.tail, _TAILS)
        check_choice("layout", self.layout, ("dense", "jagged"))
        check_choice("multiprocessing_context", self.multiprocessing_context, _START_METHODS)
        for name in ("persistent_workers", "multiprocessing_context"):
            if getattr(self, name) and not self.num_workers:
                raise InvalidRequestError(f"{name} needs num_workers of at least 1, got num_workers=0.")
        if self.where is not None:
            parse_filter(self.where)
            if self.replay_from is not None:
                raise InvalidRequestError(
                    f"replay_from trains all that was recorded, so where={self.where!r} has no effect. Leave it out."
                )
        _check_clearing(self.clear_consumed, bool(self.replay))
        if isinstance(self.sampler, GroupSampler):
            self.sampler.check_tail(self.tail)

    def _check_template(self) -> None:
        if tq.is_internal(self.partition):
            raise InvalidRequestError(
                f"partition {self.partition!r} begins with '_', as the queue's own do: no report would show it. Give "
                f"it another name."
            )
        try:
            unknown = [name for name in self.variables if name not in VARIABLES]
            if not unknown:
                self.partition_at(epoch=0, global_step=0, stage="train")
        except (ValueError, LookupError) as error:
            raise InvalidRequestError(f"partition template {self.partition!r} is malformed: {error}.") from error
        if unknown:
            known = ", ".join(f"{{{name}}}" for name in VARIABLES)
            raise InvalidRequestError(
                f"partition template {self.partition!r} uses {{{unknown[0]}}}"
                f"{did_you_mean(unknown[0], VARIABLES, likeness=0.0)} Known: {known}."
            )

    def _check_sizes(self) -> None:
        if self.draws_groups and self.batch_size is not None:
            raise InvalidRequestError(
                f"batch_size={self.batch_size} has no effect with a GroupSampler, which draws whole groups, however "
                f"many rows they have. Leave it out; micro_batch_size is the rows that a step gets at once."
            )
        if self.cuts_by_tokens and self.micro_batch_size is not None:
            raise InvalidRequestError(
                f"micro_batch_size={self.micro_batch_size} has no effect with GroupSampler(micro_batch_tokens=...). "
                f"Leave one of them out."
            )
        check_int("batch_size", self.batch_size, 1, optional=self.draws_groups)
        check_int("micro_batch_size", self.micro_batch_size, 1, optional=True)
        check_int("num_batches", self.num_batches, 1, optional=True)
        check_int("num_workers", self.num_workers, 0)
        if self.batch_size is not None and (self.micro_batch_size or 0) > self.batch_size:
            raise InvalidRequestError(
                f"micro_batch_size {self.micro_batch_size} is larger than batch_size {self.batch_size}. Lower "
                f"it, or omit it."
            )

    def register(self, client: TransferQueueClient, dp_size: int) -> None:
        """Register the task and its sampler with the queue, for this number of data-parallel ranks.

        Nothing is registered for a stream that replays a record: the task may be one of a live run there.

        Raises:
            InvalidRequestError: the sampler can't draw such batches.
        """
        if self.record is not None:
            return
        sampler = _for_ranks(self.sampler or "RankAwareSampler", dp_size)
        if isinstance(sampler, BaseSampler):
            sampler.check(self.batch_size or 0, dp_size)
        # An earlier run may have registered the task with another policy, which would hold on.
        client.register_task(self.task, sampler, dp_size, self.tail or ("uneven_ok" if dp_size == 1 else "drop"))

    def deal_anew(self, client: TransferQueueClient, dp_size: int, stage: str) -> None:
        """Reset what this task was given for another number of ranks, where it reads from the first batch each time.

        Nothing is reset for a stream that replays a record.
        """
        if self.record is not None:
            return
        pattern = self.pattern(stage)
        for name, partition in client.get_stats()["partitions"].items():
            sizes = partition["tasks"].get(self.task, {}).get("dp_sizes", ())
            if fnmatchcase(name, pattern) and {*sizes} - {dp_size}:
                client.reset_consumption(name, self.task)

    @cached_property
    def record(self) -> RecordedBatches | None:
        """What ``replay_from`` names. Raises CheckpointNotFoundError if there is nothing."""
        return None if self.replay_from is None else RecordedBatches(self.replay_from)

    @property
    def draws_groups(self) -> bool:
        """Whether a batch is whole groups."""
        return isinstance(self.sampler, GroupSampler)

    @property
    def groups(self) -> int | None:
        """Groups of a batch, of all ranks together; None: it has no whole groups."""
        return self.sampler.groups if isinstance(self.sampler, GroupSampler) else None

    @property
    def cuts_by_tokens(self) -> bool:
        """Whether the sampler says how batches are cut."""
        return isinstance(self.sampler, GroupSampler) and self.sampler.micro_batch_tokens is not None

    @property
    def cuts_draws(self) -> bool:
        """Whether several micro-batches may be one draw of groups."""
        return self.groups is not None and (self.micro_batch_size is not None or self.cuts_by_tokens)

    @property
    def bounds_staleness(self) -> bool:
        """Whether no group may be trained that is older than the sampler's ``max_staleness``."""
        return isinstance(self.sampler, GroupSampler) and self.sampler.bound is not None

    @property
    def acks_free_room(self) -> bool:
        """Whether what was trained is deleted once it is acknowledged, as groups always are."""
        return bool(self.clear_consumed) or self.draws_groups

    @property
    def clearing_tasks(self) -> list[str]:
        """Tasks that must be done with a sample before ``clear_consumed`` deletes it. Empty: it deletes nothing."""
        if self.clear_consumed is False:
            return []
        return [self.task, *(self.clear_consumed if isinstance(self.clear_consumed, list) else ())]

    @property
    def variables(self) -> list[str]:
        """Variables that the partition template uses."""
        return [name for _, name, _, _ in Formatter().parse(self.partition) if name is not None]

    def pattern(self, stage: str) -> str:
        """A pattern for all partitions that the template may name in this stage."""
        values = {None: "", "stage": stage}
        return "".join(text + values.get(name, "*") for text, name, _, _ in Formatter().parse(self.partition))

    def partition_at(self, *, epoch: int, global_step: int, stage: str, policy_version: int | None = None) -> str:
        """The partition's name at this point of a run. ``policy_version``: by default the global step."""
        version = global_step if policy_version is None else policy_version
        return self.partition.format(epoch=epoch, global_step=global_step, policy_version=version, stage=stage)


def as_stream(given: Stream | Mapping[str, Any], label: str) -> Stream:
    """Convert a mapping of a Stream's options.

    Raises:
        InvalidRequestError: an unknown option (the text names the nearest one), a missing one, or an impossible value.
    """
    if isinstance(given, Stream):
        return given
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"stream {label!r} must be a Stream or a mapping of its options, got {given!r}.")
    options = {each.name: each.default is MISSING for each in fields(Stream)}
    unknown = [str(name) for name in given if name not in options]
    if unknown and all(isinstance(each, Stream | Mapping) for each in given.values()):
        raise InvalidRequestError(
            f"stream {label!r} must be one Stream, got several: {list_names(unknown)}. A run trains one; return other "
            f"loaders beside it from train_dataloader of your own TQDataModule."
        )
    if unknown:
        raise InvalidRequestError(
            f"stream {label!r} has no option {unknown[0]!r}{did_you_mean(unknown[0], options, likeness=0.0)}"
        )
    needed = [name for name, has_no_default in options.items() if has_no_default]
    needed += [] if isinstance(given.get("sampler"), GroupSampler) else ["batch_size"]
    missing = [name for name in needed if name not in given]
    if missing:
        raise InvalidRequestError(f"stream {label!r} lacks {', '.join(missing)}: got {dict(given)!r}.")
    return Stream(**given)


def _for_ranks(sampler: BaseSampler | str, dp_size: int) -> BaseSampler | str:
    """The sampler for so many ranks. A name stays one, unless it is that of a built-in sampler which follows them."""
    if isinstance(sampler, BaseSampler):
        return sampler.for_ranks(dp_size)
    named = getattr(tq, sampler, None)
    if isinstance(named, type) and issubclass(named, BaseSampler):
        with suppress(TypeError):  # the queue says which arguments it lacks
            made = named()
            following = made.for_ranks(dp_size)
            return sampler if following is made else following
    return sampler


def _check_clearing(tasks: object, replay: bool) -> None:
    if not isinstance(tasks, bool) and not (isinstance(tasks, list) and all(isinstance(t, str) and t for t in tasks)):
        raise InvalidRequestError(f"clear_consumed must be true, false or a list of tasks, got {tasks!r}.")
    if tasks is not False and replay:
        raise InvalidRequestError(
            "replay reads samples again, so clear_consumed can't delete them. Set only one of them."
        )


def sampler_modules(streams: Iterable[Stream]) -> list[str]:
    """Modules that the queue must allow for the samplers of these streams."""
    samplers = (stream.sampler for stream in streams)
    return sorted({type(sampler).__module__ for sampler in samplers if isinstance(sampler, BaseSampler)})


# ---- the streams of a Trainer together ----


@dataclass(frozen=True, slots=True)
class StageStream:
    """A stream and the stage that reads it."""

    label: str
    """The stage, with a number where a stage has several streams: "train", "val", "val0", "val1"."""
    stage: str
    stream: Stream


def stage_streams(entry: str, streams: Mapping[str, Sequence[Stream]]) -> list[StageStream]:
    """The streams that an entry point ("fit", "validate", ...) reads.

    Raises:
        InvalidRequestError: the stream that this entry point needs is missing.
    """
    stages = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}[entry]
    if not streams[stages[0]]:
        raise InvalidRequestError(f"trainer.{entry} needs TQDataModule({stages[0]}=Stream(...)), which is missing.")
    return [
        StageStream(stage if len(streams[stage]) == 1 else f"{stage}{number}", stage, stream)
        for stage in stages
        for number, stream in enumerate(streams[stage])
    ]


def check_tail(train: Stream, dp_size: int) -> None:
    """Raise InvalidRequestError where training would end earlier on one rank, and the others would wait forever."""
    if train.tail == "uneven_ok" and dp_size > 1:
        raise InvalidRequestError(
            f"stream 'train': tail='uneven_ok' can end the stream on one of {dp_size} ranks before the others, which "
            f"would then wait forever in their next collective. Use 'drop' or 'pad'."
        )


def check_batches_fit(streams: Sequence[StageStream], dp_size: int, samples: int | None) -> None:
    """Raise InvalidRequestError for training batches of more samples than the queue holds (None: any number).

    With a tail that is padded or uneven, a small sealed partition may still be one batch.
    """
    for own in [each for each in streams if each.stage == "train" and each.stream.tail in (None, "drop")]:
        rows = (own.stream.batch_size or 0) * dp_size
        if own.stream.record is None and samples is not None and rows > samples:
            raise InvalidRequestError(
                f"stream {own.label!r} takes {rows:,} samples at once ({own.stream.batch_size} for each of {dp_size} "
                f"data-parallel ranks), but the queue holds {samples:,} samples (total_storage_size). Lower "
                f"batch_size, or raise total_storage_size."
            )


def check_records(streams: Sequence[StageStream], dp_size: int, has_producers: bool) -> bool:
    """Whether all these streams replay records, so that no producers and no saved queue are needed.

    Raises:
        InvalidRequestError: a record doesn't fit its stream, or producers would feed replayed and other streams.
    """
    replaying = [each for each in streams if each.stream.replay_from is not None]
    for own in [each.stream for each in replaying]:
        asks_for = (own.fields, dp_size, own.batch_size, own.head_fields or (), own.groups)
        RecordedBatches(str(own.replay_from)).check(*asks_for)
    others = [each.label for each in streams if each not in replaying]
    if replaying and others and has_producers:
        raise InvalidRequestError(
            f"stream {replaying[0].label!r} replays a record, and {others[0]!r} doesn't. Producers would feed both, "
            f"and nobody would read what they put for the first. Set replay_from for all streams, or omit the others."
        )
    return bool(replaying) and not others


def check_streams(streams: Mapping[str, Sequence[Stream]], train_acks: bool) -> None:
    """Raise InvalidRequestError for streams that contradict each other, or their stage."""
    if train_acks:  # validation reads its partition from the first batch, which training has acknowledged
        _check_validation_reads_its_own(streams["train"], streams["val"])
    first: dict[str, Stream] = {}
    for stage, stream in [(stage, stream) for stage, each in streams.items() for stream in each]:
        if stage != "train" and stream.replay is False:
            raise InvalidRequestError(
                f"stream of task {stream.task!r}: replay=False is for training. Validation, test and prediction start "
                f"at the first batch of their partition each time. Omit replay."
            )
        other = first.setdefault(stream.task, stream)  # a task has one sampler and one tail policy
        if other is not stream and (_sampling(other), other.tail) != (_sampling(stream), stream.tail):
            raise InvalidRequestError(
                f"two streams of task {stream.task!r} have different samplers or tails ({other.sampler!r}, "
                f"{other.tail!r} and {stream.sampler!r}, {stream.tail!r}). Make them equal, or use different tasks."
            )


def _check_validation_reads_its_own(train: Sequence[Stream], val: Sequence[Stream]) -> None:
    read = {(stream.partition, stream.task) for stream in train if "stage" not in stream.variables}
    for partition, task in [(stream.partition, stream.task) for stream in val]:
        if (partition, task) in read:
            raise InvalidRequestError(
                f"the train and the val stream both read partition {partition!r} as task {task!r}, so each would take "
                f"the other's batches. Give validation a partition, or a task name, of its own."
            )


def _sampling(stream: Stream) -> Any:
    """Type and arguments, because a configuration file builds a separate sampler for each stream."""
    return stream.sampler.spec() if isinstance(stream.sampler, BaseSampler) else stream.sampler
