# SPDX-License-Identifier: Apache-2.0
"""Put and get through a real queue: whose rows, in what order, and what a failed put leaves behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from plain_rows import rows
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue.interface import connect
from transfer_queue.transport.blocking import run_blocking

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def stored_values(client: tq.TransferQueueClient) -> int:
    return sum(unit.values for unit in run_blocking(client.storage_manager.stats()))


def test_put_returns_ready_metadata_of_new_consecutive_samples(client, name):
    meta = client.put(rows(b=torch.zeros(3), a=torch.ones(3, 2)), partition_id=name)
    first = meta.global_indexes[0]
    assert meta.global_indexes == [first, first + 1, first + 2]
    assert (meta.partition_ids, meta.field_names, meta.is_ready) == ([name] * 3, ["a", "b"], True)


def test_rows_come_in_the_order_of_the_metadata_repeats_included(client, name):
    meta = client.put(rows(a=torch.arange(4)), partition_id=name)
    assert client.get_data(meta.select_samples([3, 0, 0, 2]))["a"].tolist() == [3, 0, 0, 2]


def test_only_the_fields_of_the_metadata_are_read_sorted_by_name(client, name):
    meta = client.put(rows(c=torch.arange(2), a=torch.arange(2), b=torch.arange(2)), partition_id=name)
    assert list(client.get_data(meta.select_fields(["c", "a"])).keys()) == ["a", "c"]


def test_metadata_without_fields_gives_rows_without_columns(client, name):
    meta = client.put(rows(a=torch.arange(3)), partition_id=name)
    assert client.get_data(meta.select_fields([])).batch_size == (3,)
    assert client.get_data(tq.BatchMeta()).batch_size == (0,)


def test_put_onto_metadata_returns_the_same_object_with_the_new_fields(client, name):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    assert client.put(rows(b=torch.tensor([5.0, 6.0])), metadata=meta) is meta
    assert meta.field_names == ["a", "b"]
    assert client.get_data(meta)["b"].tolist() == [5.0, 6.0]


def test_a_second_put_of_a_field_replaces_it(client, name):
    meta = client.put(rows(a=torch.tensor([1, 2])), partition_id=name)
    client.put(rows(a=torch.tensor([7])), metadata=meta[1])
    assert client.get_data(meta)["a"].tolist() == [1, 7]


def test_a_sample_is_ready_only_when_all_asked_fields_are_there(client, name):
    meta = client.put(rows(a=torch.arange(4)), partition_id=name)
    client.put(rows(b=torch.arange(2)), metadata=meta.select_samples([1, 3]))
    fetched = client.get_meta(["a", "b"], 2, name, task_name="t")
    assert fetched.global_indexes == [meta.global_indexes[1], meta.global_indexes[3]]
    with pytest.raises(tq.BatchTimeoutError, match="2 lack field 'b'"):
        client.get_meta(["a", "b"], 1, name, task_name="t", timeout_s=0.0)


def test_a_fetched_batch_takes_results_back_under_the_same_samples(client, name):
    meta = client.put(rows(a=torch.arange(3)), partition_id=name)
    fetched = client.get_meta(["a"], 3, name, task_name="reward")
    client.put(rows(score=client.get_data(fetched)["a"] * 10), metadata=fetched)
    meta = client.get_meta(["score"], 3, name, task_name="train")
    assert client.get_data(meta)["score"].tolist() == [0, 10, 20]


def test_metadata_of_two_partitions_writes_each_row_to_its_own(client, name):
    one = client.put(rows(a=torch.tensor([1, 2])), partition_id=name)
    two = client.put(rows(a=torch.tensor([3, 4])), partition_id=f"{name}/2")
    both = tq.BatchMeta.concat([one, two]).select_samples([3, 0, 2, 1])
    ragged = torch.nested.nested_tensor([torch.full((n,), n) for n in (4, 1, 3, 2)], layout=torch.jagged)
    strided = torch.nested.as_nested_tensor([torch.full((n, n), n) for n in (4, 1, 3, 2)], layout=torch.strided)
    client.put(TensorDict({"b": ragged, "c": NonTensorStack(*"4132"), "d": strided}, batch_size=[4]), metadata=both)
    for partition, expected in ((name, [1, 2]), (f"{name}/2", [3, 4])):
        meta = client.get_meta(["b", "c", "d"], partition_id=partition, mode="force_fetch")
        data = client.get_data(meta)
        assert meta.is_ready
        assert [row.tolist() for row in data["b"].unbind()] == [[n] * n for n in expected]
        assert data["c"] == [str(n) for n in expected]
        assert [row.tolist() for row in data["d"].unbind()] == [[[n] * n] * n for n in expected]


def test_what_was_read_may_be_modified_without_changing_what_is_stored(client, name):
    source = torch.arange(6.0).reshape(2, 3)
    meta = client.put(rows(a=source), partition_id=name)
    source.zero_()
    client.get_data(meta)["a"].values().fill_(-1.0)
    assert client.get_data(meta)["a"].values().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_rows_that_fill_a_padded_batch_are_not_written_back(client, name):
    client.register_task(f"task of {name}", tail="pad")
    client.put(rows(a=torch.arange(3)), partition_id=name)
    client.seal_partition(name)
    meta = client.get_meta(["a"], 4, name, task_name=f"task of {name}", sampling_config={"dp_rank": 0, "dp_size": 1})
    assert meta.padding_mask == [False, False, False, True]
    client.put(rows(b=torch.tensor([10, 11, 12, -1])), metadata=meta)
    assert client.get_data(meta.select_fields(["b"]))["b"].tolist() == [10, 11, 12, 10]


def test_a_plain_dict_of_columns_is_put_as_well(client, name):
    meta = client.put({"a": torch.arange(2), "text": ["x", "y"]}, partition_id=name)
    data = client.get_data(meta)
    assert (data["a"].tolist(), data["text"]) == ([0, 1], ["x", "y"])


def test_many_megabytes_come_back_whole(client, name):
    values = torch.randn(64, 65_536)
    meta = client.put(rows(a=values), partition_id=name)
    assert torch.equal(client.get_data(meta)["a"].values(), values.flatten())
    client.clear_partition(name)


def test_cleared_samples_are_a_key_error_and_clearing_again_is_nothing(client, name):
    meta = client.put(rows(a=torch.arange(3)), partition_id=name)
    client.clear_samples(meta[0])
    client.clear_samples(meta[0])
    with pytest.raises(KeyError, match="'a'") as caught:
        client.get_data(meta)
    assert isinstance(caught.value, tq.StorageKeyNotFoundError)
    assert client.get_data(meta[1:])["a"].tolist() == [1, 2]


def test_clearing_frees_the_values(client, name):
    before = stored_values(client)
    meta = client.put(rows(a=torch.arange(4), b=torch.arange(4)), partition_id=name)
    client.clear_samples(meta[:2])
    assert stored_values(client) == before + 4
    client.clear_partition(name)
    assert stored_values(client) == before
    assert name not in client.get_partition_list()


def test_indexes_are_never_reused(client, name):
    before = client.put(rows(a=torch.arange(3)), partition_id=name).global_indexes
    client.clear_partition(name)
    assert client.put(rows(a=torch.arange(3)), partition_id=name).global_indexes[0] > before[-1]


def test_concurrent_puts_of_one_loop_all_arrive(client, name):
    async def go() -> list[tq.BatchMeta]:
        puts = (client.async_put(rows(a=torch.tensor([i])), partition_id=name) for i in range(20))
        return await asyncio.gather(*puts)

    metas = asyncio.run(go())
    assert client.get_data(tq.BatchMeta.concat(metas))["a"].tolist() == list(range(20))


# ---- data_parser ----


def test_a_data_parser_replaces_the_values_and_the_schema_follows(client, name):
    def parser(columns: dict[str, Any]) -> dict[str, Any]:
        return {"url": [text.upper() for text in columns["url"]], "n": columns["n"].to(torch.float32)}

    data = TensorDict({"url": NonTensorStack("a", "b"), "n": torch.arange(2)}, batch_size=[2])
    meta = client.put(data, partition_id=name, data_parser=parser)
    back = client.get_data(meta)
    assert (back["url"], back["n"].tolist()) == (["A", "B"], [0.0, 1.0])
    assert meta.field_schema["n"]["dtype"] == torch.float32


@pytest.mark.parametrize(
    ("parser", "cause"),
    [
        ("no function", "not callable"),
        (lambda columns: [1], "not a dict"),
        (lambda columns: {"b": columns["a"]}, "keys"),
        (lambda columns: {"a": columns["a"][:1]}, "count"),
        (lambda columns: {"a": columns["nothing"]}, "KeyError"),
    ],
    ids=["not callable", "no dict", "other keys", "other count", "raises"],
)
def test_a_data_parser_that_misbehaves_fails_the_put_and_nothing_is_left(client, name, parser, cause):
    before = stored_values(client)
    with pytest.raises(RuntimeError, match=cause):
        client.put(rows(a=torch.arange(2)), partition_id=name, data_parser=parser)
    assert stored_values(client) == before
    assert client.get_production_status(["a"], name) == (None, None)


# ---- races with a clear ----


def test_put_onto_samples_cleared_meanwhile_is_an_error_and_leaves_no_value(client, name):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    client.clear_samples(meta)
    before = stored_values(client)
    with pytest.raises(KeyError, match="aren't in partition"):
        client.put(rows(b=torch.arange(2)), metadata=meta)
    client.clear_partition(name)
    with pytest.raises(RuntimeError, match="not found"):
        client.put(rows(b=torch.arange(2)), metadata=meta)
    assert stored_values(client) == before


def test_a_clear_while_a_put_is_prepared_leaves_no_value(client, name):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    before = stored_values(client)

    def clears(columns: dict[str, Any]) -> dict[str, Any]:
        client.clear_partition(name)
        return columns

    with pytest.raises(RuntimeError, match="not found"):
        client.put(rows(b=torch.arange(2)), metadata=meta, data_parser=clears)
    assert stored_values(client) == before - 2
    made = client.put(rows(b=torch.arange(2)), partition_id=name, data_parser=clears)
    assert client.get_meta(["b"], partition_id=name, mode="force_fetch").global_indexes == made.global_indexes


def test_a_put_after_a_clear_or_a_seal_by_another_client_knows_of_it(queue, client, name):
    other = connect("other", queue)
    before = stored_values(client)
    for _ in range(5):
        client.put(rows(a=torch.arange(2)), partition_id=name)
    other.clear_partition(name)
    meta = client.put(rows(a=torch.tensor([1, 2])), partition_id=name)
    assert client.get_data(meta)["a"].tolist() == [1, 2]
    for _ in range(5):
        client.put(rows(a=torch.arange(2)), partition_id=name)
    other.seal_partition(name)
    with pytest.raises(ValueError, match="sealed after 12 samples"):
        client.put(rows(a=torch.arange(2)), partition_id=name)
    assert stored_values(client) == before + 12
    other.close()


def test_a_partition_made_anew_by_another_client_with_another_dtype_loses_nothing(queue, client, name):
    other = connect("other", queue)
    client.put(rows(a=torch.arange(2), b=torch.zeros(2)), partition_id=name)
    other.clear_partition(name)
    other.create_partition(name, fields={"b": ("int64", [])})
    other.put(rows(a=torch.tensor([8, 9]), b=torch.tensor([8, 9])), partition_id=name)
    meta = client.get_meta(["a"], 2, name, task_name="t")
    with pytest.raises(ValueError, match=r"declared as dtype int64, shape .*, this put brings dtype float32"):
        client.put(rows(b=torch.zeros(2)), metadata=meta)
    assert client.get_data(other.get_meta(["b"], 2, name, task_name="t2"))["b"].tolist() == [8, 9]
    other.close()
