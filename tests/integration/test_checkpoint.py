# SPDX-License-Identifier: Apache-2.0
"""A queue saved to a directory and restored: values, ledger, keys; while others go on; onto other storage units."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.checkpoint_support import (
    ROWS,
    Busy,
    every_kind,
    fetch,
    held,
    numbers,
    rows_of,
    samples_of_units,
    started,
    values,
    values_held,
    wait_until,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]], list[int]]:
    """A checkpoint of every kind of value, what was put, and whose samples have "late", too."""
    directory = tmp_path_factory.mktemp("saved") / "deep" / "checkpoint"
    data = every_kind()
    with started(units=2) as client:
        meta = client.put(every_kind(0, ROWS // 2), partition_id="train@3/ä")
        for at in range(ROWS // 2, ROWS):
            meta = tq.BatchMeta.concat([meta, client.put(every_kind(at, at + 1), partition_id="train@3/ä")])
        late = list(range(0, ROWS, 3))
        client.put(TensorDict({"late": torch.arange(len(late))}, batch_size=[len(late)]), meta.select_samples(late))
        client.save_checkpoint(directory, metadata={"step": 3})
        assert all(samples_of_units(client))
    return directory, {name: rows_of(data.get(name)) for name in data.keys()}, late  # noqa: SIM118


@pytest.mark.programs
@pytest.mark.parametrize(
    ("settings", "units"),
    [({"arena": True}, 1), ({"arena": True}, 3), ({"arena": False}, 3)],
    ids=["one", "three", "three without arena"],
)
def test_every_kind_of_value_is_restored_onto_any_number_of_units(saved, settings, units):
    directory, expected, late = saved
    with started(units=units, **settings) as client:
        client.load_checkpoint(directory)
        assert (len(samples_of_units(client)), all(samples_of_units(client))) == (units, True)
        meta = client.get_meta(list(expected), partition_id="train@3/ä", mode="force_fetch")
        assert meta.global_indexes == list(range(ROWS))
        data = client.get_data(meta)
        assert {name: rows_of(data.get(name)) for name in expected} == expected
        assert values_held(client) == ROWS * len(expected) + len(late)


def test_other_tools_can_read_the_values(saved):
    directory, _, late = saved
    (folder,) = [path for path in (directory / "simple_storage").iterdir() if path.is_dir()]
    files = {path.name.split("-", 1)[-1]: path for path in folder.iterdir()}
    assert np.load(files["samples.npy"]).tolist() == list(range(ROWS))
    assert np.load(files["dense.npy"])[7].tolist() == [7 * n for n in range(1, 7)]
    assert np.load(files["bfloat.npy"]).dtype == np.uint16
    assert np.load(files["late.npy"]).tolist() == list(range(len(late)))
    assert np.load(files["late.samples.npy"]).tolist() == late
    offsets, flat = np.load(files["ragged.offsets.npy"]), np.load(files["ragged.values.npy"])
    assert flat[offsets[5] : offsets[6]].tolist() == [5, 6, 7, 8, 9]
    edges, packed = np.load(files["text.offsets.npy"]).tolist(), files["text.msgpack"].read_bytes()
    assert msgspec.msgpack.decode(packed[edges[9] : edges[10]]) == "sample 9"
    metadata = json.loads((directory / "metadata.json").read_text())
    assert (metadata["storage_saved"], metadata["user_metadata"]) == (True, {"step": 3})


@pytest.mark.programs
def test_batches_in_flight_come_again_and_consumption_keys_and_tags_are_restored(tmp_path):
    with started() as client:
        meta = client.put(numbers(20), partition_id="p", tags=[{"n": n} for n in range(20)])
        tq.kv_put("k", "q", {"x": torch.tensor(5)}, {"state": "done"})
        first, second = fetch(client, 4, 0), fetch(client, 4, 1)
        client.ack(first, "train")
        client.seal_partition("p")
        tq.save_checkpoint(tmp_path / "c")
    with started(units=1) as client:
        tq.load_checkpoint(tmp_path / "c")
        with pytest.raises(tq.TransferQueueError, match="settled"):
            fetch(client, 4, 0)
        again = fetch(client, 4, 1)
        assert (again.global_indexes, again.token) == (second.global_indexes, second.token)
        assert values(client, again) == [4, 5, 6, 7]
        assert client.ack(second, "train") == 1
        assert values(client, fetch(client, 4, 2)) == [8, 9, 10, 11]
        assert client.get_consumption_status("train", "p")[1].tolist() == [1] * 12 + [0] * 8
        assert client.get_meta(["x"], partition_id="p", mode="force_fetch").custom_meta == meta.custom_meta
        assert tq.kv_list() == {"p": {}, "q": {"k": {"state": "done"}}}
        assert tq.kv_batch_get("k", "q")["x"].tolist() == [5]
        with pytest.raises(ValueError, match="sealed"):
            client.put(numbers(1), partition_id="p")
        assert client.put(numbers(1), partition_id="r").global_indexes > meta.global_indexes


def test_samples_that_lacked_a_field_in_the_hand_of_its_producer_are_given_out_again_after_a_load(tmp_path):
    asked = (["x"], 4, "p", "fetch", "add", None, 30.0, None, "y")
    with started(units=1) as client:
        client.put(numbers(4), partition_id="p")
        client.seal_partition("p")
        first = client.get_meta(*asked).select_samples([0])
        client.put({"y": torch.zeros(1)}, metadata=first)
        with pytest.raises(tq.EndOfPartitionError):
            client.get_meta(*asked)
        client.save_checkpoint(tmp_path / "c")
    with started(units=1) as client:
        client.load_checkpoint(tmp_path / "c")
        assert values(client, client.get_meta(*asked)) == [1, 2, 3]


def test_a_load_replaces_what_the_queue_held_and_answers_who_waits(tmp_path):
    with started() as client:
        client.put(numbers(8), partition_id="p")
        client.save_checkpoint(tmp_path / "c")
        client.clear_partition("p")
        client.put(numbers(5, 100), partition_id="q")
        answers: list[Any] = []
        waiter = threading.Thread(target=lambda: answers.append(fetch(client, 4, 0, timeout_s=60.0)))
        waiter.start()
        wait_until(lambda: client.get_stats()["waiting"])
        client.load_checkpoint(tmp_path / "c")
        waiter.join()
        assert values(client, answers[0]) == [0, 1, 2, 3]
        assert client.get_partition_list() == ["p"]
        assert held(client) == (8, 8)
        client.load_checkpoint(tmp_path / "c")
        assert values(client, fetch(client, 4, 0)) == [0, 1, 2, 3]
        with pytest.raises(KeyError):
            values(client, answers[0])  # that sample is gone, whatever its index was
        client.put(numbers(3), partition_id="p")
        assert held(client) == (11, 11)


WIDE = 1000
"""Several rows of it are more than travels in a message."""


def row(sample: torch.Tensor, version: int) -> TensorDict:
    """Every field follows from the sample's number and the version."""
    base = sample * 1000 + version
    return TensorDict(
        {
            "id": sample, "version": torch.full_like(sample, version), "wide": base[:, None].expand(-1, WIDE) + 0,
            "pair": torch.stack([base, -base], 1),
        },
        batch_size=[len(sample)],
    )  # fmt: skip


def clear_all(client: tq.TransferQueueClient) -> None:
    for partition in client.get_partition_list():
        client.clear_partition(partition)


@pytest.mark.programs
@pytest.mark.parametrize("arena", [True, False])
def test_whatever_goes_on_meanwhile_every_saved_row_is_of_one_moment(tmp_path, arena):
    ids = torch.arange(64)
    with started(arena=arena) as client:
        old = client.put(row(ids, 0), partition_id="old", tags=[{"version": 0}] * 64)
        tq.kv_batch_put([str(i) for i in range(64)], "keyed", row(ids, 0), [{"version": 0}] * 64)
        going: list[Any] = []

        def replace(turn: int) -> None:
            part = slice(turn % 4 * 16, turn % 4 * 16 + 16)
            chosen = old.select_samples(list(range(64))[part])
            client.put(row(ids[part], turn + 1), chosen, tags=[{"version": turn + 1}] * 16)

        def replace_keyed(turn: int) -> None:
            keys = [str(i) for i in range(turn % 64, turn % 64 + 1)]
            tq.kv_batch_put(keys, "keyed", row(ids[turn % 64 : turn % 64 + 1], turn + 1), [{"version": turn + 1}])

        def add(turn: int) -> None:
            client.put(row(ids, turn), partition_id="new", tags=[{"version": turn}] * 64)

        def clear(turn: int) -> None:
            going.append(client.put(row(ids[:4], turn), partition_id="going", tags=[{"version": turn}] * 4))
            if turn > 9:
                client.clear_samples(going[turn - 9])

        busy = [Busy(step) for step in (replace, replace_keyed, add, clear)]
        for number in range(3):
            wait_until(lambda: all(each.rounds for each in busy))
            tq.save_checkpoint(tmp_path / str(number))
        for each in busy:
            each.stop()
        clear_all(client)
        assert held(client) == (0, 0), "what was cleared meanwhile is dropped"
    with started(units=3) as client:
        for number in range(3):
            tq.load_checkpoint(tmp_path / str(number))
            for partition in client.get_partition_list():
                check_rows(client, partition)


def check_rows(client: tq.TransferQueueClient, partition: str) -> None:
    meta = client.get_meta(["id", "version", "wide", "pair"], partition_id=partition, mode="force_fetch")
    data = client.get_data(meta)
    versions = [tags["version"] for tags in meta.custom_meta]
    assert data["version"].tolist() == versions, "tags and values were published together"
    base = data["id"] * 1000 + data["version"]
    assert torch.equal(data["wide"].values(), base.repeat_interleave(WIDE))
    assert torch.equal(data["pair"].values(), torch.stack([base, -base], 1).flatten())


def test_on_an_event_loop_others_go_on(tmp_path):
    async def main(client: tq.TransferQueueClient) -> None:
        meta = await client.async_put(numbers(2000), partition_id="p")
        save = asyncio.create_task(client.async_save_checkpoint(tmp_path / "c"))
        while not save.done():
            await client.async_clear_samples(meta.select_samples([0]))
            await asyncio.sleep(0)
        await client.async_load_checkpoint(tmp_path / "c")
        assert len(await client.async_get_meta(["x"], partition_id="p", mode="force_fetch")) in (1999, 2000)

    with started() as client:
        asyncio.run(main(client))


def test_two_saves_with_one_client_at_a_time_are_both_whole(tmp_path):
    async def main(client: tq.TransferQueueClient) -> None:
        meta = await client.async_put(every_kind(), partition_id="p")
        saves = [asyncio.create_task(client.async_save_checkpoint(tmp_path / name)) for name in "ab"]
        await asyncio.wait(saves, return_when=asyncio.FIRST_COMPLETED)
        await client.async_clear_samples(meta)
        await asyncio.gather(*saves)
        for name in "ab":
            await client.async_load_checkpoint(tmp_path / name)
            assert len(await client.async_get_meta(["dense"], partition_id="p", mode="force_fetch")) == ROWS

    with started() as client:
        asyncio.run(main(client))
        assert values_held(client) == ROWS * 12


@pytest.mark.programs
def test_controller_and_storage_can_be_saved_and_restored_apart(tmp_path):
    with started() as client:
        client.put(numbers(6), partition_id="p")
        client.save_storage_checkpoint(tmp_path)
        client.save_controller_checkpoint(tmp_path / "state")
        client.save_controller_checkpoint(tmp_path / "state")
    with started(units=3) as client:
        client.put(numbers(2), partition_id="q")
        client.load_storage_checkpoint(tmp_path)
        assert client.get_partition_list() == ["q"]
        client.load_controller_checkpoint(tmp_path / "state")
        assert values(client, fetch(client, 6, 0)) == list(range(6))
        assert held(client) == (6, 6)


@pytest.mark.programs
def test_samples_without_values_are_saved_too(tmp_path):
    with started() as client:
        inserted = client.get_meta(["x"], 3, "p", mode="insert")
        tq.kv_put("k", "q", None, {"state": "pending"})
        client.put(numbers(2), inserted.select_samples([0, 2]))
        client.save_checkpoint(tmp_path / "c")
    with started(units=3) as client:
        client.load_checkpoint(tmp_path / "c")
        assert tq.kv_list("q") == {"q": {"k": {"state": "pending"}}}
        assert client.get_production_status(["x"], "p")[1].tolist() == [[1], [0], [1]]
        client.put(numbers(1, 9), inserted.select_samples([1]))
        assert values(client, fetch(client, 3, 0)) == [0, 9, 1]


@pytest.mark.programs
def test_pickled_values_are_saved_as_they_lie(tmp_path):
    with started(allow_pickle=True) as client:
        tq.kv_put("k", "p", {"x": threading.Event})
        client.save_checkpoint(tmp_path / "c")
    with started(allow_pickle=False) as client:
        client.load_checkpoint(tmp_path / "c")  # nothing of it is run
        with pytest.raises(tq.UnsupportedValueError, match="allow_pickle"):
            tq.kv_batch_get("k", "p")


def test_values_of_a_memory_only_backend_are_saved_whatever_was_asked_for(tmp_path, caplog):
    with started() as client:
        client.put(numbers(3), partition_id="p")
        tq.save_checkpoint(tmp_path / "c", include_storage=False)
        assert "include_storage=False is ignored" in caplog.text
        tq.load_checkpoint(tmp_path / "c")
        assert values(client, fetch(client, 3, 0)) == [0, 1, 2]


def test_a_checkpoint_of_an_empty_queue_can_be_loaded(tmp_path):
    with started() as client:
        client.create_partition("empty", 5)
        client.save_checkpoint(tmp_path / "c")
        client.put(numbers(2), partition_id="p")
        client.load_checkpoint(tmp_path / "c")
        assert client.get_partition_list() == ["empty"]
        assert held(client) == (0, 0)
        client.put(numbers(5), partition_id="empty")  # as many as it was created for
        assert fetch(client, 5, 0, partition="empty").size == 5
        with pytest.raises(tq.EndOfPartitionError):
            fetch(client, 1, 1, partition="empty")


@pytest.mark.programs
def test_a_state_of_many_slices_is_saved_and_restored_whole(tmp_path):
    rows, keys = torch.arange(4000), [f"key {number}" for number in range(3500)]
    with started(units=3) as client:
        meta = client.put(TensorDict({"x": rows, "y": rows * 2}, batch_size=[4000]), partition_id="p")
        client.put(TensorDict({"late": rows[:1800]}, batch_size=[1800]), meta.select_samples(list(range(1, 3601, 2))))
        tq.kv_batch_put(keys, "q", TensorDict({"x": rows[:3500]}, batch_size=[3500]), [{"n": n} for n in range(3500)])
        given = [fetch(client, 1000, number) for number in range(3)]
        client.save_checkpoint(tmp_path / "c")
    described = tq.describe_checkpoint(tmp_path / "c", verify=True)["partitions"]
    counts = {name: (each["samples"], each["keys"]) for name, each in described.items()}
    assert counts == {"p": (4000, 0), "q": (3500, 3500)}
    assert {name: each["samples"] for name, each in described["p"]["fields"].items()} == {
        "x": 4000, "y": 4000, "late": 1800,
    }  # fmt: skip
    assert described["p"]["tasks"] == {"train": {"given": 3000, "consumed": 3000}}
    with started(units=2) as client:
        client.put(numbers(5), partition_id="before")
        client.load_checkpoint(tmp_path / "c")
        found = client.get_data(client.get_meta(["x", "y"], partition_id="p", mode="force_fetch"))
        assert (found["x"].tolist(), found["y"].tolist()) == (rows.tolist(), (rows * 2).tolist())
        assert tq.kv_batch_get(keys, "q")["x"].tolist() == list(range(3500))
        assert tq.kv_list("q")["q"]["key 3499"] == {"n": 3499}
        late = client.get_meta(["late"], 1800, "p", task_name="other")
        assert client.get_data(late)["late"].tolist() == list(range(1800))
        assert [fetch(client, 1000, number).token for number in range(3)] == [each.token for each in given]


FORMAT_1 = Path(__file__).parents[1] / "data" / "checkpoint_format_1"


def test_a_checkpoint_of_format_1_is_described_and_loaded():
    """Rank 1 was not given its batch 1 yet."""
    described = tq.describe_checkpoint(FORMAT_1, verify=True)
    assert (described["metadata"], list(described["partitions"])) == ({"step": 7}, ["p", "q"])
    assert described["partitions"]["p"]["fields"]["r"] == {
        "samples": 3, "dtype": "int64", "shape": [None], "nbytes": 152,
    }  # fmt: skip
    with started() as client:
        client.load_checkpoint(FORMAT_1)
        everything = client.get_meta(["x"], partition_id="p", mode="force_fetch")
        assert (values(client, everything), everything.custom_meta) == (list(range(12)), [{"n": n} for n in range(12)])
        ragged = client.get_data(client.get_meta(["r"], 3, "p", task_name="other"))["r"]
        assert [row.tolist() for row in ragged.unbind()] == [[], [0], [0, 1]]
        assert tq.kv_list("q") == {"q": {"a": {"s": "done"}, "b": {"s": "new"}}}
        config = [{"dp_rank": rank} for rank in (1, 0)]
        given = [client.get_meta(["x"], 2, "p", task_name="train", sampling_config=each) for each in config]
        assert [values(client, meta) for meta in given] == [[6, 7], [8, 9]]


def test_a_load_that_does_not_fit_changes_nothing(saved):
    with started(units=1, total_storage_size=20) as client:
        client.put(numbers(8), partition_id="p")
        with pytest.raises(tq.StorageFullError, match="150 samples, the queue takes 20"):
            client.load_checkpoint(saved[0])
        assert held(client) == (8, 8)


def test_a_load_that_no_unit_has_memory_for_changes_nothing(saved):
    with started(units=1, capacity_bytes=300_000, put_timeout_s=0.2) as client:
        client.put(numbers(8), partition_id="p")
        with pytest.raises(tq.StorageFullError, match=r"can never fit|Storage capacity exceeded"):
            client.load_checkpoint(saved[0])
        assert held(client) == (8, 8)
        assert values(client, fetch(client, 8, 0)) == list(range(8))
