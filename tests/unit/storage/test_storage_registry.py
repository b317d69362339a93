# SPDX-License-Identifier: Apache-2.0
"""Backends by name, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from transfer_queue.transport.inproc_channel import InprocCaller

import transfer_queue.storage as storage
from transfer_queue.errors import ConfigError
from transfer_queue.storage import registry
from transfer_queue.transport.modes import run_blocking

UNITS = {"units": [{"name": "u0", "address": "inproc://u0"}]}


@pytest.mark.parametrize("name", ["SimpleStorage", "AsyncSimpleStorageManager"])
def test_both_names_of_the_default_backend_make_it(name):
    assert type(registry.create(name, InprocCaller({}, "me"), UNITS)) is storage.SimpleStorageManager


def test_an_unknown_name_is_told_the_nearest_known_one():
    with pytest.raises(
        ConfigError, match=r"no storage backend 'SimpelStorage'. Did you mean 'SimpleStorage'\? Known: "
    ):
        registry.create("SimpelStorage", InprocCaller({}, "me"), UNITS)


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))

    @registry.register("Own")
    class Own(storage.StorageManager):
        async def put_data(self, data, metadata, data_parser=None):
            self.kept = data
            return data

        async def get_data(self, metadata):
            return self.kept.select(*metadata.field_names)

        async def clear_data(self, metadata):
            self.cleared = list(metadata.global_indexes)

    return Own


def test_a_registered_backend_needs_only_put_get_and_clear(own):
    manager = registry.create("Own", InprocCaller({}, "me"), {"layout": "jagged"})
    assert type(manager) is own
    data = TensorDict({"b": torch.arange(4).view(2, 2), "a": ["x", "y"]}, batch_size=[2])
    meta = SimpleNamespace(global_indexes=[3, 4], field_names=["a", "b"])
    run_blocking(manager.put_data(data, meta))
    assert run_blocking(manager.get_rows([3, 4], ["b"]))["b"].is_nested
    assert run_blocking(manager.get_rows([3, 4], ["b"], "dense"))["b"].tolist() == [[0, 1], [2, 3]]
    run_blocking(manager.clear_rows([3, 4], ["b"]))
    assert not hasattr(manager, "cleared")
    run_blocking(manager.clear_rows([3, 4]))
    assert manager.cleared == [3, 4]
    run_blocking(manager.close())


def test_what_such_a_backend_does_not_tell_the_controller_is_left_to_the_client(own):
    manager, data = own(InprocCaller({}, "me"), {}), TensorDict({"a": torch.arange(2)}, batch_size=[2])
    order: list[str] = []
    said = run_blocking(manager.put_and_tell(manager.prepared(data), [3, 4], b"publish", lambda: order.append("done")))
    assert (said, order, manager.kept is data) == (b"", ["done"], True)
    meta = SimpleNamespace(global_indexes=[3, 4], field_names=["a"])
    update = run_blocking(manager.update_data(data, meta, message=b"publish"))
    assert (update.said, update.absent, update.stored is data) == (b"", False, True)
    assert run_blocking(manager.update_data(data, meta, absent=True, message=b"publish")) is None, "it can't tell"


def test_a_class_that_is_no_manager_can_not_be_registered():
    with pytest.raises(TypeError, match="no StorageManager subclass"):
        registry.register("Bad")(dict)


@pytest.mark.parametrize("module", ["transfer_queue.storage.shm.unit", "transfer_queue.storage.simple.manager"])
def test_servers_import_neither_torch_nor_tensordict(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'tensordict', 'ray', 'lightning') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_offers_its_names_and_no_others():
    assert storage.AsyncSimpleStorageManager is storage.SimpleStorageManager
    assert set(storage.__all__) <= set(dir(storage))
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        _ = storage.Nope
