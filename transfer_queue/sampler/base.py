# SPDX-License-Identifier: Apache-2.0
"""The sampler interface: which of the ready samples a fetch gets, and what a sampler remembers."""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from pkgutil import resolve_name
from typing import Any, TypeVar

from transfer_queue.errors import SamplerError

Picked = tuple[list[int], list[int]]
"""(sampled, consumed): what the caller gets, and what the task never gets again."""

CALLABLE_KEY = "$callable"
"""A function among a constructor's arguments, in ``spec()``: ``{"$callable": "module:name"}``."""

_SamplerT = TypeVar("_SamplerT", bound="BaseSampler")


@dataclass(frozen=True, slots=True)
class Round:
    """What a round is drawn from: one batch for each of these ranks."""

    ready: Sequence[int]
    """Indexes of the ready samples, ascending: at least ``samples_needed``, and possibly far more."""
    batch_size: int
    ranks: tuple[int | None, ...]
    """None: a reader that names no rank."""
    batch_index: int | None
    partition: Any
    """What may be read besides: a PartitionView of control/draw.py. Direct callers may pass less; see each sampler."""


class BaseSampler(ABC):
    """Picks samples, as a function of (ready, batch size, own state) without clock, thread or I/O.

    Subclasses call ``super().__init__()`` and keep their state in ``_states[partition][task][dp_rank][batch_index]``.
    ``has_cached_result``, ``forget``, ``clear_cache`` and checkpoints then work without further code.

    Examples:
        >>> class NewestFirst(tq.BaseSampler):
        ...     def sample(self, ready_indexes, batch_size, *args, **kwargs):
        ...         newest = list(ready_indexes)[-batch_size:]
        ...         return newest, list(newest)
        >>> NewestFirst()([3, 5, 8], 2)
        ([5, 8], [5, 8])
    """

    dp_size: int | None = None
    """Number of data-parallel ranks, if the sampler itself must know it; set on the instance."""

    _unnumbered: int | None = None
    """The batch of a request without ``batch_index``."""

    _states: dict[str, dict[str, dict[Any, Any]]]
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls: type[_SamplerT], *args: Any, **kwargs: Any) -> _SamplerT:
        # Set here, so that spec() and state work whatever a subclass's __init__ does.
        self = super().__new__(cls)
        self._arguments = (args, kwargs)
        self._states = {}
        return self

    def __init__(self) -> None:
        self._states = {}

    def __call__(self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any) -> Picked:
        return self.sample(ready_indexes, batch_size, *args, **kwargs)

    @abstractmethod
    def sample(self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any) -> Picked:
        """Pick from the ready samples.

        Args:
            ready_indexes: Ascending, possibly far more than needed: slice or iterate it, don't copy it whole.
            batch_size: Samples asked for, per rank.
            kwargs: ``partition`` (a PartitionView), ``partition_id``, ``task_name``, ``dp_rank``, ``batch_index``,
                ``dp_size`` and the caller's ``sampling_config``.
        Returns:
            (sampled, consumed), two separate lists. ([], []) means "not enough yet".
        Raises:
            ValueError: The request can never work; raised before any state changes.
        """

    def samples_needed(self, batch_size: int, dp_size: int | None) -> int:
        """The smallest number of ready samples for which ``sample`` is worth calling."""
        return batch_size * (dp_size or 1)

    def check(self, batch_size: int, dp_size: int | None) -> None:
        """Raise ValueError for sizes that can never give a batch. Called when a fetch arrives."""
        if batch_size < 1:
            raise SamplerError(f"batch_size must be at least 1, got {batch_size}.")
        self._check_ranks(dp_size)

    def tail(self, ready_indexes: Sequence[int], batch_size: int, *, partition: Any = None) -> list[int]:
        """The remaining samples of a sealed partition that may be used in incomplete batches, in order."""
        return list(ready_indexes)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether ``sample`` would answer from memory, so that nothing needs to be ready."""
        config = sampling_config or {}
        batch = config.get("batch_index")
        batches = self._states.get(partition_id, {}).get(task_name, {}).get(config.get("dp_rank"))
        return isinstance(batches, dict) and (self._unnumbered if batch is None else batch) in batches

    def forget(self, partition_id: str, task_name: str, batch_index: int | None) -> None:
        """Delete what is remembered of one batch for all ranks, because the ledger has it now."""
        batch = self._unnumbered if batch_index is None else batch_index
        ranks = self._states.get(partition_id, {}).get(task_name)
        if not isinstance(ranks, dict):
            return
        for rank, batches in list(ranks.items()):
            # Other types than dicts are a subclass's own state.
            if isinstance(batches, dict) and batch in batches:
                del batches[batch]
                if not batches:
                    del ranks[rank]

    def clear_cache(self, partition_id: str) -> None:
        """Delete all state of a partition that was cleared."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """What the sampler remembers, as plain data."""
        return {"_states": copy.deepcopy(self._states)}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Remember what ``save_checkpoint`` returned, and nothing else."""
        self._states = copy.deepcopy(state.get("_states", {}))

    def spec(self) -> dict[str, Any]:
        """Describe this sampler as plain data, so that ``registry.resolve`` can build it in another process.

        Raises:
            SamplerError: An argument is neither plain data nor an importable function.
        """
        args, kwargs = self._arguments
        names = [*inspect.signature(type(self).__init__).parameters][1:]
        where = f"{type(self).__module__}:{type(self).__qualname__}"
        labels = [*names[: len(args)], *(f"number {i + 1}" for i in range(len(names), len(args)))]
        return {
            "class": where,
            "args": [_plain(value, f"argument {label} of {where}") for label, value in zip(labels, args, strict=True)],
            "kwargs": {name: _plain(value, f"argument {name} of {where}") for name, value in kwargs.items()},
        }

    def for_ranks(self, dp_size: int) -> BaseSampler:
        """Return this sampler for ``dp_size`` ranks: rebuilt if its own ``dp_size`` was left at the default."""
        parameter = inspect.signature(type(self).__init__).parameters.get("dp_size")
        if parameter is None or self.dp_size == dp_size or self.dp_size not in (None, parameter.default):
            return self
        args, kwargs = self._arguments
        names = [*inspect.signature(type(self).__init__).parameters][1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs, "dp_size": dp_size}
        return type(self)(**given)

    def _check_ranks(self, dp_size: int | None) -> None:
        if dp_size is not None and self.dp_size is not None and dp_size != self.dp_size:
            raise SamplerError(
                f"{type(self).__name__} was built for dp_size {self.dp_size}, the task has dp_size {dp_size}. "
                f"Register the sampler with dp_size={dp_size}."
            )

    def _rank(self, dp_rank: int | None, num_ranks: int | None) -> int:
        """The rank that is answered, where ``sample`` draws for all of them."""
        if dp_rank is None and (num_ranks or 1) > 1:
            raise SamplerError(
                f"{type(self).__name__} splits over {num_ranks} ranks and needs dp_rank to answer one of them. "
                f'Pass sampling_config={{"dp_rank": ..., "batch_index": ...}}.'
            )
        if dp_rank is not None and dp_rank < 0:
            raise SamplerError(f"dp_rank must be greater than or equal to 0, got {dp_rank}.")
        return dp_rank or 0

    def _recall(self, partition_id: str, task_name: str, dp_rank: int, batch_index: int) -> Picked | None:
        pair = self._states.get(partition_id, {}).get(task_name, {}).get(dp_rank, {}).get(batch_index)
        return None if pair is None else (list(pair[0]), list(pair[1]))

    def _remember(
        self, partition_id: str, task_name: str, dp_rank: int | None, batch_index: int, sampled: list[int]
    ) -> None:
        # Copies, here and in _recall: a caller that changes its list must not change the memory.
        ranks = self._states.setdefault(partition_id, {}).setdefault(task_name, {})
        ranks.setdefault(dp_rank, {})[batch_index] = (list(sampled), list(sampled))


class RoundSampler(BaseSampler):
    """Draws for all ranks at once, and remembers nothing of it: the queue knows what each rank was given.

    The samplers of this package do so. The queue asks them by ``sample`` only where they remember something, or where
    the caller gives arguments. Subclasses in other packages are always asked by ``sample``.
    """

    def round(self, wanted: Round) -> list[list[int]]:
        """One batch per rank, disjoint; [] while there is none for some rank. Here the oldest samples, in order.

        A round that doesn't exist yet must be cheap to refuse, because this is called after every change.
        """
        return dealt(list(wanted.ready[: wanted.batch_size * len(wanted.ranks)]), wanted.batch_size)

    def _share(self, wanted: Round, rank: int, task_name: str, partition_id: str) -> Picked:
        """One rank's share of a round. The first rank to ask draws for all, and their shares are remembered."""
        batch = wanted.batch_index or 0
        if self._recall(partition_id, task_name, rank, batch) is None:
            for each, share in zip(wanted.ranks, self.round(wanted), strict=False):
                self._remember(partition_id, task_name, each, batch, share)
        return self._recall(partition_id, task_name, rank, batch) or ([], [])


def dealt(indexes: list[int], size: int) -> list[list[int]]:
    """One batch after the other."""
    return [indexes[at : at + size] for at in range(0, len(indexes), size)]


def in_index_order(ready_indexes: Sequence[int]) -> Sequence[int]:
    """Return the ready indexes, ascending. Direct callers may pass an unsorted list; views are always sorted."""
    return sorted(ready_indexes) if isinstance(ready_indexes, list) else ready_indexes


def _plain(value: Any, label: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, label) for item in value]
    if isinstance(value, dict) and CALLABLE_KEY not in value and all(isinstance(key, str) for key in value):
        return {key: _plain(item, label) for key, item in value.items()}
    if callable(value) and (path := _import_path(value)):
        return {CALLABLE_KEY: path}
    raise SamplerError(
        f"{label} is {value!r}, which can't travel to the controller. "
        f"Pass plain data (numbers, strings, lists, dicts) or a function that another process can import."
    )


def _import_path(function: Any) -> str | None:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)):
        return None
    path = f"{module}:{name}"
    try:
        return path if resolve_name(path) is function else None
    except (ImportError, AttributeError, ValueError):  # a function within another one has no path
        return None


Weight = str | Callable[[dict[str, Any]], float]
"""The name of a tag that holds the weight, or a function of a sample's tags."""


def sample_weights(indexes: list[int], weight: Weight, view: Any, missing: float | None = None) -> list[float]:
    """One weight per index.

    Args:
        missing: Weight of a sample that lacks the tag. None: that is an error.
    Raises:
        SamplerError: A tag is missing, or a weight is no finite number >= 0; the text names the sample.
    """
    tags = view.get_custom_meta(indexes)
    if missing is not None and isinstance(weight, str):
        tags = {index: {weight: missing, **(tags.get(index) or {})} for index in indexes}
    return [_weigh(index, tags.get(index) or {}, weight) for index in indexes]


def _weigh(index: int, tags: dict[str, Any], weight: Weight) -> float:
    if isinstance(weight, str):
        if weight not in tags:
            raise SamplerError(
                f"sample {index} has no tag {weight!r}, which the sampler balances by; its tags: {sorted(tags)}. "
                f"Write the tag when the sample is put, or name another tag when you build the sampler."
            )
        value = tags[weight]
        source = f"tag {weight!r}"
    else:
        value = weight(tags)
        source = f"weight function {getattr(weight, '__name__', weight)!r}"
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise SamplerError(f"{source} of sample {index} is {value!r}; a weight must be a finite number >= 0.")
    # .item(): numpy scalars would overflow silently and slow the partitioning down.
    return value.item() if hasattr(value, "item") else value  # type: ignore[return-value]
