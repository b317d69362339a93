# SPDX-License-Identifier: Apache-2.0
"""What programs written for TransferQueue do, found by running them: each must work here without a change."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import logging
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from clients import connect
from plain_rows import rows
from tensordict import NonTensorData, NonTensorStack, TensorDict

import transfer_queue as tq

CONF = {"controller": {"polling_mode": True, "sampler_modules": ["tests.integration.scoring_sampler"]}}


class Kind(enum.Enum):
    A = "a"


@dataclasses.dataclass(frozen=True)
class OneField:
    a: int


# ---- versions ----


def test_the_version_is_the_level_of_the_api_and_the_distribution_has_its_own():
    import lightning_tq

    assert tq.__version__ == "0.1.11"  # verl saves the queue only from 0.1.9 on
    assert lightning_tq.__version__ == tq.__distribution_version__ != tq.__version__


# ---- fields that nobody has ----


def test_selected_fields_that_no_sample_has_are_left_out(queue, name):
    tq.kv_batch_put(["a", "b"], name, rows(x=torch.arange(2), y=torch.arange(2)))

    def get(fields: Any) -> list[str]:
        return sorted(tq.kv_batch_get(["a", "b"], name, fields).keys())

    assert get(["x", "nowhere"]) == ["x"]
    assert get(["nowhere", "y", "x"]) == ["x", "y"]
    with pytest.raises(ValueError, match=r"nowhere.*not ready"):
        get(["nowhere", "neither"])


def test_fields_selected_by_metadata_must_be_fields_of_the_metadata(queue, name):
    # The metadata says what there is, so another name is a mistake; a program of the API expects to be told.
    meta = tq.kv_batch_put(["a", "b"], name, rows(x=torch.arange(2), y=torch.arange(2)))
    assert sorted(tq.kv_batch_get_by_meta(meta, ["y", "x"]).keys()) == ["x", "y"]
    for fields in ("nowhere", ["x", "nowhere"]):
        with pytest.raises(ValueError, match=r"select_fields \['nowhere'\] not found.*\['x', 'y'\]"):
            tq.kv_batch_get_by_meta(meta, fields)


def test_a_selected_field_that_one_of_the_samples_lacks_is_left_out_with_one_warning(queue, name, caplog):
    # verl pads batches with samples that have every field it may select; the others lack some of them.
    meta = tq.kv_batch_put(["a", "b"], name, rows(x=torch.arange(2)))
    tq.kv_put("b", name, {f"late_{name}": torch.tensor(1)})
    tq.kv_put("c", name, {"elsewhere": torch.tensor(1)})
    for _ in range(2):
        assert sorted(tq.kv_batch_get(["a", "b"], name, ["x", f"late_{name}", "elsewhere"]).keys()) == ["x"]
    assert [f"late_{name}" in record.getMessage() for record in caplog.records] == [True]
    meta.fields = ["x", f"late_{name}"]
    assert sorted(tq.kv_batch_get_by_meta(meta).keys()) == ["x"]
    with pytest.raises(ValueError, match="not ready for all 2 keys"):
        tq.kv_batch_get(["a", "b"], name, [f"late_{name}"])
    assert sorted(asyncio.run(tq.async_kv_batch_get("b", name, [f"late_{name}", "nowhere"])).keys()) == [f"late_{name}"]


def test_metadata_selects_the_fields_that_it_has(client, name):
    meta = client.put(rows(x=torch.arange(2), y=torch.arange(2)), partition_id=name)
    assert meta.select_fields(["x", "nowhere"]).field_names == ["x"]
    with pytest.raises(ValueError, match=r"none of the fields \['nowhere'\].*\['x', 'y'\]"):
        meta.select_fields(["nowhere"])
    assert tq.BatchMeta().select_fields(["x"]).field_names == []


# ---- arguments of samplers, tags ----


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([3, 1], dtype=">i4"),
        np.array(["ab", "c"]),
        np.array([True, False]),
        np.array(1.5),
        np.empty((0, 4)),
        np.float32(0.5),
        np.int64(-3),
        np.bool_(True),
    ],
    ids=lambda value: f"{type(value).__name__} {value.dtype} {value.shape}",
)
def test_arrays_and_scalars_reach_the_sampler_as_they_are(client, name, value):
    client.register_task(f"task of {name}", sampler="tests.integration.scoring_sampler:Described")
    client.put(rows(x=torch.arange(1)), partition_id=name)
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is compared)
        client.get_meta(
            ["x"], 1, name, task_name=f"task of {name}", sampling_config={"seen": {"deep": [value]}, "plain": 1}
        )
    native = value.astype(value.dtype.newbyteorder("<"))
    assert f"{type(value).__name__} {native.dtype.str} {value.shape} {value.tolist()!r}" in str(error.value)


def test_a_sampler_that_ranks_by_an_array_of_scores(client, name):
    client.register_task(f"task of {name}", sampler="tests.integration.scoring_sampler:BestScores")
    meta = client.put(rows(x=torch.arange(4)), partition_id=name)
    config = {"scores": np.array([0.1, 0.9, 0.5, 0.7]), "first": np.int64(meta.global_indexes[0])}
    best = client.get_meta(["x"], 2, name, task_name=f"task of {name}", sampling_config=config)
    assert best.global_indexes == [meta.global_indexes[1], meta.global_indexes[3]]


@pytest.mark.parametrize(
    "value",
    [np.array([{}], dtype=object), np.array(["2026-01-01"], dtype="M8[D]"), np.zeros(2, dtype="i4,f4")],
    ids=["objects", "dates", "records"],
)
def test_an_array_that_a_sampler_cannot_get_is_named(client, name, value):
    with pytest.raises(tq.UnsupportedValueError, match=r"sampling_config holds an array of dtype"):
        client.get_meta(["x"], 1, name, task_name="t", sampling_config={"scores": value})


def test_an_array_that_is_too_large_for_a_message_is_refused(client, name):
    with pytest.raises(tq.UnsupportedValueError, match=r"134217728 bytes"):
        client.get_meta(["x"], 1, name, task_name="t", sampling_config={"scores": np.empty(2**24)})


def test_scalars_in_tags_become_plain_numbers(queue, name):
    tag = {"reward": np.float32(0.5), "n": np.int64(3), "ok": np.bool_(True), "in": [np.float64(1.5)]}
    meta = tq.kv_put("k", name, tag=tag)
    assert meta.tags == [{"reward": 0.5, "n": 3, "ok": True, "in": [1.5]}]
    assert [type(value) for value in tq.kv_list(name)[name]["k"].values()] == [float, int, bool, list]


@pytest.mark.parametrize("value", [(1, 2), {1}, frozenset("a"), [{"deep": (1,)}]], ids=repr)
def test_tuples_and_sets_in_tags_are_refused_and_nothing_is_written(client, name, value):
    with pytest.raises(tq.UnsupportedValueError, match="would come back as a list"):
        tq.kv_put("k", name, {"x": torch.tensor(1)}, tag={"t": value})
    with pytest.raises(tq.UnsupportedValueError, match="would come back as a list"):
        client.put(rows(x=torch.arange(1)), partition_id=name, tags=[{"t": value}])
    assert name not in client.get_partition_list()


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2020, 1, 1), datetime.timedelta(1), uuid.UUID(int=1), decimal.Decimal("1.5"), OneField(1),
        Kind.A, np.datetime64("2020"), bytearray(b"a"), [{"deep": uuid.UUID(int=1)}], {uuid.UUID(int=1): 1},
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_plain_data_in_tags_is_refused_and_nothing_is_written(client, name, value):
    with pytest.raises(tq.UnsupportedValueError, match="would not come back as one"):
        tq.kv_put("k", name, {"x": torch.tensor(1)}, tag={"t": value})
    assert name not in client.get_partition_list()


@pytest.mark.parametrize("value", ["a", 1, 0.5, True, None, b"a", [1, {"a": None}], {1: "a", (1, 2): "b"}], ids=repr)
def test_plain_data_in_tags_comes_back_as_it_was(queue, name, value):
    tq.kv_put("k", name, tag={"t": value})
    assert tq.kv_list(name)[name]["k"] == {"t": value}


# ---- values ----


@pytest.mark.parametrize("count", [1, 3])
def test_a_non_tensor_of_a_list_with_an_entry_per_row_is_as_many_rows(client, name, count):
    entries = [[f"turn {i}"] * i for i in range(count)]
    data = TensorDict({"x": torch.arange(count), "turns": NonTensorData(entries, batch_size=[count])}, [count])
    meta = client.put(data, partition_id=name)
    assert client.get_data(meta)["turns"] == entries
    assert client.get_data(meta[count - 1])["turns"] == entries[-1:]


def test_its_rows_are_told_apart_where_a_batch_is_written_into_several_partitions(client, name):
    meta = tq.BatchMeta.concat(
        [client.put(rows(x=torch.arange(2)), partition_id=f"{name}/{n}") for n in range(2)]
    ).select_samples([0, 2, 3, 1])
    data = TensorDict(
        {"t": NonTensorData(list("abcd"), batch_size=[4]), "one": NonTensorData("s", batch_size=[4])}, [4]
    )
    client.put(data, metadata=meta)
    for n, texts in ((0, ["a", "d"]), (1, ["b", "c"])):
        got = client.get_data(client.get_meta(partition_id=f"{name}/{n}", mode="force_fetch"))
        assert (got["t"], got["one"]) == (texts, ["s", "s"])


def test_images_come_back_as_they_were_put(client, name):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    images = [image.fromarray(pixels).convert(mode) for mode in ("RGB", "L", "1", "RGBA", "P", "F", "I")]
    images[4].info["transparency"] = 3
    prompts = [[{"role": "user", "content": [{"type": "image", "image": each}, "what is it?"]}] for each in images]
    meta = client.put(rows(raw_prompt=NonTensorStack(*prompts), image=NonTensorStack(*images)), partition_id=name)
    back = client.get_data(meta)
    assert [each[0]["content"][0]["image"] for each in back["raw_prompt"]] == images
    for before, after in zip(images, back["image"], strict=True):
        assert (after.mode, after.size, after.tobytes()) == (before.mode, before.size, before.tobytes())
    assert back["image"][4].convert("RGBA").tobytes() == images[4].convert("RGBA").tobytes()


# ---- dtypes ----


def two_dtypes(client: tq.TransferQueueClient, name: str) -> tuple[tq.BatchMeta, tq.BatchMeta]:
    """A float mask, then an int one."""
    return tuple(
        client.put(rows(x=torch.arange(2), mask=torch.ones(2, 3, dtype=dtype)), partition_id=name)
        for dtype in (torch.float32, torch.int64)
    )


def test_each_sample_of_a_field_keeps_its_dtype(client, name):
    floats, ints = two_dtypes(client, name)
    assert client.get_data(floats)["mask"].dtype == torch.float32
    assert client.get_data(ints)["mask"].dtype == torch.int64
    everything = client.get_meta(partition_id=name, mode="force_fetch")
    assert everything.get_dtypes("mask") == [torch.float32] * 2 + [torch.int64] * 2
    assert [row.fields["mask"]["dtype"] for row in everything.samples] == everything.get_dtypes("mask")
    assert client.get_data(everything.select_fields("x"))["x"].tolist() == [0, 1, 0, 1]
    for part, dtype in ((everything[:2], torch.float32), (everything[2:], torch.int64)):
        assert part.field_schema["mask"]["dtype"] == dtype
        assert client.get_data(part)["mask"].dtype == dtype


@pytest.mark.parametrize("layout", ["jagged", "dense"])
def test_a_batch_that_mixes_dtypes_is_cast_as_torch_cat_does(queue, client, name, layout):
    two_dtypes(client, name)
    reader = connect("reader", queue, layout)
    try:
        meta = reader.get_meta(["x", "mask"], 4, name, task_name="t").select_samples([3, 0, 2, 1])
        data = reader.get_data(meta)
    finally:
        reader.close()
    assert data["x"].tolist() == [1, 0, 0, 1]
    assert (data["mask"].dtype, data["mask"].is_nested) == (torch.float32, layout == "jagged")
    assert [row.tolist() for row in data["mask"]] == [[1, 1, 1]] * 4


def test_a_stream_casts_a_batch_that_mixes_dtypes(queue, client, name):
    two_dtypes(client, name)
    client.seal_partition(name)
    ((data, meta),) = tq.StreamingDataset(queue, 4, 4, ["mask"], name, "t", 0)
    assert (data["mask"].dtype, meta.size) == (torch.float32, 4)


def test_keys_of_different_dtypes_come_together_unless_some_are_objects(queue, name):
    tq.kv_put("float", name, {"mask": torch.tensor([0.5])})
    tq.kv_put("int", name, {"mask": torch.tensor([1])})
    tq.kv_put("text", name, {"mask": "none"})
    assert tq.kv_batch_get("int", name)["mask"][0].tolist() == [1]
    assert tq.kv_batch_get("text", name)["mask"] == ["none"]
    assert [row.tolist() for row in tq.kv_batch_get(["int", "float"], name)["mask"]] == [[1.0], [0.5]]
    with pytest.raises(
        tq.SchemaConflictError,
        match=r"field 'mask'.*torch.float32 in 1 samples \(\d+\), torch.int64 in 1 .*objects in 1",
    ):
        tq.kv_batch_get(["float", "int", "text"], name)


def test_a_stream_reads_a_dtype_after_the_samples_of_the_other_were_cleared(client, name):
    floats, _ = two_dtypes(client, name)
    client.clear_samples(floats)
    client.put(rows(x=torch.arange(2), mask=torch.ones(2, 3, dtype=torch.int64)), partition_id=name)
    meta = client.get_meta(["mask"], 4, name, task_name="t")
    assert client.get_data(meta)["mask"].dtype == torch.int64


def test_a_field_of_several_dtypes_is_warned_of_once(client, name, caplog):
    with caplog.at_level(logging.WARNING, logger="transfer_queue"):
        for turn in range(2):
            for dtype in (torch.float32, torch.int64, torch.int64):
                client.put(TensorDict({name: torch.ones(1, dtype=dtype)}, [1]), partition_id=f"{name}/{turn}")
                tq.kv_put(f"k{dtype}", f"{name}/{turn}", {name: torch.ones(1, dtype=dtype)})
    (warning,) = [record.getMessage() for record in caplog.records if repr(name) in record.getMessage()]
    assert "several dtypes: float32, int64" in warning


def test_a_declared_field_takes_one_dtype_and_shape(client, name):
    assert client.create_partition(name, fields={"mask": ("int64", [None]), "note": ("object", None)})
    client.put(TensorDict({"mask": torch.ones(2, 3, dtype=torch.int64), "note": ["a", "b"]}, [2]), partition_id=name)
    for wrong in (torch.ones(1, 3), torch.ones(1, 3, 2, dtype=torch.int64), torch.ones(1, 3, dtype=torch.bool)):
        with pytest.raises(tq.SchemaConflictError, match=r"'mask' .* is declared as dtype int64, shape \[None\]"):
            client.put(rows(mask=wrong), partition_id=name)
        with pytest.raises(tq.SchemaConflictError, match="is declared as"):
            tq.kv_put("k", name, {"mask": wrong[0]})
    assert (client.get_stats()["partitions"][name]["samples"], tq.kv_list(name)) == (2, {name: {}})
    with pytest.raises(ValueError, match="'int63', which is no dtype"):
        client.create_partition(name, fields={"mask": ("int63", None)})


def test_a_checkpoint_keeps_dtypes_per_sample_and_declarations(client, name, tmp_path):
    two_dtypes(client, name)
    client.create_partition(f"{name}/declared", fields={"mask": ("int64", [None])})
    client.save_checkpoint(tmp_path / "saved")
    client.clear_partition(name)
    client.load_checkpoint(tmp_path / "saved")
    everything = client.get_meta(["mask"], partition_id=name, mode="force_fetch")
    assert everything.get_dtypes("mask") == [torch.float32] * 2 + [torch.int64] * 2
    assert [client.get_data(everything[at])["mask"].dtype for at in (0, 3)] == [torch.float32, torch.int64]
    with pytest.raises(tq.SchemaConflictError):
        client.put(rows(mask=torch.ones(1, 3)), partition_id=f"{name}/declared")
