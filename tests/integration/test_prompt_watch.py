# SPDX-License-Identifier: Apache-2.0
"""verl's prompts followed through a real queue: own puts and clears are seen at once, and ended prompts end a wait."""

from __future__ import annotations

import time

import pytest
import torch
from streaming_support import WAIT_S, InThread

import transfer_queue as tq
from tests.integration.noticing import until_parked
from transfer_queue.contrib.prompt_table import PromptTable, PromptWatch


def tell(name: str, status: str, *uids: str) -> None:
    tags = {"is_prompt": True, "status": status, "global_steps": 1}
    tq.kv_batch_put(list(uids), name, tags=[tags] * len(uids))


def put_trajectory(name: str, key: str) -> None:
    tq.kv_put(key, name, {"x": torch.zeros(2)}, {"seq_len": 2})


def statuses(table: PromptTable) -> dict[str, set[str]]:
    return {status: keys for status, keys in table.prompts.items() if keys}


def test_the_table_has_everything_that_came_before(client, name):
    watch = PromptWatch(name)
    assert statuses(watch.current()) == {}
    tell(name, "running", "p", "q")
    put_trajectory(name, "p_0_0")
    tell(name, "finished", "p")
    table = watch.current()
    assert statuses(table) == {"running": {"q"}, "finished": {"p"}}
    assert (table.trajectories, table.steps) == ({"p_0_0": {"seq_len": 2}}, {"p": 1, "q": 1})
    tq.kv_clear(["p", "p_0_0"], name)
    assert (statuses(watch.current()), watch.table.trajectories) == ({"running": {"q"}}, {})


def test_a_list_longer_than_an_answer_comes_whole(client, name):
    watch = PromptWatch(name)
    uids = [str(i) for i in range(12_000)]
    tell(name, "running", *uids)
    assert statuses(watch.current()) == {"running": set(uids)}
    tell(name, "finished", *uids)
    assert statuses(watch.current()) == {"finished": set(uids)}


def test_a_cleared_partition_begins_anew(client, name):
    watch = PromptWatch(name)
    tell(name, "finished", "p")
    assert watch.current().num_ended() == 1
    client.clear_partition(name)
    assert watch.current().num_ended() == 0
    tell(name, "running", "q")
    assert statuses(watch.current()) == {"running": {"q"}}


def test_an_unknown_status_is_an_error_until_it_is_gone(client, name):
    watch = PromptWatch(name)
    tell(name, "running", "p")
    assert statuses(watch.current()) == {"running": {"p"}}
    tell(name, "done", "q")
    for _ in range(2):
        with pytest.raises(ValueError, match="'done'"):
            watch.current()
    tq.kv_clear("q", name)
    assert statuses(watch.current()) == {"running": {"p"}}


def test_a_wait_ends_with_the_half_of_what_is_missing_and_with_the_last(client, name):
    watch = PromptWatch(name)
    tell(name, "running", *"abcd")
    put_trajectory(name, "a_0_0")
    watch.current()
    waiting = InThread(lambda: watch.wait(4, timeout_s=WAIT_S))
    until_parked(client, partition=name)
    tell(name, "finished", "a")
    put_trajectory(name, "b_0_0")
    until_parked(client, partition=name)
    tell(name, "failure", "b")
    waiting.result()
    assert watch.current().num_ended() == 2
    for uid in "cd":
        waiting = InThread(lambda: watch.wait(4, timeout_s=WAIT_S))
        until_parked(client, partition=name)
        tell(name, "finished", uid)
        waiting.result()
        watch.current()
    assert watch.table.num_ended() == 4


def test_a_wait_is_no_longer_than_it_may_be(client, name):
    watch = PromptWatch(name)
    began = time.monotonic()
    watch.wait(1, timeout_s=0.05)  # there is no such partition yet
    tell(name, "running", "p")
    watch.current()
    watch.wait(1, timeout_s=0.05)
    assert 0.1 <= time.monotonic() - began < WAIT_S
