# SPDX-License-Identifier: Apache-2.0
"""What the dashboard remembers of a queue: bounded points, and a log in which each problem begins and ends once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from lightning_tq.dashboard.history import QueueHistory
from lightning_tq.queue_report import plain
from transfer_queue import diagnose


def histogram(*counts: int, total: float = 0.0) -> dict[str, Any]:
    return {"counts": list(counts), "sum": total}


def task(consumed_per_s: float | None = 0.0) -> dict[str, Any]:
    return {"consumed_per_s": consumed_per_s, "consumed": 0, "in_flight_samples": 0}


UNIT = {"unit": "unit0", "held_nbytes": 7, "spilled_nbytes": 0, "capacity_bytes": None, "parked": 0}


def report(**changes: Any) -> dict[str, Any]:
    partition = {
        "put_per_s": 2.0, "tasks": {"learn": task(3.0)}, "abandoned": None, "lost": {}, "samples": 0, "held": 0,
        "sealed": False, "fields": [], "put_total": 9,
    }  # fmt: skip
    partition |= {name: changes.pop(name) for name in list(changes) if name in partition}
    stats = {
        "partitions": {"train": partition, "other": {**partition, "abandoned": None, "lost": {}}}, "waiting": [],
        "lost_units": [], "alarms": [], "metrics": {"versions": {}, "age_s": {}}, "clients": {}, "capacity": None,
    }  # fmt: skip
    told = {**stats, "units": [UNIT], **changes}
    return {**told, "findings": [plain(each) for each in diagnose(told)]}


def waiting(waited_s: float, **more: Any) -> dict[str, Any]:
    return {
        "task": "learn", "writer": False, "partition": "train", "waited_s": waited_s, "client": "c", "wanted": 4,
        "fields": ["x"], **more,
    }  # fmt: skip


def told(history: QueueHistory) -> list[tuple[str, str]]:
    return [(event["level"], event["text"]) for event in history.events]


def test_a_point_adds_up_partitions_and_shows_the_longest_wait_of_each_task():
    history = QueueHistory()
    history.add(report(waiting=[waiting(1.0), waiting(3.0), waiting(2.0, task=None, writer=True)]), now=50.0)
    assert list(history.points) == [
        {"n": 2, "t": 50.0, "put": 4.0, "got": {"learn": 6.0}, "waits": {"learn": 3.0}, "other_waits": {"puts": 2.0},
         "held": {"unit0": 7}, "versions": {}, "age_s": {}, "starved": {}},
    ]  # fmt: skip


def test_a_task_that_is_called_as_another_series_is_apart_from_it():
    history = QueueHistory()
    mine, put = waiting(3.0, task="puts"), waiting(2.0, task=None, writer=True)
    history.add(report(tasks={"puts": task()}, waiting=[mine, put]), now=50.0)
    [point] = history.points
    assert (point["waits"], point["other_waits"]) == ({"puts": 3.0}, {"puts": 2.0})


def test_points_are_bounded_and_told_once():
    history = QueueHistory()
    for second in range(2000):
        history.add(report(), float(second))
    assert (len(history.points), history.since(history.points[-1]["n"])) == (900, [])
    assert [point["t"] for point in history.since(history.points[-3]["n"])] == [1998.0, 1999.0]


def test_staleness_is_the_mean_of_what_was_handed_out_in_the_last_half_minute():
    history = QueueHistory()
    for second, counts, total in ((0, (4, 0), 0.0), (20, (4, 2), 10.0), (40, (4, 4), 30.0), (100, (4, 4), 30.0)):
        metrics = {"versions": {"learn": histogram(*counts, total=total)}, "age_s": {}}
        history.add(report(metrics=metrics), float(second))
    assert [point["versions"] for point in history.points] == [{}, {"learn": 5.0}, {"learn": 10.0}, {}]


def test_a_problem_is_logged_when_it_begins_and_when_it_is_over():
    history = QueueHistory()
    for second, abandoned in enumerate((None, "reward", "reward", None)):
        history.add(report(abandoned=abandoned), float(second))
    text = (
        "all producers of 'reward' have died, readers of 'train' get an error. Look at their output, or restart them."
    )
    assert told(history) == [("bad", text), ("good", f"over: {text}")]
    assert (history.problems, [event["t"] for event in history.events]) == ([], [1.0, 3.0])


def test_a_task_that_waits_long_is_a_warning_that_says_what_it_lacks_and_problems_go_first():
    history = QueueHistory()
    history.add(report(waiting=[waiting(5.0, lacking={"reward": 3})]), 0.0)
    assert history.problems == []
    history.add(report(waiting=[waiting(12.0, lacking={"reward": 3})], lost_units=["unit1"]), 7.0)
    assert [problem["text"] for problem in history.problems] == [
        "storage unit 'unit1' ended, and its values with it.",
        "task 'learn' waited 12.0 s for 4 samples of 'train': 3 lack field 'reward'. Check the producers, "
        "or wait longer (timeout_s).",
    ]


def test_a_full_queue_is_one_problem_until_it_is_not_full_any_more():
    history, seen = QueueHistory(), []
    put = waiting(3.0, task=None, writer=True)
    for second, puts in ((0, [put]), (1, []), (4, [{**put, "waited_s": 12.0}]), (5, []), (20, [])):
        history.add(report(waiting=puts), float(second))
        seen.append([problem["level"] for problem in history.problems])
    assert seen == [["warn"], ["warn"], ["bad"], ["bad"], []]
    assert [event["level"] for event in history.events] == ["warn", "good"]


def test_rates_are_means_that_weigh_the_last_seconds_most():
    history = QueueHistory()
    for second, rate in enumerate((100.0, 0.0, 100.0, 0.0, 100.0)):
        history.add(report(put_per_s=rate / 2), float(second))
    shown = [point["put"] for point in history.points]
    assert shown[0] == 100.0
    assert max(abs(b - a) for a, b in pairwise(shown)) < 20.0


@pytest.mark.parametrize(("waits_in", "side"), [(0, "training"), (8, "generation")])
def test_the_task_that_reads_most_fields_says_which_side_limits_the_run(waits_in, side):
    history = QueueHistory()
    teacher, learner = {**task(9.0), "ready": {"x": 3}}, {**task(3.0), "ready": {"x,y where v > 1": 0}}
    for second in range(10):
        waits = [waiting(0.3, task="label"), *([waiting(0.3)] if second < waits_in else [])]
        history.add(report(tasks={"label": teacher, "learn": learner}, waiting=waits), float(second))
    assert history.bottleneck is not None
    assert history.bottleneck["names"] == (side,)
    assert "task 'learn' waited for samples in" in history.bottleneck["statement"]


@pytest.mark.parametrize(
    ("waited_s", "side"), [(0.0, "training"), (0.1, "training and generation"), (0.6, "generation")]
)
def test_a_reader_that_says_how_long_it_waited_is_believed_although_its_fetch_ahead_waits(waited_s, side):
    history = QueueHistory()
    for second in range(10):
        seconds = 40.0 + waited_s * second if second else 0.0  # the first batch came late
        says = {**task(4.0), "done_total": second, "asked_s_ago": 0.5, "starved_s": seconds}
        history.add(report(tasks={"learn": says}, waiting=[waiting(0.5)]), float(second))
    assert history.bottleneck is not None
    assert history.bottleneck["names"] == (side,)


def test_a_fetch_ahead_that_waits_no_longer_than_through_steps_before_is_no_wait_of_its_reader():
    history, sides = QueueHistory(), []
    for second in range(60):  # steps of 30 s; each batch comes after 25
        says = {**task(4.0), "done_total": 4, "asked_s_ago": 0.5, "starved_s": 0.0}
        waits = [waiting(float(second % 30))] if second % 30 < 25 else []
        history.add(report(tasks={"learn": says}, waiting=waits), float(second))
        assert history.bottleneck is not None
        sides.append(history.bottleneck["names"][0])
    assert set(sides[30:]) == {"training"}


def test_waits_between_partitions_count_although_the_reader_is_new_in_each():
    history, second, starved_s = QueueHistory(), 0, 0.0
    for _ in range(6):
        for step in range(10):  # 8 s of waiting, 2 s of training
            waits, samples = ([waiting(0.5 + step)], 0) if step < 8 else ([], 4)
            says = {**task(float(samples)), "done_total": samples, "asked_s_ago": step, "starved_s": starved_s}
            history.add(report(tasks={"learn": says}, waiting=waits), float(second))
            second += 1
        starved_s += 8.0
    assert history.bottleneck is not None
    assert history.bottleneck["names"] == ("generation",)


def test_a_problem_is_the_same_one_while_only_the_numbers_in_its_text_change():
    history, seen = QueueHistory(), []
    for second in range(3):
        alarm = {"number": 4, "what": "MySampler", "held_s": 2.0 + second, "seen_s_ago": 0.4 * second}
        history.add(report(lost={"x": 9 - second}, alarms=[alarm]), float(second))
        seen.append([(problem["id"], problem["text"]) for problem in history.problems])
    assert len({text for problems in seen for _, text in problems}) == 6
    assert [len({id_ for id_, _ in column}) for column in zip(*seen, strict=True)] == [1, 1]
    assert len(history.events) == 2, "each began once"


def test_two_alarms_of_the_same_sampler_are_two_problems():
    history = QueueHistory()
    alarms = [{"number": n, "what": "MySampler", "held_s": 2.0, "seen_s_ago": 1.0} for n in (1, 2)]
    history.add(report(alarms=alarms), 0.0)
    assert len({problem["id"] for problem in history.problems}) == 2


def test_problems_of_names_that_read_alike_are_apart():
    history = QueueHistory()
    alike = [waiting(12.0, task="a b", partition="c"), waiting(12.0, task="a", partition="b c")]
    history.add(report(waiting=alike, lost_units=["unit1", "unit1"]), 0.0)
    assert len(history.problems) == len({problem["id"] for problem in history.problems}) == 4


def test_a_queue_that_does_not_answer_is_a_problem_until_it_does():
    history = QueueHistory()
    history.unreachable("gone", 1.0)
    history.unreachable("gone", 2.0)
    history.add(report(), 3.0)
    assert told(history) == [("bad", "gone"), ("good", "over: gone")]


def test_what_was_wrong_is_not_over_because_the_queue_does_not_answer():
    history = QueueHistory()
    history.add(report(lost_units=["unit1"]), 1.0)
    history.unreachable("gone", 2.0)
    history.add(report(lost_units=["unit1"]), 3.0)
    lost = "storage unit 'unit1' ended, and its values with it."
    assert told(history) == [("bad", lost), ("bad", "gone"), ("good", "over: gone")]
    assert [problem["text"] for problem in history.problems] == [lost]
