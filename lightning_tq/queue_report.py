# SPDX-License-Identifier: Apache-2.0
"""A report on a running queue: two snapshots of its statistics give rates, and rich draws the tables."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_tq.checks import byte_text, counted, list_names
from transfer_queue import Finding, diagnose, is_internal
from transfer_queue.errors import TransferQueueError

if TYPE_CHECKING:
    from transfer_queue import Observer, TransferQueueClient

R = TypeVar("R")
Numbers = dict[str, Any]
Holdings = dict[str, int]
"""What a client holds, by kind."""
_HELD = ("connections", "reservations", "reserved", "leases", "pins", "freezes", "leaves", "parked", "unreceived")

_UNITS_TIMEOUT_S = 5.0

_SAMPLES = ("partition", "", "samples", "put/s", "task", "ready", "in flight", "consumed", "per s", "dropped")
_GROUPS = ("groups of", "added", "are", "slots in use")
_WAITING = ("waits", "since", "for", "held up by")
_HOLDERS = ("holds", "reserved", "leases", "pins", "freezes", "leaves")
_CLIENTS = ("client", *_HELD)
_UNITS = ("unit", "samples", "live", "held", "of", "arena", "spare", "leased", "uncommitted", "pins", "puts waiting")
_NAMES = {"partition", "task", "groups of", "waits", "holds", "client", "unit"}
"""Columns that a narrow terminal folds, so that numbers stay whole."""
_LONG = {"", "are", "for", "held up by"}
"""Columns of sentences."""
_SHORT = 12
_CONTROL = dict.fromkeys([*range(10), *range(11, 32), *range(127, 160)], "\ufffd")
_RARE = {"dropped", "spare", "leased", "uncommitted", "puts waiting", *_HELD[1:]}
"""Columns that are hidden while they are empty."""
_FILE_WIDTH = 160
_MOST_LINES = 3


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """Statistics of the controller and of each storage unit, as plain data."""

    stats: Numbers
    units: list[Numbers]
    taken_at: float
    """Monotonic seconds."""
    units_error: str | None = None
    """Why ``units`` is empty although units may exist."""

    def findings(self) -> list[Finding]:
        """What waits in the queue, and what went wrong."""
        return diagnose(self.stats, self.units, self.units_error)


async def take_snapshot(client: TransferQueueClient | Observer) -> QueueSnapshot:
    """Ask the controller and every storage unit once. It changes nothing in the queue."""
    stats = await client.async_get_stats()
    stats["clients"] = others(stats)
    del stats["asked_by"]
    units: list[Numbers] = []
    error = None
    try:
        answers = await _within(_UNITS_TIMEOUT_S, client.async_get_storage_stats())
        # "path" describes this client's own route for values, and it moves none.
        units = [{name: number for name, number in unit.items() if name != "path"} for unit in answers]
        silent = {unit["name"] for unit in stats["storage_units"]} - {unit["unit"] for unit in units}
        error = f"no answer from {list_names(silent)}" if units and silent else None
    except asyncio.TimeoutError:
        error = f"no answer from every unit within {_UNITS_TIMEOUT_S:g} s"
    except TransferQueueError as failure:  # the controller's numbers are still useful
        error = str(failure)
    return QueueSnapshot(stats, units, time.monotonic(), error)


async def _within(seconds: float, asked: Coroutine[Any, Any, R]) -> R:
    """As ``asyncio.wait_for``, which drops a cancellation that comes together with the result before Python 3.12."""
    asking = asyncio.ensure_future(asked)
    try:
        if not (await asyncio.wait([asking], timeout=seconds))[0]:
            raise asyncio.TimeoutError
        return asking.result()
    finally:
        asking.cancel()


def others(stats: Numbers) -> dict[str, Holdings]:
    """What each client of the queue holds, without the client that asked for these statistics."""
    return {
        name: {**dict.fromkeys(_HELD, 0), **held}
        for name, held in stats["clients"].items()
        if name != stats["asked_by"]
    }


def make_report(address: str, now: QueueSnapshot, before: QueueSnapshot | None = None) -> Numbers:
    """What ``--json`` prints: the statistics of ``now``, and rates since ``before``.

    ``put_per_s``: samples that became readable. ``consumed_per_s``, per task: samples that it consumed, or that were
    cleared before it could. Both are None without ``before``, or if the partition or the task began anew since.
    ``findings``: what ``diagnose`` finds, with its text. The queue's own partitions and their tasks are left out.
    """
    stats, before = without_internal(now.stats), before or now
    earlier, seconds = before.stats["partitions"], now.taken_at - before.taken_at
    partitions = {name: _with_rates(own, earlier.get(name, {}), seconds) for name, own in stats["partitions"].items()}
    return {
        "address": address, **stats, "partitions": partitions, "units": now.units, "units_error": now.units_error,
        "findings": [plain(each) for each in now.findings()],
    }  # fmt: skip


def without_internal(stats: Numbers) -> Numbers:
    """Statistics without the queue's own partitions, their tasks and the fields that only they have."""
    partitions = {name: each for name, each in stats["partitions"].items() if not is_internal(name)}
    fields = {field for each in partitions.values() for field in each["fields"]}
    own = {f for name, each in stats["partitions"].items() if is_internal(name) for f in each["fields"]} - fields
    by_task = {kind: _without_internal(stats["metrics"][kind]) for kind in ("versions", "age_s")}
    return {
        **stats, "partitions": partitions, "dropped": _without_internal(stats["dropped"]),
        "metrics": {**stats["metrics"], **by_task},
        "waiting": [each for each in stats["waiting"] if each["writer"] or not is_internal(each["partition"])],
        "producers": {field: each for field, each in stats["producers"].items() if field not in own},
    }  # fmt: skip


def _without_internal(by_name: Numbers) -> Numbers:
    return {name: each for name, each in by_name.items() if not is_internal(name)}


def plain(finding: Finding) -> Numbers:
    """Its fields and its texts, for JSON."""
    return {**asdict(finding), "statement": finding.statement, "text": str(finding)}


def _with_rates(partition: Numbers, earlier: Numbers, seconds: float) -> Numbers:
    """A partition or task that ``earlier`` lacks began since, with no samples."""
    tasks = {}
    for name, task in partition["tasks"].items():
        was = earlier.get("tasks", {}).get(name, {})
        tasks[name] = {**task, "consumed_per_s": _rate(task["done_total"], was.get("done_total", 0), seconds)}
    put_per_s = _rate(partition["put_total"], earlier.get("put_total", 0), seconds)
    groups = partition.get("groups")
    added = {} if groups is None else {"groups": {**groups, "says": list(Finding.of_groups("", groups).held_up_by)}}
    return {**partition, "put_per_s": put_per_s, "tasks": tasks, **added}


def _rate(now: int, before: int, seconds: float) -> float | None:
    if now < before or seconds <= 0:  # another partition with this name, or a forgotten task
        return None
    return (now - before) / seconds


# ---- tables ----


def show(what: RenderableType) -> None:
    """Print it to stdout."""
    console = Console()
    if not console.is_terminal:  # rich assumes 80 columns for a file
        console.width = _FILE_WIDTH
    console.print(what)


def clients_table(clients: dict[str, Holdings]) -> RenderableType:
    """What each client holds, whether it is anything or not."""
    return table_of(_CLIENTS, [_holder_row(name, held, _CLIENTS) for name, held in clients.items()])


def tables(report: Numbers) -> RenderableType:
    """One screen: a headline, samples by partition and task, waiting requests, holders, storage units, alarms."""
    findings = report["findings"]
    parts: list[RenderableType] = [_headline(report), table_of(_SAMPLES, list(_sample_rows(report)))]
    holding = {name: held for name, held in report["clients"].items() if any(held[what] for what in _HOLDERS[1:])}
    rows = {
        _GROUPS: [_group_row(name, own["groups"]) for name, own in report["partitions"].items() if "groups" in own],
        _WAITING: [_waiting_row(each) for each in findings if each["waits_for"]],
        _HOLDERS: [_holder_row(name, held, _HOLDERS) for name, held in holding.items()],
        _UNITS: [_unit_row(unit) for unit in report["units"]],
    }
    parts += [table_of(columns, own) for columns, own in rows.items() if own]
    for kind in ("gone", "lost", "full", "storage", "unit", "sampler"):
        if texts := [each["statement"] for each in findings if each["kind"] == kind]:
            more = len(texts) - _MOST_LINES
            shown = [*texts[-_MOST_LINES:], *([f"and {more:,} more of this kind (lightning-tq doctor)"] * (more > 0))]
            parts.append(Text("\n".join(shown), style="red"))
    return Group(*(line for part in parts for line in (part, Text())))


def _headline(report: Numbers) -> Text:
    partitions = report["partitions"].values()
    samples = sum(partition["samples"] for partition in partitions)
    limit = "" if report["capacity"] is None else f" of {report['capacity']:,}"
    held = sum(unit["held_nbytes"] for unit in report["units"])
    return Text(
        f"{report['address']}: {samples:,}{limit} samples in {counted(len(partitions), 'partition')}, "
        f"{byte_text(held)} held, {counted(len(report['waiting']), 'request')} waiting"
    )


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """A table, with numbers on the right. Columns that are rarely needed are left out where they are empty."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    empty = {name for at, name in enumerate(columns) if all(str(row[at]) in ("", "0", "0 B") for row in rows)}
    shown = [at for at, name in enumerate(columns) if name not in _RARE & empty]
    for at in shown:
        is_text = columns[at] in _LONG or not all(re.match(r"\d|$", str(row[at])) for row in rows)
        wraps = columns[at] in _NAMES or any(len(str(row[at])) > _SHORT for row in rows if columns[at] in _LONG)
        justify: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(columns[at], justify=justify, overflow="fold" if wraps else "ellipsis", no_wrap=not wraps)
    for row in rows:
        table.add_row(*(literal(row[at]) for at in shown))
    return table


def literal(cell: str | Text) -> Text:
    """Keep names literal. Rich would read ``val[hard]`` as markup, and a terminal obeys control characters."""
    return Text(cell.translate(_CONTROL)) if isinstance(cell, str) else cell


def _sample_rows(report: Numbers) -> Iterator[list[str | Text]]:
    for name, partition in report["partitions"].items():
        declared = "" if partition["num_samples"] is None else f" of {partition['num_samples']:,}"
        first: list[str | Text] = [
            name, _state(report, name), f"{partition['samples']:,}{declared}", _per_s(partition["put_per_s"])
        ]  # fmt: skip
        for number, (task, numbers) in enumerate(partition["tasks"].items()):
            yield [*(["", "", "", ""] if number else first), task, *_task_row(numbers)]
        if not partition["tasks"]:
            yield [*first, Text("no reader", style="dim"), "", "", "", "", ""]


def _state(report: Numbers, name: str) -> Text:
    partition = report["partitions"][name]
    is_wrong = any(each["kind"] in ("gone", "lost") and each["names"][0] == name for each in report["findings"])
    state = "sealed" if partition["sealed"] else f"{partition['held']:,} coming" if partition["held"] else "open"
    return Text(state, style="red" if is_wrong else "")


def _task_row(task: Numbers) -> list[str | Text]:
    ready: Sequence[str] = [f"{count:,}" for count in task["ready"].values()]
    if len(ready) > 1:  # the task reads several sets of fields
        ready = [f"{count:,} ({fields})" for fields, count in task["ready"].items()]
    return [
        "\n".join(ready) or "0",
        f"{task['in_flight']:,}",
        f"{task['consumed']:,}" + (" (all)" if task["ended"] else ""),
        _per_s(task["consumed_per_s"]),
        Text(f"{task['dropped']:,}", style="yellow" if task["dropped"] else ""),
    ]


def _group_row(name: str, groups: Numbers) -> list[str | Text]:
    slots = [f"{task}: {each['used']:,} of {each['budget']:,}" for task, each in groups["slots"].items()]
    return [name, f"{groups['added']:,}", ", ".join(groups["says"]), ", ".join(slots)]


def _waiting_row(finding: Numbers) -> list[str | Text]:
    since = "" if finding["age_s"] is None else f"{finding['age_s']:.1f} s"
    return [finding["what"], since, finding["waits_for"], ", ".join(finding["held_up_by"])]


def _holder_row(name: str, held: Holdings, columns: Sequence[str]) -> list[str | Text]:
    return [name, *(f"{held[what]:,}" for what in columns[1:])]


def _unit_row(unit: Numbers) -> list[str | Text]:
    capacity = unit["capacity_bytes"]
    puts = f"{unit['parked']:,} ({byte_text(unit['parked_nbytes'])})" if unit["parked"] else "0"
    return [
        unit["unit"], f"{unit['samples']:,}", byte_text(unit["live_nbytes"]), byte_text(unit["held_nbytes"]),
        "no limit" if capacity is None else byte_text(capacity), byte_text(unit["arena_nbytes"]),
        byte_text(unit["recyclable_nbytes"]), byte_text(unit["leased_nbytes"]), byte_text(unit["uncommitted_nbytes"]),
        f"{unit['pins']:,}", puts,
    ]  # fmt: skip


def _per_s(per_s: float | None) -> str:
    if per_s is None:
        return ""
    return f"{per_s:,.0f}" if per_s >= 10 or not per_s else f"{per_s:.1f}"
