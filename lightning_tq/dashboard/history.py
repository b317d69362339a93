# SPDX-License-Identifier: Apache-2.0
"""The history of a queue as its dashboard has seen it: points of the charts, and a log of what went wrong."""

# Times are seconds of the clock on the wall, passed in: this file must not read a clock.

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_tq.queue_report import plain
from transfer_queue import Finding

Numbers = dict[str, Any]
_POINTS = 900
"""A quarter of an hour, at one per second."""
_EVENTS = 200
_STALENESS_OF_S = 30.0
_ALARM_OF_S = 60.0
STARVING_S = 10.0
"""A task that waits for longer is said to starve."""
_LOOK_S = 30.0
_SMOOTH_OVER_S = 5.0
_FULL_FOR_S = 5.0
"""A queue is full until it was not for so long: between two puts that wait there are moments in which none does."""


class QueueHistory:
    """Reports of the queue go in; points and events come out. Both are bounded."""

    def __init__(self) -> None:
        self.points: deque[Numbers] = deque(maxlen=_POINTS)
        """Each with its number ``n``, its time ``t``, and a value per series of each chart."""
        self.events: deque[Numbers] = deque(maxlen=_EVENTS)
        """Each with its number, its time, its ``level`` ("bad", "warn" or "good") and its ``text``."""
        self.problems: list[Numbers] = []
        """What is wrong now, the worst first: ``id``, ``level`` and ``text``. Only the text's numbers may change."""
        self.bottleneck: Numbers | None = None
        """Which side limits the run now: a finding as plain data."""
        self._smooth: dict[tuple[str, ...], float] = {}
        self._starved: dict[str, float] = {}
        """By task that has got samples, how long its reader has waited since it began."""
        self._full: tuple[float, Numbers] = (-math.inf, {})
        """When the queue was full last, and what was said of it."""
        self._numbers = 0
        self._current: dict[str, Numbers] = {}
        self._histograms: deque[tuple[float, Numbers]] = deque()

    def add(self, report: Numbers, now: float) -> None:
        """Take in a report, as ``make_report`` makes it. Its rates become means, that weigh the last seconds most."""
        self._smooth_rates(report, now)
        problems = {each["id"]: each for each in _problems(report["findings"])}
        if _FULL in problems:
            self._full = now, problems[_FULL]
        elif now - self._full[0] < _FULL_FOR_S:
            problems[_FULL] = self._full[1]
        self._log(problems, now)
        self._histograms.append((now, report["metrics"]))
        while now - self._histograms[0][0] > _STALENESS_OF_S:
            self._histograms.popleft()
        self._numbers += 1
        before, metrics = self._histograms[0][1], report["metrics"]
        staleness = {kind: dict(_means(metrics[kind], before[kind])) for kind in ("versions", "age_s")}
        point = {"n": self._numbers, "t": now, **_series(report), **staleness}
        self.points.append({**point, "starved": self._newly_starved(report)})
        self.bottleneck = plain(_bottleneck(report, [*self.points]))

    def unreachable(self, why: str, now: float) -> None:
        """The queue did not answer. Whatever else is wrong lasts, as far as is known."""
        self._log({**self._current, "unreachable": {"id": "unreachable", "level": "bad", "text": why}}, now)

    def since(self, number: int) -> list[Numbers]:
        """The points after this one, the oldest first."""
        return [point for point in self.points if point["n"] > number]

    def _newly_starved(self, report: Numbers) -> dict[str, float]:
        """How long the readers of tasks that say it have waited since the last report. A first batch doesn't count."""
        latest: dict[str, tuple[float, float]] = {}
        for partition in report["partitions"].values():
            for task, own in partition["tasks"].items():
                if "starved_s" in own and (own["done_total"] or task in self._starved):
                    latest[task] = min(latest.get(task, (math.inf, 0.0)), (own["asked_s_ago"], own["starved_s"]))
        now = {task: seconds for task, (_, seconds) in latest.items()}
        new = {task: max(0.0, seconds - self._starved.get(task, seconds)) for task, seconds in now.items()}
        self._starved |= now  # a task between two partitions is in none
        return new

    def _smooth_rates(self, report: Numbers, now: float) -> None:
        past_s = now - self.points[-1]["t"] if self.points else math.inf
        before, self._smooth = self._smooth, {}
        new = 1.0 - math.exp(-past_s / _SMOOTH_OVER_S)
        for name, partition in report["partitions"].items():
            rates: list[tuple[tuple[str, ...], Numbers, str]] = [((name,), partition, "put_per_s")]
            rates += [((name, task), own, "consumed_per_s") for task, own in partition["tasks"].items()]
            for key, holder, rate in rates:
                if holder[rate] is not None:
                    was = before.get(key, holder[rate])
                    self._smooth[key] = holder[rate] = was + new * (holder[rate] - was)

    def _log(self, problems: dict[str, Numbers], now: float) -> None:
        for name, problem in problems.items():
            if name not in self._current:
                self._event(problem["level"], problem["text"], now)
        for name, problem in self._current.items():
            if name not in problems:
                self._event("good", f"over: {problem['text']}", now)
        self._current = problems
        self.problems = sorted(problems.values(), key=lambda problem: problem["level"] != "bad")

    def _event(self, level: str, text: str, now: float) -> None:
        self._numbers += 1
        self.events.append({"n": self._numbers, "t": now, "level": level, "text": text})


def _means(now: Mapping[str, Numbers], before: Mapping[str, Numbers]) -> Iterator[tuple[str, float]]:
    """Of what each task was given since then; one that was given nothing has none."""
    for task, own in now.items():
        was = before.get(task, {"counts": [], "sum": 0})
        count = sum(own["counts"]) - sum(was["counts"])
        if count > 0:
            yield task, (own["sum"] - was["sum"]) / count


def _series(report: Numbers) -> Numbers:
    """Samples per second, put by all and consumed by task; longest waits, of tasks and of others; bytes by unit.

    Tasks are apart from all else, because a task may have any name.
    """
    got: dict[str, float] = {}
    for partition in report["partitions"].values():
        for task, own in partition["tasks"].items():
            got[task] = got.get(task, 0.0) + (own["consumed_per_s"] or 0.0)
    waits: dict[str, float] = dict.fromkeys(got, 0.0)
    other_waits: dict[str, float] = {}
    for each in report["waiting"]:
        name = each["task"] or ("puts" if each["writer"] else "leases" if "workers" in each else "waits for keys")
        kind = waits if each["task"] else other_waits
        kind[name] = max(kind.get(name, 0.0), each["waited_s"])
    put = sum(partition["put_per_s"] or 0.0 for partition in report["partitions"].values())
    held = {unit["unit"]: unit["held_nbytes"] for unit in report["units"]}
    return {"put": put, "got": got, "waits": waits, "other_waits": other_waits, "held": held}


def _bottleneck(report: Numbers, points: list[Numbers]) -> Finding:
    """Of the tasks that have asked lately, the one that reads most fields trains."""
    seen = [point for point in points if points[-1]["t"] - point["t"] <= _LOOK_S]
    fields: dict[str, int] = {}
    for partition in report["partitions"].values():
        for task, own in partition["tasks"].items():
            most = max((len(names.partition(" where ")[0].split(",")) for names in own.get("ready", ())), default=0)
            fields[task] = max(fields.get(task, 0), most)
    waits = {task: sum(point["waits"].get(task, 0.0) > 0 for point in seen) for task in fields}
    got = {task: sum(point["got"].get(task, 0.0) for point in seen) for task in fields}
    active = [task for task in fields if waits[task] or got[task] >= _LEAST_RATE * len(seen)]
    seconds = max(seen[-1]["t"] - seen[0]["t"], 1.0)
    task = max(active, key=lambda task: (fields[task], got[task]), default=None)
    if task is None:
        return Finding.of_a_look(None, seconds, 0.0)
    if not any(task in point["starved"] for point in seen):
        return Finding.of_a_look(task, seconds, waits[task] / len(seen))
    waited_s = sum(point["starved"].get(task, 0.0) for point in seen[1:]) + _unreported_s(task, points)
    return Finding.of_a_look(task, seconds, min(1.0, waited_s / seconds))


def _unreported_s(task: str, points: list[Numbers]) -> float:
    """How long the reader has waited since its last fetch, which is what it has reported.

    What it fetches ahead may wait while it is busy. So only a fetch counts that waits for longer than any before it
    through which the reader was busy.
    """
    wait_s: float = points[-1]["waits"].get(task, 0.0)
    before = [point for point in points if point["t"] < points[-1]["t"] - wait_s]
    was_busy = sum(point["starved"].get(task, 0.0) for point in before) < _BUSY_BELOW * len(before)
    busy_s = max((point["waits"].get(task, 0.0) for point in before), default=0.0) if was_busy else 0.0
    return wait_s if wait_s > max(STARVING_S, _LONGER * busy_s) else 0.0


_BUSY_BELOW = 0.05
"""Seconds per point, of which there is one per second, that a busy reader waits."""
_LONGER = 1.2
_LEAST_RATE = 1e-3
"""Of samples per second: a mean that fades never becomes 0."""
_FULL = repr(("full",))


def _problems(findings: list[Numbers]) -> Iterator[Numbers]:
    """What is wrong, with an id that stays the same while it lasts: of what kind it is, and of whom."""
    for each in findings:
        kind, age_s = each["kind"], each["age_s"] or 0.0
        is_over = kind == "sampler" and age_s >= _ALARM_OF_S
        waits_for_a_save = kind == "put" and not each["to_do"]
        is_normal = age_s < STARVING_S or (kind in ("keys", "put", "lease") and not waits_for_a_save)
        if not is_over and not (each["waits_for"] and is_normal):
            is_mild = each["waits_for"] or (kind == "full" and age_s < STARVING_S)
            yield {"id": repr((kind, *each["names"])), "level": "warn" if is_mild else "bad", "text": each["text"]}
