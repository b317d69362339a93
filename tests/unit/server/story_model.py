# SPDX-License-Identifier: Apache-2.0
"""What a queue should hold and answer, for stories of many clients: plain dicts, beside the model of the plane."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tests.unit.control.control_model import Entry, Key, PartitionModel, Sample, View
from transfer_queue import protocol as p


class Plan(NamedTuple):
    """How a task reads. ``names_batch``: it says which batch_index it wants; else its rank gets the next one."""

    fields: list[str]
    dp_size: int | None = None
    names_batch: bool = False


TASKS = {
    "free": Plan(["x"]),
    "pair": Plan(["x", "y"]),
    "named": Plan(["x"], 2, True),
    "next": Plan(["x", "y"], 2),
}


@dataclass
class Reader(View):
    """``next``: by rank, the batch after the last one it was given. ``missed``: given, and never received."""

    next: dict[int, int] = field(default_factory=dict)
    missed: set[Key] = field(default_factory=set)

    def due(self, rank: int) -> int:
        """The batch of a fetch that names none."""
        at = self.next.get(rank, 0)
        while (rank, at) in self.settled:
            at += 1
        return min([each for own, each in self.missed if own == rank], default=at)

    def gave(self, key: Key) -> None:
        self.next[key[0] or 0] = max(self.next.get(key[0] or 0, 0), key[1] + 1)
        self.missed.discard(key)

    def settle(self, key: Key) -> None:
        super().settle(key)
        self.missed.discard(key)

    def reset(self) -> None:
        super().reset()
        self.next.clear()
        self.missed.clear()
        for entry in self.ledger.values():
            entry.token = ""  # another one, which the next answer tells

    def lost(self, key: Key, token: str) -> None:
        """The answer with this batch never arrived."""
        if key in self.ledger and self.ledger[key].token == token and key[1] < self.next.get(key[0] or 0, 0):
            self.missed.add(key)


class Turn(NamedTuple):
    """What a fetch gets: a new batch ("draw") or one of the ledger ("batch"), an error or an end; "": it waits."""

    kind: str = ""
    key: Key | None = None
    samples: Sequence[int] = ()


@dataclass
class Part(PartitionModel):
    """``values``: by sample and field. ``num_rewrites``: publishes to samples that were there."""

    values: dict[int, dict[str, int]] = field(default_factory=dict)
    num_rewrites: int = 0

    def view(self, task: str) -> Reader:
        view = self.views.setdefault(task, Reader())
        assert isinstance(view, Reader)
        return view

    def hold(self, indexes: Sequence[int], client: str) -> None:
        self.samples.update({index: Sample(client) for index in indexes})
        self.samples = dict(sorted(self.samples.items()))

    def wrote(self, indexes: Sequence[int], columns: Mapping[str, list[int]], tags: Mapping[int, Any]) -> None:
        """These values are published. ``tags``: by row."""
        self.hold([index for index in indexes if index not in self.samples], "")
        self.num_rewrites += any(self.samples[index].state == "live" for index in indexes)
        for row, index in enumerate(indexes):
            own = {name: values[row] for name, values in columns.items()}
            self.values.setdefault(index, {}).update(own)
            self.samples[index].tags.update(tags.get(row, {}))
        self.publish(list(indexes), list(columns), 0.0)

    def clear(self, indexes: list[int]) -> list[int]:
        gone = super().clear(indexes)
        for index in gone:
            self.values.pop(index, None)
        return gone

    def shifted(self, by: int) -> Part:
        """The same samples in a queue where they have other indexes."""
        views = {}
        for task, view in self.views.items():
            views[task] = copy.deepcopy(view)
            views[task].given = {index + by: key for index, key in view.given.items()}
            views[task].consumed = {index + by for index in view.consumed}
            for entry in views[task].ledger.values():
                entry.indexes = [index + by for index in entry.indexes]
                entry.consumes = {index + by for index in entry.consumes}
        return replace(
            self, views=views, samples={index + by: copy.deepcopy(own) for index, own in self.samples.items()},
            values={index + by: dict(own) for index, own in self.values.items()},
            keys={key: index + by for key, index in self.keys.items()},
        )  # fmt: skip

    def with_field(self, name: str) -> list[int]:
        return [index for index in self.live() if name in self.samples[index].fields]

    def release(self, indexes: Iterable[int]) -> None:
        self.release_reserved([index for index in indexes if index in self.samples])

    def turn(self, fetch: p.Fetch, may_draw: bool = True) -> Turn:
        """What this fetch gets now. ``may_draw``: none waits in front of it."""
        view, (fields, dp_size, _), key = self.view(fetch.task), TASKS[fetch.task], None
        if fetch.dp_rank is not None:
            index = view.due(fetch.dp_rank) if fetch.batch_index is None else fetch.batch_index
            key = (fetch.dp_rank, index)
            if key in view.settled:
                return Turn("InvalidRequestError")
            if key in view.ledger:
                own = view.ledger[key].indexes
                return Turn("batch" if self.samples.keys() >= set(own) else "SampleClearedError", key, own)
        ready, wanted = self.ready(fetch.task, fields), fetch.batch_size * (dp_size or 1)
        if not may_draw:
            return Turn()
        if len(ready) >= wanted:
            return Turn("draw", key, ready[:wanted])
        coming = len(self.undrawn(fetch.task)) - len(ready) + len(self.held())
        if self.sealed and dp_size is not None and len(ready) + coming < wanted:
            return Turn("ended")
        if self.sealed and dp_size is None and not coming:
            return Turn("draw", key, ready) if ready else Turn("ended")
        return Turn()

    def give(self, fetch: p.Fetch, turn: Turn) -> list[int]:
        """The fetch gets this; if it is new, so do the other ranks. Returns its samples."""
        view, indexes = self.view(fetch.task), list(turn.samples)
        if turn.key is None:
            view.given.update(dict.fromkeys(indexes))
            view.consumed.update(indexes)
            return indexes
        if turn.kind == "draw":
            for rank in range(TASKS[fetch.task].dp_size or 1):
                own = indexes[rank * fetch.batch_size : (rank + 1) * fetch.batch_size]
                assert (rank, turn.key[1]) not in view.ledger, "a batch exists for all ranks or for none"
                view.ledger[rank, turn.key[1]] = Entry(own, set(own), "", 2)
                view.given.update(dict.fromkeys(own, (rank, turn.key[1])))
                view.consumed.update(own)
        entry = view.ledger[turn.key]
        view.consumed.update(entry.consumes)
        view.gave(turn.key)
        return entry.indexes


@dataclass
class Write:
    """A put: how it begins, what it writes by field, its tags by row, and the samples once they are known."""

    begin: Any
    values: dict[str, list[int]]
    tags: dict[int, dict[str, int]]
    indexes: list[int] = field(default_factory=list)

    @property
    def by_key(self) -> bool:
        return isinstance(self.begin, p.ResolveKeys)


@dataclass
class Saved:
    """``parts``: what the queue held when it was frozen. ``torn``: samples that a late writer may have replaced."""

    parts: dict[str, Part]
    seen: set[int]
    torn: set[int]
    state: list[bytes] = field(default_factory=list)
