# SPDX-License-Identifier: Apache-2.0
"""Tasks that have gone on to another partition, and streams that have ended: no group waits for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import transfer_queue as tq
from transfer_queue.errors import GroupStateError

SPREAD = "std(reward) > 0"


@pytest.fixture
def tasks(client: tq.TransferQueueClient, name: str) -> list[str]:
    """Two that train the same groups, one at a time. The second has a gate."""
    own = [f"actor-{name}", f"critic-{name}"]
    for task, gate in zip(own, (None, SPREAD), strict=True):
        client.register_task(task, tq.GroupSampler(groups=1, ahead=0, gate=gate))
    return own


def add(client: tq.TransferQueueClient, partition: str, tasks: list[str], **options: Any) -> None:
    client.add_groups({"prompt": torch.arange(1)}, partition, tasks=tasks, keys=["k"], **options)


def work(client: tq.TransferQueueClient, partition: str) -> tq.BatchMeta:
    """A worker makes the one group there. Returns its rows."""
    (lease,) = client.lease(partition, timeout_s=10.0)
    return lease.close({"answer": torch.arange(2)})


def judged(client: tq.TransferQueueClient, rows: tq.BatchMeta) -> None:
    rows.update_custom_meta([{"reward": 0.0}, {"reward": 1.0}])
    client.set_custom_meta(rows)


def state_of(client: tq.TransferQueueClient, partition: str) -> str:
    return str(client.kv_list(partition)[partition]["k"]["group.state"])


def given(client: tq.TransferQueueClient, partition: str, task: str) -> tq.BatchMeta:
    reader = {"dp_rank": 0, "batch_index": 0}
    return client.get_meta(["answer"], None, partition, task_name=task, sampling_config=reader, timeout_s=10.0)


def test_a_task_that_has_gone_on_keeps_no_group_from_the_gate_of_another(client, name, tasks):
    actor, critic = tasks
    add(client, name, tasks)
    client.move_on(f"{name}/next", actor, left=[name])
    rows = work(client, name)
    assert state_of(client, name) == "closed"
    judged(client, rows)
    client.ack(given(client, name, critic), critic)
    assert client.kv_list(name)[name] == {}


def test_the_deadline_frees_the_slots_of_a_group_that_one_task_has_left_and_no_gate_could_judge(client, name, tasks):
    add(client, name, tasks, deadline_s=0.2)
    client.move_on(f"{name}/next", tasks[0], left=[name])
    work(client, name)
    client.wait_keys(name, where="group.state == 'expired'", timeout_s=20.0)
    add(client, f"{name}/next", tasks)
    work(client, f"{name}/next")


def test_a_restored_queue_knows_which_tasks_have_gone_on_from_groups_under_work(client, name, tasks, tmp_path: Path):
    actor, critic = tasks
    add(client, name, tasks)
    client.move_on(f"{name}/next", actor, left=[name])
    client.lease(name)
    client.save_checkpoint(tmp_path / "queue")
    client.load_checkpoint(tmp_path / "queue")
    judged(client, work(client, name))
    client.ack(given(client, name, critic), critic)
    add(client, f"{name}/next", tasks)
    work(client, f"{name}/next")  # the slot is free


def test_no_group_waits_again_where_all_its_tasks_have_gone_on(client, name, tasks):
    actor, _ = tasks
    add(client, name, [actor])
    client.move_on(f"{name}/next", actor, left=[name])
    assert state_of(client, name) == "expired"
    with pytest.raises(GroupStateError, match=r"were to train 1 group of .* gone on to other partitions"):
        client.retry_groups(name)
    client.move_on(name, actor)
    assert client.retry_groups(name) == 1


def test_no_group_waits_again_after_the_end_of_a_stream_with_a_filter(client, name, tasks):
    actor, _ = tasks
    client.add_groups({"prompt": torch.arange(2)}, name, tasks=[actor])
    client.seal_partition(name)
    client.lease(name)[0].reject("no use")
    client.lease(name)[0].close({"answer": torch.arange(1)}, tags=[{"env": "maths"}])
    assert client.get_meta(["answer"], None, name, task_name=actor, where="env == 'maths'").size == 1
    with pytest.raises(tq.EndOfPartitionError):
        client.get_meta(["answer"], None, name, task_name=actor, where="env == 'maths'", timeout_s=10.0)
    with pytest.raises(GroupStateError, match="was answered that nothing more comes"):
        client.retry_groups(name)
