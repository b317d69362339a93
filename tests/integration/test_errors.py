# SPDX-License-Identifier: Apache-2.0
"""What bad input gets: a typed error that says what to do, and nothing is lost."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from calls import answered
from clients import connect
from plain_rows import Point, rows
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError

# ---- bad requests ----


def test_an_unknown_field_is_named_beside_those_that_exist(client, name):
    client.put(rows(prompt=torch.arange(2), reward=torch.arange(2)), partition_id=name)
    with pytest.raises(TimeoutError, match=r"nobody has put field 'rewards'.*there are 'prompt', 'reward'") as caught:
        client.get_meta(["prompt", "rewards"], 1, name, task_name="t", timeout_s=0.0)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_size_below_one_is_refused(client, name, batch_size):
    for mode in ("fetch", "insert"):
        with pytest.raises(ValueError, match=rf"at least.*got {batch_size}"):
            client.get_meta(["a"], batch_size, name, mode=mode, task_name="t")


def test_a_rank_outside_its_group_is_refused_before_anything_is_consumed(client, name):
    client.put(rows(a=torch.arange(4)), partition_id=name)
    for dp_rank, text in ((2, "ranks go from 0 to 1"), (-1, "must be greater than or equal to 0")):
        with pytest.raises(ValueError, match=text):
            client.get_meta(["a"], 1, name, task_name="t", sampling_config={"dp_rank": dp_rank, "dp_size": 2})
    assert client.get_consumption_status("t", name)[1].tolist() == [0] * 4


def test_different_group_sizes_for_one_task_are_refused(client, name):
    client.register_task(f"task of {name}", dp_size=2)
    with pytest.raises(ValueError, match=r"\[2, 4\]"):
        client.get_meta(["a"], 1, name, task_name=f"task of {name}", sampling_config={"dp_rank": 0, "dp_size": 4})


def test_a_fetch_needs_fields_a_partition_a_task_and_a_known_mode(client, name):
    with pytest.raises(ValueError, match="at least one field"):
        client.get_meta([], 1, name, task_name="t")
    with pytest.raises(ValueError, match="partition_id"):
        client.get_meta(["a"], 1, task_name="t")
    with pytest.raises(ValueError, match="task_name"):
        client.get_meta(["a"], 1, name)
    with pytest.raises(ValueError, match="batch_size"):
        client.get_meta(["a"], partition_id=name, task_name="t")
    with pytest.raises(ValueError, match="did you mean 'force_fetch'"):
        client.get_meta(["a"], 1, name, mode="force-fetch")
    with pytest.raises(TypeError, match="data_fields"):
        client.get_meta([1], 1, name, task_name="t")
    assert name not in client.get_partition_list()


def test_a_put_needs_rows_and_somewhere_to_go(client, name):
    meta = client.put(rows(a=torch.arange(2)), partition_id=name)
    with pytest.raises(ValueError, match="partition_id"):
        client.put(rows(a=torch.arange(2)))
    with pytest.raises(ValueError, match="0 rows"):
        client.put(TensorDict({"a": torch.zeros(0)}, batch_size=[0]), partition_id=name)
    with pytest.raises(ValueError, match="0 samples"):
        client.put(rows(a=torch.arange(2)), metadata=tq.BatchMeta())
    with pytest.raises(ValueError, match="batch dimension"):
        client.put(TensorDict({"a": torch.zeros(2)}, batch_size=[]), partition_id=name)
    with pytest.raises(ValueError, match=r"got {.a.: 1, .b.: 2}"):
        client.put({"a": [1], "b": [1, 2]}, partition_id=name)
    with pytest.raises(ValueError, match="got list"):
        client.put([1, 2], partition_id=name)
    assert client.get_meta(["a"], partition_id=name, mode="force_fetch").global_indexes == meta.global_indexes


@pytest.mark.parametrize(
    ("column", "error", "text"),
    [
        (torch.tensor(1), ValueError, "field 'x' of a put is a single Tensor"),
        (7, ValueError, "field 'x' of a put is a single int"),
        (torch.tensor(7), ValueError, "field 'x' of a put is a single Tensor without dimensions"),
        ("abc", ValueError, "field 'x' of a put is a single str: a column is a tensor, an array, a list or a tuple"),
        (b"abc", ValueError, "single bytes"),
        ({1, 2, 3}, ValueError, "single set"),
        ({"a": 1, "b": 2, "c": 3}, ValueError, "single dict"),
        (range(3), ValueError, "single range"),
        (torch.zeros(3, device="meta"), tq.UnsupportedValueError, "field 'x' is on the meta device"),
    ],
)
def test_what_is_no_column_is_named_and_nothing_is_stored(client, name, column, error, text):
    with pytest.raises(error, match=text):
        client.put({"x": column, "reward": torch.arange(3)}, partition_id=name)
    assert name not in client.get_partition_list()


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.array([b"ab", b"cd"], "V2"), r"field 'x' is an array of dtype \|V2, which no tensor has\. Cast it"),
        (np.array([(1, 2.0)] * 2, [("a", "i8"), ("b", "f8")]), r"an array of dtype \[\('a', '<i8'\)"),
        (np.ones(2, np.longdouble), f"an array of dtype {np.dtype(np.longdouble)}"),
        (np.ones(2, np.clongdouble), f"an array of dtype {np.dtype(np.clongdouble)}"),
        (np.ma.array([1, 2], mask=[0, 1]), r"a masked array \(MaskedArray of int64\), and its mask would be lost"),
    ],
    ids=["void", "structured", "longdouble", "clongdouble", "masked"],
)
def test_an_array_that_is_no_column_is_named_with_its_dtype_and_nothing_is_stored(client, name, array, text):
    with pytest.raises(tq.UnsupportedValueError, match=text):
        client.put({"x": array}, partition_id=name)
    with pytest.raises(tq.UnsupportedValueError, match=text):
        client.put({"x": torch.ones(2)}, partition_id=name, data_parser=lambda columns: {"x": array})
    assert name not in client.get_partition_list()


@pytest.mark.parametrize("field", ["a\ud800", 1])
def test_what_is_no_name_of_a_field_is_shown(client, name, field):
    with pytest.raises(ValueError, match=re.escape(repr(field))) as caught:
        client.put({field: torch.arange(1)}, partition_id=name)
    assert isinstance(caught.value, tq.TransferQueueError)


@pytest.mark.parametrize(
    ("tags", "text"),
    [
        (["a"], "tags of row 0 are a str, 'a'"),
        ({"a": 1}, "one mapping per row, got dict"),
        ([{}, {}], "1 rows were given with 2 tags"),
    ],
)
def test_tags_that_are_no_mapping_per_row_are_refused(client, name, tags, text):
    with pytest.raises(InvalidRequestError, match=text):
        client.put({"x": torch.arange(1)}, partition_id=name, tags=tags)
    with pytest.raises(InvalidRequestError, match=text):
        tq.kv_batch_put(["key"], name, {"x": torch.arange(1)}, tags=tags)
    assert name not in client.get_partition_list()


def test_none_among_tags_means_that_the_row_has_none(client, name):
    meta = client.put({"x": torch.arange(3)}, partition_id=name, tags=[None, {"a": 1}, None])
    assert meta.custom_meta == [{}, {"a": 1}, {}]
    everything = client.get_meta(["x"], partition_id=name, mode="force_fetch")
    assert everything.custom_meta == meta.custom_meta


def test_a_put_to_samples_of_another_partition_than_it_names_writes_nothing(client, name):
    meta = client.put({"x": torch.arange(2)}, partition_id=name)
    with pytest.raises(ValueError, match=rf"partition_id 'other' with metadata of samples in \['{name}'\]"):
        client.put({"y": torch.arange(2)}, metadata=meta, partition_id="other")
    assert client.put({"y": torch.arange(2)}, metadata=meta, partition_id=name).field_names == ["x", "y"]
    assert "other" not in client.get_partition_list()


@pytest.mark.parametrize(("key", "meant"), [("dp_rnk", "dp_rank"), ("batch_idx", "batch_index"), ("Where", "where")])
def test_a_misspelt_key_of_a_sampling_config_is_refused_with_the_one_that_was_meant(client, name, key, meant):
    client.put({"x": torch.arange(2)}, partition_id=name)
    with pytest.raises(ValueError, match=f"{key!r}; did you mean {meant!r}"):
        client.get_meta(["x"], 1, name, task_name="t", sampling_config={key: 0})
    own = {"n_samples_per_prompt": 1, "rank": 0}  # these may be a sampler's own
    assert client.get_meta(["x"], 1, name, task_name="t", sampling_config=own).size == 1


@pytest.mark.parametrize("dp_size", [0, -1])
def test_a_group_of_no_ranks_is_refused(queue, client, name, dp_size):
    client.put({"x": torch.arange(2)}, partition_id=name)
    with pytest.raises(ValueError, match=f"dp_size must be at least 1, got {dp_size}"):
        client.get_meta(["x"], 1, name, task_name="t", sampling_config={"dp_rank": 0, "dp_size": dp_size})
    with pytest.raises(ValueError, match=f"dp_size must be at least 1, got {dp_size}"):
        tq.StreamingDataset(queue, 1, 1, ["x"], name, "t", 0, dp_size=dp_size)


@pytest.mark.parametrize("verb", ["get_data", "clear_samples", "set_custom_meta"])
@pytest.mark.parametrize("value", [None, {"x": 1}])
def test_what_is_no_metadata_is_refused_by_name(client, verb, value):
    with pytest.raises(InvalidRequestError, match=f"{verb} takes a BatchMeta.*got {type(value).__name__}"):
        getattr(client, verb)(value)


def test_a_number_beyond_64_bits_is_shown(client, name):
    client.put({"x": torch.arange(2)}, partition_id=name)
    strange = tq.BatchMeta([2**70], [name], {"x": {}})
    for call in (
        lambda: client.get_data(strange),
        lambda: client.clear_samples(strange),
        lambda: client.put({"x": torch.arange(1)}, metadata=strange),
        lambda: client.kv_retrieve_keys([2**70], name),
        lambda: client.get_meta(["x"], 2**70, name, task_name="t"),
        lambda: client.get_meta(["x"], 1, name, task_name="t", sampling_config={"of_the_sampler": [2**70]}),
    ):
        with pytest.raises(ValueError, match=str(2**70)) as caught:
            call()
        assert isinstance(caught.value, tq.TransferQueueError)


def test_an_argument_of_the_wrong_type_is_named(client):
    with pytest.raises(tq.TransferQueueError, match="partition of Reserve: Expected `str`, got `int`"):
        client.put({"x": torch.zeros(2)}, partition_id=3)


def test_more_or_fewer_rows_than_samples_write_nothing(client, name):
    meta = client.put(rows(a=torch.tensor([1, 2])), partition_id=name)
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"{count} rows of data for 2 samples"):
            client.put(rows(a=torch.zeros(count, dtype=torch.int64)), metadata=meta)
    assert client.get_data(meta)["a"].tolist() == [1, 2]


def test_a_dtype_that_was_not_declared_names_both_and_the_old_values_stay(client, name):
    assert client.create_partition(name, fields={"a": (torch.int64, None)})
    meta = client.put(rows(a=torch.tensor([1, 2])), partition_id=name)
    text = "'a' of partition .* is declared as dtype int64, this put brings dtype float32"
    with pytest.raises(ValueError, match=text) as caught:
        client.put(rows(a=torch.zeros(2)), metadata=meta)
    assert isinstance(caught.value, tq.SchemaConflictError)
    with pytest.raises(ValueError, match=text):
        client.put(rows(a=torch.zeros(2)), partition_id=name)
    with pytest.raises(ValueError, match="declared as dtype int64, this put brings plain objects"):
        client.put(TensorDict({"a": ["x", "y"]}, batch_size=[2]), metadata=meta)
    everything = client.get_meta(["a"], partition_id=name, mode="force_fetch")
    assert (everything.global_indexes, client.get_data(everything)["a"].tolist()) == (meta.global_indexes, [1, 2])


def test_a_nested_tensordict_is_refused_with_the_way_out(client, name):
    with pytest.raises(TypeError, match="flatten_keys"):
        client.put(TensorDict({"a": rows(b=torch.arange(2))}, batch_size=[2]), partition_id=name)
    assert client.get_production_status(["a"], name) == (None, None)


def test_an_object_that_needs_pickle_names_its_type_and_the_switch(client, name):
    with pytest.raises(TypeError, match=r"Point.*allow_pickle") as caught:
        client.put(TensorDict({"a": NonTensorStack(Point(1))}, batch_size=[1]), partition_id=name)
    assert isinstance(caught.value, tq.UnsupportedValueError)
    assert client.get_production_status(["a"], name) == (None, None)


def test_a_tag_that_is_no_plain_data_is_refused_before_the_values_are_written(client, name):
    meta = client.put(rows(a=torch.tensor([1])), partition_id=name)
    for tag, text in (
        ({"t": object()}, "holds a object"),
        ({3: 1}, "named by strings"),
        ({"big": 2**70}, "more than 64 bits"),
    ):
        bad = meta.copy()
        bad.update_custom_meta([tag])
        with pytest.raises(TypeError, match=text):
            client.put(rows(a=torch.tensor([2])), metadata=bad)
        with pytest.raises(TypeError, match=text):
            client.set_custom_meta(bad)
    assert client.get_data(meta)["a"].tolist() == [1]


def test_a_field_never_put_and_a_sample_cleared_are_told_apart_from_nothing(client, name):
    meta = client.put(rows(a=torch.arange(1)), partition_id=name)
    meta.add_fields(rows(b=torch.arange(1)))
    with pytest.raises(RuntimeError, match="'b'"):
        client.get_data(meta)


def test_a_sampler_that_is_unknown_or_not_allowed_says_what_there_is(client):
    with pytest.raises(ValueError, match=r"Could not find sampler 'Sequental'. Did you mean 'SequentialSampler'"):
        client.register_task("t", sampler="Sequental")
    with pytest.raises(ValueError, match=r"'os' may not be imported.*sampler_modules"):
        client.register_task("t", sampler="os:PathLike")


def test_a_late_fetch_names_the_clients_that_still_owe_samples(queue, client, name):
    writers = [connect(f"writer{number}", queue) for number in range(2)]
    for writer in writers:
        reserve = p.Reserve(writer.session.number(), name, 4, {})
        answered(writer, reserve, p.Reserved)
    owed = r"0 ready, 8 are reserved by clients writer0\.\S+, writer1\.\S+ and not put yet, nothing was published"
    with pytest.raises(tq.BatchTimeoutError, match=owed):
        client.get_meta(["owed"], 1, name, task_name="t", timeout_s=0.0)
    for writer in writers:
        writer.close()


def test_an_argument_that_a_verb_lacks_is_reported_of_the_verb_that_was_called(client, name):
    with pytest.raises(TypeError, match=r"^put\(\) got an unexpected keyword argument 'partition'"):
        client.put({"a": torch.arange(2)}, partition=name)


def test_a_late_fetch_says_what_it_waited_for(client, name):
    with pytest.raises(
        tq.BatchTimeoutError, match=r"task 't' waited 0.0 s for 1 sample of .* the partition is not in the queue, "
    ):
        client.get_meta(["a"], 1, name, task_name="t", timeout_s=0.0)


def test_a_late_fetch_whose_sampler_picked_nothing_says_so(client, name):
    client.register_task(f"task of {name}", sampler=tq.GRPOGroupNSampler(2))
    meta = client.put(rows(a=torch.arange(3)), partition_id=name)
    client.put(rows(b=torch.arange(2)), metadata=meta.select_samples([0, 2]))
    with pytest.raises(RuntimeError, match=r"2 ready.*Sampler returned no samples"):
        client.get_meta(["b"], 2, name, task_name=f"task of {name}", timeout_s=0.0)
