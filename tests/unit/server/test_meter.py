# SPDX-License-Identifier: Apache-2.0
"""What a server counts: requests and their latencies, how old and how stale batches are, bytes by their way."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.unit.server.front_kit import NBYTES, PAGE, Client, failed, front_of
from transfer_queue import protocol as p
from transfer_queue.server.meter import AGE_BOUNDS_S, BOUNDS, REQUEST_BOUNDS_S, VERSION_BOUNDS, Meter
from transfer_queue.storage.messages import Abort, AskUnitStats, ColumnHeader, Columns, Commit, Write
from transfer_queue.storage.wire import dense_layout


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def counted(bounds: tuple[float, ...], *values: float) -> dict[str, Any]:
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[sum(value > bound for bound in bounds)] += 1
    return {"counts": counts, "sum": sum(values)}


def metered() -> tuple[Meter, Clock]:
    clock = Clock()
    return Meter(clock), clock


def batch(*indexes: int, tags: dict[int, Any] | None = None) -> p.Batch:
    packed = [p.encode((tags or {}).get(index, {})) for index in indexes]
    return p.Batch(1, "p", p.pack_indexes(np.array(indexes)), {}, b"", p.pack_tags(packed))


def reserved(first: int, count: int) -> p.Reserved:
    return p.Reserved(1, p.pack_indexes(np.arange(first, first + count)))


def test_a_request_is_timed_from_its_arrival_to_its_answer_and_its_samples_and_errors_are_counted():
    meter, clock = metered()
    clock.now = 10.25
    meter.answered(p.Fetch(1, "p", "t", ["x"], 3), 10.0, batch(4, 5, 6))
    meter.answered(p.Fetch(2, "p", "t", ["x"], 3), 10.0, p.Failed(2, "", ""))
    expected = {"seconds": counted(REQUEST_BOUNDS_S, 0.25, 0.25), "errors": 1, "samples": 3}
    assert meter.of_controller()["requests"] == {"GET_META": expected}
    assert meter.of_unit({}, {})["requests"] == {}


def test_the_two_forms_of_a_put_share_a_name():
    meter, _ = metered()
    meter.answered(p.Put(1, p.Reserve(1, "p", 2)), 0.0, reserved(0, 2))
    meter.answered(Write(2, p.pack_indexes(np.arange(3)), Columns([])), 0.0, p.Done(2))
    meter.answered(p.Put(3, p.CheckFields(3, "p", p.pack_indexes(np.arange(4)), {})), 0.0, p.Done(3))
    assert {name: verb["samples"] for name, verb in meter.of_unit({}, {})["requests"].items()} == {"PUT": 9}


def test_the_age_of_a_batch_is_that_of_its_oldest_sample():
    meter, clock = metered()
    for first, now in ((0, 0.0), (10, 100.0), (20, 200.0)):
        clock.now = now
        meter.answered(p.Reserve(1, "p", 10), now, reserved(first, 10))
    clock.now = 201.0
    fetch = p.Fetch(2, "p", "t", ["x"], 3)
    meter.answered(fetch, 201.0, batch(25, 19, 24))
    meter.answered(fetch, 201.0, batch(29))
    assert meter.of_controller()["age_s"] == {"t": counted(AGE_BOUNDS_S, 101.0, 1.0)}


def test_marks_of_ages_are_bounded_and_stay_near_the_truth():
    meter, clock = metered()
    for second in range(20_000):
        clock.now = float(second)
        meter.answered(p.Reserve(1, "p", 1), clock.now, reserved(second, 1))
    assert len(meter._ages._times) <= 4097
    ages = [meter._ages.of(index, 20_000.0) for index in (0, 5000, 19_999)]
    assert all(age is not None and abs(age - true) <= 100 for age, true in zip(ages, (20_000, 15_000, 1), strict=True))


def test_staleness_is_how_many_versions_a_sample_is_behind_the_newest_one():
    meter, _ = metered()
    put = p.Put(1, p.Reserve(1, "p", 2), tags={0: {"policy_version": 7}, 1: {"policy_version": "odd"}})
    meter.answered(put, 0.0, reserved(0, 2))
    tags = {0: {"policy_version": 7}, 1: {"policy_version": 4}, 2: {"policy_version": True}, 3: {}}
    meter.answered(p.Fetch(2, "p", "t", ["x"], 4), 0.0, batch(0, 1, 2, 3, tags=tags))
    assert meter.of_controller()["versions"] == {"t": counted(VERSION_BOUNDS, 0, 3)}


def test_the_newest_version_is_forgotten_after_two_minutes_with_other_puts():
    meter, clock = metered()

    def put(version: int) -> None:
        meter.answered(p.Put(1, p.Reserve(1, "p", 1), tags={0: {"policy_version": version}}), 0.0, reserved(0, 1))

    def behind(version: int) -> float:
        before = meter.of_controller()["versions"].get("t", {"sum": 0})["sum"]
        got = batch(0, tags={0: {"policy_version": version}})
        meter.answered(p.Fetch(2, "p", "t", ["x"], 1), 0.0, got)
        return float(meter.of_controller()["versions"]["t"]["sum"] - before)

    found = []
    for clock.now, version in ((0.0, 900), (1.0, 5), (61.0, 5), (100.0, 6), (122.0, 7), (5000.0, 8), (5001.0, 0)):
        put(version)
        found.append(behind(4))
    assert found == [896, 896, 896, 896, 3, 4, 4]


def test_the_number_of_tasks_with_a_histogram_is_bounded():
    meter, _ = metered()
    meter.answered(p.Reserve(1, "p", 10), 0.0, reserved(0, 10))
    for number in range(300):
        meter.answered(p.Fetch(2, "p", f"t{number}", ["x"], 1), 0.0, batch(0))
    histograms = meter.of_controller()["age_s"]
    assert len(histograms) == 101
    assert sum(histograms["(others)"]["counts"]) == 200


def test_a_front_counts_what_it_answers_and_the_bytes_of_values():
    front = front_of()
    writer, reader = Client(front, "writer"), Client(front, "reader")
    writer.stored([7, 8])
    reader.send(reader.fetch(2))
    metrics = reader.send(p.GetStats(reader.number()))[0].reply.value["metrics"]
    assert (sum(metrics["requests"]["GET_META"]["seconds"]["counts"]), metrics["requests"]["GET_META"]["samples"]) == (
        1,
        2,
    )
    assert metrics["bounds"] == {name: list(bounds) for name, bounds in BOUNDS.items()}
    of_unit = reader.send(AskUnitStats(reader.number()))[0].reply.metrics
    assert of_unit["requests"]["PUT"]["samples"] == 2
    assert of_unit["bytes"] == {
        "put": {"message": 2 * NBYTES, "memory": 0},
        "get": {"message": 2 * NBYTES, "memory": 0},
    }


def moved(front: Any) -> dict[str, dict[str, int]]:
    client = Client(front, "who asks")
    found: dict[str, dict[str, int]] = client.one(AskUnitStats(client.number())).metrics["bytes"]
    return found


def test_bytes_count_once_they_are_committed():
    front = front_of(pages=4)
    writer = Client(front, "writer")
    reserved_ = writer.one(writer.reserve(2))
    layout = dense_layout("uint8", 1, (NBYTES,))
    write = Write(writer.number(), reserved_.indexes, Columns([ColumnHeader("x", layout, 2)]))
    writer.one(write, [bytes(2 * NBYTES)])
    assert moved(front)["put"] == {"message": 0, "memory": 0}
    writer.one(Commit(writer.number(), [("writer", write.id)]))
    assert moved(front)["put"] == {"message": 2 * NBYTES, "memory": 0}
    writer.one(writer.put_leased([1, 2]))
    assert moved(front)["put"] == {"message": 2 * NBYTES, "memory": 2 * PAGE}
    assert len(writer.send(writer.fetch(1, mapped=True))) == 1
    assert moved(front)["get"] == {"message": 8, "memory": PAGE}, "its shape, and not the other row of the block"


def test_bytes_of_refused_and_aborted_writes_do_not_count():
    front = front_of(capacity_bytes=3 * NBYTES)
    writer = Client(front, "writer")
    reserved_ = writer.one(writer.reserve(1))
    layout = dense_layout("uint8", 1, (NBYTES,))
    write = Write(writer.number(), reserved_.indexes, Columns([ColumnHeader("x", layout, 1)]))
    writer.one(write, [bytes(NBYTES)])
    writer.tell(Abort(writer.number(), [write.id]))
    failed(writer.put([1, 2, 3, 4])[0], "StorageFullError")
    failed(writer.put([1], begin=writer.check([77]))[0], "SampleClearedError")
    assert moved(front)["put"] == {"message": 0, "memory": 0}
