# SPDX-License-Identifier: Apache-2.0
"""A client whose values lie in a backend of the user's own, which has no more than put, get and clear."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain_rows import rows
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.calls import fetch_of
from transfer_queue import storage
from transfer_queue.storage import backends
from transfer_queue.transport.session import Session

CONF = {"server_processes": "one"}


class Shelf(storage.StorageManager):
    """Values by (index, field), in this process."""

    def __init__(self, session: Session, config: Any) -> None:
        super().__init__(session, config)
        self.kept: dict[tuple[int, str], torch.Tensor] = {}

    async def put_data(self, data: TensorDict, metadata: Any, data_parser: Any = None) -> TensorDict:
        stored = data if data_parser is None else TensorDict(data_parser(data.to_dict()), data.batch_size)
        for field, column in stored.items():
            for index, value in zip(metadata.global_indexes, column.unbind(), strict=True):
                self.kept[index, field] = value.clone()
        return stored

    async def get_data(self, metadata: Any) -> TensorDict:
        columns = {
            field: torch.stack([self.kept[index, field] for index in metadata.global_indexes])
            for field in metadata.field_names
        }
        return TensorDict(columns, batch_size=[len(metadata.global_indexes)])

    async def clear_data(self, metadata: Any) -> None:
        cleared = set(metadata.global_indexes)
        self.kept = {key: value for key, value in self.kept.items() if key[0] not in cleared}


@pytest.fixture
def own(queue: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tq.TransferQueueClient]:
    monkeypatch.setattr(backends, "_table", backends._table.copy())
    backends.StorageManagerFactory.register("Shelf")(Shelf)
    client = tq.TransferQueueClient("own", queue.controller.zmq_info)
    client.initialize_storage_manager("Shelf", queue.backend.SimpleStorage)
    yield client
    client.close()


def kept(client: tq.TransferQueueClient) -> dict[tuple[int, str], Any]:
    return {key: value.tolist() for key, value in client.storage_manager.kept.items()}


def test_puts_are_published_by_the_client_and_read_from_the_backend(own, client, name):
    for turn in range(5):
        own.put(rows(a=torch.tensor([turn, -turn])), partition_id=name, tags=[{"turn": turn}, {}])
    meta = own.get_meta(["a"], 10, name, task_name="t")
    assert own.get_data(meta)["a"].tolist() == [value for turn in range(5) for value in (turn, -turn)]
    assert meta.custom_meta == [tag for turn in range(5) for tag in ({"turn": turn}, {})]
    assert all(unit["values"] == 0 for unit in client.get_storage_stats()), "no unit holds any of it"


def test_a_stream_s_batch_comes_from_the_backend(own, name):
    own.put(rows(a=torch.arange(2)), partition_id=name)
    batch = own.fetch_batch(fetch_of(["a"], 2, name, "t"))
    assert (own.take(batch)["a"].tolist(), batch.meta.field_names) == ([0, 1], ["a"])


def test_a_new_field_and_a_replaced_one_are_published(own, name):
    meta = own.put(rows(a=torch.arange(2)), partition_id=name)
    own.put(rows(b=torch.tensor([5, 6])), metadata=meta, tags=[{"x": 1}, {}])
    own.put(rows(a=torch.tensor([8, 9])), metadata=meta)
    found = own.get_meta(["a", "b"], 2, name, task_name="t")
    assert (own.get_data(found)["a"].tolist(), own.get_data(found)["b"].tolist()) == ([8, 9], [5, 6])
    assert found.custom_meta == [{"x": 1}, {}]


def test_a_parser_s_values_are_stored(own, name):
    meta = own.put(rows(a=torch.arange(2)), partition_id=name, data_parser=lambda columns: {"a": columns["a"] + 10})
    own.put(rows(b=torch.arange(2)), metadata=meta, data_parser=lambda columns: {"b": columns["b"] + 20})
    found = own.get_data(own.get_meta(["a", "b"], 2, name, task_name="t"))
    assert (found["a"].tolist(), found["b"].tolist()) == ([10, 11], [20, 21])


def test_a_put_that_is_refused_is_cleared_from_the_backend(own, client, name):
    for _ in range(4):
        own.put(rows(a=torch.arange(2)), partition_id=name)
    before = kept(own)
    client.seal_partition(name)
    with pytest.raises(ValueError, match="is sealed after 8 samples"):
        own.put(rows(a=torch.arange(2)), partition_id=name)
    assert kept(own) == before
    assert client.get_stats()["partitions"][name]["held"] == 0


def test_a_dtype_that_was_not_declared_is_refused_before_the_backend_replaces_anything(own, client, name):
    own.create_partition(name, fields={"a": ("int64", None)})
    meta = own.put(rows(a=torch.arange(2)), partition_id=name)
    before = kept(own)
    for data in (rows(a=torch.zeros(2)), rows(a=torch.zeros(2), b=torch.zeros(2))):
        with pytest.raises(tq.SchemaConflictError):
            own.put(data, metadata=meta)
    assert kept(own) == before


def test_cleared_samples_leave_the_backend(own, name):
    meta = own.put(rows(a=torch.arange(3)), partition_id=name)
    own.clear_samples(meta[1:])
    assert kept(own) == {(meta.global_indexes[0], "a"): 0}
    own.clear_partition(name)
    assert kept(own) == {}
