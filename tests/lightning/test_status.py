# SPDX-License-Identifier: Apache-2.0
"""``lightning-tq status`` shows a running queue from outside and changes nothing in it."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run
from producing import FIELDS, rows
from rich.console import Console

import transfer_queue as tq
from lightning_tq import TQDataModule
from lightning_tq.queue_report import QueueSnapshot, make_report, tables, take_snapshot
from tests.console import lightning_tq
from tests.lightning.conftest import ROOT, stream
from tests.warm_python import started

pytestmark = pytest.mark.timeout(120)

TASK = {
    "ready": {"x": 6}, "consumed": 4, "done_total": 8, "in_flight": 1, "in_flight_samples": 4, "settled": 0,
    "ended": None, "dropped": 0,
}  # fmt: skip
PARTITION = {
    "samples": 10, "published": 14, "put_total": 14, "held": 0, "sealed": False, "num_samples": None, "keys": 0,
    "fields": ["x"], "tasks": {"learn": TASK}, "abandoned": None, "lost": {},
}  # fmt: skip
STATS: dict[str, Any] = {
    "partitions": {}, "waiting": [], "capacity": None, "clients": {}, "alarms": [], "lost_units": [], "dropped": {},
    "producers": {}, "metrics": {"versions": {}, "age_s": {}},
}  # fmt: skip
HOLDINGS = {
    "connections": 1, "reservations": 0, "reserved": 0, "leases": 0, "pins": 0, "freezes": 0, "leaves": 0, "parked": 0,
    "unreceived": 0,
}  # fmt: skip
UNIT = {
    "unit": "unit0", "samples": 10, "values": 10, "live_nbytes": 1 << 20, "held_nbytes": 3 << 19, "blocks": 1,
    "capacity_bytes": 1 << 28, "parked": 0, "parked_nbytes": 0, "arena_nbytes": 1 << 21, "recyclable_nbytes": 0,
    "leased_nbytes": 0, "pins": 0, "uncommitted_nbytes": 0, "spilled_nbytes": 0,
}  # fmt: skip


def snapshot(at: float, partition: dict[str, Any], **task: Any) -> QueueSnapshot:
    tasks = {"learn": {**TASK, **task}}
    partitions = {"train": {**PARTITION, "tasks": tasks, **partition}}
    return QueueSnapshot({**STATS, "partitions": partitions}, [UNIT], at)


def rates(now: QueueSnapshot, before: QueueSnapshot | None) -> tuple[Any, Any]:
    partition = make_report("a", now, before)["partitions"]["train"]
    return partition["put_per_s"], partition["tasks"]["learn"]["consumed_per_s"]


def test_rates_compare_two_snapshots() -> None:
    before = snapshot(10.0, {"put_total": 10}, done_total=0)
    assert rates(snapshot(12.0, {"put_total": 14}, done_total=8), before) == (2.0, 4.0)
    assert rates(snapshot(12.0, {}), None) == (None, None)


def test_clears_cancelled_puts_and_resets_do_not_lower_the_rates() -> None:
    before = snapshot(10.0, {"put_total": 10, "published": 10, "samples": 10}, consumed=4, done_total=4)
    now = snapshot(12.0, {"put_total": 12, "published": 9, "samples": 2}, consumed=0, done_total=8)
    assert rates(now, before) == (1.0, 2.0)


def test_a_partition_or_task_that_began_since_counts_from_nothing() -> None:
    before = QueueSnapshot({**STATS, "partitions": {}}, [UNIT], 10.0)
    now = snapshot(12.0, {"put_total": 10}, done_total=4)
    assert rates(now, before) == (5.0, 2.0)
    before.stats["partitions"]["train"] = {**PARTITION, "tasks": {}, "put_total": 6}
    assert rates(now, before) == (2.0, 2.0)


def test_a_new_partition_with_the_same_name_has_no_rate() -> None:
    before = snapshot(10.0, {"put_total": 10}, done_total=4)
    assert rates(snapshot(12.0, {"put_total": 3}, done_total=0), before) == (None, None)


def drawn(report_: dict[str, Any], width: int = 160) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(tables(report_))
    return [" ".join(line.split()) for line in capture.get().splitlines() if line.strip()]


def test_the_tables_show_samples_by_task_waiting_requests_and_units() -> None:
    waiting = [
        {"partition": "train", "task": "learn", "client": "c", "waited_s": 3.21, "writer": False, "fields": ["x", "y"],
         "wanted": 8, "ready": 6, "lacking": {"y": 2}},
        {"partition": "train", "task": None, "client": "Buffer.9", "waited_s": 2.0, "writer": False, "wanted": 3,
         "keys": "keys where done == true"},
        {"partition": "val", "task": "half", "client": "c", "waited_s": 1.0, "writer": False, "fields": ["x"],
         "wanted": 4, "ready": 1, "lacking": {}, "unmatched": 3},
        {"partition": "train", "task": None, "client": "Rollout.7", "waited_s": 1.0, "writer": True, "wanted": 5},
        {"partition": None, "task": None, "client": "Rollout.8", "waited_s": 2.0, "writer": True, "wanted": None,
         "wanted_nbytes": 3 << 20},
    ]  # fmt: skip
    stats = {
        **STATS,
        "partitions": {"train": PARTITION, "val": {**PARTITION, "tasks": {}, "sealed": True, "num_samples": 10}},
        "waiting": waiting, "capacity": 20, "clients": {"idle": {**HOLDINGS, "unreceived": 3, "parked": 1}},
    }  # fmt: skip
    kept = (
        "task 'learn' has not consumed 6 samples, task 'learn' has not acknowledged 4 samples, no task reads 10 samples"
    )
    assert drawn(make_report("ipc:///q", QueueSnapshot(stats, [UNIT], 1.0)), width=300) == [
        "ipc:///q: 20 of 20 samples in 2 partitions, 1.5 MiB held, 5 requests waiting",
        "partition samples put/s task ready in flight consumed per s",
        "train open 10 learn 6 1 4",
        "val sealed 10 of 10 no reader",
        "waits since for held up by",
        "task 'learn' 3.2 s 8 samples of 'train' 6 ready, 2 lack field 'y', nobody has put field 'y' so far (there "
        "are 'x')",
        "a wait for keys of Buffer.9 2.0 s 3 keys of 'train' where done == true",
        "task 'half' 1.0 s 4 samples of 'val' 1 ready, 3 don't match the filter, the partition is sealed",
        f"a put of Rollout.7 1.0 s room for 5 samples of 'train' in a queue of 20 {kept}",
        f"a put of Rollout.8 2.0 s room for 3 MiB in a queue of 256 MiB {kept}",
        "unit samples live held of arena",
        "unit0 10 1.0 MiB 1.5 MiB 256 MiB 2.0 MiB",
        f"the queue is full, 20 of 20 samples, 1.5 MiB of 256 MiB, 2 puts wait for room, {kept}",
    ]


def test_clients_that_hold_something_are_shown_with_what_it_is() -> None:
    holding = {"writer": {**HOLDINGS, "reserved": 1200, "reservations": 2, "leases": 1}, "idle": HOLDINGS}
    stats = {**snapshot(1.0, {}).stats, "clients": {**holding, "saver[1]": {**HOLDINGS, "freezes": 1}}}
    shown = drawn(make_report("a", QueueSnapshot(stats, [], 1.0)))
    assert shown[3:] == ["holds reserved leases freezes", "writer 1,200 1 0", "saver[1] 0 0 1"]


def test_samplers_that_held_the_server_are_named_the_latest_ones() -> None:
    alarms = [{"number": i, "what": f"S{i} of task 't'", "held_s": 2.5, "seen_s_ago": 9.6 - i} for i in range(5)]
    report = make_report("a", QueueSnapshot({**STATS, "alarms": alarms}, [], 1.0))
    assert drawn(report)[2:] == [
        "S2 of task 't' held the server for 2.5 s, when nobody else was served, seen 8 s ago",
        "S3 of task 't' held the server for 2.5 s, when nobody else was served, seen 7 s ago",
        "S4 of task 't' held the server for 2.5 s, when nobody else was served, seen 6 s ago",
        "and 2 more of this kind (lightning-tq doctor)",
    ]
    assert report["alarms"] == alarms


def test_what_is_wrong_is_shown_and_empty_columns_are_not() -> None:
    stats = snapshot(1.0, {"abandoned": "rewards"}, dropped=3).stats
    shown = drawn(
        make_report(
            "a", QueueSnapshot(stats, [{**UNIT, "uncommitted_nbytes": 512, "parked": 2, "parked_nbytes": 2048}], 1.0)
        )
    )
    assert shown[2] == "train open 10 learn 6 1 4 3"
    assert shown[-3].endswith("2.0 MiB 512 B 2 (2.0 KiB)")
    assert shown[-2].startswith("all producers of 'rewards' have died")
    assert shown[-1].startswith("the queue is full, 1.5 MiB of 256 MiB, 1 put waits for room")


def test_a_terminal_of_80_columns_shows_the_state_and_whole_numbers() -> None:
    stats = snapshot(1.0, {}).stats
    stats["partitions"] = {"rollouts": {**PARTITION, "samples": 12345, "tasks": {"update_actor_with_reference": TASK}}}
    shown = drawn(make_report("a", QueueSnapshot(stats, [], 1.0)), width=80)
    assert all(word in shown[2].split() for word in ("open", "12,345", "6", "1", "4")), shown


def test_control_characters_of_names_do_not_reach_the_terminal() -> None:
    stats = snapshot(1.0, {}).stats
    stats["partitions"] = {"a\x1b[31m\0": {**PARTITION, "tasks": {}}}
    assert drawn(make_report("a", QueueSnapshot(stats, [], 1.0)))[2] == "a\ufffd[31m\ufffd open 10 no reader"


def test_names_are_shown_as_they_are_whatever_brackets_they_hold() -> None:
    stats = snapshot(1.0, {}).stats
    stats["partitions"] = {"val[hard]": {**PARTITION, "tasks": {"[b]": TASK}}, "data[/x]": {**PARTITION, "tasks": {}}}
    shown = drawn(make_report("a", QueueSnapshot(stats, [], 1.0)))
    assert shown[2:] == ["val[hard] open 10 [b] 6 1 4", "data[/x] open 10 no reader"]


def test_silent_units_are_named_below_the_controllers_tables() -> None:
    shown = drawn(make_report("a", QueueSnapshot(snapshot(1.0, {}).stats, [], 1.0, "storage unit unit0 has ended.")))
    assert shown[2:] == ["train open 10 learn 6 1 4", "storage: storage unit unit0 has ended"]


# ---- the command ----


@pytest.fixture
def queue(data: Callable[..., TQDataModule]) -> TQDataModule:
    """Ten samples in it."""
    dm = data(train=stream())
    dm.client.put(rows(10), partition_id="train")
    return dm


def test_json_holds_the_statistics_of_the_queue(queue: TQDataModule) -> None:
    reader = threading.Thread(target=_wait_for_rewards, args=[queue.client])
    reader.start()
    while not queue.client.get_stats()["waiting"]:
        pass
    ((code, out, err),) = run(["status", queue.address, "--json"])
    queue.client.clear_partition("train")
    reader.join()
    assert (code, err) == (0, "")
    report = json.loads(out)
    train = report["partitions"]["train"]
    assert (report["address"], train["samples"], train["put_per_s"]) == (queue.address, 10, 0.0)
    assert train["tasks"]["score"].pop("asked_s_ago") is not None
    assert train["tasks"]["score"] == {
        "ready": {"x,reward": 0}, "consumed": 0, "in_flight": 0, "in_flight_samples": 0, "drawn": 0, "settled": 0,
        "dp_sizes": [], "ended": None, "dropped": 0, "done_total": 0, "consumed_per_s": 0.0,
    }  # fmt: skip
    (waiting,) = report["waiting"]
    assert (waiting["task"], waiting["wanted"], waiting["lacking"]) == ("score", 4, {"reward": 10})
    assert [unit["samples"] for unit in report["units"]] == [10]
    (parked,) = [held["parked"] for held in report["clients"].values()]
    assert (parked, report["alarms"]) == (1, []), "the client that asks is not among them"
    assert "path" not in report["units"][0], "the path describes only this client, which moves no values"


def _wait_for_rewards(client: tq.TransferQueueClient) -> None:
    with pytest.raises(tq.EndOfPartitionError):
        client.get_meta(["x", "reward"], 4, "train", task_name="score", timeout_s=100)


def test_status_changes_nothing_and_leaves_no_client_behind(queue: TQDataModule) -> None:
    def told() -> Any:
        return {name: own for name, own in queue.client.get_stats().items() if name not in ("metrics", "producers")}

    before = told()
    ((code, out, err),) = run(["status"], TQ_ADDRESS=queue.address)
    assert (code, err) == (0, "")
    assert f"{queue.address}: 10 samples in 1 partition, " in out
    assert told() == before
    assert queue.client.get_meta(FIELDS, 10, "train", task_name="learn").size == 10


def test_watching_in_a_terminal_draws_the_tables_again_and_again_until_ctrl_c(queue: TQDataModule) -> None:
    ours, theirs = pty.openpty()
    words = "-m", "lightning_tq", "status", "--watch", "--every", "0.05", queue.address
    environment = {**os.environ, "COLUMNS": "300"}  # longer than any address
    with open(theirs, "w") as terminal, started(*words, env=environment, out=terminal) as (program, _, err):
        drawn = b""
        while drawn.count(b"10 samples in 1 partition") < 3:
            drawn += os.read(ours, 4096)
        program.send_signal(signal.SIGINT)
        assert (program.wait(30), err.read()) == (0, "")
    os.close(ours)


def test_watching_a_queue_that_ends_says_so(queue: TQDataModule) -> None:
    address = queue.address
    words = "-m", "lightning_tq", "status", "--watch", address, "--every", "0.05", "--json"
    with started(*words) as (program, out, err):
        reports = [json.loads(out.readline()) for _ in range(3)]
        assert [each["partitions"]["train"]["samples"] for each in reports] == [10, 10, 10]
        queue.close()
        assert program.wait(60) == 2
        said = err.read()
    assert said.startswith("error: ")
    assert address in said


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "no queue was named"),
        (["elsewhere"], "'elsewhere' is not an address"),
        (["ipc:///nowhere/controller"], "no queue at ipc:///nowhere/controller"),
        (["--watch", "ipc:///nowhere/controller"], "no queue at ipc:///nowhere/controller"),
    ],
)
def test_no_queue_is_an_error_in_one_line(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lightning_tq(["status", *args]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith(f"error: {says}")


def test_its_options_need_neither_a_trainer_nor_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from lightning_tq.cli import main; assert main(['status', 'nowhere']) == 2; "
        "assert not {'torch', 'lightning', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)


def test_a_look_that_is_cancelled_in_the_moment_of_its_answer_ends_so():
    async def cancel_with_the_answer(client):
        looking = asyncio.ensure_future(take_snapshot(client))
        asking: list[asyncio.Task[Any]] = []
        while not asking:
            await asyncio.sleep(0)
            asking = [task for task in asyncio.all_tasks() if "storage_stats" in repr(task.get_coro())]
        asking[0].add_done_callback(lambda _: looking.cancel())
        with pytest.raises(asyncio.CancelledError):
            await looking

    tq.init()
    try:
        asyncio.run(cancel_with_the_answer(tq.get_client()))
    finally:
        tq.close()


def test_groups_are_listed_with_their_states_the_oldest_work_and_slots() -> None:
    oldest = {"worker": "rollout-7", "key": "q1", "age_s": 2470.0}
    groups = {
        "added": 40, "states": {"ready": 12, "running": 3}, "rejected": {"std(reward) > 0": 5}, "oldest": oldest,
        "slots": {"learn": {"used": 15, "here": 15, "budget": 16, "per_step": 8}},
    }  # fmt: skip
    console = Console(width=200)
    with console.capture() as shown:
        console.print(tables(make_report("a", snapshot(1.0, {"groups": groups}))))
    (line,) = [line for line in shown.get().splitlines() if "rollout-7" in line]
    told = "12 ready, 3 running (oldest 41 min, rollout-7), 5 rejected by std(reward) > 0"
    assert [told in line, line.startswith("train"), " 40 " in line, "learn: 15 of 16" in line] == [True] * 4
