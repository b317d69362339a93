# SPDX-License-Identifier: Apache-2.0
"""GroupSampler: draws whole groups, and bounds how many are begun and how old they get."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, Protocol

from transfer_queue.errors import SamplerError
from transfer_queue.sampler.base import Picked, Round, RoundSampler, sample_weights
from transfer_queue.sampler.karmarkar_karp import karmarkar_karp
from transfer_queue.sampler.micro_batches import refined, starts_within

ORDERS = ("oldest", "newest", "arrival")
STALE = ("train", "wait", "drop")


class GroupView(Protocol):
    """One group, for a sampler. ``seq``: its place in the order of first leases."""

    index: int
    seq: int
    version: int | None

    def all_members(self) -> list[int]:
        """Indexes of its rows."""


class DrawableGroups(Protocol):
    """The groups that a task may draw, in the order of its sampler. ``step``: the one that trains what is drawn now."""

    step: int | None

    def __iter__(self) -> Iterator[GroupView]: ...
    def __contains__(self, group: GroupView, /) -> bool: ...

    def unfinished(self) -> Iterator[GroupView]:
        """All that this task has still to draw and that work has begun on, in the order of first leases."""

    def overtook(self, group: GroupView) -> list[int]:
        """Ascending, the places in the order of first leases that this task has drawn behind this group."""


class GroupSampler(RoundSampler):
    """Draws ``groups`` whole groups per step, and admits so many leases that they are trained young enough.

    At most ``oversample * (ahead + 1) * groups`` groups hold a slot: they are leased, closed, ready, or drawn and not
    trained yet. A fetch needs no ``batch_size``, and one has no effect.

    Args:
        groups: Per step, over all data-parallel ranks.
        ahead: Steps that workers may be ahead of the trainer.
        oversample: More groups than are needed, for gates that reject some.
        order: Which ready groups are drawn first: those of the "oldest" version, the "newest", or by "arrival".
        window: Only the first so many groups may be drawn, counted from the first undrawn one in the order of first
            leases: a slow group is overtaken by fewer than that. None: no limit.
        max_staleness: Most versions between a group's first lease and the step that trains it. None: no limit.
        stale: What becomes of older groups: "train" them all the same; "wait" for slow groups in time, so that none
            gets too old; or "drop" them, and their leases.
        gate: A filter over the rows' tags, such as ``"std(reward) > 0"``. Groups that don't match are rejected.
        balance: Tag with the length of a row. Ranks then get groups of about the same length in all.
        micro_batch_tokens: Most that the lengths of a micro-batch's rows add up to; a longer row is one of its own. All
            ranks cut their shares into equally many. It needs ``balance``, and loaders, which ask for batches by
            number. None: ``micro_batch_size`` says how to cut.
        dp_size: Data-parallel ranks, which must divide ``groups``. None: as the task was registered.
    Raises:
        SamplerError: an impossible value; it is a ValueError.
    Examples:
        >>> client.register_task("actor", tq.GroupSampler(groups=8, ahead=1, gate="std(reward) > 0"))
    """

    def __init__(
        self,
        groups: int,
        ahead: int = 1,
        oversample: float = 1.0,
        order: Literal["oldest", "newest", "arrival"] = "oldest",
        window: int | None = None,
        max_staleness: int | None = None,
        stale: Literal["train", "wait", "drop"] = "train",
        gate: str | None = None,
        balance: str | None = None,
        dp_size: int | None = None,
        micro_batch_tokens: int | None = None,
    ) -> None:
        super().__init__()
        for name, number, least in (
            ("groups", groups, 1), ("ahead", ahead, 0), ("window", window, 1), ("max_staleness", max_staleness, 0),
            ("dp_size", dp_size, 1), ("micro_batch_tokens", micro_batch_tokens, 1),
        ):  # fmt: skip
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
                raise SamplerError(f"{name} must be a whole number of at least {least}, got {number!r}.")
        if not isinstance(oversample, int | float) or not 1.0 <= oversample < math.inf:
            raise SamplerError(f"oversample must be at least 1, got {oversample!r}.")
        for name, text, such_as in (("gate", gate, "std(reward) > 0"), ("balance", balance, "length")):
            if text == "" or not isinstance(text, str | None):
                raise SamplerError(f'{name} must be a text such as "{such_as}", got {text!r}.')
        if order not in ORDERS or stale not in STALE:
            raise SamplerError(
                f"order must be one of {', '.join(ORDERS)}, and stale one of {', '.join(STALE)}; got {order!r} and "
                f"{stale!r}."
            )
        if micro_batch_tokens is not None and balance is None:
            raise SamplerError("micro_batch_tokens needs balance, the tag that says how long a row is.")
        if stale != "train" and max_staleness is None:
            raise SamplerError(f"stale={stale!r} needs max_staleness, which says what is too old.")
        if window is not None and window < groups:
            raise SamplerError(f"window must be at least groups ({groups}), got {window}: a draw takes as many.")
        self.groups, self.ahead, self.oversample, self.order, self.window = groups, ahead, oversample, order, window
        self.max_staleness, self.stale, self.gate, self.balance = max_staleness, stale, gate, balance
        self.dp_size, self.micro_batch_tokens = dp_size, micro_batch_tokens

    @property
    def bound(self) -> int | None:
        """``max_staleness``, where it is kept."""
        return None if self.stale == "train" else self.max_staleness

    @property
    def budget(self) -> int:
        """The number of slots."""
        return min(self.admitted.values()) if self.stale == "wait" else self.admitted["ahead"]

    @property
    def admitted(self) -> dict[str, int]:
        """By option, how many groups it lets workers be ahead of training."""
        admitted = {"ahead": math.ceil(self.oversample * (self.ahead + 1) * self.groups)}
        if self.bound is not None:
            admitted["max_staleness"] = (self.bound + 1) * self.groups
        return admitted

    @property
    def limits(self) -> dict[str, int]:
        """The options that keep workers from going further ahead, with values that would let them."""
        least = min(self.admitted.values())
        return {name: getattr(self, name) + 1 for name, groups in self.admitted.items() if groups == least}

    @property
    def order_key(self) -> Any:
        """By which ready groups are sorted; None: as they become ready."""
        return {"oldest": _oldest, "newest": _newest, "arrival": None}[self.order]

    def samples_needed(self, batch_size: int, dp_size: int | None) -> int:
        return 1

    def check(self, batch_size: int, dp_size: int | None) -> None:
        self._check_ranks(dp_size)
        if self.groups % (dp_size or 1):
            raise SamplerError(
                f"groups ({self.groups}, over all ranks) must be a multiple of dp_size ({dp_size}), so that every rank "
                f"gets as many."
            )

    def check_tail(self, tail: str | None) -> None:
        """Raise SamplerError for a tail policy that would tear groups apart."""
        if tail == "pad":
            raise SamplerError(
                "tail='pad' repeats rows to fill a round, and a row that is repeated would count twice in what is "
                "computed over its group. A GroupSampler takes 'drop' or 'uneven_ok'."
            )

    def sample(self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any) -> Picked:
        """Only a queue can draw groups."""
        raise SamplerError("GroupSampler draws groups of a queue's partition, and takes no sampling_config.")

    def round(self, wanted: Round) -> list[list[int]]:
        return self._dealt(wanted, self.pick)

    def last_round(self, wanted: Round) -> list[list[int]]:
        """What a sealed partition has left; fewer ranks may get some."""
        return self._dealt(wanted, list)

    # ---- which groups ----

    def pick(self, queue: DrawableGroups) -> list[GroupView]:
        """The groups of the next step; [] while there are too few, or slow ones must come first."""
        chosen = self._first(queue)
        if len(chosen) < self.groups:
            return []
        last, step = self.max_staleness, queue.step
        if self.stale != "wait" or step is None or last is None or self._keeps_bound(queue, chosen, last - step):
            return chosen
        chosen = sorted((group for group in queue.unfinished() if group in queue), key=_oldest)[: self.groups]
        # Where all that was begun is ready, waiting would change nothing.
        is_waiting = any(group not in queue for group in queue.unfinished())
        return [] if is_waiting and not self._keeps_bound(queue, chosen, last - step) else chosen

    def _first(self, queue: DrawableGroups) -> list[GroupView]:
        if self.window is None:
            return list(islice(queue, self.groups))
        allowed: set[int] = set()
        overtook: list[int] | None = None
        for place, group in enumerate(islice(queue.unfinished(), self.window)):
            overtook = queue.overtook(group) if overtook is None else overtook
            # What was drawn in front of it has its place still, or a slow first group could be overtaken for ever. A
            # step of the first ones of all may always be drawn, because it overtakes none.
            if place >= self.groups and place + bisect_left(overtook, group.seq) >= self.window:
                break
            allowed.add(group.index)
        return list(islice((group for group in queue if group.index in allowed), self.groups))

    def _keeps_bound(self, queue: DrawableGroups, chosen: Iterable[GroupView], spare: int) -> bool:
        """Whether all others can still be trained in time, as many in each step as a step takes.

        ``spare``: added to a group's version, the number of steps after this one in which it may be trained.
        """
        taken = {group.index for group in chosen}
        others = [group.version for group in queue.unfinished() if group.index not in taken]
        steps_left = sorted(version + spare for version in others if version is not None)
        return all(number < left * self.groups for number, left in enumerate(steps_left))

    # ---- micro-batches ----

    def cut(self, shares: Sequence[list[int]], partition: Any) -> list[list[int]]:
        """By rank, the rows of each of its micro-batches: equally many for all. Only with ``micro_batch_tokens``."""
        most = self.micro_batch_tokens or math.inf
        lengths = [sample_weights(share, self.balance or "", partition) for share in shares]
        parts = [starts_within(own, most) for own in lengths]
        count, rows = max(map(len, parts)), min(map(len, shares))
        if rows < count:
            raise SamplerError(
                f"a rank got {rows} rows of a round that another one cuts into {count} micro-batches of up to {most:,} "
                f"tokens. Ranks must make equally many steps: raise micro_batch_tokens, or groups."
            )
        return [refined(own, starts, count) for own, starts in zip(lengths, parts, strict=True)]

    # ---- which rank ----

    def _dealt(self, wanted: Round, pick: Callable[[DrawableGroups], list[GroupView]]) -> list[list[int]]:
        queue: DrawableGroups | None = wanted.partition.group_queue(wanted.ready)
        chosen = [] if queue is None else pick(queue)
        num_ranks, members = len(wanted.ranks), [group.all_members() for group in chosen]
        if self.balance is None or num_ranks == 1:
            parts = [list(range(rank, len(chosen), num_ranks)) for rank in range(num_ranks)]
        else:
            lengths = [sum(sample_weights(own, self.balance, wanted.partition)) for own in members]
            parts = karmarkar_karp(lengths, num_ranks, equal_size=not len(chosen) % num_ranks)
        return [[index for at in part for index in members[at]] for part in parts if part]


def _oldest(group: GroupView) -> tuple[int, int]:
    return (-1 if group.version is None else group.version), group.seq


def _newest(group: GroupView) -> tuple[int, int]:
    return (0 if group.version is None else -group.version), group.seq
