# SPDX-License-Identifier: Apache-2.0
"""What the checkers share: what counts as trained in the end, and which errors the faults explain. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tests.chaos.ledger import Record

Key = tuple[str, str, int]
"""(rank, partition, batch)"""


class Trained(NamedTuple):
    at: float
    life: int
    numbers: list[int]


def named(what: str, numbers: list[Any]) -> list[str]:
    """One sentence if there are any."""
    return [f"{len(numbers)} {what}: {numbers[:20]}"] if numbers else []


def effective(records: Sequence[Record]) -> tuple[dict[Key, Trained], list[str]]:
    """What counts as trained in the end, by batch, and what changed although it must not.

    A queue that was restored has forgotten what happened after its checkpoint. What a rank acknowledged before counts.
    """
    wrong: list[str] = []
    final: dict[Key, Trained] = {}
    acked: dict[Key, float] = {}
    saves = {record.what["began"]: record.at for record in records if record.event == "saved"}
    for record in records:
        if record.event == "restored":
            began = record.what["began"]
            ended = (
                None if began is None else saves.get(began, record.at)
            )  # its process may have died before it said so
            final = {} if ended is None else {key: one for key, one in final.items() if acked.get(key, ended) < ended}
            acked = {key: at for key, at in acked.items() if key in final}
        elif record.event == "trained":
            key = _key(record, record.what["batch"])
            before = final.get(key)
            if before is not None and before.life == record.life and before.numbers != record.what["numbers"]:
                wrong.append(f"batch {key} was {before.numbers}, and then {record.what['numbers']}")
            final[key] = Trained(record.at, record.life, record.what["numbers"])
        elif record.event == "acking":
            for batch in range(record.what["batch"] + 1):
                acked.setdefault(_key(record, batch), record.at)
    return final, wrong


def _key(record: Record, batch: int) -> Key:
    return record.actor, record.what.get("part", ""), batch


# ---- errors ----

_EXPLAINED = {
    "QueueUnreachableError": {"kill queue", "kill unit", "kill host", "stop", "cut", "full memory"},
    "UnitLostError": {"kill unit", "kill host", "kill queue", "cut", "full memory"},
    "SessionEndedError": {"stop", "cut", "full memory"},
    "ProducersGoneError": {"kill", "die", "kill all", "kill queue", "kill host", "stop", "cut", "full memory"},
    "StorageKeyNotFoundError": {"kill unit", "kill host", "cut"},
    "ClosedError": {"kill queue"},
    "CheckpointError": {"fill"},
    "MemoryError": {"full memory"},
    "RemoteError": {"full memory"},
    "LeaseLostError": {"stop", "kill", "die", "kill queue", "cut", "kill host", "kill all", "full memory"},
    "BatchTimeoutError": {"kill unit", "kill host", "cut", "stop"},
    "StorageFullError": {"kill", "die", "stop", "kill all", "cut", "kill unit", "fill", "kill queue", "kill host"},
}
"""By error, the faults of which one must have happened before."""


def errors(records: Sequence[Record], small_disk: bool) -> Iterator[str]:
    """Those that no fault explains. ``small_disk``: there may be no room for a checkpoint."""
    happened: set[str] = set()
    for record in records:
        if record.event == "fault":
            happened.add(record.what["fault"])
        elif record.event == "error" and not _EXPLAINED.get(record.what["kind"], set()) & happened:
            yield f"{record.actor} got {record.what['kind']}, which no fault explains: {record.what['text']}"
        elif record.event == "unsaved" and not small_disk and not {"kill queue", "stop", "cut"} & happened:
            yield f"{record.actor} could not save: {record.what['text']}"
