# SPDX-License-Identifier: Apache-2.0
"""Is each group accounted for, once, and as its number says? Judged by the ledgers alone. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.chaos.groups import fate_of
from tests.chaos.judgement import effective, errors, named
from tests.chaos.ledger import Record
from tests.chaos.plan import Plan


def check(plan: Plan, records: Sequence[Record]) -> list[str]:
    """What went wrong, in sentences; empty if nothing did."""
    final, found = effective(records)
    found += errors(records, plan.disk_nbytes is not None)
    times = Counter(number for trained in final.values() for number in trained.numbers)
    found += named("groups were trained more than once", sorted(n for n, count in times.items() if count > 1))
    left = _left(records)
    found += named("groups were trained and are still there", sorted(set(times) & set(left)))
    unknown = sorted(set(range(plan.shape["count"])) - set(times) - set(left))
    found += named("groups are neither trained nor there", unknown)
    found += _fates(plan, times, left)
    found += _versions(plan, records)
    return found


def _left(records: Sequence[Record]) -> dict[int, str]:
    """By group, the state that it is in at the end."""
    states = [record.what["states"] for record in records if record.event == "left"]
    return {int(key.removeprefix("g")): state for some in states for key, state in some.items()}


def _fates(plan: Plan, times: Counter[int], left: dict[int, str]) -> Iterator[str]:
    """Each ends as its number says. With ``stale="drop"`` it may get too old before."""
    for number in range(plan.shape["count"]):
        ended = "trained" if number in times else left.get(number, "nowhere")
        allowed = {fate_of(number), "nowhere"} | ({"stale"} if plan.shape["stale"] == "drop" else set())
        if ended not in allowed:
            yield f"group {number} ended as {ended}, where {sorted(allowed)} would be right"


def _versions(plan: Plan, records: Sequence[Record]) -> Iterator[str]:
    """Nothing is trained that is older than was asked for. Step k of one rank trains with version k."""
    most = plan.shape["max_staleness"]
    for record in records if most is not None and plan.actors["trainer"] == 1 else ():
        if record.event == "trained":
            old = [v for v in record.what["versions"] if v is not None and record.what["batch"] - v > most]
            if old and record.what["batch"]:
                yield f"batch {record.what['batch']} has groups of versions {old}, and {most} steps is the bound"
