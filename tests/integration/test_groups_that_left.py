# SPDX-License-Identifier: Apache-2.0
"""Streams of groups of which some leave after they were drawn: nothing else is skipped, and ranks keep step."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

import transfer_queue as tq


def close_groups(client: Any, tasks: list[str], partition: str, sizes: list[int]) -> None:
    """Groups of so many rows each, which have the number of their group."""
    client.add_groups({"number": torch.arange(len(sizes))}, partition, tasks=tasks)
    client.seal_partition(partition)
    for lease in client.lease(partition, len(sizes)):
        number = int(lease.head["number"][0])
        lease.close({"answer": torch.full((sizes[number],), number)})


def stream(task: str, partition: str, micro: int | None, state: Any = None, **options: Any) -> tq.StreamingDataset:
    options = {"dp_rank": 0, "prefetch": False, "timeout_s": 20.0, **options}
    made = tq.StreamingDataset(None, None, micro, ["answer"], partition, task, **options)
    if state is not None:
        made.load_state_dict(state)
    return made


def numbers(item: Any) -> list[int]:
    return item[0]["answer"].tolist()


def take(dataset: tq.StreamingDataset, count: int | None = None) -> tuple[list[list[int]], dict[str, Any]]:
    """The next micro-batches, all if ``count`` is None, and the position after them."""
    items = iter(dataset)
    found = [numbers(item) for item in islice(items, count)]
    state = dataset.state_dict()
    items.close()  # type: ignore[attr-defined]
    dataset.close()
    return found, state


def reject(client: Any, task: str, partition: str, *gone: int, batches: int = 1) -> None:
    """A reader of the task's first batches rejects the groups of these numbers."""
    for batch in range(batches):
        position = {"dp_rank": 0, "batch_index": batch}
        meta = client.get_meta(["answer"], partition_id=partition, task_name=task, sampling_config=position)
        rows = [row for row, number in enumerate(client.get_data(meta)["answer"].tolist()) if number in gone]
        client.reject(meta.select_samples(rows), "of no use")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("gone", range(4))
def test_a_stream_that_goes_on_within_a_batch_skips_no_group_but_those_that_left(client, name, gone, workers):
    client.register_task(name, tq.GroupSampler(groups=4))
    close_groups(client, [name], name, [2] * 4)
    found, state = take(stream(name, name, 2), 2)
    assert found == [[0, 0], [1, 1]]
    reject(client, name, name, gone)
    rest = stream(name, name, 2, state)
    loaded = tq.StreamingDataLoader(rest, num_workers=workers, multiprocessing_context="fork" if workers else None)
    assert [numbers(item) for item in loaded] == [[number] * 2 for number in (2, 3) if number != gone]
    rest.close()


def test_micro_batches_lack_only_what_has_left_of_them_however_often_a_stream_goes_on(client, name):
    client.register_task(name, tq.GroupSampler(groups=4))
    close_groups(client, [name], name, [1, 3, 2, 3])  # cut as [0 1 1] [1 2 2] [3 3 3]
    reject(client, name, name, 1)
    found, state = take(stream(name, name, 3), 1)
    assert found == [[0]]
    reject(client, name, name, 0)
    found, state = take(stream(name, name, 3, state), 1)
    assert found == [[2, 2]]
    assert take(stream(name, name, 3, state))[0] == [[3, 3, 3]]


def test_a_stream_goes_on_after_a_batch_of_which_nothing_is_left(client, name, tmp_path):
    client.register_task(name, tq.GroupSampler(groups=2, ahead=2))
    close_groups(client, [name], name, [1] * 6)
    _, state = take(stream(name, name, 1), 1)
    reject(client, name, name, 0, 1)
    position = {"partition_id": name, "task_name": name, "sampling_config": {"dp_rank": 0, "batch_index": 0}}
    with pytest.raises(
        tq.errors.InvalidRequestError, match=r"nothing is left of batch 0 of task .* a later batch_index"
    ):
        client.get_meta(["answer"], **position)
    client.save_checkpoint(tmp_path / "c")
    client.load_checkpoint(tmp_path / "c")
    assert client.get_stats()["partitions"][name]["tasks"][name]["settled"] == 0, "a run may resume there"
    assert take(stream(name, name, 1, state), 2)[0] == [[2], [3]]
    client.reset_consumption(name, name)
    assert take(stream(name, name, 1))[0] == [[4], [5], [2], [3]], "batch 1 stays, batch 0 is drawn anew"


def test_a_rank_that_names_no_batch_goes_on_after_one_of_which_nothing_is_left(client, name):
    client.register_task(name, tq.GroupSampler(groups=1))
    close_groups(client, [name], name, [1] * 2)
    reject(client, name, name, 0)
    client.reset_consumption(name, name)
    meta = client.get_meta(["answer"], partition_id=name, task_name=name, sampling_config={"dp_rank": 0})
    assert client.get_data(meta)["answer"].tolist() == [1]


@pytest.fixture
def critic(client, name) -> str:
    """Another task that trains the groups, one by one."""
    client.register_task(name, tq.GroupSampler(groups=4), dp_size=2)
    client.register_task(f"critic-{name}", tq.GroupSampler(groups=1, ahead=7), dp_size=1)
    return f"critic-{name}"


def test_ranks_make_as_many_steps_when_another_task_rejects_what_one_has_not_fetched_yet(client, name, critic):
    close_groups(client, [name, critic], name, [4, 2, 4, 6])
    zero, state = take(stream(name, name, 2, dp_size=2), 1)
    reject(client, critic, name, 1, batches=2)
    one, _ = take(stream(name, name, 2, dp_rank=1, dp_size=2))
    rest, _ = take(stream(name, name, 2, state, dp_size=2))
    assert zero + rest == [[0, 0], [0, 0], [2, 2], [2, 2]]
    assert one == [[3], [3], [3, 3], [3, 3]]


def test_ranks_get_one_error_where_nothing_is_left_for_one_of_them_and_go_on_together(client, name, critic):
    close_groups(client, [name, critic], name, [1] * 8)
    assert take(stream(name, name, None, dp_size=2), 1)[0] == [[0, 2]]
    reject(client, critic, name, 1, 3, batches=4)
    errors = []
    for rank in (1, 0):
        made = stream(name, name, None, dp_rank=rank, dp_size=2)
        with pytest.raises(tq.errors.InvalidRequestError, match=r"all groups that dp_rank 1 .* in batch 0 ") as error:
            next(iter(made))
        errors.append(str(error.value))
        made.close()
    assert errors[0] == errors[1]
    assert "Go on at batch_index 1 on all ranks" in errors[0]
    after = {"partition_id": name, "batch_index": 1, "micro_batch": 0}
    assert [take(stream(name, name, None, after, dp_rank=rank, dp_size=2), 1)[0] for rank in range(2)] == [
        [[4, 6]], [[5, 7]]
    ]  # fmt: skip


def test_what_a_rank_has_not_received_of_such_a_round_is_drawn_again(client, name, critic):
    close_groups(client, [name, critic], name, [1] * 8)
    assert take(stream(name, name, None, dp_size=2), 1)[0] == [[0, 2]]
    reject(client, critic, name, 0, 2, batches=3)
    for _ in range(2):
        with pytest.raises(tq.errors.InvalidRequestError, match=r"all groups that dp_rank 0 .* in batch 0 "):
            take(stream(name, name, None, dp_rank=1, dp_size=2))
    after = {"partition_id": name, "batch_index": 1, "micro_batch": 0}
    later = [take(stream(name, name, None, after, dp_rank=rank, dp_size=2), 1)[0] for rank in range(2)]
    assert sorted(number for ((*own,),) in later for number in own) == [1, 3, 4, 5]


def test_ranks_that_name_no_batch_all_hear_of_such_a_round(client, name):
    client.register_task(name, tq.GroupSampler(groups=3), dp_size=3)
    client.register_task(f"critic-{name}", tq.GroupSampler(groups=1, ahead=11), dp_size=1)
    close_groups(client, [name, f"critic-{name}"], name, [1] * 9)
    assert take(stream(name, name, None, dp_size=3), 1)[0] == [[0]]
    reject(client, f"critic-{name}", name, 1, batches=2)
    for rank in (1, 2, 1, 2):
        at = {"dp_rank": rank, "dp_size": 3}
        with pytest.raises(tq.errors.InvalidRequestError, match=r"all groups that dp_rank 1 .* in batch 0 "):
            client.get_meta(["answer"], partition_id=name, task_name=name, sampling_config=at)


def test_a_round_with_a_rank_for_which_nothing_is_left_is_drawn_again_after_a_reset(client, name, critic):
    close_groups(client, [name, critic], name, [1] * 6)
    assert take(stream(name, name, None, dp_size=2), 1)[0] == [[0, 2]]
    reject(client, critic, name, 1, 3, batches=4)
    client.reset_consumption(name, name)
    assert [take(stream(name, name, None, dp_rank=rank, dp_size=2), 1)[0] for rank in range(2)] == [[[0, 4]], [[2, 5]]]


def test_a_rank_with_fewer_rows_left_than_the_others_have_steps_says_why(client, name, critic):
    close_groups(client, [name, critic], name, [2, 6, 2, 2])
    assert take(stream(name, name, 2, dp_size=2), 1)[0] == [[0]]
    reject(client, critic, name, 1, batches=2)
    made = stream(name, name, 2, dp_rank=1, dp_size=2)
    with pytest.raises(
        tq.errors.InvalidRequestError, match="2 rows are left for 4 micro-batches of this rank, because"
    ):
        next(iter(made))
    made.close()


def test_a_follower_is_given_no_batch_of_which_nothing_is_left(client, name, tmp_path):
    client.register_task(name, tq.GroupSampler(groups=2))
    close_groups(client, [name], name, [1] * 4)
    assert take(stream(name, name, None))[0] == [[0, 1], [2, 3]]
    reject(client, name, name, 0, 1)
    client.register_task(f"copy-{name}", follows=name)
    assert client.save_batches(tmp_path / "record", f"copy-{name}") == 1
