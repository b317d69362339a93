# SPDX-License-Identifier: Apache-2.0
"""Samplers as tasks use them: registered by a client, fed by several producers, asked by several ranks."""

from __future__ import annotations

import contextlib

import pytest
import torch
from plain_rows import rows

import transfer_queue as tq

CONF = {"controller": {"polling_mode": True}}


@pytest.fixture
def task(name):
    return f"task of {name}"


def test_groups_stay_whole_when_an_early_one_lacks_a_field(client, name, task):
    client.register_task(task, sampler=tq.GRPOGroupNSampler(4))
    first = client.put(rows(a=torch.arange(4)), partition_id=name)
    second = client.put(rows(a=torch.arange(8)), partition_id=name)
    client.put(rows(b=torch.arange(3)), metadata=first[1:])
    client.put(rows(b=torch.arange(8)), metadata=second)
    given = [client.get_meta(["a", "b"], 4, name, task_name=task).global_indexes for _ in range(3)]
    assert given == [second.global_indexes[:4], second.global_indexes[4:], []]
    client.put(rows(b=torch.arange(1)), metadata=first[0])
    assert client.get_meta(["a", "b"], 4, name, task_name=task).global_indexes == first.global_indexes


def test_groups_of_producers_that_take_turns_are_not_mixed(queue, client, name, task):
    client.register_task(task, sampler={"class": "GRPOGroupNSampler", "kwargs": {"n_samples_per_prompt": 3}})
    other = tq.TransferQueueClient("other", queue.controller.zmq_info)
    other.initialize_storage_manager("SimpleStorage", queue.backend.SimpleStorage)
    puts = [each.put(rows(a=torch.arange(3)), partition_id=name).global_indexes for each in (client, other) * 5]
    given = [client.get_meta(["a"], 3, name, task_name=task).global_indexes for _ in range(10)]
    assert sorted(given) == sorted(puts)
    other.close()


def test_a_balanced_round_is_drawn_for_all_ranks_at_once(client, name, task):
    client.register_task(task, sampler=tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2))
    meta = client.put(rows(a=torch.arange(8)), partition_id=name)
    meta.update_custom_meta([{"total_lengths": n} for n in (100, 100, 80, 80, 20, 20, 1, 1)])
    client.set_custom_meta(meta)
    asked = [{"dp_rank": dp_rank, "batch_index": 0} for dp_rank in (0, 1, 0)]
    shares = [client.get_meta(["a"], 4, name, task_name=task, sampling_config=each) for each in asked]
    assert client.check_consumption_status(task, name)
    totals = [sum(tag["total_lengths"] for tag in share.custom_meta) for share in shares]
    assert sorted(totals[:2]) == [200, 202]
    assert shares[0].global_indexes == shares[2].global_indexes


def test_a_balanced_draw_without_the_tag_it_was_told_names_the_sample(client, name, task):
    client.register_task(task, sampler=tq.SeqlenBalancedSampler(1, 1, weight="tokens"))
    meta = client.put(rows(a=torch.arange(1)), partition_id=name)
    with pytest.raises(ValueError, match=rf"sample {meta.global_indexes[0]} has no tag 'tokens'"):
        client.get_meta(["a"], 1, name, task_name=task, sampling_config={"dp_rank": 0, "batch_index": 0})
    assert client.get_consumption_status(task, name)[1].tolist() == [0]


def test_peers_of_one_rank_get_the_same_batches_in_the_earlier_call_form_too(client, name, task):
    client.register_task(task, sampler="RankAwareSampler")
    client.put(rows(a=torch.arange(6)), partition_id=name)

    def take(replica: int) -> list[int]:
        config = {"data_replica_group": 0, "data_replica_rank": replica, "data_replica_world_size": 2}
        return client.get_meta(["a"], 2, name, task_name=task, sampling_config=config).global_indexes

    leader = [take(0) for _ in range(3)]
    assert [take(1) for _ in range(3)] == leader
    assert len({index for batch in leader for index in batch}) == 6
    assert take(0) == []


def test_two_tasks_of_one_partition_draw_by_their_own_samplers(client, name, task):
    client.register_task(task, sampler="GRPOGroupNSampler")
    client.register_task(f"{task} 2", sampler=tq.TokenBudgetSampler(max_tokens=50))
    meta = client.put(rows(a=torch.arange(4)), partition_id=name)
    meta.update_custom_meta([{"total_lengths": 20}] * 4)
    client.set_custom_meta(meta)
    assert client.get_meta(["a"], 4, name, task_name=task).size == 4
    config = {"dp_rank": 0, "batch_index": 0}
    assert client.get_meta(["a"], 4, name, task_name=f"{task} 2", sampling_config=config).size == 2


@pytest.mark.parametrize(("before", "now"), [(None, 2), (1, 2), (2, 1), (2, 4)])
def test_batches_for_another_number_of_ranks_are_refused_and_dealt_anew_after_a_reset(client, name, task, before, now):
    client.put(rows(a=torch.arange(8)), partition_id=name)
    client.seal_partition(name)

    def read(rank):
        found, at = [], {"dp_rank": rank}
        with contextlib.suppress(tq.EndOfPartitionError):
            for index in range(9):
                meta = client.get_meta(["a"], 2, name, task_name=task, sampling_config={**at, "batch_index": index})
                found += client.get_data(meta)["a"].tolist()
        return found

    client.register_task(task, "RankAwareSampler", before)
    assert sorted(value for rank in range(before or 1) for value in read(rank)) == list(range(8))
    client.register_task(task, "RankAwareSampler", now)
    for rank in range(now):
        with pytest.raises(ValueError, match=f"another one; it is {now} now"):
            read(rank)
    client.reset_consumption(name, task)
    dealt = [read(rank) for rank in range(now)]
    assert sorted(value for own in dealt for value in own) == list(range(8))
    client.reset_consumption(name, task)
    assert [read(rank) for rank in range(now)] == dealt, "those stay"


def test_clearing_samples_drops_the_batches_that_held_them(client, name, task):
    client.register_task(task, sampler="RankAwareSampler")
    client.put(rows(a=torch.arange(2)), partition_id=name)
    config = {"dp_rank": 0, "batch_index": 0}
    old = client.get_meta(["a"], 2, name, task_name=task, sampling_config=config)
    client.clear_samples(old)
    new = client.put(rows(a=torch.arange(2)), partition_id=name)
    with pytest.raises(ValueError, match="settled"):
        client.get_meta(["a"], 2, name, task_name=task, sampling_config=config)
    later = client.get_meta(["a"], 2, name, task_name=task, sampling_config={**config, "batch_index": 1})
    assert later.global_indexes == new.global_indexes
