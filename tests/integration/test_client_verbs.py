# SPDX-License-Identifier: Apache-2.0
"""Every verb of the client: its modes, its answers for the unknown and the empty, its state after a clear."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import torch
from plain_rows import rows

import transfer_queue as tq

CONF = {"controller": {"polling_mode": True}}


# ---- making a client ----


def test_a_client_made_by_hand_from_the_configuration_works(queue, client, name):
    other = tq.TransferQueueClient("by hand", queue.controller.zmq_info)
    other.initialize_storage_manager(queue.backend.storage_backend, queue.backend[queue.backend.storage_backend])
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    assert (other.client_id, other.get_data(meta)["a"].tolist()) == ("by hand", [0, 1])
    other.close()
    other.close()
    with pytest.raises(RuntimeError, match="closed"):
        other.get_data(meta)
    with pytest.raises(RuntimeError, match="closed"):
        other.get_partition_list()


def test_a_client_refuses_what_is_no_server_info():
    with pytest.raises(ValueError, match="controller_info is None"):
        tq.TransferQueueClient("x", None)
    with pytest.raises(TypeError, match="got str"):
        tq.TransferQueueClient("x", "ipc:///tmp/x")


def test_data_operations_before_the_storage_is_chosen_are_runtime_errors(queue, name):
    bare = tq.AsyncTransferQueueClient("bare", queue.controller.zmq_info)
    with pytest.raises(RuntimeError, match="initialize_storage_manager"):
        _ = bare.storage_manager
    with pytest.raises(RuntimeError, match="initialize_storage_manager"):
        asyncio.run(bare.async_put(rows(a=torch.arange(1)), partition_id=name))
    bare.close()


def test_every_async_verb_has_its_blocking_twin_with_the_same_signature():
    verbs = {name for name in dir(tq.AsyncTransferQueueClient) if name.startswith("async_")}
    for name in verbs:
        twin = getattr(tq.TransferQueueClient, name.removeprefix("async_"))
        assert inspect.signature(twin) == inspect.signature(getattr(tq.AsyncTransferQueueClient, name)), name
        assert not inspect.iscoroutinefunction(twin), name
    assert len(verbs) >= 22


# ---- get_meta ----


def test_fetch_gives_each_sample_to_each_task_once(client, name):
    client.put(rows(a=torch.arange(5)), partition_id=name)
    first = client.get_meta(["a"], 3, name, task_name="one")
    second = client.get_meta(["a"], 2, name, mode="fetch", task_name="one")
    assert client.get_meta(["a"], 1, name, task_name="one").size == 0
    assert len({*first.global_indexes, *second.global_indexes}) == 5
    assert client.get_meta(["a"], 5, name, task_name="two").size == 5


def test_not_enough_is_an_empty_batch_when_polling(client, name):
    assert client.get_meta(["a"], 1, "never used", task_name="t").size == 0
    client.put(rows(a=torch.arange(2)), partition_id=name)
    empty = client.get_meta(["a"], 3, name, task_name="t")
    assert (empty.size, bool(empty)) == (0, False)
    assert client.get_meta(["a"], 2, name, task_name="t").size == 2


def test_one_field_may_be_given_as_a_string(client, name):
    client.put(rows(a=torch.arange(1), b=torch.arange(1)), partition_id=name)
    assert client.get_meta("a", 1, name, task_name="t").field_names == ["a"]


def test_a_fetched_batch_is_ready_and_carries_schema_and_tags(client, name):
    meta = client.put(rows(a=torch.ones(2, 3, dtype=torch.bfloat16)), partition_id=name)
    meta.update_custom_meta([{"n": 1}, {"n": 2}])
    client.set_custom_meta(meta)
    fetched = client.get_meta(["a"], 2, name, task_name="t")
    assert (fetched.is_ready, fetched.partition_ids, fetched.custom_meta) == (True, [name] * 2, [{"n": 1}, {"n": 2}])
    assert (fetched.get_dtypes("a"), fetched.get_shapes("a")) == ([torch.bfloat16] * 2, [(3,)] * 2)


def test_insert_makes_samples_that_a_put_fills(client, name):
    meta = client.get_meta(["a", "b"], 3, name, mode="insert")
    assert (meta.size, meta.field_names, meta.is_ready) == (3, ["a", "b"], False)
    indexes, status = client.get_production_status(["a", "b"], name)
    assert (indexes.tolist(), status.tolist()) == (meta.global_indexes, [[0, 0]] * 3)
    client.put(rows(a=torch.arange(3), b=torch.arange(3)), metadata=meta)
    assert client.check_production_status(["a", "b"], name)
    assert client.get_meta(["a", "b"], 3, name, task_name="t").global_indexes == meta.global_indexes


def test_inserted_samples_without_values_can_be_looked_at_and_cleared(client, name):
    meta = client.get_meta(["a"], 2, name, mode="insert")
    assert client.get_consumption_status("t", name)[1].tolist() == [0, 0]
    client.clear_samples(meta)
    assert client.get_consumption_status("t", name)[0].tolist() == []
    client.clear_partition(name)
    assert name not in client.get_partition_list()


def test_force_fetch_describes_all_samples_and_marks_nothing(client, name):
    meta = client.put(rows(a=torch.arange(3), b=torch.arange(3)), partition_id=name)
    client.put(rows(c=torch.arange(1)), metadata=meta[1])
    client.get_meta(["a"], 2, name, task_name="t")
    every = client.get_meta(["a", "c", "unknown"], partition_id=name, mode="force_fetch")
    assert (every.global_indexes, every.field_names) == (meta.global_indexes, ["a", "c"])
    assert every.production_status.tolist() == [0, 0, 0]
    only = client.get_meta(["a", "c"], partition_id=name, mode="force_fetch")
    assert only.production_status.tolist() == [0, 1, 0]
    assert client.get_meta(partition_id=name, mode="force_fetch").field_names == ["a", "b"]
    assert client.get_consumption_status("t", name)[1].tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match="not found"):
        client.get_meta(["a"], partition_id="never used", mode="force_fetch")


def test_sampling_config_reaches_the_sampler_and_the_ledger(client, name):
    client.put(rows(a=torch.arange(8)), partition_id=name)
    asked = {"dp_rank": 0, "batch_index": 0, "partition_id": name, "task_name": "t"}
    first = client.get_meta(["a"], 2, name, task_name="t", sampling_config=asked)
    again = client.get_meta(["a"], 2, name, task_name="t", sampling_config=asked)
    later = client.get_meta(["a"], 2, name, task_name="t", sampling_config={**asked, "batch_index": 1})
    assert first.global_indexes == again.global_indexes
    assert set(first.global_indexes).isdisjoint(later.global_indexes)
    assert (first.batch_index, later.batch_index) == (0, 1)


def test_a_dp_rank_without_batch_index_gets_one_batch_after_another(client, name):
    client.put(rows(a=torch.arange(6)), partition_id=name)
    given = [client.get_meta(["a"], 2, name, task_name="t", sampling_config={"dp_rank": 0}) for _ in range(3)]
    assert len({index for meta in given for index in meta.global_indexes}) == 6


# ---- status ----


def test_status_of_the_unknown_is_none_and_its_check_false(client, name):
    assert client.get_consumption_status("t", "never used") == (None, None)
    assert client.get_production_status(["a"], "never used") == (None, None)
    assert client.check_consumption_status("t", "never used") is False
    assert client.check_production_status(["a"], "never used") is False
    client.put(rows(a=torch.arange(1)), partition_id=name)
    assert client.get_production_status(["a", "b"], name) == (None, None)
    assert client.get_production_status([], name) == (None, None)
    assert client.check_production_status(["b"], name) is False


def test_status_follows_production_and_consumption(client, name):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    client.put(rows(b=torch.arange(1)), metadata=meta[0])
    indexes, status = client.get_production_status(["a", "b"], name)
    assert (indexes.dtype, status.dtype) == (torch.int64, torch.int8)
    assert (indexes.tolist(), status.tolist()) == (meta.global_indexes, [[1, 1], [1, 0]])
    assert [client.check_production_status(fields, name) for fields in (["a"], ["a", "b"])] == [True, False]
    assert client.get_consumption_status("never seen", name)[1].tolist() == [0, 0]
    client.get_meta(["a"], 1, name, task_name="t")
    indexes, status = client.get_consumption_status("t", name)
    assert (indexes.dtype, status.dtype, status.tolist()) == (torch.int64, torch.int8, [1, 0])
    assert client.check_consumption_status("t", name) is False
    client.get_meta(["a"], 1, name, task_name="t")
    assert client.check_consumption_status("t", name) is True


def test_an_emptied_partition_is_not_consumed(client, name):
    client.clear_samples(client.put(rows(a=torch.arange(1)), partition_id=name))
    assert client.check_consumption_status("t", name) is False
    assert name in client.get_partition_list()


def test_reset_consumption_of_one_task_or_all(client, name):
    client.put(rows(a=torch.arange(2)), partition_id=name)
    for task in ("one", "two"):
        client.get_meta(["a"], 2, name, task_name=task)
    assert client.reset_consumption(name, "one") is True
    assert [client.check_consumption_status(task, name) for task in ("one", "two")] == [False, True]
    assert client.reset_consumption(name) is True
    assert client.check_consumption_status("two", name) is False
    assert client.get_meta(["a"], 2, name, task_name="one").size == 2
    assert client.reset_consumption("never used") is False


def test_after_a_reset_the_same_question_gets_the_same_samples(client, name):
    client.put(rows(a=torch.arange(4)), partition_id=name)
    asked = {"dp_rank": 0, "batch_index": 0}
    first = client.get_meta(["a"], 2, name, task_name="t", sampling_config=asked).global_indexes
    client.reset_consumption(name, "t")
    assert client.get_meta(["a"], 2, name, task_name="t", sampling_config=asked).global_indexes == first


# ---- tags ----


def test_set_custom_meta_replaces_a_samples_tags(client, name):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    meta.update_custom_meta([{"x": 1, "y": 1}, {"x": 2}])
    client.set_custom_meta(meta)
    meta.clear_custom_meta()
    meta.update_custom_meta([{"z": 3}, {}])
    client.set_custom_meta(meta)
    client.set_custom_meta(tq.BatchMeta())
    assert client.get_meta(["a"], partition_id=name, mode="force_fetch").custom_meta == [{"z": 3}, {}]


def test_a_put_stores_the_tags_of_its_metadata_too(client, name):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    meta.update_custom_meta([{"score": 0.5}, {"score": 1.5}])
    client.put(rows(b=torch.arange(2)), metadata=meta)
    fetched = client.get_meta(["a", "b"], 2, name, task_name="t")
    assert fetched.custom_meta == [{"score": 0.5}, {"score": 1.5}]


def test_a_put_with_older_metadata_does_not_wipe_newer_tags(client, name):
    meta = client.put(rows(a=torch.arange(1)), partition_id=name)
    meta.update_custom_meta([{"x": "old"}])
    client.set_custom_meta(meta)
    stale = client.get_meta(["a"], 1, name, task_name="t")
    meta.update_custom_meta([{"x": "new", "y": 1}])
    client.set_custom_meta(meta)
    stale.update_custom_meta([{"z": 2}])
    client.put(rows(b=torch.arange(1)), metadata=stale)
    now = client.get_meta(["a"], partition_id=name, mode="force_fetch").custom_meta
    assert now == [{"x": "new", "y": 1, "z": 2}]


# ---- partitions ----


def test_partitions_are_listed_while_they_exist(client, name):
    assert client.create_partition(name) is True
    assert client.create_partition(name) is False
    assert name in client.get_partition_list()
    client.clear_partition(name)
    client.clear_partition(name)
    assert name not in client.get_partition_list()


def test_clearing_samples_of_two_partitions_clears_both_and_nothing_else(client, name):
    one = client.put(rows(a=torch.arange(2)), partition_id=name)
    two = client.put(rows(a=torch.arange(2)), partition_id=f"{name}/2")
    client.clear_samples(tq.BatchMeta.concat([one[0], two[1]]))
    client.clear_samples(tq.BatchMeta())
    assert client.get_meta(["a"], partition_id=name, mode="force_fetch").global_indexes == one.global_indexes[1:]
    assert client.get_meta(["a"], partition_id=f"{name}/2", mode="force_fetch").global_indexes == two.global_indexes[:1]


def test_a_cleared_partition_starts_over_with_consumption_and_schema(client, name):
    client.put(rows(a=torch.arange(2)), partition_id=name)
    client.get_meta(["a"], 2, name, task_name="t", sampling_config={"dp_rank": 0, "batch_index": 0})
    client.clear_partition(name)
    meta = client.put(rows(a=torch.zeros(2)), partition_id=name)
    again = client.get_meta(["a"], 2, name, task_name="t", sampling_config={"dp_rank": 0, "batch_index": 0})
    assert again.global_indexes == meta.global_indexes


def test_a_sealed_partition_ends_for_each_task_after_its_last_sample(client, name):
    client.put(rows(a=torch.arange(3)), partition_id=name)
    client.seal_partition(name)
    assert [client.get_meta(["a"], 2, name, task_name="t").size for _ in range(2)] == [2, 1]
    with pytest.raises(tq.EndOfPartitionError, match="sealed"):
        client.get_meta(["a"], 2, name, task_name="t")
    with pytest.raises(ValueError, match="sealed after 3 samples"):
        client.put(rows(a=torch.arange(1)), partition_id=name)


def test_stats_tell_who_has_what(client, name):
    client.put(rows(a=torch.arange(3)), partition_id=name)
    client.get_meta(["a"], 2, name, task_name="t")
    mine = client.get_stats()["partitions"][name]
    assert (mine["samples"], mine["fields"], mine["tasks"]["t"]["consumed"]) == (3, ["a"], 2)


# ---- keys ----


def test_kv_retrieve_meta_leaves_unknown_keys_out_or_makes_them(client, name):
    assert client.kv_retrieve_meta("a", name).size == 0
    made = client.kv_retrieve_meta(["a", "b"], name, create=True)
    assert (made.size, made.field_names, made.is_ready) == (2, [], made.is_ready)
    client.put(rows(x=torch.arange(2)), metadata=made)
    found = client.kv_retrieve_meta(["b", "unknown", "a"], name)
    assert found.global_indexes == made.global_indexes[::-1]
    assert (found.field_names, found.is_ready) == (["x"], True)
    assert client.get_data(found)["x"].tolist() == [1, 0]
    more = client.kv_retrieve_meta(["c", "a"], name, create=True)
    assert more.global_indexes[1] == made.global_indexes[0]
    assert more.global_indexes[0] > made.global_indexes[1]
    assert client.kv_list(name) == {name: {"a": {}, "b": {}, "c": {}}}


def test_keys_are_checked(client, name):
    with pytest.raises(ValueError, match="empty"):
        client.kv_retrieve_meta([], name)
    for wrong in (3, [3], ("a",)):
        with pytest.raises(TypeError, match="list of strings"):
            client.kv_retrieve_meta(wrong, name)


def test_kv_retrieve_keys_names_each_sample_or_none(client, name):
    keyed = client.kv_retrieve_meta(["a", "b"], name, create=True).global_indexes
    bare = client.put(rows(x=torch.arange(1)), partition_id=name).global_indexes
    assert client.kv_retrieve_keys([keyed[1], bare[0], keyed[0]], name) == ["b", None, "a"]
    assert client.kv_retrieve_keys(keyed[0], name) == ["a"]
    with pytest.raises(ValueError, match="empty"):
        client.kv_retrieve_keys([], name)
    for wrong in ([torch.tensor(1).numpy()[()]], ["a"], "a"):
        with pytest.raises(TypeError, match="list of int"):
            client.kv_retrieve_keys(wrong, name)
    with pytest.raises(RuntimeError, match="not found"):
        client.kv_retrieve_keys(keyed, "never used")


# ---- loops ----


def test_one_client_serves_several_loops_over_time(client, name):
    client.put(rows(a=torch.arange(30)), partition_id=name)

    async def take() -> list[int]:
        metas = await asyncio.gather(*(client.async_get_meta(["a"], 1, name, task_name="t") for _ in range(3)))
        data = await asyncio.gather(*(client.async_get_data(meta) for meta in metas))
        return [value for row in data for value in row["a"].tolist()]

    own = asyncio.new_event_loop()
    taken = [value for _ in range(4) for value in own.run_until_complete(take())]
    taken += [value for _ in range(4) for value in asyncio.run(take())]
    taken += own.run_until_complete(take())
    own.close()
    assert sorted(taken + asyncio.run(take())) == list(range(30))


def test_a_fetch_cancelled_by_its_loop_takes_nothing(client, name):
    async def go() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.async_get_meta(["a"], 1, name, task_name="t", timeout_s=30.0), 0.05)

    asyncio.run(go())
    assert not any(parked["partition"] == name for parked in client.get_stats()["waiting"])
    client.put(rows(a=torch.arange(1)), partition_id=name)
    assert client.get_meta(["a"], 1, name, task_name="t").size == 1


# ---- what holds samples up ----


def test_what_keeps_samples_from_being_cleared_is_told_and_nothing_is_cleared(client, name):
    nothing = {"tasks": {}, "not_begun": [], "unread": 0, "readers": {}}
    assert client.held_up_by(name) == nothing
    client.put(rows(a=torch.arange(5)), partition_id=name)
    assert client.held_up_by(name, ["later"]) == nothing | {"not_begun": ["later"], "unread": 5}
    batch = client.get_meta(["a"], 2, name, task_name="learn", sampling_config={"dp_rank": 0, "batch_index": 0})
    client.get_meta(["a"], 5, name, task_name="judge")
    for _ in range(2):  # by then the answer to the first fetch has come, and is known to have
        told = client.held_up_by(name, ["learn", "later"])
    assert told == nothing | {"tasks": {"learn": 5}, "not_begun": ["later"]}
    client.ack(batch, "learn")
    assert client.held_up_by(name) == nothing | {"tasks": {"learn": 3}}
    assert client.clear_consumed(name) == 2
    unread = client.get_meta(["a"], 3, name, task_name="learn")
    for _ in range(2):
        told = client.held_up_by(name)
    own = client.get_stats()["asked_by"]
    assert told == nothing | {"tasks": {"learn": 3}, "readers": {own: 3}}
    client.get_data(unread)
    assert client.clear_consumed(name) == 3
    assert client.held_up_by(name) == nothing


# ---- names ----


def test_one_string_is_one_name_wherever_names_are_given(client, name):
    meta = client.put(rows(a=torch.arange(4)), partition_id=name)
    batch = client.get_meta(["a"], 2, name, task_name="train")
    client.get_data(batch)
    assert client.held_up_by(name, "train")["not_begun"] == []
    assert client.clear_consumed(name, "train") == 2
    client.move_on(name, "train", left=f"{name}@0")
    assert client.check_production_status("a", name)
    with pytest.raises(ValueError, match="3 heads were given with 1 keys"):
        client.add_groups({"a": torch.arange(3)}, f"{name}@groups", keys="abc")
    assert meta.size == 4


@pytest.mark.parametrize("wrong", ["1", [], float("nan"), True])
def test_a_timeout_that_is_no_number_is_named(client, name, wrong):
    with pytest.raises(ValueError, match=r"timeout_s of .* must be a number of seconds"):
        client.get_meta(["a"], 1, name, task_name="train", timeout_s=wrong)


@pytest.mark.parametrize("where", [None, "a > 1"])
def test_a_sampling_config_that_is_no_mapping_is_named(client, name, where):
    with pytest.raises(ValueError, match=r"sampling_config must be a mapping, got 1\.5"):
        client.get_meta(["a"], 1, name, task_name="train", sampling_config=1.5, where=where)


@pytest.mark.parametrize("wrong", [None, 5])
def test_names_that_are_no_names_are_named(client, wrong):
    with pytest.raises(TypeError, match="partition must be a string or a list of strings"):
        client.lease(wrong)
