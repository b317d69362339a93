# SPDX-License-Identifier: Apache-2.0
"""Feeding groups: rows of a data set become heads of groups, a bounded number ahead of the workers that lease them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import transfer_queue as tq
from lightning_tq.checks import check_int
from transfer_queue import EndOfPartitionError, KeysTimeoutError, TransferQueueClient
from transfer_queue.errors import ConfigError, InvalidRequestError

Row = Mapping[str, Any]
Rows = Iterable[Row] | Callable[[int], Iterable[Row]]
_WAITS = "group.state == 'waiting'"
_LOOK_EVERY_S = 30.0


def feed_groups(
    rows: Rows,
    partition: str,
    *,
    client: TransferQueueClient | None = None,
    epochs: int = 1,
    waiting: int = 256,
    key: str = "row",
    tags: Sequence[str] = (),
    **terms: Any,
) -> None:
    """Add each row as a group, and seal the partition after the last one. It goes on where an earlier feeder stopped.

    At most ``waiting`` groups wait for their first lease. The queue knows how many were added, also one that was
    restored, so nothing is added twice or left out. Nobody else may add groups to these partitions.

    Args:
        rows: Mappings of fields: any iterable, a data set with length and index, or a function of the epoch that
            returns one. They must come in the same order after a resume.
        partition: A name; for several epochs a template such as "train@{epoch}". The next epoch's partition is there
            before the last one is sealed, because workers that lease from "train@*" end when all of them are done.
        client: Default: this process's client (``transfer_queue.get_client()``).
        waiting: Most groups that wait. Half of them are added at once.
        key: Row n has the key "<key>/n".
        tags: Names of entries of a row that become tags instead of fields.
        terms: The rest as for ``client.add_groups``: parts, tasks, attempts, deadline_s and so on.
    Raises:
        InvalidRequestError: epochs without "{epoch}" in the partition, or rows that can be read only once.
        EndOfPartitionError: the partition was cleared meanwhile.
    Examples:
        >>> feed_groups([{"prompt": "1 + 1"}, {"prompt": "2 + 3"}], "sums", parts=4, key="sum")
        >>> [lease.key for lease in client.lease("sums", 2)]
        ['sum/0', 'sum/1']
    """
    check_int("epochs", epochs, 1)
    check_int("waiting", waiting, 1)
    if "{" in partition.replace("{epoch}", ""):
        raise InvalidRequestError(f"the only part of a partition's template is '{{epoch}}', got {partition!r}.")
    if epochs > 1 and "{epoch}" not in partition:
        raise InvalidRequestError(
            f"{epochs} epochs need partitions of their own, such as 'train@{{epoch}}', got {partition!r}."
        )
    if epochs > 1 and isinstance(rows, Iterator):
        raise InvalidRequestError(
            f"rows can be read only once, but epochs={epochs}. Give a list, a data set, or a function of the epoch."
        )
    client = tq.get_client() if client is None else client
    names = [partition.format(epoch=epoch) for epoch in range(epochs)]
    for epoch in range(_first_epoch(client, names), epochs):
        _Feeder(client, names[epoch], waiting).feed(
            rows(epoch) if callable(rows) else rows, key, frozenset(tags), terms
        )
        for name in names[epoch + 1 : epoch + 2]:
            client.create_partition(name)
        client.seal_partition(names[epoch])


def feed(rows: str, partition: str, *, args: Mapping[str, Any] | None = None, **terms: Any) -> None:
    """``feed_groups`` as the target of a Producer: ``Producer(target="lightning_tq.prompts:feed", args={...})``.

    Args:
        rows: "module:function", which returns the rows. A function with a parameter "epoch" gets it.
        args: Other keyword arguments of that function.
        terms: The rest as for ``feed_groups``.
    Raises:
        ConfigError: there is no such function.
    """
    module, _, name = rows.partition(":")
    function: Callable[..., Iterable[Row]] | None = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ConfigError(f"rows={rows!r} names no function that returns rows. Write 'module:function'.")
    given, takes_epoch = dict(args or {}), "epoch" in inspect.signature(function).parameters

    def of_epoch(epoch: int) -> Iterable[Row]:
        return function(**given, **({"epoch": epoch} if takes_epoch else {}))

    feed_groups(of_epoch, partition, **terms)


def _first_epoch(client: TransferQueueClient, names: list[str]) -> int:
    """The first one that is not complete. Those before it may be cleared."""
    known = client.get_stats()["partitions"]
    there = [epoch for epoch, name in enumerate(names) if name in known]
    is_open = [epoch for epoch in there if not known[names[epoch]]["sealed"]]
    return min(is_open, default=max(there, default=-1) + 1)


class _Feeder:
    """Fills one partition. It follows the states of its groups, as the queue reports each change."""

    def __init__(self, client: TransferQueueClient, partition: str, waiting: int) -> None:
        self._client, self._partition, self._most = client, partition, waiting
        self._changes = iter(client.kv_watch(partition, timeout_s=_LOOK_EVERY_S))
        self._waiting: set[str] = set()

    def feed(self, rows: Iterable[Row], key: str, tags: frozenset[str], terms: Mapping[str, Any]) -> None:
        known = self._client.get_stats()["partitions"].get(self._partition, {})
        number = known.get("groups", {}).get("added", 0)
        left, self._waiting = _from(rows, number), self._listed()
        while chunk := list(islice(left, self._room())):
            keys = [f"{key}/{number + at}" for at in range(len(chunk))]
            self._waiting.update(keys)
            columns, tagged = _columns(number, chunk, tags)
            self._client.add_groups(columns, self._partition, keys=keys, tags=tagged, **terms)
            number += len(chunk)

    def _room(self) -> int:
        """Wait until half of the groups that may wait do. Returns how many more may."""
        while len(self._waiting) > self._most // 2:
            try:
                changes = next(self._changes, None)
            except KeysTimeoutError:  # a group may have come and gone between two reports, and none mentions it
                self._waiting = self._listed()
                continue
            if changes is None:
                raise EndOfPartitionError(f"partition {self._partition!r} was cleared while groups were added to it.")
            for key, tags in changes.changed.items():
                (self._waiting.add if tags.get("group.state") == "waiting" else self._waiting.discard)(key)
            self._waiting.difference_update(changes.removed)
        return self._most - len(self._waiting)

    def _listed(self) -> set[str]:
        return set(self._client.kv_list(self._partition, where=_WAITS).get(self._partition, {}))


def _columns(number: int, rows: list[Row], tags: frozenset[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fields and the tags of these rows. ``number``: of the first one."""
    names = rows[0].keys()
    for at, row in enumerate(rows):
        if row.keys() != names or not tags <= row.keys():
            raise InvalidRequestError(
                f"row {number + at} has {sorted(row)}, where others have {sorted(names)} and tags are "
                f"{sorted(tags)}. All rows must have the same entries."
            )
    columns = {name: [row[name] for row in rows] for name in names if name not in tags}
    if not columns:
        raise InvalidRequestError(f"row {number} has no entry besides its tags {sorted(tags)}. A group needs a field.")
    return columns, [{name: row[name] for name in tags} for row in rows]


def _from(rows: Any, start: int) -> Iterator[Row]:
    """The rows from this one on."""
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):  # without reading those before
        return (rows[number] for number in range(start, len(rows)))
    return islice(iter(rows), start, None)
