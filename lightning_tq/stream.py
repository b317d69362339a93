# SPDX-License-Identifier: Apache-2.0
"""Stream: what one loader of a Trainer reads from the queue, and how."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from lightning_tq.checks import check_int
from transfer_queue import BaseSampler
from transfer_queue.errors import InvalidRequestError

if TYPE_CHECKING:
    from transfer_queue import TransferQueueClient

VARIABLES = ("epoch", "global_step", "policy_version", "stage")
"""What a partition template may use."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Samples of one task, batch after batch, out of the partitions that a template names."""

    partition: str
    """Partition, or a template of it: "train@{epoch}". May use {epoch}, {global_step}, {policy_version} (of the weights
    that PublishWeights handed out last; without it the global step) and {stage} ("train", "val", ...), as they are when
    an iterator starts; a running one never changes partition."""
    task: str
    """Name of the consumer. Each task sees every sample of a partition, independently of other tasks."""
    fields: list[str]
    """Fields to read. A sample is ready when it has all of them."""
    batch_size: int
    """Samples per data-parallel rank and batch: what the sampler picks at once."""
    micro_batch_size: int | None = None
    """Rows of what the loader yields, a part of a batch. Default: the whole batch."""
    sampler: BaseSampler | str | None = None
    """Which ready samples make a batch: class_path and init_args, or the name of a built-in sampler. Default:
    RankAwareSampler with the number of data-parallel ranks."""
    tail: Literal["drop", "pad", "uneven_ok"] | None = None
    """What becomes of samples that can't fill the last round of a sealed partition: drop (counted), pad (repeat
    samples, marked in BatchMeta.padding_mask) or uneven_ok. Default: uneven_ok for one rank, drop for more."""
    num_batches: int | None = None
    """Micro-batches per epoch and rank, where that is known. The loader then has a length, and Lightning fetches
    nothing ahead of the batch it trains; needed when producers wait for step k before they make batch k+1."""
    replay: bool | None = None
    """Whether an iterator that comes back to its partition reads it from the first batch again (true), or goes on
    behind what was trained (false). Default: false for training; all others always read again."""
    clear_consumed: bool | list[str] = False
    """Training only: forget samples, for good, once they are trained and every task that reads the partition is done
    with them, so that a partition without end takes bounded memory. A list names tasks that must be done, too, though
    they may begin later. False: samples stay until their partition is cleared."""
    num_workers: int = 0
    """DataLoader worker processes. 0 is right for most: a thread fetches ahead in any case."""
    persistent_workers: bool = False
    """Keep the workers from one epoch to the next. Needs num_workers of 1 or more."""
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    """How workers start. Needs num_workers of 1 or more. Default: as torch does on this system."""
    prefetch_batches: int = 2
    """Batches fetched ahead, per worker. 0: each is fetched when it is asked for."""
    layout: Literal["dense", "jagged"] = "dense"
    """Tensor fields come as dense tensors where the rows' shapes agree, or always as jagged nested tensors."""
    timeout_s: float | None = None
    """Longest wait for one batch before BatchTimeoutError. Default: wait, and report every 30 s what for."""
    pin_memory: bool = False
    """Copy batches into page-locked memory, for faster transfer to an accelerator; without one it does nothing."""
    sampling_config: dict[str, Any] | None = None
    """More keywords for the sampler, with every fetch."""

    def __post_init__(self) -> None:
        """Raises InvalidRequestError (a ValueError) for what can't be right."""
        self._check_names()
        self._check_sizes()
        _check_choice("tail", self.tail, ("drop", "pad", "uneven_ok", None))
        _check_choice("layout", self.layout, ("dense", "jagged"))
        _check_choice("multiprocessing_context", self.multiprocessing_context, ("fork", "spawn", "forkserver", None))
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise InvalidRequestError(f"timeout_s must be above 0, or None to wait, got {self.timeout_s!r}.")
        for name in ("persistent_workers", "multiprocessing_context"):
            if getattr(self, name) and not self.num_workers:
                raise InvalidRequestError(f"{name} needs num_workers of at least 1, got num_workers=0.")
        _check_clearing(self.clear_consumed, bool(self.replay))
        if not isinstance(self.sampler, (BaseSampler, str, type(None))):
            raise InvalidRequestError(f"sampler must be a sampler, a built-in's name or None, got {self.sampler!r}.")

    def _check_names(self) -> None:
        for name in ("partition", "task"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidRequestError(f"{name} must be a name, got {value!r}.")
        if isinstance(self.fields, str) or not self.fields or not all(isinstance(f, str) and f for f in self.fields):
            raise InvalidRequestError(f"fields must be a list of field names, at least one, got {self.fields!r}.")
        unknown = [name for name in self.variables if name not in VARIABLES]
        if unknown:
            near = difflib.get_close_matches(unknown[0], VARIABLES, 1, 0.0)[0]
            known = ", ".join(f"{{{name}}}" for name in VARIABLES)
            raise InvalidRequestError(
                f"partition template {self.partition!r} uses {{{unknown[0]}}}; did you mean {{{near}}}? Known: {known}."
            )

    def _check_sizes(self) -> None:
        least = {"batch_size": 1, "micro_batch_size": 1, "num_batches": 1, "num_workers": 0, "prefetch_batches": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is None and name in ("micro_batch_size", "num_batches"):
                continue
            check_int(name, value, minimum)
        if self.micro_size > self.batch_size:
            raise InvalidRequestError(
                f"micro_batch_size {self.micro_batch_size} is larger than batch_size {self.batch_size}, of which it "
                f"is a part. Lower it, or leave it out."
            )

    def register(self, client: TransferQueueClient, dp_size: int) -> None:
        """Tell the queue how the task draws, for so many data-parallel ranks.

        Raises:
            InvalidRequestError: the sampler can't draw such batches.
        """
        sampler = self.sampler or "RankAwareSampler"
        if isinstance(sampler, BaseSampler):
            sampler = sampler.for_ranks(dp_size)
            sampler.check(self.batch_size, dp_size)
        client.register_task(self.task, sampler, dp_size, self.tail)

    @property
    def micro_size(self) -> int:
        """Rows of what the loader yields."""
        return self.batch_size if self.micro_batch_size is None else self.micro_batch_size

    @property
    def variables(self) -> list[str]:
        """Names that the partition template uses."""
        try:
            return [name for _, name, _, _ in Formatter().parse(self.partition) if name is not None]
        except ValueError as error:
            raise InvalidRequestError(f"partition template {self.partition!r} is malformed: {error}.") from error

    def partition_at(self, *, epoch: int, global_step: int, stage: str, policy_version: int | None = None) -> str:
        """The partition's name at this point of a run. ``policy_version``: by default the global step."""
        version = global_step if policy_version is None else policy_version
        return self.partition.format(epoch=epoch, global_step=global_step, policy_version=version, stage=stage)


def _check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise InvalidRequestError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _check_clearing(tasks: object, replay: bool) -> None:
    if not isinstance(tasks, bool) and not (isinstance(tasks, list) and all(isinstance(t, str) and t for t in tasks)):
        raise InvalidRequestError(f"clear_consumed must be true, false or a list of tasks, got {tasks!r}.")
    if tasks is not False and replay:
        raise InvalidRequestError("a stream that is read again (replay) can't forget what was read: clear_consumed.")


def sampler_modules(streams: Iterable[Stream]) -> list[str]:
    """Modules that a queue must allow for the samplers of these streams."""
    samplers = (stream.sampler for stream in streams)
    return sorted({type(sampler).__module__ for sampler in samplers if isinstance(sampler, BaseSampler)})
