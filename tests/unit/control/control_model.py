# SPDX-License-Identifier: Apache-2.0
"""What a partition should be, in plain dicts and sets: the reference that the control plane is compared with.
And the tasks that read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Key = tuple[int | None, int]


@dataclass
class Sample:
    """One reserved or published row."""

    holder: str
    state: str = "held"  # held, live
    fields: set[str] = field(default_factory=set)
    tags: dict[str, int] = field(default_factory=dict)


@dataclass
class Entry:
    """One batch that the plane promised to give again."""

    indexes: list[int]
    consumes: set[int]
    token: str
    dp_size: int | None


@dataclass
class View:
    """One task in one partition. ``given``: the ledger key each sample went to, None where it was an unnamed fetch."""

    given: dict[int, Key | None] = field(default_factory=dict)
    consumed: set[int] = field(default_factory=set)
    ledger: dict[Key, Entry] = field(default_factory=dict)
    settled: set[Key] = field(default_factory=set)
    ended: set[str | None] = field(default_factory=set)
    """Filters of fetches that were told the end of a sealed partition."""
    last_drawn: set[str | None] = field(default_factory=set)
    """Filters whose last samples were drawn after the seal: their end may have come with that batch."""
    num_resets: int = 0
    ends: set[int] = field(default_factory=set)
    received: tuple[int, set[int]] = field(default_factory=lambda: (0, set()))
    """Number of resets, and the samples of unnamed fetches since then whose answers were received."""

    def is_past_end(self, request: Any, batch_index: int | None) -> bool:
        start = request.pass_start
        return start is not None and batch_index is not None and any(start < end <= batch_index for end in self.ends)

    def ack(self, tokens: list[str], earlier: bool) -> int:
        named = [key for key, entry in self.ledger.items() if entry.token in tokens]
        hit = [
            key for key in self.ledger
            if key in named or (earlier and any(rank == key[0] and at > key[1] for rank, at in named))
        ]  # fmt: skip
        for key in hit:
            self.settle(key)
        return len(hit)

    def release(self, indexes: list[int], num_resets: int) -> None:
        """An unnamed fetch got these, and was cancelled."""
        back = [i for i in indexes if i in self.given and self.given[i] is None and num_resets == self.num_resets]
        for index in back:
            del self.given[index]
            self.consumed.discard(index)
        if back:
            self.ended.clear()
            self.last_drawn.clear()

    def settle(self, key: Key) -> None:
        del self.ledger[key]
        self.settled.add(key)

    def clear(self, gone: set[int]) -> None:
        for index in gone:
            self.given.pop(index, None)
            self.consumed.discard(index)
        for key, entry in list(self.ledger.items()):
            if entry.consumes & gone and entry.consumes.isdisjoint(self.given):
                self.settle(key)

    def reset(self) -> None:
        for key, entry in list(self.ledger.items()):
            if entry.dp_size is not None and any(batch == key[1] for _, batch in self.settled):
                del self.ledger[key]
        self.settled.clear()
        self.num_resets += 1
        self.ends.clear()
        self.consumed.clear()
        self.given = {index: key for index, key in self.given.items() if key in self.ledger}
        self.ended.clear()
        self.last_drawn.clear()


FILTERS: dict[str | None, Callable[[dict[str, int]], bool]] = {
    None: lambda tags: True,
    "v >= 1": lambda tags: tags.get("v", 0) >= 1,
    "not exists(v)": lambda tags: "v" not in tags,
    "v in [0, 2] or total_lengths > 2": lambda tags: tags.get("v") in (0, 2) or tags.get("total_lengths", 0) > 2,
}


@dataclass
class PartitionModel:
    """Samples by index, in order of index."""

    samples: dict[int, Sample] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    sealed: bool = False
    num_samples: int | None = None
    published: int = 0
    last_published: float | None = None
    tokens: set[str] = field(default_factory=set)

    def view(self, task: str) -> View:
        return self.views.setdefault(task, View())

    def live(self) -> list[int]:
        return [index for index, sample in self.samples.items() if sample.state == "live"]

    def held(self) -> list[int]:
        """Under way: reserved for a put that has begun."""
        return [index for index, sample in self.samples.items() if sample.state == "held"]

    def has(self, index: int, fields: list[str]) -> bool:
        sample = self.samples.get(index)
        return sample is not None and sample.state == "live" and sample.fields.issuperset(fields)

    def undrawn(self, task: str) -> list[int]:
        given = self.view(task).given
        return [index for index in self.live() if index not in given]

    def matches(self, index: int, where: str | None) -> bool:
        return FILTERS[where](self.samples[index].tags)

    def ready(self, task: str, fields: list[str], where: str | None = None) -> list[int]:
        complete = [index for index in self.undrawn(task) if self.has(index, fields)]
        return [index for index in complete if self.matches(index, where)]

    def unmatched(self, task: str, fields: list[str], where: str | None) -> list[int]:
        """Those that would be ready without the filter."""
        return [index for index in self.ready(task, fields) if not self.matches(index, where)]

    def lacking(self, indexes: list[int], fields: list[str]) -> dict[str, int]:
        counts = {name: sum(not self.has(index, [name]) for index in indexes) for name in fields}
        return {name: count for name, count in counts.items() if count}

    def make_live(self, indexes: list[int]) -> None:
        for index in indexes:
            self.published += self.samples[index].state != "live"
            self.samples[index].state = "live"
        self.seal_if_complete()

    def seal_if_complete(self) -> None:
        if self.num_samples is not None and self.published >= self.num_samples:
            self.sealed = True

    def publish(self, indexes: list[int], fields: list[str], now: float) -> None:
        for index in indexes:
            self.samples[index].fields.update(fields)
        self.make_live(indexes)
        self.last_published = now

    def done_with(self, tasks: set[str], being_read: set[int]) -> list[int]:
        views = [self.view(task) for task in tasks]
        named = {index for view in views for entry in view.ledger.values() for index in entry.indexes} | being_read
        return [i for i in self.live() if i not in named and all(i in view.consumed for view in views)]

    def clear(self, indexes: list[int]) -> list[int]:
        gone = [index for index in sorted(set(indexes)) if index in self.samples]
        for index in gone:
            del self.samples[index]
        self.keys = {key: index for key, index in self.keys.items() if index in self.samples}
        for view in self.views.values():
            view.clear(set(gone))
        return gone

    def release_reserved(self, indexes: list[int]) -> None:
        self.clear([i for i in indexes if i in self.samples and self.samples[i].state != "live"])

    def uninsert(self, indexes: list[int]) -> None:
        samples = self.samples
        bare = [i for i in indexes if i in samples and not samples[i].fields and not samples[i].tags]
        self.published -= len(bare)
        self.clear(bare)


@dataclass
class ProducersModel:
    """Every session that asked to write a field or published it, in the order in which those that ended did."""

    alive: dict[str, dict[str, bool]] = field(default_factory=dict)
    ends: dict[str, list[tuple[float, bool]]] = field(default_factory=dict)

    def announced(self, client: str, fields: Any) -> None:
        for name in fields:
            self.alive.setdefault(name, {}).setdefault(client, False)

    def published(self, client: str, fields: Any) -> None:
        for name in fields:
            self.alive.setdefault(name, {})[client] = True

    def gone(self, client: str, died: bool, now: float) -> None:
        for name, alive in self.alive.items():
            published = alive.pop(client, None)
            if published or (died and published is not None):
                self.ends.setdefault(name, []).append((now, died))

    def lost(self, fields: list[str], now: float, grace_s: float) -> bool:
        return any(
            self.ends.get(name) and not self.alive[name] and self.ends[name][-1][1]
            and now >= self.ends[name][-1][0] + grace_s
            for name in fields
        )  # fmt: skip

    def clear(self) -> None:
        self.alive.clear()
        self.ends.clear()


MAX_TOKENS = 8


@dataclass(frozen=True)
class TaskPlan:
    """How a task of the machine is registered and read. ``sizes``: the batch sizes it asks for."""

    sampler: str | dict[str, Any] | None = None
    dp_size: int | None = None
    tail: str | None = None
    sizes: tuple[int, ...] = (1, 2, 3)
    finite: bool = False
    exact: bool = True
    """Any batch_size * dp_size ready samples make a round."""

    @property
    def policy(self) -> str:
        return self.tail or ("uneven_ok" if (self.dp_size or 1) == 1 else "drop")


def spec(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"class": name, "args": [], "kwargs": kwargs}


TASKS = {
    "plain": TaskPlan(),
    "padded": TaskPlan(dp_size=2, tail="pad", sizes=(2,)),
    "uneven": TaskPlan("SequentialSampler", dp_size=3, tail="uneven_ok", sizes=(1, 2)),
    "ranks": TaskPlan("RankAwareSampler", dp_size=2),
    "groups": TaskPlan(spec("GRPOGroupNSampler", n_samples_per_prompt=2), dp_size=2, sizes=(2,), exact=False),
    "balanced": TaskPlan(spec("SeqlenBalancedSampler", dp_size=2), tail="pad", sizes=(1, 2)),
    "tokens": TaskPlan(spec("TokenBudgetSampler", max_tokens=MAX_TOKENS), dp_size=2, sizes=(3,), exact=False),
    "finite": TaskPlan(finite=True, sizes=(2,)),
    "finite_ranks": TaskPlan(dp_size=2, finite=True, sizes=(2,)),
}
DP_SIZES = {name: 2 if name == "balanced" else plan.dp_size for name, plan in TASKS.items()}
