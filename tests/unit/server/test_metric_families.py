# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told of a front: its counters only grow, whatever happens to samples, tasks and partitions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.server.front_kit import Client, front_of, samples_of
from transfer_queue import protocol as p
from transfer_queue.server.metric_families import metrics_of
from transfer_queue.storage.messages import AskUnitStats

pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")

Series = tuple[str, tuple[tuple[str, str], ...]]
"""The name of a metric, and its labels."""


class Scraped:
    """A front with a writer and a reader of task "t", and what each scrape of it has found."""

    def __init__(self) -> None:
        self.front = front_of()
        self.writer, self.reader = Client(self.front, "writer"), Client(self.front, "reader")
        self.counters: dict[Series, float] = {}
        self.all: dict[Series, float] = {}
        self.reader.one(p.RegisterTask(self.reader.number(), "t", dp_size=2, tail="drop"))

    def scrape(self) -> None:
        """Raises AssertionError if a counter is less than it was before."""
        stats = self.reader.one(p.GetStats(self.reader.number())).value
        unit = msgspec.structs.asdict(self.reader.one(AskUnitStats(self.reader.number())))
        families = list(metrics_of(stats, [unit], {"uptime_s": 1.0, "rss_nbytes": 1}))
        before, self.counters, self.all = self.counters, {}, {}
        for family in families:
            for sample in family.samples:
                series = (sample.name, tuple(sorted(sample.labels.items())))
                self.all[series] = sample.value
                if family.type in ("counter", "histogram"):
                    self.counters[series] = sample.value
        less = {series: (before[series], now) for series, now in self.counters.items() if now < before.get(series, 0)}
        assert not less

    def value(self, name: str, **labels: str) -> float | None:
        return self.all.get((name, tuple(sorted(labels.items()))))

    def ask(self, kind: Any, *args: Any) -> Any:
        return self.reader.send(kind(self.reader.number(), *args))[0].reply

    # ---- what may happen ----

    def put(self) -> None:
        self.writer.put([1, 2, 3], tags={0: {"policy_version": 3}})

    def withdraw_a_put(self) -> None:
        """It is cancelled when it is done, and its caller never got the answer."""
        put, frames = self.writer.a_put([4, 5])
        self.writer.send(put, frames)
        self.writer.cancel(put.id)

    def insert(self) -> None:
        self.ask(p.Insert, "p", 1, ["x"], 0.0)

    def fetch(self) -> None:
        self.reader.send(self.reader.fetch(1, dp_rank=0))

    def fetch_by_another_task(self) -> None:
        self.reader.send(self.reader.fetch(1, task="other"))

    def return_a_batch(self) -> None:
        fetch = self.reader.fetch(1, task="other")
        self.reader.send(fetch)
        self.reader.cancel(fetch.id)

    def reset_task(self) -> None:
        self.ask(p.ResetConsumption, "p", "t")

    def reset_all(self) -> None:
        self.ask(p.ResetConsumption, "p")

    def forget_task(self) -> None:
        self.ask(p.ForgetTask, "t")

    def seal(self) -> None:
        self.ask(p.SealPartition, "p")

    def clear_consumed(self) -> None:
        self.ask(p.ClearConsumed, "p", [])

    def clear_one(self) -> None:
        described = self.ask(p.Describe, "p")
        if isinstance(described, p.Batch):
            self.ask(p.ClearSamples, "p", p.pack_indexes(samples_of(described)[:1]))

    def clear_partition(self) -> None:
        self.ask(p.ClearPartition, "p")


HAPPENINGS = [
    Scraped.put, Scraped.withdraw_a_put, Scraped.insert, Scraped.fetch, Scraped.fetch_by_another_task,
    Scraped.return_a_batch, Scraped.reset_task, Scraped.reset_all, Scraped.forget_task, Scraped.seal,
    Scraped.clear_consumed, Scraped.clear_one, Scraped.clear_partition,
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(HAPPENINGS), max_size=25))
def test_counters_only_grow(happenings):
    scraped = Scraped()
    for happen in [Scraped.put, Scraped.put, Scraped.fetch, *happenings]:
        happen(scraped)
        scraped.scrape()


@pytest.mark.parametrize(
    "happen", [Scraped.withdraw_a_put, Scraped.return_a_batch, Scraped.reset_task, Scraped.reset_all, Scraped.clear_one]
)
def test_counters_go_on_from_where_they_were(happen):
    scraped = Scraped()
    for each in (Scraped.put, Scraped.fetch, Scraped.fetch_by_another_task, happen, Scraped.put, Scraped.fetch):
        each(scraped)
        scraped.scrape()
    put = scraped.value("tq_partition_published_samples_total", partition_id="p")
    assert put == (8 if happen is Scraped.withdraw_a_put else 6)


def test_what_a_task_got_again_counts_again():
    scraped = Scraped()
    for happen in (Scraped.put, Scraped.fetch, Scraped.fetch_by_another_task, Scraped.reset_all, Scraped.fetch):
        happen(scraped)
    scraped.scrape()
    done = {
        task: scraped.value("tq_partition_done_samples_total", partition_id="p", task_name=task)
        for task in ("t", "other")
    }
    assert done == {"t": 3.0, "other": 1.0}, "a round for two ranks, and the first rank's batch again"


def test_a_task_that_comes_again_counts_from_0():
    scraped = Scraped()
    for happen in (Scraped.put, Scraped.fetch, Scraped.forget_task, Scraped.clear_one, Scraped.fetch):
        happen(scraped)
    scraped.scrape()
    assert scraped.value("tq_partition_done_samples_total", partition_id="p", task_name="t") == 1.0


def test_samples_that_a_task_will_not_get_are_a_gauge_that_a_reset_lowers():
    scraped, found = Scraped(), []
    for happen in (Scraped.put, Scraped.seal, Scraped.fetch, Scraped.fetch, Scraped.reset_task):
        happen(scraped)
        scraped.scrape()
        found.append(scraped.value("tq_dropped_samples", task_name="t", reason="tail"))
    assert found == [None, None, None, 1.0, None]


def test_alarms_are_counted_although_only_the_latest_are_told():
    scraped = Scraped()
    for last in (0, 3, 20):
        scraped.front.alarms = lambda last=last: [
            {"number": n, "what": "s", "held_s": 2.0, "seen_s_ago": 1.0} for n in range(max(1, last - 15), last + 1)
        ]
        scraped.scrape()
        assert scraped.value("tq_controller_alarms_total") == last


def test_groups_are_counted_by_state_with_their_slots() -> None:
    slots = {"g": {"used": 1, "budget": 4, "per_step": 2}}
    oldest = {"worker": "w", "key": "q0", "age_s": 7.0}
    groups = {"added": 3, "states": {"waiting": 2, "running": 1}, "oldest": oldest, "rejected": {}, "slots": slots}
    groups["left"] = {"failed": {"out of memory": 2}}
    scraped = Scraped()
    scraped.put()
    stats = scraped.reader.one(p.GetStats(scraped.reader.number())).value
    for partition in stats["partitions"].values():
        partition["groups"] = groups
    (name,) = stats["partitions"]
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in metrics_of(stats, [], {"uptime_s": 1.0, "rss_nbytes": 1}) for sample in family.samples
        if sample.name.startswith("tq_group")
    }  # fmt: skip
    assert found == {
        ("tq_groups", name, "waiting"): 2, ("tq_groups", name, "running"): 1,
        ("tq_groups_left", "failed", "out of memory", name): 2,
        ("tq_group_oldest_lease_seconds", name): 7,
        ("tq_group_slots_used", "g"): 1, ("tq_group_slots_budget", "g"): 4,
    }  # fmt: skip
