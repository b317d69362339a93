# SPDX-License-Identifier: Apache-2.0
"""Groups and leases through a real queue: workers that die, hang and come late; and what is refused at once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import before
from clients import connect
from noticing import until_parked

import transfer_queue as tq
from tests.own_processes import SLOW
from transfer_queue.errors import GateStarvedError, GroupStateError, LeaseLostError

NUM_GROUPS, NUM_WORKERS = 120, 3
PATIENCE_S = 100.0 * SLOW
WORKER = """
import os, random, sys, time
import torch, transfer_queue as tq
partition, path = sys.argv[1:3]
client = tq.get_client()
ledger = open(path, "a", buffering=1)
for lease in client.leases(partition, 2, lease_s=30.0):
    number = int(lease.head["number"][0])
    print("begin", number, lease.attempt, file=ledger)
    time.sleep(random.random() * 0.02)
    lease.put({"answer": torch.tensor([number] * 2)}, part=lease.parts[0])
    lease.close({"answer": torch.tensor([number] * 2)}, tags=[{"reward": 1.0}] * 2)
    print("closed", number, lease.attempt, file=ledger)
"""


def heads(count: int, first: int = 0) -> dict[str, Any]:
    return {"number": torch.arange(first, first + count)}


def answers(*numbers: int) -> dict[str, Any]:
    return {"answer": torch.tensor(numbers)}


def state_of(client: Any, partition: str, lease: Any) -> str:
    return str(client.kv_list(partition)[partition][lease.key]["group.state"])


@pytest.fixture
def actor(client, name) -> str:
    """A task of the test's own that draws groups."""
    client.register_task(f"actor-{name}", tq.GroupSampler(groups=2), tail="uneven_ok")
    return f"actor-{name}"


def test_workers_without_work_are_one_finding_that_says_why(client, name, actor):
    client.add_groups(heads(8), name, tasks=[actor])
    held = client.lease(name, 8)
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(client.lease, name, timeout_s=PATIENCE_S) for _ in range(2)]
        while not (found := [each for each in tq.diagnose(client.get_stats()) if each.what == "2 workers"]):
            assert not any(wait.done() for wait in waits)
        slots = client.get_stats()["partitions"][name]["groups"]["slots"][actor]["budget"]
        full = f"task {actor!r} has {slots} of {slots} slots in use"
        assert [each.held_up_by for each in found] == [(full,)]
        assert found[0].waits_for == f"a group of {name!r} to work on"
        for lease in held[:2]:
            lease.reject("no use")
        assert all(wait.result() for wait in waits)


def test_how_stale_drawn_groups_were_is_counted_by_task(client, name, actor):
    client.advance(name, 3)
    client.add_groups(heads(2), name, tasks=[actor])
    for number, lease in enumerate(client.lease(name, 2)):
        lease.close(answers(number))
    client.advance(name, 5)
    client.get_meta(["answer"], None, name, task_name=actor)
    counted = client.get_stats()["metrics"]["versions"][actor]
    assert (sum(counted["counts"]), counted["sum"]) == (2, 4)


# ---- workers that die ----


@pytest.mark.slow  # the chaos of groups does this and more, with fewer of them
@pytest.mark.timeout(400)
def test_killed_workers_lose_skip_and_repeat_nothing(client, script, name, actor, tmp_path):
    metas = client.add_groups(heads(NUM_GROUPS), name, parts=2, worker_attempts=50, tasks=[actor])
    client.seal_partition(name)
    assert metas.size == NUM_GROUPS

    def begin(number: int) -> Any:
        return script(WORKER, name, str(tmp_path / f"worker-{number}"))

    workers, chance = [begin(number) for number in range(NUM_WORKERS)], random.Random(3)
    trained: list[int] = []
    deadline, num_killed = time.monotonic() + PATIENCE_S, 0
    while time.monotonic() < deadline:
        if len(trained) > 10 * num_killed and num_killed < 6:  # by what is done: a worker takes seconds to start
            at = chance.randrange(NUM_WORKERS)
            workers[at].kill()
            workers[at].wait()
            num_killed += 1
            workers[at] = begin(NUM_WORKERS + num_killed)
        try:
            batch = client.get_meta(["answer"], 1, name, task_name=actor, timeout_s=0.5)
        except (tq.BatchTimeoutError, tq.ProducersGoneError):  # gone for longer than the grace, as others start
            continue
        except tq.EndOfPartitionError:
            break
        numbers = client.get_heads(batch, "number")["number"].tolist()
        rows = client.get_data(batch)["answer"].tolist()
        assert rows == [numbers[group] for group in batch.group_index], "rows are those of their group"
        assert all(batch.group_index.count(group) == 4 for group in range(len(numbers))), "groups are whole"
        trained += numbers
    assert sorted(trained) == list(range(NUM_GROUPS))
    written = [line.split() for path in Path(tmp_path).iterdir() for line in path.read_text().splitlines()]
    begun = [int(number) for word, number, _ in written if word == "begin"]
    closed = [int(number) for word, number, _ in written if word == "closed"]
    assert set(begun) == set(range(NUM_GROUPS))
    assert len(set(closed)) == len(closed), "no group is closed twice"
    assert num_killed == 6
    for worker in workers:
        assert worker.wait(PATIENCE_S) == 0, worker.stderr.read()


@pytest.mark.programs
def test_a_worker_that_is_stopped_loses_its_lease_and_comes_late(client, script, name):
    client.add_groups(heads(1), name)
    code = (
        "import sys, torch, transfer_queue as tq\n"
        "lease = tq.get_client().lease(sys.argv[1], lease_s=1.0)[0]\n"
        "print('leased', flush=True)\n"
        "sys.stdin.readline()\n"
        "try: lease.close({'answer': torch.tensor([1])})\n"
        "except tq.errors.LeaseLostError: print('lost', lease.aborted, flush=True)\n"
    )
    worker = script(code, name)
    assert worker.stdout.readline() == "leased\n"
    time.sleep(2.0)
    with pytest.raises(tq.BatchTimeoutError, match="1 running"):
        client.lease(name, timeout_s=0.1)  # the worker renews its lease
    os.kill(worker.pid, signal.SIGSTOP)
    (own,) = client.lease(name, timeout_s=PATIENCE_S)
    assert own.attempt == 2
    os.kill(worker.pid, signal.SIGCONT)
    worker.stdin.write("\n")
    worker.stdin.flush()
    assert worker.stdout.readline() == "lost True\n"
    own.close(answers(2))
    batch = client.get_meta(["answer"], 1, name, task_name="reader")
    assert client.get_data(batch)["answer"].tolist() == [2]


# ---- handles ----


def test_a_body_that_fails_releases_with_its_text(client, name):
    client.add_groups(heads(1), name)
    with pytest.raises(ZeroDivisionError), client.lease(name)[0] as lease:
        _ = 1 // 0
    tags = client.kv_list(name)[name][lease.key]
    assert tags["group.state"] == "waiting"
    assert tags["group.reason"] == ["ZeroDivisionError: integer division or modulo by zero"]
    (again,) = client.lease(name)
    assert again.attempt == 2


def test_leases_end_with_the_partition_and_release_what_a_failed_body_leaves(client, name):
    client.add_groups(heads(4), name)
    client.seal_partition(name)

    def work() -> None:
        for lease in client.leases(name, 3):
            if int(lease.head["number"][0]) == 1:
                raise KeyError("the body fails")
            lease.close(answers(0))

    with pytest.raises(KeyError):
        work()
    seen = [int(lease.close(answers(7)).size) for lease in client.leases(name)]
    assert seen == [1, 1, 1]


def test_async_twins(client, name):
    async def work() -> list[int]:
        await client.async_add_groups(heads(3), name)
        await client.async_seal_partition(name)
        numbers = []
        async for lease in client.leases(name):
            async with lease:
                await lease.async_put(answers(1))
                assert (await lease.async_members()).size == 0
                await lease.async_close(answers(2))
            numbers.append(int(lease.head["number"][0]))
        return numbers

    assert asyncio.run(work()) == [0, 1, 2]


def test_a_row_of_an_open_group_reaches_an_ordinary_task_that_waits(client, name):
    client.add_groups(heads(1), name)
    (lease,) = client.lease(name)

    async def put_while_another_waits() -> Any:
        batch = asyncio.ensure_future(client.async_get_meta(["answer"], 1, name, task_name="log", timeout_s=PATIENCE_S))
        await asyncio.to_thread(until_parked, client, partition=name)
        await lease.async_put(answers(7))
        return await batch

    assert asyncio.run(put_while_another_waits()).size == 1


def test_the_heads_of_the_first_groups_are_not_given_to_a_task_that_reads_the_partition(client, name):
    task = f"plain-{name}"
    client.put({"number": torch.tensor([7])}, partition_id=name)
    assert client.get_data(client.get_meta(["number"], 1, name, task_name=task))["number"].tolist() == [7]
    client.add_groups(heads(3), name)
    client.put({"number": torch.tensor([8])}, partition_id=name)
    assert client.get_data(client.get_meta(["number"], 1, name, task_name=task))["number"].tolist() == [8]


def test_keep_all_goes_on_with_the_rows_of_a_lost_lease(client, name):
    client.add_groups(heads(1), name)
    (first,) = client.lease(name)
    first.put(answers(5))
    first.release("preempted")
    (second,) = client.lease(name, keep="all")
    assert client.get_data(second.members)["answer"].tolist() == [5]
    second.close(answers(6))
    batch = client.get_meta(["answer"], 2, name, task_name="reader")
    assert client.get_data(batch)["answer"].tolist() == [5, 6]


def test_a_lease_that_is_of_no_use_any_more_is_aborted(client, name):
    task = f"actor-{name}"
    client.register_task(task, tq.GroupSampler(groups=1, ahead=1, max_staleness=0, stale="drop"))
    client.advance(name, 0)
    client.add_groups(heads(1), name, tasks=[task])
    (lease,) = client.lease(name)
    assert not lease.aborted
    client.advance(name, 1)
    deadline = time.monotonic() + PATIENCE_S
    while not lease.aborted:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(LeaseLostError, match="stale"):
        lease.close(answers(1))


def test_a_block_whose_lease_is_lost_ends_and_the_worker_goes_on(client, name):
    task, done = f"actor-{name}", []
    client.register_task(task, tq.GroupSampler(groups=1, ahead=1, max_staleness=0, stale="drop"))
    client.advance(name, 0)
    client.add_groups(heads(2), name, tasks=[task])
    client.seal_partition(name)
    for version, lease in enumerate(client.leases(name), 1):
        with lease:
            if version == 1:
                client.advance(name, version)  # the trainer is faster: what is worked on is of no use
            lease.close(answers(version))
            done.append(int(lease.head["number"]))
        if version == 2:
            client.get_meta(["answer"], partition_id=name, task_name=task)
    assert done == [1]


def test_a_block_that_uses_a_lease_wrongly_or_loses_another_one_raises(client, name):
    client.add_groups(heads(2), name)
    mine, others = client.lease(name, 2)
    others.release("it is done by another one")
    with pytest.raises(LeaseLostError, match="has ended"), mine:
        others.close(answers(1))
    assert state_of(client, name, mine) == "waiting", "the error has released it"
    (mine,) = client.lease(name)
    mine.close(answers(1))
    with pytest.raises(LeaseLostError, match="has ended"), mine:
        mine.close(answers(2))


def test_a_coroutines_block_ends_like_that_too(client, name):
    async def work() -> list[str]:
        head = await client.async_add_groups(heads(1), name)
        (lease,) = await client.async_lease(name)
        async with lease:
            await client.async_clear_samples(head)
            await lease.async_close(answers(1))
            return ["closed"]
        return ["lost"]

    assert asyncio.run(work()) == ["lost"]


def test_a_worker_that_stood_still_until_its_group_was_gone_gets_other_work(client, queue, name):
    client.add_groups(heads(2), name, keys=["gone", "there"])
    other, gone = connect("other", queue), client.kv_retrieve_meta("gone", name)
    with before(client, "Read", lambda: other.clear_samples(gone)):  # as if it had been trained meanwhile
        (lease,) = client.lease(name)
    assert (lease.key, lease.attempt) == ("there", 1)
    other.close()


def test_a_batch_that_comes_again_lacks_the_rows_of_groups_that_have_left(client, name, actor):
    client.add_groups(heads(2), name, tasks=[actor])
    one, other = client.lease(name, 2)
    one.put(answers(1, 2))
    other.put(answers(3, 4))
    position = {"dp_rank": 0, "batch_index": 0}
    rewards = {"partition_id": name, "task_name": f"reward-{name}", "sampling_config": position}
    assert client.get_meta(["answer"], 4, **rewards).size == 4
    one.reject("of no use")
    again = client.get_meta(["answer"], 4, **rewards)  # by a reward process that comes back
    assert client.get_data(again)["answer"].tolist() == [3, 4]
    assert client.ack(again, f"reward-{name}") == 1

    client.add_groups(heads(1, 2), name, tasks=[actor])
    other.close(answers(5))
    client.lease(name)[0].close(answers(6))
    drawing = {"partition_id": name, "task_name": actor, "sampling_config": position}
    drawn = client.get_meta(["answer"], **drawing)
    client.reject(drawn.select_samples([0]), "of no use")
    again = client.get_meta(["answer"], **drawing)  # by a trainer that was killed before its ack
    assert (client.get_data(again)["answer"].tolist(), again.group_index) == ([6], [0])


# ---- bad input: typed errors at once, and the others go on ----


def test_a_lease_of_a_stranger_is_refused(client, script, name):
    client.add_groups(heads(2), name)
    mine, _ = client.lease(name, 2)
    code = (
        "import sys, torch, transfer_queue as tq\n"
        "from transfer_queue import protocol as p\n"
        "from transfer_queue.client.lease import Lease\n"
        "client = tq.get_client()\n"
        "granted = p.GrantedLease(int(sys.argv[2]), sys.argv[1], int(sys.argv[3]), 'k', 1, None, [0], {})\n"
        "lease = Lease(client, granted, None, {}, 60.0)\n"
        "for verb in (lambda: lease.close({'answer': torch.tensor([1])}), lambda: lease.reject('no')):\n"
        "    try: verb()\n"
        "    except tq.errors.LeaseLostError as error: print(type(error).__name__, flush=True)\n"
    )
    stranger = script(code, name, str(mine.token), str(mine._granted.head))
    out, error = stranger.communicate(timeout=PATIENCE_S)
    assert (out, error) == ("LeaseLostError\nLeaseLostError\n", "")
    mine.close(answers(1))
    assert state_of(client, name, mine) == "closed"


def test_what_comes_after_the_end_is_refused(client, name):
    client.add_groups(heads(2), name, parts=2)
    first, second = client.lease(name, 2)
    first.put(answers(1), part=0)
    with pytest.raises(GroupStateError, match="has no rows"):
        first.close()
    first.close(part=0)
    with pytest.raises(GroupStateError, match="was closed"):
        first.put(answers(1), part=0)
    first.close(answers(1))
    with pytest.raises(LeaseLostError, match="has ended"):
        first.put(answers(1))
    second.release("for another")
    with pytest.raises(LeaseLostError, match="has ended"):
        second.close(answers(1))
    assert client.lease(name)[0].attempt == 2


def test_odd_rows_are_not_dealt(client, name):
    client.add_groups(heads(1), name, parts=2)
    (lease,) = client.lease(name)
    with pytest.raises(tq.errors.InvalidRequestError, match="3 rows can't be dealt evenly to 2 parts"):
        lease.close(answers(1, 2, 3))
    lease.close(answers(1, 2, 3, 4))


def test_a_lease_goes_on_after_a_part_that_it_does_not_have_was_refused(client, name):
    client.add_groups(heads(1), name, parts=3)
    lease, other = (*client.lease(name, by="part"), *client.lease(name))
    for part in (0, 7, -1):
        with pytest.raises(tq.errors.InvalidRequestError, match=f"has no part {part}, but 2 from 1 to 2"):
            other.put(answers(1), part=part)
    assert not other.aborted
    lease.close(answers(1))
    other.close(answers(2, 3))
    assert state_of(client, name, other) == "closed"


def test_a_head_with_a_key_that_exists_adds_no_group(client, name):
    client.add_groups(heads(1), name, keys=["a"])
    with pytest.raises(GroupStateError, match="1 of 2 keys exist"):
        client.add_groups(heads(2), name, keys=["b", "a"])
    with pytest.raises(GroupStateError, match="same key"):
        client.add_groups(heads(2), name, keys=["c", "c"])
    assert list(client.kv_list(name)[name]) == ["a"]


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ({"parts": 0}, "parts"), ({"parts": 2, "min_parts": 3, "deadline_s": 1.0}, "min_parts must be at most parts"),
        ({"parts": 2, "min_parts": 1}, "give deadline_s"), ({"attempts": 0}, "attempts"),
        ({"deadline_s": 0.0}, "deadline_s"), ({"tasks": ["a", "a"]}, "different"),
        ({"tags": [{"group.state": "done"}]}, "belong to the queue"),
        ({"keys": ["a", "b"]}, "Give one string per head"),
    ],
)  # fmt: skip
def test_impossible_terms_are_refused(client, name, terms, text):
    with pytest.raises(ValueError, match=text):
        client.add_groups(heads(1), name, **terms)
    assert client.add_groups(heads(1), name).size == 1


@pytest.mark.parametrize("has_groups", [True, False])
def test_tags_of_the_queue_are_refused_whatever_the_partition_holds(client, name, has_groups):
    plain = client.put(heads(1), partition_id=name)
    if has_groups:
        client.add_groups(heads(1), name)
    plain.update_custom_meta([{"group.state": "done"}])
    with pytest.raises(tq.errors.InvalidRequestError, match="belong to the queue"):
        client.set_custom_meta(plain)


def test_a_gate_that_does_not_parse_leaves_the_task_as_it_was(client, name, actor):
    with pytest.raises(tq.errors.InvalidRequestError, match="the gate"):
        client.register_task(actor, tq.GroupSampler(groups=2, gate="std(reward"))
    client.add_groups(heads(2), name, tasks=[actor])
    for lease in client.lease(name, 2):
        lease.close(answers(1))
    assert client.get_meta(["answer"], 1, name, task_name=actor).size == 2


def test_each_head_has_its_own_fields(client, name):
    client.add_groups({"text": ["a", "b"]}, name)
    client.add_groups({"text": ["c"], "image": torch.ones(1, 3)}, name)
    client.add_groups({"number": torch.ones(1)}, name)
    found = [sorted(lease.head.keys()) for lease in client.lease(name, 4, timeout_s=20.0)]
    assert found == [["text"], ["text"], ["image", "text"], ["number"]]


def test_a_group_that_is_ready_is_so_after_a_load(client, name, actor, tmp_path):
    client.add_groups({"number": torch.arange(3)}, name, tasks=[actor])
    for lease in client.lease(name, 3, timeout_s=20.0):
        lease.close({"answer": torch.ones(2)})
    position = {"dp_rank": 0, "batch_index": 0}
    client.get_meta(["answer"], partition_id=name, task_name=actor, timeout_s=20.0, sampling_config=position)
    states = [tags["group.state"] for tags in client.kv_list(name)[name].values()]
    client.save_checkpoint(tmp_path / "c")
    client.load_checkpoint(tmp_path / "c")
    assert states == ["drawn", "drawn", "ready"]
    assert [tags["group.state"] for tags in client.kv_list(name)[name].values()] == states


def test_a_field_that_a_head_lacks_is_named(client, name):
    client.add_groups(heads(2), name)
    for lease in client.lease(name, 2):
        lease.close(answers(1))
    batch = client.get_meta(["answer"], 2, name, task_name=f"reward-{name}")
    for fields in ("nunber", ["number", "nunber"]):
        with pytest.raises(tq.StorageKeyNotFoundError, match=r"lack the fields \['nunber'\]"):
            client.get_heads(batch, fields)
    assert set(client.get_heads(batch).keys()) == {"number"}


def test_a_gate_that_waits_for_a_tag_says_which(client, name, actor):
    client.register_task(actor, tq.GroupSampler(groups=1, gate="max(score) > 0"))
    client.add_groups(heads(1), name, tasks=[actor])
    (lease,) = client.lease(name)
    meta = lease.close(answers(1), tags=[{"reward": 1.0}])
    with pytest.raises(tq.BatchTimeoutError, match=r"rows lack tag 'score' of the gate \(they have 'reward'\)"):
        client.get_meta(["answer"], 1, name, task_name=actor, timeout_s=0.1)
    meta.update_custom_meta([{"score": 1.0}])
    client.set_custom_meta(meta)
    assert client.get_meta(["answer"], 1, name, task_name=actor).size == 1


def test_a_field_that_no_row_of_a_group_has_is_named(client, name, actor):
    client.register_task(actor, tq.GroupSampler(groups=1))
    client.add_groups(heads(1), name, tasks=[actor])
    (lease,) = client.lease(name)
    lease.close(answers(1, 2))
    text = r"2 rows lack field 'answre', nobody has put field 'answre' so far \(there are 'number', 'answer'\)"
    with pytest.raises(tq.BatchTimeoutError, match=text):
        client.get_meta(["answre"], 1, name, task_name=actor, timeout_s=0.1)


def test_a_worker_that_forgets_to_close_its_lease_is_warned(client, name, caplog):
    client.add_groups(heads(1), name)
    with client.lease(name)[0] as lease:
        lease.put(answers(1))
    assert f"Lease({lease.key!r} of {name!r}" in caplog.text
    assert "is given back: its body ended without close(), reject() or release()." in caplog.text


def test_a_wait_for_a_partition_that_is_not_there_says_what_is(client, name, actor):
    client.put(answers(1), partition_id=name)
    with pytest.raises(
        tq.BatchTimeoutError, match=r"samples of 'nowhere': the partition is not in the queue, which ho"
    ):
        client.get_meta(["answer"], 1, "nowhere", task_name=actor, timeout_s=0.1)


def test_a_registration_that_is_refused_changes_nothing_of_what_the_gate_has_rejected(client, name, actor):
    client.register_task(actor, tq.GroupSampler(groups=1, ahead=0, gate="max(reward) > 0"))
    client.register_task(f"critic-{name}", tq.GroupSampler(groups=1, ahead=0))
    client.add_groups(heads(12), name, tasks=[actor, f"critic-{name}"])
    for number in range(10):
        (lease,) = client.lease(name)
        lease.close(answers(1), tags=[{"reward": 0.0}])
        if number == 8:
            with pytest.raises(GroupStateError, match="neither would ever step"):
                client.register_task(actor, tq.GroupSampler(groups=5, ahead=0))
    with pytest.raises(GateStarvedError, match="rejected 10 groups in a row"):
        client.get_meta(["answer"], 1, name, task_name=actor, timeout_s=PATIENCE_S)


def test_a_gate_over_a_tag_that_is_no_number_rejects_with_the_reason(client, name, actor):
    client.register_task(actor, tq.GroupSampler(groups=1, gate="max(reward) > 0"))
    client.add_groups(heads(12), name, tasks=[actor])
    for _ in range(10):
        (lease,) = client.lease(name)
        lease.close(answers(1), tags=[{"reward": "high"}])
    assert state_of(client, name, lease) == "rejected"
    with pytest.raises(GateStarvedError, match="is no number"):
        client.get_meta(["answer"], 1, name, task_name=actor, timeout_s=0.1)
    (lease,) = client.lease(name)
    lease.close(answers(1), tags=[{"reward": 1.0}])
    assert client.get_meta(["answer"], 1, name, task_name=actor).size == 1


def test_groups_that_ranks_can_not_share_evenly_are_refused_when_the_task_is_registered(client, actor):
    with pytest.raises(tq.errors.SamplerError, match=r"groups \(4, .* must be a multiple of dp_size \(3\)"):
        client.register_task(actor, tq.GroupSampler(groups=4), dp_size=3)


def test_two_tasks_with_budgets_that_contradict_each_other_are_refused(client, name):
    small, large = f"small-{name}", f"large-{name}"
    client.register_task(small, tq.GroupSampler(groups=1, ahead=0))
    client.register_task(large, tq.GroupSampler(groups=4))
    with pytest.raises(GroupStateError, match="neither would ever step"):
        client.add_groups(heads(1), name, tasks=[small, large])
    client.register_task(small, tq.GroupSampler(groups=1, ahead=3))
    client.add_groups(heads(1), name, tasks=[small, large])
    with pytest.raises(GroupStateError, match="neither would ever step"):
        client.register_task(small, tq.GroupSampler(groups=1, ahead=0))
    assert len(client.lease(name)) == 1


def test_versions_never_go_back_but_on_a_resume(client, name):
    client.advance(name, 3)
    with pytest.raises(GroupStateError, match="version 3 trains"):
        client.advance(name, 2)
    client.advance(name, 2, resumed=True)
    client.add_groups(heads(1), name)
    assert client.lease(name)[0].version == 2


def test_a_version_of_several_partitions_goes_back_with_that_of_one_of_them(client, name):
    client.advance(f"{name}@*", 10)
    with pytest.raises(GroupStateError, match=r"version 10 trains in .*@"):
        client.advance(f"{name}@1", 4)
    client.advance(f"{name}@1", 4, resumed=True)
    client.add_groups(heads(1), f"{name}@1")
    assert client.lease(f"{name}@1")[0].version == 4


def test_a_lease_that_waits_says_for_what(client, name, actor):
    with pytest.raises(tq.BatchTimeoutError, match="there is no such partition"):
        client.lease(name, timeout_s=0.05)
    client.add_groups(heads(9), name, tasks=[actor, f"other-{name}"])
    with pytest.raises(tq.BatchTimeoutError, match="has no GroupSampler"):
        client.lease(name, timeout_s=0.05)


@pytest.mark.programs
def test_a_fetch_that_waits_for_groups_that_no_worker_gets_says_why(client, name, actor):
    def text(task: str) -> str:
        with pytest.raises(tq.BatchTimeoutError) as caught:
            client.get_meta(["answer"], 2, name, task_name=task, timeout_s=0.05)
        return str(caught.value)

    client.add_groups(heads(9), name, tasks=[actor, f"other-{name}"])
    for task in (actor, f"other-{name}", f"unnamed-{name}"):
        assert f"9 groups get no worker while task 'other-{name}', which is to train them, has no Group" in text(task)
        assert f"Give task 'other-{name}' a GroupSampler" in text(task)
    client.register_task(f"other-{name}", tq.GroupSampler(groups=1, ahead=1))
    assert len(client.lease(name, 9)) == 2
    assert "no worker" not in text(f"unnamed-{name}")
    assert f"task 'other-{name}' has 2 of 2 slots in use" in text(actor)
