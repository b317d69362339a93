# SPDX-License-Identifier: Apache-2.0
"""Small values come with their metadata, and ``get_data`` gives what is there when it is called, all the same."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import exchanges

import transfer_queue as tq
from tests.integration.faults import client_of, comes_true

Client = tq.TransferQueueClient
ROWS = 6


def some(draw: random.Random, rows: int) -> dict[str, Any]:
    """Columns of all layouts."""
    ragged = [torch.arange(draw.randrange(1, 4)) + draw.randrange(100) for _ in range(rows)]
    return {
        "x": torch.tensor([draw.randrange(100) for _ in range(rows)]),
        "ids": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
        "text": [f"text {draw.randrange(100)}" for _ in range(rows)],
    }


def plain(data: Any) -> dict[str, Any]:
    rows = {name: [data[row][name] for row in range(len(data))] for name in sorted(data.keys())}
    return {name: [str(value) for value in values] for name, values in rows.items()}


def read(client: Client, meta: tq.BatchMeta) -> Any:
    """The values, or the error."""
    try:
        return plain(client.get_data(meta))
    except tq.TransferQueueError as error:
        return type(error)


CHANGES: dict[str, Callable[[Client, tq.BatchMeta, random.Random, str], object]] = {
    "nothing": lambda other, meta, draw, path: None,
    "replaces": lambda other, meta, draw, path: other.put(some(draw, meta.size), metadata=meta),
    "replaces one": lambda other, meta, draw, path: other.put(some(draw, 1), metadata=meta.select_samples([0])),
    "adds": lambda other, meta, draw, path: other.put({"y": torch.ones(meta.size)}, metadata=meta),
    "clears": lambda other, meta, draw, path: other.clear_samples(meta),
    "clears one": lambda other, meta, draw, path: other.clear_samples(meta.select_samples([meta.size - 1])),
    "clears all": lambda other, meta, draw, path: other.clear_partition(meta.partition_ids[0]),
    "loads": lambda other, meta, draw, path: (other.save_checkpoint(path), other.load_checkpoint(path)),
}
PARTS: dict[str, Callable[[tq.BatchMeta], tq.BatchMeta]] = {
    "all": lambda meta: meta,
    "copy": lambda meta: meta.copy(),
    "fields": lambda meta: meta.select_fields(["x", "text"]),
    "rows": lambda meta: meta.select_samples([1, 0]),
    "chunk": lambda meta: meta.chunk(2)[1],
    "joined": lambda meta: tq.BatchMeta.concat(meta.chunk(2)),
    "twice": lambda meta: tq.BatchMeta.concat([meta, meta]),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_happened_since_a_fetch_its_values_are_those_that_another_process_reads(
    queue, client, name, change, part, tmp_path
):
    other, draw = client_of(queue, "changes"), random.Random(f"{change} {part}")
    client.put(some(draw, ROWS), partition_id=name)
    by_rank = {"dp_rank": 0, "batch_index": 0} if draw.random() < 0.5 else None
    meta = client.get_meta(["x", "ids", "text"], 4, name, task_name="t", sampling_config=by_rank)
    asked = PARTS[part](meta)
    CHANGES[change](other, meta, draw, str(tmp_path / "saved"))
    expected = read(other, pickle.loads(pickle.dumps(asked)))
    assert read(client, asked) == expected
    assert read(client, asked) == expected
    other.clear_partition(name)
    other.close()


def test_a_client_that_reads_nothing_is_soon_sent_no_values(client, name):
    client.put({"x": torch.arange(20)}, partition_id=name)
    metas = [client.get_meta(["x"], 1, name, task_name="t") for _ in range(20)]
    costs = [exchanges(client, lambda meta=meta: client.get_data(meta)) for meta in metas]
    assert costs == 8 * [[]] + 12 * [[["Read"]]]
    del metas[10:]
    client.reset_consumption(name, "t")
    meta = client.get_meta(["x"], 1, name, task_name="t")
    assert exchanges(client, lambda: client.get_data(meta)) == []


def test_what_came_with_a_batch_that_is_given_up_makes_room_for_others(client, name):
    client.put({"x": torch.arange(20)}, partition_id=name)
    for _ in range(19):
        client.get_meta(["x"], 1, name, task_name="t")
    meta = client.get_meta(["x"], 1, name, task_name="t")
    assert exchanges(client, lambda: client.get_data(meta)) == []


def test_another_client_reads_what_is_in_its_own_queue(queue, client, name):
    client.put({"x": torch.arange(2)}, partition_id=name)
    meta, other = client.get_meta(["x"], 2, name, task_name="t"), client_of(queue, "other")
    assert exchanges(other, lambda: other.get_data(meta)) == [["Read"]]
    assert exchanges(client, lambda: client.get_data(meta)) == []
    other.close()


def test_what_came_along_keeps_none_of_the_queue_s_memory(queue, client, name):
    def in_use() -> int:
        return int(client.get_storage_stats()[0]["arena_nbytes"])

    before, idle = in_use(), client_of(queue, "idle")
    client.put({"x": torch.ones(512, 1024)}, partition_id=name)
    meta = idle.get_meta(["x"], 4, name, task_name="t")
    client.clear_partition(name)
    assert comes_true(lambda: in_use() <= before)
    with pytest.raises(tq.StorageKeyNotFoundError):
        idle.get_data(meta)
    idle.close()


def test_values_of_more_than_16_kib_come_when_they_are_read(client, name):
    client.put({"x": torch.ones(2, 4096)}, partition_id=name)
    for count, asked in ((1, []), (2, [["Read"]])):
        meta = client.get_meta(["x"], count, name, task_name=f"t{count}")
        assert exchanges(client, lambda meta=meta: client.get_data(meta)) == asked
