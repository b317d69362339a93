# SPDX-License-Identifier: Apache-2.0
"""What the paragraph at the end of a fit counts, and what it advises."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer
from recorders import Recorder

import transfer_queue as tq
from lightning_tq import Stream
from lightning_tq.callbacks import fit_report
from lightning_tq.callbacks.fit_report import FitReport
from transfer_queue import Finding


def test_the_clock_leaves_out_validation_and_earlier_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(fit_report.time, "perf_counter", lambda: now)
    report, training = FitReport(), (Trainer(logger=False), Recorder())
    now = 105.0
    first = report.read(7.0)
    now = 115.0
    report.on_validation_start(*training)
    now = 155.0
    report.on_validation_end(*training)
    report.on_validation_end(*training)
    now = 165.0
    assert report.read(12.0).since(first) == (20.0, 5.0)
    assert report.read(99.0).since(first) == (20.0, 20.0)  # no more than all of it


JUDGED = {"added": 100, "states": {"waiting": 20, "rejected": 72}, "rejected": {"any(ok)": 72}}
PRODUCERS = "add producers (Producer(count=...)) or make them faster"
GATE = ["loosen the gate 'any(ok)', which rejected 90% of the groups", "work on prompts that pass it"]
FURTHER = "let workers go further ahead of training by GroupSampler({})"


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"ahead": 2}, [PRODUCERS, FURTHER.format("ahead=3")]),
        (
            {"max_staleness": 1, "stale": "wait"},
            [PRODUCERS, FURTHER.format("ahead=2, max_staleness=2")],
        ),
        ({"ahead": 4, "max_staleness": 1, "stale": "wait"}, [PRODUCERS, FURTHER.format("max_staleness=2")]),
        (
            {"gate": "any(ok)"},
            [
                *GATE,
                "begin more groups than a step needs by GroupSampler(oversample=10)",
                FURTHER.format("ahead=2"),
            ],
        ),
        (
            {"gate": "any(ok)", "max_staleness": 1, "stale": "wait"},  # oversample would admit no more
            [*GATE, FURTHER.format("ahead=2, max_staleness=2")],
        ),
    ],
    ids=["ahead", "both", "staleness", "gate", "gate and staleness"],
)
def test_the_advice_names_what_limits_the_workers(options: dict[str, Any], advice: list[str]) -> None:
    sampler = tq.GroupSampler(groups=4, **options)
    drawing = Stream(partition="train", task="learn", fields=["x"], sampler=sampler)
    partition = {"groups": JUDGED} if sampler.gate else {}
    assert list(fit_report._advice(drawing, Finding.of_training(100.0, 60.0), partition)) == advice


def test_what_ended_producers_is_mended_before_more_are_added() -> None:
    drawing = Stream(partition="train", task="learn", fields=["x"], batch_size=4)
    advice = list(fit_report._advice(drawing, Finding.of_training(100.0, 60.0), {}, restarted=2))
    assert advice == [
        "mend what ended producers, which were started again 2 times (the warnings say why)", PRODUCERS
    ]  # fmt: skip
    assert len(list(fit_report._advice(drawing, Finding.of_training(100.0, 1.0), {}, restarted=2))) == 1


@pytest.mark.parametrize(("ready", "counts"), [(23, 0), (24, 24)])
def test_samples_for_several_steps_that_are_ready_at_the_end_speak_against_slow_generation(
    ready: int, counts: int
) -> None:
    drawing = Stream(partition="train", task="learn", fields=["x"], batch_size=4)
    partition = {"tasks": {"learn": {"ready": {"x": ready, "x,y": 1}}, "other": {"ready": {"x": 1000}}}}
    assert fit_report._more_than_enough(drawing, partition, dp_size=2) == counts
    assert fit_report._more_than_enough(drawing, {}, dp_size=2) == 0


def test_the_advice_names_the_field_that_samples_wait_for() -> None:
    drawing = Stream(partition="train", task="learn", fields=["x", "reward"], batch_size=4)
    partition = {"produced": {"x": 100, "reward": 64, "other": 1}}
    (advice,) = fit_report._advice(drawing, Finding.of_training(100.0, 60.0), partition)
    assert advice == "add producers of field 'reward', which 36 samples still lack, or make them faster"
