# SPDX-License-Identifier: Apache-2.0
"""Metric families: the queue's statistics as Prometheus knows metrics. Plain numbers in, nothing is asked or served."""

# The names of the first part of each table are those of TransferQueue 0.1; docs/metrics.md explains all of them.
# A counter only grows, as long as what its labels name exists. What may go down is a gauge.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import Metric

Numbers = Mapping[str, Any]
_PRODUCED = "Share of the samples that have all fields, or all that the task reads."


def metrics_of(stats: Numbers, units: Sequence[Numbers], process: Numbers) -> Iterable[Metric]:
    """The queue's statistics as metric families.

    Args:
        stats: Statistics of the controller, as ``get_stats`` returns them.
        units: Statistics of each storage unit, as ``get_storage_stats`` returns them.
        process: ``uptime_s`` and ``rss_nbytes`` of the controller's process.
    """
    page = _Page(stats["metrics"]["bounds"])
    _controller(page, stats, process)
    for name, partition in stats["partitions"].items():
        _partition(page, partition, name)
        for task, own in partition["tasks"].items():
            _task(page, own, partition["samples"], {"partition_id": name, "task_name": task})
    _groups(page, {name: own["groups"] for name, own in stats["partitions"].items() if "groups" in own})
    _waiting(page, stats["waiting"])
    capacity = None if stats["capacity"] is None else stats["capacity"] / max(1, len(units))
    in_front = next((each["name"] for each in stats["storage_units"] if each["number"] == 0), None)
    for unit in units:
        _unit(page, unit, capacity, process["rss_nbytes"] if unit["unit"] == in_front else None)
    return page.families.values()


class _Page:
    """What a scrape gets: each family is made with its first value. ``bounds``: of the histograms, by what they count.

    A value of None is left out.
    """

    def __init__(self, bounds: Mapping[str, Sequence[float]]) -> None:
        self.families: dict[str, Any] = {}
        self.bounds = bounds

    def gauge(self, name: str, text: str, value: float | None, **labels: str) -> None:
        from prometheus_client.core import GaugeMetricFamily

        if value is not None:
            self._family(GaugeMetricFamily, name, text, labels).add_metric(list(labels.values()), float(value))

    def gauges(self, prefix: str, rows: Mapping[str, tuple[str, float | None]], labels: Mapping[str, str]) -> None:
        """``rows``: text and value by the rest of the name."""
        for name, (text, value) in rows.items():
            self.gauge(prefix + name, text, value, **labels)

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        """``name`` without the ending ``_total``."""
        from prometheus_client.core import CounterMetricFamily

        self._family(CounterMetricFamily, name, text, labels).add_metric(list(labels.values()), float(value))

    def histogram(self, name: str, text: str, counted: Numbers, what: str, **labels: str) -> None:
        from prometheus_client.core import HistogramMetricFamily

        edges = [*map(str, self.bounds[what]), "+Inf"]
        buckets = list(zip(edges, accumulate(counted["counts"]), strict=True))
        self._family(HistogramMetricFamily, name, text, labels).add_metric(
            list(labels.values()), buckets, counted["sum"]
        )

    def _family(self, kind: Any, name: str, text: str, labels: Iterable[str]) -> Any:
        if name not in self.families:
            self.families[name] = kind(name, text, labels=list(labels))
        return self.families[name]


def _controller(page: _Page, stats: Numbers, process: Numbers) -> None:
    one = {
        "controller_uptime_seconds": ("Time since the controller started.", process["uptime_s"]),
        "controller_memory_rss_bytes": ("Memory of the controller's process.", process["rss_nbytes"]),
        "partitions_total": ("Partitions.", len(stats["partitions"])),
        "global_index_allocated_total": ("Global indexes handed out; a restore leaves some out.", stats["next_index"]),
        "global_index_reusable_total": ("Always 0: indexes are never reused.", 0),
        "sessions": ("Clients with a session.", sum("connections" in own for own in stats["clients"].values())),
        "storage_units": ("Storage units.", len(stats["storage_units"])),
        "storage_units_lost": ("Storage units that ended with what they held.", len(stats["lost_units"])),
        "samples_capacity": ("Most samples stored at once.", stats["capacity"]),
    }
    page.gauges("tq_", one, {})
    alarms = max((alarm["number"] for alarm in stats["alarms"]), default=0)
    page.counter("tq_controller_alarms", "Times that a sampler held the server.", alarms)
    for task, reasons in stats["dropped"].items():
        for reason, count in reasons.items():
            text = "Samples that a task will not get: left over by a tail, or cleared before it got them."
            page.gauge("tq_dropped_samples", text, count, task_name=task, reason=reason)
    for field, own in stats["producers"].items():
        text = "Living clients that have announced or put the field."
        page.gauge("tq_field_producers", text, own["alive"], field=field)
        text = "Time since a producer put the field."
        page.gauge("tq_field_published_age_seconds", text, own["published_s_ago"], field=field)
    _controller_histograms(page, stats["metrics"])


def _controller_histograms(page: _Page, metrics: Numbers) -> None:
    for name, verb in metrics["requests"].items():
        _request(page, "tq_controller_request", verb, {"op_type": name})
    text = "Time that one turn of the server's loop took."
    page.histogram("tq_controller_loop_seconds", text, metrics["loop"], "loop")
    for task, own in metrics["age_s"].items():
        text = "Time since the oldest sample of a batch was reserved, when it was handed out."
        page.histogram("tq_batch_age_seconds", text, own, "age_s", task_name=task)
    for task, own in metrics["versions"].items():
        text = "Policy versions between a sample and the newest one put, when it was handed out."
        page.histogram("tq_sample_staleness_versions", text, own, "versions", task_name=task)


def _request(page: _Page, name: str, verb: Numbers, labels: Mapping[str, str]) -> None:
    text = "Time from a request's arrival to its answer, waits included."
    page.histogram(f"{name}_duration_seconds", text, verb["seconds"], "seconds", **labels)
    page.counter(name, "Requests answered.", sum(verb["seconds"]["counts"]), **labels)
    page.counter(f"{name}_errors", "Requests answered with an error.", verb["errors"], **labels)
    page.counter(f"{name}_samples", "Samples of these requests.", verb["samples"], **labels)


def _partition(page: _Page, own: Numbers, name: str) -> None:
    samples = own["samples"]
    of_partition = {
        "samples_total": ("Samples in the partition.", samples),
        "reserved_samples": ("Samples that writers reserved and have not put.", own["held"]),
        "sealed": ("1: no more samples will come.", own["sealed"]),
        "declared_samples": ("Samples at which the partition seals itself.", own["num_samples"]),
    }
    page.gauges("tq_partition_", of_partition, {"partition_id": name})
    page.counter("tq_partition_published_samples", "Samples put so far.", own["put_total"], partition_id=name)
    complete = min(own["produced"].values(), default=0)  # at most so many samples have every field
    share = _share(complete, samples)
    page.gauge("tq_partition_production_progress", _PRODUCED, share, partition_id=name, task_name="all")
    for field in own["fields"]:
        of_field = {
            "lacking_samples": ("Samples without the field.", samples - own["produced"].get(field, samples)),
            "lost_samples": ("Samples that lost the field with a storage unit.", own["lost"].get(field, 0)),
            "producers_gone": ("1: all producers of the field have died.", own["abandoned"] == field),
        }
        page.gauges("tq_partition_", of_field, {"partition_id": name, "field": field})


def _task(page: _Page, own: Numbers, samples: int, labels: Mapping[str, str]) -> None:
    ready = max(own["ready"].values(), default=0)  # of several sets of fields that it reads, the one with most
    of_task = {
        "production_progress": (_PRODUCED, _share(own["consumed"] + ready, samples)),
        "consumption_progress": ("Share of the samples that the task got.", _share(own["consumed"], samples)),
        "ready_samples": ("Samples that the task can get now.", ready),
        "in_flight_batches": ("Batches handed out and not acknowledged.", own["in_flight"]),
        "in_flight_samples": ("Samples handed out and not acknowledged.", own["in_flight_samples"]),
    }
    page.gauges("tq_partition_", of_task, labels)
    text = "Samples that the task got, or that were cleared."
    page.counter("tq_partition_done_samples", text, own["done_total"], **labels)


def _share(count: int, samples: int) -> float:
    return min(1.0, count / samples) if samples else 0.0


def _groups(page: _Page, partitions: Mapping[str, Numbers]) -> None:
    slots: dict[str, Numbers] = {}
    for name, own in partitions.items():
        for state, count in own["states"].items():
            text = "Groups in this state; of those that left, all that did."
            page.gauge("tq_groups", text, count, partition_id=name, state=state)
        for state, reasons in own["left"].items():
            for reason, count in reasons.items():
                text = "Groups that have left, by state and reason."
                page.gauge("tq_groups_left", text, count, partition_id=name, state=state, reason=reason)
        oldest = None if own["oldest"] is None else own["oldest"]["age_s"]
        page.gauge("tq_group_oldest_lease_seconds", "Age of the oldest lease.", oldest, partition_id=name)
        slots |= own["slots"]
    for task, own in slots.items():
        page.gauge("tq_group_slots_used", "Slots in use.", own["used"], task_name=task)
        page.gauge("tq_group_slots_budget", "Slots there are.", own["budget"], task_name=task)


def _waiting(page: _Page, waiting: Iterable[Numbers]) -> None:
    found: dict[tuple[str, str], list[float]] = {}
    lacking: dict[tuple[str, str, str], int] = {}
    for each in waiting:
        kind = "put" if each["writer"] else "keys" if "keys" in each else "lease" if "workers" in each else "fetch"
        found.setdefault((kind, each["task"] or ""), []).extend([each["waited_s"]] * each.get("workers", 1))
        for field, count in each.get("lacking", {}).items():
            lacking[each["partition"], each["task"], field] = count
    for (kind, task), waits in found.items():
        text = "Requests that wait: fetch, put, keys or lease."
        page.gauge("tq_waiting_requests", text, len(waits), kind=kind, task_name=task)
        text = "How long the oldest of them has waited."
        page.gauge("tq_waiting_longest_seconds", text, max(waits), kind=kind, task_name=task)
    for (partition, task, field), count in lacking.items():
        text = "Samples without this field, for which a fetch waits."
        page.gauge("tq_waiting_lacking_samples", text, count, partition_id=partition, task_name=task, field=field)


def _unit(page: _Page, unit: Numbers, capacity: float | None, rss_nbytes: int | None) -> None:
    """``capacity``: most samples of this unit. ``rss_nbytes``: of its process, where that is known."""
    requests, name = unit["metrics"]["requests"], str(unit["unit"])
    answered = {op: sum(verb["seconds"]["counts"]) for op, verb in requests.items()}
    of_unit = {
        "capacity_total": ("Most samples in the unit.", capacity),
        "active_keys_total": ("Samples in the unit.", unit["samples"]),
        "utilization_ratio": ("How full the unit is.", _utilization(unit, capacity)),
        "memory_rss_bytes": ("Memory of the unit's process; only of the unit in the controller's process.", rss_nbytes),
        "ssd_offload_enabled": ("1: values may go to disk.", unit["spill_bytes"] > 0),
        "ssd_active_bytes": ("Values on disk.", unit["spilled_nbytes"]),
        "requests_arrived": ("Requests answered.", sum(answered.values())),
        "capacity_bytes": ("Most bytes of values.", unit["capacity_bytes"]),
        "held_bytes": ("Bytes that values occupy.", unit["held_nbytes"]),
        "live_bytes": ("Bytes of readable values.", unit["live_nbytes"]),
        "arena_bytes": ("Memory that clients map, in use.", unit["arena_nbytes"]),
        "recyclable_bytes": ("Memory that clients map, kept for later puts.", unit["recyclable_nbytes"]),
        "leased_bytes": ("Memory leased to writers.", unit["leased_nbytes"]),
        "uncommitted_bytes": ("Values put aside to replace others.", unit["uncommitted_nbytes"]),
        "pins": ("Reads that pin memory.", unit["pins"]),
        "waiting_puts": ("Puts that wait for room.", unit["parked"]),
        "waiting_bytes": ("Bytes of puts that wait for room.", unit["parked_nbytes"]),
    }
    page.gauges("tq_storage_", of_unit, {"storage_unit_id": name})
    for direction, paths in unit["metrics"]["bytes"].items():
        for path, nbytes in paths.items():
            text = "Bytes of values put or read, in messages or in memory that client and unit share."
            page.counter("tq_storage_bytes", text, nbytes, storage_unit_id=name, direction=direction, path=path)
    for op, verb in requests.items():
        labels = {"storage_unit_id": name, "op_type": op}
        _request(page, "tq_storage_request", verb, labels)
        page.gauge("tq_storage_arrivals_by_op", "Requests answered.", answered[op], **labels)
        page.gauge("tq_storage_request_ops", "Requests answered.", answered[op], **labels)
        _latencies(page, verb["seconds"], labels)


def _utilization(unit: Numbers, capacity: float | None) -> float | None:
    shares = []
    if unit["capacity_bytes"]:
        shares.append((unit["held_nbytes"] - unit["spilled_nbytes"]) / unit["capacity_bytes"])
    if capacity:
        shares.append(unit["samples"] / capacity)
    return max(shares, default=None)


def _latencies(page: _Page, seconds: Numbers, labels: Mapping[str, str]) -> None:
    counts, text = seconds["counts"], "Mean latency since the start, in seconds."
    page.gauge("tq_storage_request_latency_avg", text, seconds["sum"] / sum(counts), **labels)
    for percent in (50, 99):
        text = f"Percentile {percent} of the latency since the start, in seconds, from the histogram."
        value = _quantile(counts, page.bounds["seconds"], percent / 100)
        page.gauge(f"tq_storage_request_latency_p{percent}", text, value, **labels)


def _quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """Interpolated between the bounds; of values beyond the last one, that one."""
    wanted, below = share * sum(counts), 0
    for count, low, high in zip(counts, (0.0, *bounds), (*bounds, bounds[-1]), strict=True):
        if count and below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        below += count
    return bounds[-1]
