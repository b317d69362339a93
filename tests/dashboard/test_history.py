# SPDX-License-Identifier: Apache-2.0
"""What the dashboard remembers of a queue: bounded points, and a log in which each problem begins and ends once."""

from __future__ import annotations

from typing import Any

from lightning_tq.dashboard.history import QueueHistory


def histogram(*counts: int, total: float = 0.0) -> dict[str, Any]:
    return {"counts": list(counts), "sum": total}


def task(consumed_per_s: float | None = 0.0) -> dict[str, Any]:
    return {"consumed_per_s": consumed_per_s}


def report(**changes: Any) -> dict[str, Any]:
    partition = {"put_per_s": 2.0, "tasks": {"learn": task(3.0)}, "abandoned": None, "lost": {}}
    partition |= {name: changes.pop(name) for name in list(changes) if name in partition}
    return {
        "partitions": {"train": partition, "other": {**partition, "abandoned": None, "lost": {}}}, "waiting": [],
        "units": [{"unit": "unit0", "held_nbytes": 7}], "units_error": None, "lost_units": [], "alarms": [],
        "metrics": {"versions": {}, "age_s": {}}, "taken_at": 100.0, **changes,
    }  # fmt: skip


def waiting(waited_s: float, **more: Any) -> dict[str, Any]:
    return {
        "task": "learn",
        "writer": False,
        "partition": "train",
        "waited_s": waited_s,
        "client": "c",
        "wanted": 4,
        **more,
    }


def told(history: QueueHistory) -> list[tuple[str, str]]:
    return [(event["level"], event["text"]) for event in history.events]


def test_a_point_adds_up_partitions_and_shows_the_longest_wait_of_each_task():
    history = QueueHistory()
    history.add(report(waiting=[waiting(1.0), waiting(3.0), waiting(2.0, task=None, writer=True)]), now=50.0)
    assert list(history.points) == [
        {"n": 1, "t": 50.0, "put": 4.0, "got": {"learn": 6.0}, "waits": {"learn": 3.0, "puts": 2.0},
         "held": {"unit0": 7}, "versions": {}, "age_s": {}},
    ]  # fmt: skip


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
    text = "All producers of 'reward' have died. Readers of 'train' get an error."
    assert told(history) == [("bad", text), ("good", f"over: {text}")]
    assert (history.problems, [event["t"] for event in history.events]) == ([], [1.0, 3.0])


def test_a_task_that_waits_long_is_a_warning_that_says_what_it_lacks_and_problems_go_first():
    history = QueueHistory()
    history.add(report(waiting=[waiting(5.0, lacking={"reward": 3})]), 0.0)
    assert history.problems == []
    history.add(report(waiting=[waiting(12.0, lacking={"reward": 3})], lost_units=["unit1"]), 7.0)
    assert [problem["text"] for problem in history.problems] == [
        "Storage unit 'unit1' ended, and its values with it.",
        "Task 'learn' waits for samples of 'train': 3 samples lack 'reward'.",
    ]


def test_a_queue_that_does_not_answer_is_a_problem_until_it_does():
    history = QueueHistory()
    history.unreachable("gone", 1.0)
    history.unreachable("gone", 2.0)
    history.add(report(), 3.0)
    assert told(history) == [("bad", "gone"), ("good", "over: gone")]
