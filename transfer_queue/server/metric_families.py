# SPDX-License-Identifier: Apache-2.0
"""Metric families: the queue's statistics as Prometheus knows metrics. Plain numbers in, nothing is asked or served."""

# The names of the first part of each table are those of TransferQueue 0.1; docs/metrics.md explains all of them.
# A counter only grows, as long as what its labels name exists. What may go down is a gauge.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import Metric

Numbers = Mapping[str, Any]
Row = tuple[Sequence[str], float | None]
"""Values of a metric's labels, and its value; None leaves it out."""


def metrics_of(stats: Numbers, units: Sequence[Numbers], process: Numbers) -> Iterator[Metric]:
    """The queue's statistics as metric families.

    Args:
        stats: Statistics of the controller, as ``get_stats`` returns them.
        units: Statistics of each storage unit, as ``get_storage_stats`` returns them.
        process: ``uptime_s`` and ``rss_nbytes`` of the controller's process.
    """
    metrics = stats["metrics"]
    yield from _requests("controller", [((), metrics["requests"])], metrics["bounds"]["seconds"])
    yield from _controller(stats, process)
    yield from _partitions(stats["partitions"])
    yield from _groups(stats["partitions"])
    yield from _tasks(stats["partitions"])
    yield from _waiting(stats)
    yield _histogram(
        "tq_controller_loop_seconds", "Time that one turn of the server's loop took.", (),
        [((), metrics["loop"])], metrics["bounds"]["loop"],
    )  # fmt: skip
    yield _histogram(
        "tq_batch_age_seconds", "Time since the oldest sample of a batch was reserved, when it was handed out.",
        ("task_name",), [((task,), own) for task, own in metrics["age_s"].items()], metrics["bounds"]["age_s"],
    )  # fmt: skip
    yield _histogram(
        "tq_sample_staleness_versions",
        "Policy versions between a sample and the newest one put, when it was handed out.",
        ("task_name",), [((task,), own) for task, own in metrics["versions"].items()], metrics["bounds"]["versions"],
    )  # fmt: skip
    own = [((str(unit["unit"]),), unit["metrics"]["requests"]) for unit in units]
    yield from _requests("storage", own, metrics["bounds"]["seconds"], ("storage_unit_id",))
    yield from _units(units, stats, process)
    yield from _latencies(own, metrics["bounds"]["seconds"])


def _controller(stats: Numbers, process: Numbers) -> Iterator[Metric]:
    one = {
        "tq_controller_uptime_seconds": ("Time since the controller started.", process["uptime_s"]),
        "tq_controller_memory_rss_bytes": ("Memory of the controller's process.", process["rss_nbytes"]),
        "tq_partitions_total": ("Partitions.", len(stats["partitions"])),
        "tq_global_index_allocated_total": ("Global indexes handed out so far.", stats["next_index"]),
        "tq_global_index_reusable_total": ("Always 0: indexes are never reused.", 0),
        "tq_sessions": ("Clients with a session.", sum("connections" in own for own in stats["clients"].values())),
        "tq_storage_units": ("Storage units.", len(stats["storage_units"])),
        "tq_storage_units_lost": ("Storage units that ended with what they held.", len(stats["lost_units"])),
        "tq_samples_capacity": ("Most samples stored at once.", stats["capacity"]),
    }
    for name, (text, value) in one.items():
        yield _gauge(name, text, (), [((), value)])
    alarms = max((alarm["number"] for alarm in stats["alarms"]), default=0)
    yield _counter("tq_controller_alarms", "Times that a sampler held the server.", (), [((), alarms)])
    dropped = [((t, reason), count) for t, own in stats["dropped"].items() for reason, count in own.items()]
    text = "Samples that a task will not get: left over by a tail, or cleared before it got them."
    yield _gauge("tq_dropped_samples", text, ("task_name", "reason"), dropped)
    fields = stats["producers"].items()
    text = "Living clients that have announced or put the field."
    yield _gauge("tq_field_producers", text, ("field",), [((name,), own["alive"]) for name, own in fields])
    text = "Time since a producer put the field."
    ages = [((name,), own["published_s_ago"]) for name, own in fields]
    yield _gauge("tq_field_published_age_seconds", text, ("field",), ages)


def _partitions(partitions: Mapping[str, Any]) -> Iterator[Metric]:
    of_partition = {
        "tq_partition_samples_total": ("Samples in the partition.", "samples"),
        "tq_partition_reserved_samples": ("Samples that writers reserved and have not put.", "held"),
        "tq_partition_sealed": ("1: no more samples will come.", "sealed"),
        "tq_partition_declared_samples": ("Samples at which the partition seals itself.", "num_samples"),
    }
    for metric, (text, key) in of_partition.items():
        yield _gauge(metric, text, ("partition_id",), [((name,), own[key]) for name, own in partitions.items()])
    published = [((name,), own["put_total"]) for name, own in partitions.items()]
    yield _counter("tq_partition_published_samples", "Samples put so far.", ("partition_id",), published)
    by_field = [((name, field), own, field) for name, own in partitions.items() for field in own["fields"]]
    labels = ("partition_id", "field")
    lacking = [(values, own["samples"] - own["produced"][field]) for values, own, field in by_field]
    yield _gauge("tq_partition_lacking_samples", "Samples without the field.", labels, lacking)
    lost = [(values, own["lost"].get(field, 0)) for values, own, field in by_field]
    yield _gauge("tq_partition_lost_samples", "Samples that lost the field with a storage unit.", labels, lost)
    orphaned = [(values, own["abandoned"] == field) for values, own, field in by_field]
    yield _gauge("tq_partition_producers_gone", "1: all producers of the field have died.", labels, orphaned)


def _groups(partitions: Mapping[str, Any]) -> Iterator[Metric]:
    labels = ("partition_id", "state")
    groups = [(name, own["groups"]) for name, own in partitions.items() if "groups" in own]
    by_state = [((name, state), count) for name, own in groups for state, count in own["states"].items()]
    yield _gauge("tq_groups", "Groups in this state; of those that left, all that did.", labels, by_state)
    oldest = [((name,), own["oldest"]["age_s"]) for name, own in groups if own["oldest"] is not None]
    yield _gauge("tq_group_oldest_lease_seconds", "Age of the oldest lease.", ("partition_id",), oldest)
    slots = {task: each for _, own in groups for task, each in own["slots"].items()}
    for what, text in (("used", "Slots in use."), ("budget", "Slots there are.")):
        yield _gauge(f"tq_group_slots_{what}", text, ("task_name",), [((t,), n[what]) for t, n in slots.items()])


def _tasks(partitions: Mapping[str, Any]) -> Iterator[Metric]:
    labels = ("partition_id", "task_name")
    tasks = [((name, task), own, t) for name, own in partitions.items() for task, t in own["tasks"].items()]
    produced: list[Row] = [((name, "all"), _share(_complete(own), own["samples"])) for name, own in partitions.items()]
    produced += [(values, _share(t["consumed"] + _ready(t), own["samples"])) for values, own, t in tasks]
    text = "Share of the samples that have all fields, or all that the task reads."
    yield _gauge("tq_partition_production_progress", text, labels, produced)
    consumed = [(values, _share(t["consumed"], own["samples"])) for values, own, t in tasks]
    yield _gauge("tq_partition_consumption_progress", "Share of the samples that the task got.", labels, consumed)
    ready = [(values, _ready(t)) for values, _, t in tasks]
    yield _gauge("tq_partition_ready_samples", "Samples that the task can get now.", labels, ready)
    for what, text in (("in_flight", "Batches"), ("in_flight_samples", "Samples")):
        name = f"tq_partition_{what}" + ("_batches" if what == "in_flight" else "")
        yield _gauge(name, f"{text} handed out and not acknowledged.", labels, [(v, t[what]) for v, _, t in tasks])
    done = [(values, t["done_total"]) for values, _, t in tasks]
    yield _counter("tq_partition_done_samples", "Samples that the task got, or that were cleared.", labels, done)


def _complete(partition: Numbers) -> int:
    """At most so many samples have every field."""
    return min(partition["produced"].values(), default=0)


def _ready(task: Numbers) -> int:
    """Of several sets of fields that the task reads, the one with most."""
    return max(task["ready"].values(), default=0)


def _share(count: int, of: int) -> float:
    return min(1.0, count / of) if of else 0.0


def _waiting(stats: Numbers) -> Iterator[Metric]:
    found: dict[tuple[str, str], list[float]] = {}
    lacking: dict[tuple[str, str, str], int] = {}
    for each in stats["waiting"]:
        kind = "put" if each["writer"] else "keys" if "keys" in each else "fetch"
        found.setdefault((kind, each["task"] or ""), []).append(each["waited_s"])
        for field, count in each.get("lacking", {}).items():
            lacking[each["partition"], each["task"], field] = count
    labels = ("kind", "task_name")
    counts = [(values, len(waits)) for values, waits in found.items()]
    yield _gauge("tq_waiting_requests", "Requests that wait: fetch, put or keys.", labels, counts)
    longest = [(values, max(waits)) for values, waits in found.items()]
    yield _gauge("tq_waiting_longest_seconds", "How long the oldest of them has waited.", labels, longest)
    text = "Samples without this field, for which a fetch waits."
    yield _gauge("tq_waiting_lacking_samples", text, ("partition_id", "task_name", "field"), lacking.items())


def _requests(role: str, own: Sequence[tuple[tuple[str, ...], Numbers]], bounds: Sequence[float],
              first: tuple[str, ...] = ()) -> Iterator[Metric]:  # fmt: skip
    """``own``: values of the labels ``first``, and what was counted by name of the request."""
    labels = (*first, "op_type")
    verbs = [((*values, name), verb) for values, requests in own for name, verb in requests.items()]
    name = f"tq_{role}_request"
    seconds = [(values, verb["seconds"]) for values, verb in verbs]
    text = "Time from a request's arrival to its answer, waits included."
    yield _histogram(f"{name}_duration_seconds", text, labels, seconds, bounds)
    yield _counter(name, "Requests answered.", labels, [(v, sum(verb["seconds"]["counts"])) for v, verb in verbs])
    yield _counter(f"{name}_errors", "Requests answered with an error.", labels, [(v, o["errors"]) for v, o in verbs])
    yield _counter(f"{name}_samples", "Samples of these requests.", labels, [(v, o["samples"]) for v, o in verbs])


def _units(units: Sequence[Numbers], stats: Numbers, process: Numbers) -> Iterator[Metric]:
    capacity = None if stats["capacity"] is None else stats["capacity"] / max(1, len(units))
    of_unit: dict[str, tuple[str, Callable[[Numbers], float | None]]] = {
        "capacity_total": ("Most samples in the unit.", lambda unit: capacity),
        "active_keys_total": ("Samples in the unit.", lambda unit: unit["samples"]),
        "utilization_ratio": ("How full the unit is.", lambda unit: _utilization(unit, capacity)),
        "memory_rss_bytes": (
            "Memory of the unit's process; only of the unit in the controller's process.",
            lambda unit: process["rss_nbytes"] if unit["unit"] == _own_unit(stats) else None,
        ),
        "ssd_offload_enabled": ("1: values may go to disk.", lambda unit: unit["spill_bytes"] > 0),
        "ssd_active_bytes": ("Values on disk.", lambda unit: unit["spilled_nbytes"]),
        "requests_arrived": ("Requests answered.", lambda unit: sum(_counts(unit).values())),
        "capacity_bytes": ("Most bytes of values.", lambda unit: unit["capacity_bytes"]),
        "held_bytes": ("Bytes that values occupy.", lambda unit: unit["held_nbytes"]),
        "live_bytes": ("Bytes of readable values.", lambda unit: unit["live_nbytes"]),
        "arena_bytes": ("Memory that clients map, in use.", lambda unit: unit["arena_nbytes"]),
        "recyclable_bytes": ("Memory that clients map, kept for later puts.", lambda unit: unit["recyclable_nbytes"]),
        "leased_bytes": ("Memory leased to writers.", lambda unit: unit["leased_nbytes"]),
        "uncommitted_bytes": ("Values put aside to replace others.", lambda unit: unit["uncommitted_nbytes"]),
        "pins": ("Reads that pin memory.", lambda unit: unit["pins"]),
        "waiting_puts": ("Puts that wait for room.", lambda unit: unit["parked"]),
        "waiting_bytes": ("Bytes of puts that wait for room.", lambda unit: unit["parked_nbytes"]),
    }  # fmt: skip
    labels = ("storage_unit_id",)
    for name, (text, value) in of_unit.items():
        yield _gauge(f"tq_storage_{name}", text, labels, [((str(unit["unit"]),), value(unit)) for unit in units])
    moved = [
        ((str(unit["unit"]), direction, path), nbytes)
        for unit in units
        for direction, paths in unit["metrics"]["bytes"].items()
        for path, nbytes in paths.items()
    ]
    text = "Bytes of values put or read, in messages or in memory that client and unit share."
    yield _counter("tq_storage_bytes", text, ("storage_unit_id", "direction", "path"), moved)
    by_op = [((str(unit["unit"]), op), count) for unit in units for op, count in _counts(unit).items()]
    for name in ("arrivals_by_op", "request_ops"):
        yield _gauge(f"tq_storage_{name}", "Requests answered.", ("storage_unit_id", "op_type"), by_op)


def _own_unit(stats: Numbers) -> str | None:
    """The unit in the controller's process."""
    return next((str(unit["name"]) for unit in stats["storage_units"] if unit["number"] == 0), None)


def _utilization(unit: Numbers, capacity: float | None) -> float | None:
    shares = []
    if unit["capacity_bytes"]:
        shares.append((unit["held_nbytes"] - unit["spilled_nbytes"]) / unit["capacity_bytes"])
    if capacity:
        shares.append(unit["samples"] / capacity)
    return max(shares, default=None)


def _counts(unit: Numbers) -> dict[str, int]:
    return {name: sum(verb["seconds"]["counts"]) for name, verb in unit["metrics"]["requests"].items()}


def _latencies(own: Sequence[tuple[tuple[str, ...], Numbers]], bounds: Sequence[float]) -> Iterator[Metric]:
    verbs = [((*values, op), verb["seconds"]) for values, requests in own for op, verb in requests.items()]
    labels = ("storage_unit_id", "op_type")
    means = [(values, seconds["sum"] / sum(seconds["counts"])) for values, seconds in verbs]
    yield _gauge("tq_storage_request_latency_avg", "Mean latency since the start, in seconds.", labels, means)
    for percent in (50, 99):
        found = [(values, _quantile(seconds["counts"], bounds, percent / 100)) for values, seconds in verbs]
        text = f"Percentile {percent} of the latency since the start, in seconds, from the histogram."
        yield _gauge(f"tq_storage_request_latency_p{percent}", text, labels, found)


def _quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """Interpolated between the bounds; of values beyond the last one, that one."""
    wanted, below = share * sum(counts), 0
    for count, low, high in zip(counts, (0.0, *bounds), (*bounds, bounds[-1]), strict=True):
        if count and below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        below += count
    return bounds[-1]


# ---- families ----


def _gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(name, text, labels=labels), rows)


def _counter(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    """``name`` without the ending ``_total``."""
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(name, text, labels=labels), rows)


def _filled(family: Any, rows: Iterable[Row]) -> Metric:
    for values, value in rows:
        if value is not None:
            family.add_metric(values, float(value))
    metric: Metric = family
    return metric


def _histogram(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], Numbers]],
               bounds: Sequence[float]) -> Metric:  # fmt: skip
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=labels)
    edges = [*map(str, bounds), "+Inf"]
    for values, own in rows:
        family.add_metric(values, list(zip(edges, accumulate(own["counts"]), strict=True)), own["sum"])
    return family
