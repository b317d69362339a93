# SPDX-License-Identifier: Apache-2.0
"""``lightning-tq clients``, ``evict`` and ``forget-task`` find what holds a queue up, and end it."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
from commands import run
from producing import rows
from rich.console import Console

import transfer_queue as tq
from lightning_tq import TQDataModule
from lightning_tq.queue_report import clients_table, others
from tests.console import lightning_tq
from tests.lightning.conftest import stream
from tests.own_processes import SLOW
from transfer_queue import protocol as p
from transfer_queue.transport.blocking import run_blocking

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def queue(data: Callable[..., TQDataModule]) -> TQDataModule:
    """Ten samples in it."""
    dm = data(train=stream())
    dm.client.put(rows(10), partition_id="train")
    return dm


def reserve_and_wait(address: str, pipe: Any) -> None:
    tq.close()
    tq.init(address)
    session = tq.get_client().session
    run_blocking(session.send(p.Reserve(session.number(), "train", 3, {}), p.Reserved))
    pipe.send("reserved")
    pipe.recv()


def test_a_client_that_hangs_is_found_and_evicted(queue: TQDataModule) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    writer = context.Process(target=reserve_and_wait, args=(queue.address, there))
    writer.start()
    try:
        assert here.poll(60.0 * SLOW)
        (name,) = [name for name, held in queue.client.get_stats()["clients"].items() if held.get("reserved")]
        listed, as_json, mistyped, evicted, again = run(
            ["clients"], ["clients", "--json", queue.address], ["evict", name[:-3]], ["evict", name],
            ["evict", name, queue.address], TQ_ADDRESS=queue.address,
        )  # fmt: skip
        lines = [line.split() for line in listed[1].splitlines()]
        assert (listed[0], lines[0][:4]) == (0, ["client", "connections", "reservations", "reserved"])
        assert [line[:4] for line in lines if line[0] == name] == [[name, "1", "1", "3"]]
        report = json.loads(as_json[1])
        assert (report["address"], len(report["clients"])) == (queue.address, 2), "not the client that asks"
        assert report["clients"][name]["reserved"] == 3
        assert mistyped == (1, "", f"error: the queue has no client {name[:-3]!r}; did you mean {name!r}?\n")
        assert evicted == (0, f"Evicted client {name!r}, which held 3 reserved samples.\n", "")
        assert again[0] == 1
        stats = queue.client.get_stats()
        assert (stats["partitions"]["train"]["held"], name in stats["clients"]) == (0, False)
    finally:
        here.send("leave")
        writer.join()


def test_a_name_that_is_like_none_is_answered_with_those_that_there_are(queue: TQDataModule) -> None:
    client = queue.client
    client.get_meta(["x"], 2, "train", task_name="learn")
    client.get_meta(["x"], 2, "train", task_name="judge")
    task, name, listed = run(
        ["forget-task", "zzz", queue.address], ["evict", "zzz", queue.address], ["clients", "--json", queue.address]
    )
    (own,) = json.loads(listed[1])["clients"]
    assert task == (1, "", "error: no partition knows a task 'zzz'; there is 'judge', 'learn'.\n")
    assert name == (1, "", f"error: the queue has no client 'zzz'; there is {own!r}.\n")


def test_a_misspelt_task_is_forgotten(queue: TQDataModule) -> None:
    client = queue.client
    client.get_meta(["x"], 10, "train", task_name="learn")
    client.get_meta(["x"], 2, "train", task_name="lern")
    assert client.held_up_by("train")["tasks"] == {"lern": 8}
    mistyped, forgotten, again = run(*[["forget-task", task, queue.address] for task in ("leern", "lern", "lern")])
    assert mistyped == (1, "", "error: no partition knows a task 'leern'; did you mean 'lern'?\n")
    assert forgotten == (0, "Forgot task 'lern': 1 partition knew it.\n", "")
    assert again == (1, "", "error: no partition knows a task 'lern'; did you mean 'learn'?\n")
    assert client.clear_consumed("train") == 10


def test_a_task_that_only_waits_is_known_too(queue: TQDataModule) -> None:
    pending = queue.client.start_fetch_batch(fetch("nowhere", "lost"))
    while not queue.client.get_stats()["waiting"]:
        pass
    (forgotten,) = run(["forget-task", "lost", queue.address])
    assert forgotten == (
        0, "Forgot task 'lost': 0 partitions knew it; its waiting requests got the end of their stream.\n", ""
    )  # fmt: skip
    with pytest.raises(tq.EndOfPartitionError):
        pending.finish()


def fetch(partition: str, task: str) -> Any:
    from transfer_queue.client.get import fetch_request

    return fetch_request(["x"], 2, partition, task, None, 100.0)


def test_columns_are_hidden_where_nobody_holds_anything_and_names_are_literal() -> None:
    stats = {"asked_by": "me", "clients": {"me": {"connections": 1}, "[b]": {"connections": 2, "leases": 1, "pins": 3}}}
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(clients_table(others(stats)))
    assert [line.split() for line in capture.get().splitlines()] == [
        ["client", "connections", "leases", "pins"], ["[b]", "2", "1", "3"]
    ]  # fmt: skip


@pytest.mark.parametrize("command", [["clients"], ["evict", "x"], ["forget-task", "x"]])
def test_no_queue_is_an_error_in_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for address, says in (
        ([], "no queue was named"),
        (["elsewhere"], "'elsewhere' is not an address"),
        (["ipc:///nowhere/controller"], "no queue at ipc:///nowhere/controller"),
    ):
        assert lightning_tq([*command, *address]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert captured.err.startswith(f"error: {says}")
