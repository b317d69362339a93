# SPDX-License-Identifier: Apache-2.0
"""The key-value functions: what they return, what they refuse, and that they work from any loop."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from clients import units
from plain_rows import rows
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq


def stored_values() -> int:
    return sum(unit.values for unit in units())


# ---- kv_put ----


def test_kv_put_gives_tensors_a_batch_dimension_and_keeps_objects_whole(queue, name):
    fields = {"t": torch.arange(3), "scalar": torch.tensor(7), "text": "hello", "items": [1, 2], "map": {"k": None}}
    meta = tq.kv_put("k", name, fields, {"score": 1})
    assert meta == tq.KVBatchMeta(["k"], [{"score": 1}], name, ["items", "map", "scalar", "t", "text"], {})
    data = tq.kv_batch_get("k", name)
    assert data.batch_size == (1,)
    assert data["t"].unbind()[0].tolist() == [0, 1, 2]
    assert data["scalar"].tolist() == [7]
    assert (data["text"], data["items"], data["map"]) == (["hello"], [[1, 2]], [{"k": None}])


def test_a_name_may_be_text_of_numpy(queue, client, name):
    field = np.str_("f")
    tq.kv_put(np.str_("k"), name, {field: torch.tensor(1)})
    tq.kv_batch_put(["k", "l"], name, {field: [2, 3]})
    meta = client.put({field: ["a"]}, partition_id=name)
    client.put(TensorDict({field: torch.tensor([4])}, [1]), metadata=meta)
    assert tq.kv_batch_get(["k", "l"], name)["f"].tolist() == [2, 3]
    assert client.get_data(meta)["f"].tolist() == [4]


@pytest.fixture
def many():
    """More keys than one request names, with columns of every kind and tags for all but the first."""
    count = 2 * 2048 + 3  # a request names 2048 at most
    keys = [f"k{n}" for n in range(count)]
    fields = {
        "n": torch.arange(count),
        "text": [f"text {n}" for n in range(count)],
        "ragged": torch.nested.nested_tensor([torch.full((1 + n % 3,), n) for n in range(count)], layout=torch.jagged),
    }
    return keys, fields, [None, *({"v": n} for n in range(1, count))]


def test_more_keys_than_one_request_names_are_put_listed_read_and_cleared_as_few_are(queue, client, name, many):
    keys, fields, tags = many
    meta = tq.kv_batch_put(keys, name, fields, tags)
    plain = [tag or {} for tag in tags]
    assert meta == tq.KVBatchMeta(keys, plain, name, ["n", "ragged", "text"], {})
    data = tq.kv_batch_get(keys[::-1], name)
    assert data["n"].tolist() == list(range(len(keys)))[::-1]
    assert list(data["text"]) == fields["text"][::-1]
    assert [row.tolist() for row in data["ragged"].unbind()] == [r.tolist() for r in fields["ragged"].unbind()][::-1]
    found = client.kv_retrieve_meta(keys, name)
    assert client.kv_retrieve_keys(found.global_indexes, name) == keys
    assert found.custom_meta == plain
    tq.kv_put(keys[0], name, {"late": 1})
    tq.kv_put(keys[-1], name, {"late": 2})
    assert sorted(tq.kv_batch_get(keys, name).keys()) == ["n", "ragged", "text"], "fields that all of them have"
    with pytest.raises(ValueError, match=r"1 of 4100 keys not found in partition .*\['nowhere'\]"):
        tq.kv_batch_get([*keys, "nowhere"], name)
    tq.kv_clear(keys, name)
    assert tq.kv_list(name) == {name: {}}


def test_more_tags_than_one_request_has_are_visible_with_the_values(client, name, many):
    _, fields, tags = many
    plain = [tag or {} for tag in tags]
    with pytest.raises(ValueError, match="no valid Unicode"):
        client.put({"n": fields["n"]}, partition_id=name, tags=[*tags[:-1], {"v": "\ud800"}])
    assert name not in client.get_partition_list()
    meta = client.put({"n": fields["n"]}, partition_id=name, tags=tags)
    assert meta.custom_meta == plain
    assert client.get_meta(["n"], partition_id=name, mode="force_fetch").custom_meta == plain
    client.put({"text": fields["text"]}, metadata=meta, tags=[{"w": n} for n in range(len(tags))])
    everything = client.get_meta(["n", "text"], partition_id=name, mode="force_fetch")
    assert everything.custom_meta == [{**tag, "w": n} for n, tag in enumerate(plain)]
    assert list(client.get_data(everything)["text"]) == fields["text"]


def test_kv_put_takes_a_tensordict_of_one_row(queue, name):
    tq.kv_put("k", name, rows(a=torch.ones(1, 2)))
    assert tq.kv_batch_get("k", name)["a"][0].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"batch_size \[1\], got \[2\]"):
        tq.kv_put("k", name, rows(a=torch.ones(2, 2)))


def test_later_puts_of_a_key_add_columns_and_replace_fields(queue, name):
    tq.kv_put("k", name, {"a": torch.tensor(1)})
    assert tq.kv_put("k", name, {"b": torch.tensor(2)}).fields == ["a", "b"]
    tq.kv_put("k", name, {"a": torch.tensor(3)})
    data = tq.kv_batch_get("k", name)
    assert (data["a"].tolist(), data["b"].tolist()) == ([3], [2])


def test_tags_merge_by_top_level_key_and_may_come_alone(queue, name):
    assert tq.kv_put("k", name, tag={"a": {"x": 1}, "b": 1}).fields == []
    assert tq.kv_put("k", name, tag={"a": {"y": 2}}).tags == [{"a": {"y": 2}, "b": 1}]
    assert tq.kv_list(name) == {name: {"k": {"a": {"y": 2}, "b": 1}}}


@pytest.mark.parametrize(
    ("fields", "tag"),
    [
        (None, None),
        ({"n": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)}, None),
        ([1, 2], None),
        ("text", None),
        ({"n": TensorDict({"a": torch.zeros(2)}, [])}, None),
        ({1: "text"}, None),
    ],
    ids=["neither", "nested", "list", "text", "TensorDict", "name"],
)
def test_kv_put_refuses_what_is_no_sample(queue, name, fields, tag):
    text = r"needs fields|nested|dict or a TensorDict|field 'n' is a TensorDict.*Flatten|name is a string, got 1"
    with pytest.raises(ValueError, match=text):
        tq.kv_put("k", name, fields, tag)
    assert tq.kv_list(name) == {}


# ---- kv_batch_put ----


def test_kv_batch_put_returns_keys_as_given_merged_tags_and_the_fields_that_all_have(queue, name):
    tq.kv_batch_put(["a", "b"], name, rows(x=torch.arange(2)), [{"n": 1}, {"n": 2}])
    meta = tq.kv_batch_put(["c", "a"], name, rows(y=torch.arange(2)), [{"m": 3}, None])
    assert meta == tq.KVBatchMeta(["c", "a"], [{"m": 3}, {"n": 1}], name, ["y"], {})
    assert tq.kv_batch_put(["a"], name, tags=[{}]).fields == ["x", "y"]
    assert list(tq.kv_list(name)[name]) == ["a", "b", "c"]


def test_a_plain_string_is_one_key(queue, name):
    assert tq.kv_batch_put("key", name, rows(x=torch.arange(1))).keys == ["key"]


@pytest.mark.parametrize(
    ("keys", "fields", "tags", "error", "text"),
    [
        (["a"], None, None, ValueError, "neither"),
        (["a", "b"], {"x": torch.arange(1)}, None, ValueError, "2 keys"),
        (["a", "b"], None, [{}], ValueError, "2 rows were given with 1 tags"),
        ([], {"x": torch.arange(1)}, None, ValueError, "empty"),
        (("a",), {"x": torch.arange(1)}, None, TypeError, "list of strings"),
        ([1], {"x": torch.arange(1)}, None, TypeError, "list of strings"),
        (["a", "a"], {"x": torch.arange(2)}, None, ValueError, "Got duplicated keys"),
        (["a"], {"x": NonTensorStack(object())}, None, TypeError, "object"),
        (["a"], {"x": torch.arange(1)}, [{"t": object()}], TypeError, "tag"),
        (["a"], {"x": torch.arange(1)}, [{1: "x"}], TypeError, "named by strings"),
    ],
    ids=["nothing", "rows", "tags", "no keys", "tuple", "numbers", "twice", "value", "tag value", "tag name"],
)
def test_kv_batch_put_refuses_before_a_key_is_made(queue, name, keys, fields, tags, error, text):
    before = stored_values()
    with pytest.raises(error, match=text):
        tq.kv_batch_put(keys, name, None if fields is None else rows(**fields), tags)
    assert (tq.kv_list(name).get(name, {}), stored_values()) == ({}, before)


def test_one_dict_object_given_as_every_tag_stays_separate(queue, name):
    tq.kv_batch_put(["a", "b"], name, tags=[{}] * 2)
    tq.kv_put("a", name, tag={"only": "a"})
    assert tq.kv_list(name) == {name: {"a": {"only": "a"}, "b": {}}}


def test_a_failed_put_takes_back_its_new_keys_and_keeps_the_known_ones(queue, name):
    tq.get_client().create_partition(name, fields={"x": ("int64", [])})
    tq.kv_put("known", name, {"x": torch.tensor(1)})
    with pytest.raises(ValueError, match=r"int64.*float32"):
        tq.kv_batch_put(["known", "new"], name, rows(x=torch.tensor([0.5, 0.5])))
    assert list(tq.kv_list(name)[name]) == ["known"]
    assert tq.kv_batch_get("known", name)["x"].tolist() == [1]


# ---- kv_batch_get ----


def test_kv_batch_get_keeps_the_order_and_repeats_of_the_keys(queue, name):
    tq.kv_batch_put(["a", "b", "c"], name, rows(x=torch.arange(3), y=torch.arange(3)))
    data = tq.kv_batch_get(["c", "a", "c"], name, select_fields="x")
    assert (sorted(data.keys()), data["x"].tolist()) == (["x"], [2, 0, 2])


def test_without_select_fields_every_field_that_all_keys_have_comes(queue, name):
    tq.kv_batch_put(["a", "b"], name, rows(x=torch.arange(2)))
    tq.kv_put("a", name, {"y": torch.tensor(1)})
    assert sorted(tq.kv_batch_get(["a", "b"], name).keys()) == ["x"]
    assert sorted(tq.kv_batch_get(["a"], name).keys()) == ["x", "y"]


def test_unknown_keys_and_fields_that_are_not_there_are_value_errors(queue, name):
    with pytest.raises(ValueError, match="not found"):
        tq.kv_batch_get(["a"], name)
    tq.kv_batch_put(["a", "b"], name, rows(x=torch.arange(2)))
    tq.kv_put("a", name, {"y": torch.tensor(1)})
    tq.kv_put("tagged", name, tag={"t": 1})
    with pytest.raises(ValueError, match=r"1 of 2 keys not found.*\['z'\]"):
        tq.kv_batch_get(["a", "z"], name)
    with pytest.raises(ValueError, match=r"\['y'\] not ready"):
        tq.kv_batch_get(["a", "b"], name, select_fields=["y"])
    with pytest.raises(ValueError, match="not ready"):
        tq.kv_batch_get("tagged", name)


def test_kv_batch_get_by_meta_takes_keys_and_fields_from_the_metadata(queue, name):
    meta = tq.kv_batch_put(["a", "b"], name, rows(x=torch.arange(2), y=torch.arange(2)))
    assert sorted(tq.kv_batch_get_by_meta(meta).keys()) == ["x", "y"]
    assert sorted(tq.kv_batch_get_by_meta(meta, "y").keys()) == ["y"]
    assert tq.kv_batch_get_by_meta(meta.select_keys(["b"]))["x"].tolist() == [1]
    bare = tq.KVBatchMeta(["a"], [{}], name)
    assert sorted(tq.kv_batch_get_by_meta(bare).keys()) == ["x", "y"]
    for wrong in (meta, bare):
        with pytest.raises(ValueError, match=r"select_fields.*not found"):
            tq.kv_batch_get_by_meta(wrong, ["z"])
    with pytest.raises(ValueError, match="partition_id"):
        tq.kv_batch_get_by_meta(tq.KVBatchMeta(["a"], [{}]))


def test_fields_of_the_metadata_may_be_one_plain_string(queue, name):
    meta = tq.kv_batch_put(["a"], name, rows(x=torch.arange(1), y=torch.arange(1)))
    meta.fields = "y"
    assert sorted(tq.kv_batch_get_by_meta(meta).keys()) == ["y"]


def test_one_row_of_what_came_back_is_a_tensordict(queue, name):
    tq.kv_batch_put(["a", "b"], name, rows(x=torch.arange(2), y=torch.ones(2, 3)))
    row = tq.kv_batch_get(["a", "b"], name)[1]
    assert (row["x"].item(), row["y"].tolist()) == (1, [1.0, 1.0, 1.0])


# ---- kv_list, kv_clear ----


def test_kv_list_shows_all_partitions_or_one_and_nothing_for_an_unknown_one(queue, name):
    tq.kv_put("a", name, tag={"n": 1})
    assert tq.kv_list()[name] == {"a": {"n": 1}}
    assert tq.kv_list("never used") == {}
    tq.kv_clear("a", name)
    assert tq.kv_list(name) == {name: {}}


def test_kv_clear_forgets_keys_and_values_and_ignores_unknown_ones(queue, name):
    before = stored_values()
    tq.kv_batch_put(["a", "b"], name, rows(x=torch.arange(2)))
    tq.kv_clear(["a", "unknown"], name)
    tq.kv_clear(["a"], "never used")
    assert (list(tq.kv_list(name)[name]), stored_values()) == (["b"], before + 1)
    with pytest.raises(ValueError, match="empty"):
        tq.kv_clear([], name)
    with pytest.raises(ValueError, match="not found"):
        tq.kv_batch_get("a", name)


def test_a_cleared_key_may_be_used_again(queue, name):
    tq.kv_put("a", name, {"x": torch.tensor(1)}, {"old": True})
    tq.kv_clear("a", name)
    assert tq.kv_put("a", name, {"y": torch.tensor(2)}).tags == [{}]
    assert sorted(tq.kv_batch_get("a", name).keys()) == ["y"]


def test_a_key_cleared_during_its_put_is_put_anew(queue, name):
    tq.kv_put("a", name, {"x": torch.tensor(1)})
    before = stored_values()

    async def go() -> None:
        puts = (tq.async_kv_put("a", name, {"x": torch.tensor(i), "y": torch.tensor(i)}) for i in range(30))
        clears = (tq.async_kv_clear("a", name) for _ in range(30))
        await asyncio.gather(*(call for pair in zip(puts, clears, strict=True) for call in pair))
        await tq.async_kv_put("a", name, {"x": torch.tensor(99), "y": torch.tensor(99)})

    asyncio.run(go())
    assert tq.kv_batch_get("a", name)["x"].tolist() == [99]
    assert stored_values() == before + 1


def test_samples_put_by_key_are_fetched_like_all_others(queue, name):
    tq.kv_batch_put(["a", "b"], name, rows(x=torch.arange(2)), [{"w": 1}, {"w": 2}])
    meta = tq.get_client().get_meta(["x"], 2, name, task_name="t")
    assert meta.custom_meta == [{"w": 1}, {"w": 2}]
    assert tq.get_client().kv_retrieve_keys(meta.global_indexes, name) == ["a", "b"]


# ---- data_parser, loops ----


def test_a_data_parser_works_by_key_too(queue, name):
    tq.kv_put("a", name, {"x": torch.tensor(2)}, data_parser=lambda columns: {"x": columns["x"] * 2})
    assert tq.kv_batch_get("a", name)["x"].tolist() == [4]
    with pytest.raises(RuntimeError, match="not callable"):
        tq.kv_put("b", name, {"x": torch.tensor(2)}, data_parser=3)
    assert list(tq.kv_list(name)[name]) == ["a"]


def test_the_async_twins_do_the_same_from_one_asyncio_run_after_another(queue, name):
    async def go(i: int) -> list[int]:
        await tq.async_kv_put(f"k{i}", name, {"x": torch.tensor(i)}, {"i": i})
        meta = await tq.async_kv_batch_put([f"m{i}", f"n{i}"], name, rows(x=torch.tensor([i, i])))
        data = await tq.async_kv_batch_get_by_meta(meta)
        assert (await tq.async_kv_list(name))[name][f"k{i}"] == {"i": i}
        await tq.async_kv_clear(f"m{i}", name)
        return [*data["x"].tolist(), *(await tq.async_kv_batch_get(f"k{i}", name))["x"].tolist()]

    assert [asyncio.run(go(i)) for i in range(10)] == [[i, i, i] for i in range(10)]
    assert len(tq.kv_list(name)[name]) == 20


def test_blocking_functions_work_inside_a_running_loop(queue, name):
    async def go() -> list[int]:
        tq.kv_put("a", name, {"x": torch.tensor(5)})
        return tq.kv_batch_get("a", name)["x"].tolist()

    assert asyncio.run(go()) == [5]
