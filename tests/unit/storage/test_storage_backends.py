# SPDX-License-Identifier: Apache-2.0
"""Backends by name, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

import transfer_queue.storage as storage
from transfer_queue.errors import ConfigError
from transfer_queue.storage import backends
from transfer_queue.storage.base import RowsOf
from transfer_queue.storage.shm.shared_memory import SharedMemoryManager
from transfer_queue.transport.base import Peer
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.session import Session

UNITS = {"units": [{"name": "u0", "address": "local://u0"}]}


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session("me", Peer("controller", "local://controller"))
    yield made
    made.close()


@pytest.mark.parametrize("name", ["SimpleStorage", "AsyncSimpleStorageManager"])
def test_both_names_of_the_default_backend_make_it(name, session):
    assert type(backends.StorageManagerFactory.create(name, session, UNITS)) is SharedMemoryManager


def test_an_unknown_name_is_told_the_nearest_known_one(session):
    with pytest.raises(
        ConfigError, match=r"no storage backend 'SimpelStorage'. Did you mean 'SimpleStorage'\? Known: "
    ):
        backends.StorageManagerFactory.create("SimpelStorage", session, UNITS)


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setattr(backends, "_table", backends._table.copy())

    @backends.StorageManagerFactory.register("Own")
    class Own(storage.StorageManager):
        async def put_data(self, data, metadata, data_parser=None):
            self.kept = data
            return data

        async def get_data(self, metadata):
            return self.kept.select(*metadata.field_names)

        async def clear_data(self, metadata):
            self.cleared = list(metadata.global_indexes)

    return Own


def test_a_registered_backend_needs_only_put_get_and_clear(own, session):
    manager = backends.StorageManagerFactory.create("Own", session, {"layout": "jagged"})
    assert type(manager) is own
    data = TensorDict({"b": torch.arange(4).view(2, 2), "a": ["x", "y"]}, batch_size=[2])
    meta = SimpleNamespace(global_indexes=[3, 4], field_names=["a", "b"])
    run_blocking(manager.put_data(data, meta))
    assert run_blocking(manager.read(RowsOf([3, 4], ["b"]), None, "jagged"))["b"].is_nested
    assert run_blocking(manager.read(RowsOf([3, 4], ["b"]), None, "dense"))["b"].tolist() == [[0, 1], [2, 3]]
    run_blocking(manager.clear_rows([3, 4]))
    assert manager.cleared == [3, 4]
    run_blocking(manager.close())


def test_such_a_backend_stores_at_once_what_is_written_in_steps(own, session):
    manager, data = own(session, {}), TensorDict({"a": torch.arange(2)}, batch_size=[2])
    run_blocking(manager.write(7, [3, 4], manager.prepare(data)))
    run_blocking(manager.commit(7, None))
    run_blocking(manager.abort(7, None))
    run_blocking(manager.end_session("other", [("other", 7)]))
    assert (manager.kept is data, hasattr(manager, "cleared")) == (True, False)


def test_a_class_that_is_no_manager_can_not_be_registered():
    with pytest.raises(TypeError, match="no StorageManager subclass"):
        backends.StorageManagerFactory.register("Bad")(dict)


@pytest.mark.parametrize("module", ["transfer_queue.storage.unit.unit", "transfer_queue.storage.shm.shared_memory"])
def test_servers_import_neither_torch_nor_tensordict(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'tensordict', 'ray', 'lightning') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_offers_its_names_and_no_others():
    assert storage.AsyncSimpleStorageManager is storage.SimpleStorageManager
    assert set(storage.__all__) <= set(dir(storage))
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        _ = storage.Nope
