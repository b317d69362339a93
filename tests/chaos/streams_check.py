# SPDX-License-Identifier: Apache-2.0
"""Did the queue keep its promises to plain streams? Judged by the ledgers alone: what was trained and read. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.chaos.judgement import effective, errors, named
from tests.chaos.ledger import Record
from tests.chaos.plan import Plan
from tests.chaos.streams import READ, expected


def check(plan: Plan, records: Sequence[Record]) -> list[str]:
    """What went wrong, in sentences; empty if nothing did."""
    final, found = effective(records)
    found += errors(records, plan.disk_nbytes is not None)
    times = Counter(number for trained in final.values() for number in trained.numbers)
    wanted = expected(plan.actors, plan.shape)
    found += named("samples were trained more than once", sorted(n for n, count in times.items() if count > 1))
    found += named("samples were never trained", sorted(wanted - set(times)))
    found += named("samples were trained, and nobody put them", sorted(set(times) - wanted))
    found += _reads(records, wanted)
    return found


def _reads(records: Sequence[Record], wanted: set[int]) -> Iterator[str]:
    """Within a life nobody gets a sample twice. A reader that ends takes along one batch at most."""
    by_life: dict[int, Counter[int]] = {}
    for record in records:
        if record.event == "read":
            by_life.setdefault(record.life, Counter()).update(record.what["numbers"])
    for life, times in by_life.items():
        yield from named(
            f"samples were read twice in life {life}", sorted(n for n, count in times.items() if count > 1)
        )
    read = {number for times in by_life.values() for number in times}
    begun, done = (_count(records, "reader", event) for event in ("began", "done"))
    if len(wanted - read) > READ * (begun - done):
        missing = sorted(wanted - read)
        yield f"{len(missing)} samples were never read, and {begun - done} readers died: {missing[:20]}"


def _count(records: Sequence[Record], role: str, event: str) -> int:
    return sum(record.event == event and record.actor.startswith(role) for record in records)
