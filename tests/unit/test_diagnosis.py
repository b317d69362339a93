# SPDX-License-Identifier: Apache-2.0
"""A table of statistics and of what they say: what waits, for what, who holds it up, what to do; what went wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from transfer_queue.diagnosis import diagnose, keepers, not_ready
from transfer_queue.finding import Finding
from transfer_queue.protocol import NotReady

TASK = {"consumed": 6, "in_flight_samples": 2}
PARTITION: dict[str, Any] = {
    "samples": 8, "put_total": 8, "held": 0, "sealed": False, "fields": ["x", "y"], "tasks": {"learn": TASK},
    "abandoned": None, "lost": {},
}  # fmt: skip
FETCH = {
    "partition": "train", "task": "learn", "client": "trainer.1", "waited_s": 3.21, "writer": False,
    "fields": ["x", "y"], "wanted": 4, "ready": 1, "lacking": {}, "unmatched": 0,
}  # fmt: skip
PUT = {"partition": "train", "task": None, "client": "rollout.7", "waited_s": 1.0, "writer": True, "wanted": 5}
BYTES = {**PUT, "partition": None, "wanted": None, "wanted_nbytes": 96 << 10}
KEYS = {"partition": "p", "task": None, "client": "buffer.9", "waited_s": 2.0, "writer": False, "wanted": 3}
UNIT = {"unit": "unit0", "capacity_bytes": 8 << 20, "parked": 0, "parked_nbytes": 0, "held_nbytes": 0,
        "spilled_nbytes": 0}  # fmt: skip
KEYS_WAIT = "a wait for keys of buffer.9 waited 2.0 s for {}. Check the producers, or wait longer (timeout_s)."
ROOM = "Clear consumed samples or partitions, raise {}, or raise put_timeout_s."
KEPT = "task 'learn' has not consumed 2 samples, task 'learn' has not acknowledged 2 samples, at least 4 samples are "
KEPT += "consumed and not cleared (clear_consumed, clear_partition). "
AGAIN = "Put the lost values again (client.get_lost_samples('train') names them), or clear those samples"


def stats(waiting: list[dict[str, Any]], capacity: int | None = None, **partition: Any) -> dict[str, Any]:
    return {
        "partitions": {"train": {**PARTITION, **partition}}, "waiting": waiting, "capacity": capacity, "clients": {},
        "lost_units": [], "alarms": [],
    }  # fmt: skip


def said(*args: Any) -> list[str]:
    return [str(finding) for finding in diagnose(*args)]


WAITED = "task 'learn' waited 3.2 s for 4 samples of 'train'"
FETCHES = [
    ({"lacking": {"y": 1}}, {}, "1 ready, 1 lacks field 'y'. Check the producers, lower batch_size, or wait longer "
     "(timeout_s)."),
    ({"unmatched": 3}, {"held": 2}, "1 ready, 3 don't match the filter, 2 are reserved and not put yet. Check the "
     "producers, lower batch_size, or wait longer (timeout_s)."),
    ({}, {}, "1 ready. Check the producers, lower batch_size, seal the partition if nothing more comes "
     "(client.seal_partition('train')), or wait longer (timeout_s)."),
    ({"ready": 0}, {"put_total": 0, "fields": []}, "0 ready, nothing was published yet. Check the producers, or "
     "wait longer (timeout_s)."),
    ({"lacking": {"z": 8}, "fields": ["x", "z"]}, {}, "1 ready, 8 lack field 'z', nobody has put field 'z' so far "
     "(there are 'x', 'y'). Check the producers, lower batch_size, compare the names of the fields, or wait longer "
     "(timeout_s)."),
    ({"lacking": {"y": 7}}, {"sealed": True}, "1 ready, 7 lack field 'y', the partition is sealed. Put what is "
     "missing, clear those samples, or wait longer (timeout_s)."),
    ({"lacking": {"y": 7}}, {"lost": {"y": 3, "other": 1}}, "1 ready, 7 lack field 'y', 3 samples lost 'y' with a "
     f"storage unit. {AGAIN.replace(', or', ',')}, or wait longer (timeout_s)."),
    ({"ready": 4}, {}, "4 ready, Sampler returned no samples of those that are ready, or earlier fetches of the task "
     "still wait. Check the producers, lower batch_size, or wait longer (timeout_s)."),
    ({"partition": "val"}, {"sealed": True}, "the partition is not in the queue, which holds 'train' (8 samples, "
     "sealed). Check the producers, compare the names of the partitions, or wait longer (timeout_s)."),
    ({"lacking": {"y": 3}}, {"sealed": True, "produced": {"x": 8, "y": 5}, "tasks": {
        "teacher": {"consumed": 8, "in_flight_samples": 0}, "learn": {"consumed": 4, "in_flight_samples": 0},
     }}, "1 ready, 3 lack field 'y', the partition is sealed. If the queue was restored and task "
     "'teacher' adds what is missing, give it all again (client.reset_consumption('train', 'teacher')), put what is "
     "missing, clear those samples, or wait longer (timeout_s)."),
]  # fmt: skip


@pytest.mark.parametrize(("waiting", "partition", "says"), FETCHES)
def test_a_fetch_that_waits(waiting: dict[str, Any], partition: dict[str, Any], says: str) -> None:
    text = said(stats([{**FETCH, **waiting}], **partition))[-1]
    assert text == f"{WAITED.replace('train', waiting.get('partition', 'train'))}: {says}"


def test_a_fetch_that_is_refused_says_why() -> None:
    refused = {**FETCH, "refused": "dp_size is 2, and was 4 before.", "wanted": None, "ready": None}
    assert said(stats([refused]))[0].startswith(
        "task 'learn' waited 3.2 s for samples of 'train': dp_size is 2, and was 4 before. Check the producers"
    )


def test_a_producer_that_lives_and_puts_nothing_is_named() -> None:
    lacking = {**FETCH, "lacking": {"y": 3}}
    x = {"alive": 2, "clients": ["rollout.7", "rollout.8"], "published_s_ago": 300.0}
    y = {"alive": 6, "clients": ["reward.1", "reward.2"], "published_s_ago": 41.0}

    def held_up(waiting: dict[str, Any], **producers: dict[str, Any]) -> str:
        return diagnose({**stats([waiting]), "producers": producers})[-1].held_up_by[-1]

    hangs = "nobody has put field 'y' for 41 s, though its producers live (reward.1, reward.2 and others)"
    assert held_up(lacking, x=x, y=y) == hangs
    hangs = "nobody has put field 'x' for 5 min, though its producers live (rollout.7, rollout.8)"
    assert held_up(FETCH, x=x, y=y) == hangs
    for own in ({**y, "alive": 0}, {**y, "published_s_ago": None}, {**y, "published_s_ago": 5.0}):
        assert held_up(lacking, x=x, y=own) == "3 lack field 'y'"


OTHERS = [
    ([PUT], 10, [], [f"a put of rollout.7 waited 1.0 s for room for 5 samples of 'train' in a queue of 10: {KEPT}"
                     f"{ROOM.format('total_storage_size')}"]),
    ([BYTES], None, [UNIT], [f"a put of rollout.7 waited 1.0 s for room for 96 KiB in a queue of 8 MiB: {KEPT}"
                             f"{ROOM.format('memory')}"]),
    ([], None, [{**UNIT, "parked": 2, "parked_nbytes": 3000, "capacity_bytes": None}],
     [f"a put of 2 clients at unit0 waits for room for 2.93 KiB: {KEPT}{ROOM.format('memory')}"]),
    ([{**KEYS, "keys": "keys where x > 1"}], None, [], [KEYS_WAIT.format("3 keys of 'p' where x > 1")]),
    ([{**KEYS, "wanted": None, "keys": "keys"}], None, [], [KEYS_WAIT.format("changed keys of 'p'")]),
]  # fmt: skip


@pytest.mark.parametrize(("waiting", "capacity", "units", "says"), OTHERS)
def test_puts_and_waits_for_keys(
    waiting: list[dict[str, Any]], capacity: int | None, units: list[dict[str, Any]], says: list[str]
) -> None:
    assert [text for text in said(stats(waiting, capacity), units) if "queue is full" not in text] == says


FULL = {**UNIT, "held_nbytes": 8 << 20}


@pytest.mark.parametrize(
    ("waiting", "capacity", "units", "holds"),
    [([PUT], 10, [], "8 of 10 samples, 1 put waits for room"), ([], 8, [], "8 of 8 samples"), ([], 9, [], None),
     ([], None, [FULL], "8 MiB of 8 MiB"), ([], None, [{**FULL, "spilled_nbytes": 1 << 20}], None)],
)  # fmt: skip
def test_a_queue_is_full_while_a_put_waits_and_also_between_two_puts(
    waiting: list[dict[str, Any]], capacity: int | None, units: list[dict[str, Any]], holds: str | None
) -> None:
    found = [each.statement for each in diagnose(stats(waiting, capacity), units) if each.kind == "full"]
    assert found == ([] if holds is None else [f"the queue is full, {holds}, {KEPT.rstrip('. ')}"])


def test_a_full_queue_says_which_tasks_do_not_read() -> None:
    tasks = {name: {**TASK, "asked_s_ago": age_s} for name, age_s in (("slow", 50.0), ("busy", 2.0), ("learn", 50.0))}
    (found, _) = diagnose(stats([FETCH], 8, tasks={**tasks, "done": {**TASK, "consumed": 8, "asked_s_ago": 75.0}}))
    assert [text for text in found.held_up_by if "doesn't read" in text] == [
        "task 'slow' doesn't read, it asked last 50 s ago"
    ]


def test_a_put_that_waits_for_trained_samples_is_told_what_acknowledges_them() -> None:
    _, text = said(stats([PUT], 10, tasks={"learn": {"consumed": 8, "in_flight_samples": 8}}))
    assert (
        "task 'learn' has not acknowledged 8 samples. Let the trainer acknowledge sooner (checkpoints more often"
        in text
    )


def test_a_put_that_waits_for_a_recorder_is_told_of_its_task() -> None:
    tasks = {"learn": {"in_flight_samples": 2}, "record:learn:/runs": {"in_flight_samples": 8, "follows": "learn"}}
    _, text = said(stats([PUT], 10, tasks={name: {"consumed": 8, **own} for name, own in tasks.items()}))
    assert text.endswith(
        " Start the reader of task 'record:learn:/runs' again if it has ended, forget that task (lightning-tq "
        "forget-task record:learn:/runs), clear consumed samples or partitions, raise total_storage_size, or raise "
        "put_timeout_s."
    )
    tasks["record:learn:/runs"]["in_flight_samples"] = 2
    _, text = said(stats([PUT], 10, tasks={name: {"consumed": 8, **own} for name, own in tasks.items()}))
    assert "forget" not in text


@pytest.mark.parametrize(("capacity", "is_of_the_checkpoint"), [(None, True), (13, True), (12, False)])
def test_a_put_that_a_checkpoint_holds_up_names_who_saves_it(capacity: int | None, is_of_the_checkpoint: bool) -> None:
    told = {**stats([PUT], capacity), "clients": {"idle.1": {"freezes": 0}, "saver.2": {"freezes": 1}}}
    checkpoint = "a put of rollout.7 waited 1.0 s for a checkpoint, before it replaces 5 samples of 'train'"
    assert (said(told) == [f"{checkpoint}: client saver.2 saves one."]) == is_of_the_checkpoint


@pytest.mark.parametrize(("partition", "of"), [("train", " of 'train'"), (None, "")])
def test_a_write_that_waits_for_a_checkpoint_may_have_no_number_and_no_partition(
    partition: str | None, of: str
) -> None:
    told = {**stats([{**PUT, "wanted": None, "partition": partition}]), "clients": {"saver.2": {"freezes": 1}}}
    says = f"a put of rollout.7 waited 1.0 s for a checkpoint, before it replaces samples{of}"
    assert said(told) == [f"{says}: client saver.2 saves one."]


def test_what_went_wrong_comes_before_what_waits_and_keeps_its_identity() -> None:
    alarm = {"number": 4, "what": "MySampler of task 't'", "held_s": 2.5, "seen_s_ago": 8.4}
    told = {**stats([FETCH], abandoned="y", lost={"x": 3}), "alarms": [alarm], "lost_units": ["unit1", "unit1"]}
    found = diagnose(told, units_error="storage unit unit2 does not answer.")
    assert [(each.kind, *each.names) for each in found] == [
        ("gone", "train"), ("lost", "train", "x"), ("unit", "unit1", 0), ("unit", "unit1", 1), ("storage",),
        ("sampler", 4), ("fetch", "learn", "train"),
    ]  # fmt: skip
    assert [str(each) for each in found[:-1]] == [
        "all producers of 'y' have died, readers of 'train' get an error. Look at their output, or restart them.",
        f"3 samples of 'train' lost 'x' with a storage unit. {AGAIN}.",
        *["storage unit 'unit1' ended, and its values with it."] * 2,
        "storage: storage unit unit2 does not answer.",
        "MySampler of task 't' held the server for 2.5 s, when nobody else was served, seen 8 s ago.",
    ]


def test_a_queue_in_which_nothing_waits_has_no_findings() -> None:
    assert diagnose(stats([]), [UNIT]) == []


# ---- replies ----

REPLY = NotReady(1, 4, 1, 3, {"reward": 2}, 41.0, ["a", "reward"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "Check the producers, lower batch_size, or wait longer (timeout_s)."),
        (
            {"lacking": {}},
            "Check the producers, lower batch_size, seal the partition if nothing more comes "
            "(client.seal_partition('p')), or wait longer (timeout_s).",
        ),
        ({"lacking": {}, "last_published_s": None}, "lower batch_size, or wait longer (timeout_s)."),
        ({"lacking": {}, "reserved": 1}, "lower batch_size, or wait longer (timeout_s)."),
        ({"sealed": True}, "Put what is missing, clear those samples, or wait longer (timeout_s)."),
        ({"lost": {"a": 2}}, f"{AGAIN.replace('train', 'p').replace(', or', ',')}, or wait longer (timeout_s)."),
    ],
    ids=["a field is missing", "a rest", "nothing yet", "being put", "sealed", "lost"],
)
def test_what_is_advised_is_what_helps(changes: dict[str, Any], says: str) -> None:
    assert str(not_ready(msgspec.structs.replace(REPLY, **changes), "t", "p", ["a"], 1.0)).endswith(says)


@pytest.mark.parametrize(
    ("reserved", "owed_by", "says"),
    [
        (0, [], "1 ready, 2 lack field 'reward', last"),
        (1, ["a"], "2 lack field 'reward', 1 is reserved by client a and not put yet, last"),
        (8, ["a", "b", "c"], "8 are reserved by clients a, b, c and not put yet, last"),
        (8, list("abcde"), "8 are reserved by clients a, b, c, d, e and maybe others and not put yet, last"),
        (8, [], "8 are reserved and not put yet, last"),
    ],
)
def test_samples_that_writers_owe_are_counted_and_the_writers_named(
    reserved: int, owed_by: list[str], says: str
) -> None:
    told = msgspec.structs.replace(REPLY, reserved=reserved, owed_by=owed_by)
    assert says in str(not_ready(told, "t", "p", ["a"], 1.0))


def test_who_keeps_a_queue_full() -> None:
    partitions = [(4, {"eval": (3, 0), "train": (1, 3), "third": (1, 1)}), (2, {})]
    assert keepers(partitions) == (
        "task 'eval' has not consumed 3 samples", "task 'train' has not consumed 1 sample",
        "task 'train' has not acknowledged 3 samples", "task 'third' has not acknowledged 1 sample",
        "no task reads 2 samples",
    )  # fmt: skip


# ---- runs ----


@pytest.mark.parametrize(
    ("elapsed_s", "waited_s", "says"),
    [
        (100.0, 0.0, "training was the bottleneck: it waited for samples in 0% of its time"),
        (100.0, 4.0, "training was the bottleneck: it waited for samples in 4% of its time"),
        (100.0, 9.0, "training and generation kept pace: training waited for samples in 9% of its time"),
        (
            100.0,
            60.0,
            "generation was the bottleneck: it took 2.5 times as long as training, which waited for samples in 60% of "
            "its time",
        ),
        (
            100.0,
            100.0,
            "generation was the bottleneck: it took far longer than training, which waited for samples in 100% of its "
            "time",
        ),
    ],
)
def test_what_limits_a_run_follows_from_the_share_of_waits(elapsed_s: float, waited_s: float, says: str) -> None:
    assert Finding.of_training(elapsed_s, waited_s).statement == says


def test_generation_is_not_called_slow_where_it_waited_for_room() -> None:
    assert Finding.of_training(100.0, 60.0, was_full=True).statement == (
        "the full queue was the bottleneck: producers waited for room, and training for samples in 60% of its time"
    )
    assert Finding.of_training(100.0, 1.0, was_full=True) == Finding.of_training(100.0, 1.0)


def test_generation_is_not_called_slow_where_more_samples_are_ready_than_the_next_steps_need() -> None:
    assert Finding.of_training(100.0, 60.0, ready=6528).statement == (
        "bursts or reading were the bottleneck: training waited for samples in 60% of its time, and 6,528 were ready "
        "at the end"
    )


GROUPS: dict[str, Any] = {
    "added": 40, "states": {"waiting": 12, "ready": 12, "running": 3}, "rejected": {"std(reward) > 0": 5},
    "oldest": {"worker": "rollout-7", "key": "q1", "age_s": 2470.0},
    "slots": {"learn": {"used": 16, "here": 16, "budget": 16, "per_step": 16}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({}, "12 ready, 3 running (oldest 41 min, rollout-7), 12 waiting for a worker, 5 rejected by std(reward) > 0, "
         "16 of 16 slots in use. Look at the worker of the oldest group, set deadline_s (add_groups), loosen the gate, "
         "or wait longer (timeout_s)."),
        ({"states": {}, "rejected": {}, "slots": {"learn": {"used": 0, "here": 0, "budget": 16, "per_step": 16}}},
         "there are none. Add groups, or wait longer (timeout_s)."),
        ({"states": {"drawn": 16}, "rejected": {}}, "16 in training, 16 of 16 slots in use. Let the trainer say what "
         "it has trained (client.advance), raise ahead of 'learn', or wait longer (timeout_s)."),
        ({"states": {"drawn": 16}, "rejected": {},
          "slots": {"learn": {"used": 16, "here": 16, "budget": 16, "per_step": 16, "limits": ["max_staleness"]}}},
         "16 in training, 16 of 16 slots in use. Let the trainer say what it has trained (client.advance), raise "
         "max_staleness of 'learn', or wait longer (timeout_s)."),
        ({"states": {"closed": 9}, "rejected": {},
          "slots": {"learn": {"used": 9, "here": 9, "budget": 16, "per_step": 16, "gate": "any(ok)"}}},
         "9 without a tag or field. Put the fields of the fetch, and the tags of the gate 'any(ok)', for all rows of a "
         "group, or wait longer (timeout_s)."),
        ({"states": {"waiting": 9}, "rejected": {},
          "slots": {"learn": {"used": 9, "here": 9, "budget": 16, "per_step": 16}}},
         "9 waiting for a worker. Start workers that lease groups, or wait longer (timeout_s)."),
        ({"states": {"waiting": 9}, "rejected": {},
          "slots": {"learn": {"used": 16, "here": 3, "budget": 16, "per_step": 16}}},
         "9 waiting for a worker, 16 of 16 slots in use, 13 of them by groups of other partitions. Clear the "
         "partitions that the task reads no more, or say that it has gone on (client.move_on), or wait longer "
         "(timeout_s)."),
    ],
)  # fmt: skip
def test_a_wait_for_groups_says_what_becomes_of_them(own: dict[str, Any], text: str) -> None:
    groups = {**GROUPS, **own}
    wait = f"task 'learn' waited 3.2 s for 16 groups of 'train': {text}"
    assert said(stats([FETCH], groups=groups)) == [wait]
    reply = NotReady(0, 16, 1, 8, groups=groups)
    assert str(not_ready(reply, "learn", "train", ["x"], 3.21)) == wait


def test_a_wait_for_groups_names_values_that_were_lost_with_a_storage_unit() -> None:
    groups = {**GROUPS, "states": {"closed": 2}, "rejected": {}}
    (text,) = (each for each in said(stats([FETCH], groups=groups, lost={"x": 3})) if each.startswith("task"))
    assert text.startswith("task 'learn' waited 3.2 s for 16 groups of 'train': 2 without a tag or field, 3 samples")
    assert "lost 'x' with a storage unit, 16 of 16 slots in use. Put the lost values again" in text


def test_a_task_that_draws_samples_is_told_of_samples_where_there_are_groups() -> None:
    (text,) = said(stats([{**FETCH, "task": "reward"}], groups=GROUPS))
    assert text.startswith("task 'reward' waited 3.2 s for 4 samples of 'train': 1 ready")


@pytest.mark.parametrize(("seconds", "shown"), [(12.4, "12 s"), (90.0, "2 min"), (7100.0, "118 min"), (9000.0, "2 h")])
def test_groups_are_summed_up_with_the_oldest_work(seconds: float, shown: str) -> None:
    oldest = {"worker": "rollout-7", "key": "q1", "age_s": seconds}
    found = Finding.of_groups("train", {**GROUPS, "states": {"running": 2}, "rejected": {}, "oldest": oldest})
    assert str(found) == f"groups of 'train': 2 running (oldest {shown}, rollout-7)."


END = {
    "client": "rollout-0_71.ab",
    "how": "pid 71 was killed by SIGKILL",
    "last_line": "out of memory",
    "planned": False,
}


def test_dead_producers_are_named_with_their_end_and_what_is_lacking() -> None:
    told = {**stats([], abandoned="y", produced={"y": 5}), "lost_producers": {"y": END}}
    assert said(told) == [
        "all producers of 'y' have died, last client rollout-0_71.ab, pid 71 was killed by SIGKILL, which said 'out of "
        "memory', 3 samples of 'train' lack it, readers of 'train' get an error. Look at their output, or restart them."
    ]


def test_producers_that_ended_with_their_run_are_no_finding() -> None:
    assert said({**stats([], abandoned="y"), "lost_producers": {"y": {**END, "planned": True}}}) == []


def test_the_queues_own_partitions_are_in_no_finding() -> None:
    weights = {**PARTITION, "abandoned": "x", "lost": {"x": 1}, "tasks": {"_reader": {**TASK, "consumed": 0}}}
    told = stats(
        [{**FETCH, "partition": "_weights"}, {**FETCH, "partition": "val"}, {**PUT, "partition": "_weights"}], 9
    )
    told["partitions"]["_weights"] = weights
    texts = said(told)
    assert [text.split(":")[0] for text in texts[1:]] == [
        f"{WAITED.replace('train', 'val')}", "a put of rollout.7 waited 1.0 s for room for 5 samples in a queue of 9"
    ]  # fmt: skip
    assert [text for text in texts if "_weights" in text or "_reader" in text] == []


@pytest.mark.parametrize(
    ("task", "share", "says"),
    [("learn", 0.8, "generation is the bottleneck: task 'learn' waited for samples in 80% of the last 30 s"),
     ("learn", 0.1, "training and generation keep pace: task 'learn' waited for samples in 10% of the last 30 s"),
     ("learn", 0.02, "training is the bottleneck: task 'learn' waited for samples in 2% of the last 30 s"),
     (None, 0.0, "nothing is read: no task has asked in the last 30 s")],
)  # fmt: skip
def test_a_look_says_which_side_limits_a_run_now(task: str | None, share: float, says: str) -> None:
    assert Finding.of_a_look(task, 30.0, share).statement == says
