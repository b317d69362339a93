# SPDX-License-Identifier: Apache-2.0
"""The tables of backends, of their clients and of what starts them: what they take, and what they refuse by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import transfer_queue as tq
from transfer_queue.config import merge
from transfer_queue.errors import BackendUnavailableError, ConfigError, UnknownBackendError
from transfer_queue.storage import KVStorageManager, StorageManager, StorageManagerFactory, backends
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.storage.clients import StorageClientFactory, StorageKVClient
from transfer_queue.transport.base import Peer
from transfer_queue.transport.session import Session
from transfer_queue.utils.zmq_utils import ZMQServerInfo

INFO = ZMQServerInfo("controller", "c", ports={"request_handle_socket": "ipc:///nowhere/controller"})


def test_what_is_no_backend_or_client_is_refused_when_it_is_registered():
    with pytest.raises(TypeError, match="it is no StorageManager subclass"):
        StorageManagerFactory.register("Mine")(dict)
    with pytest.raises(TypeError, match="it is no StorageKVClient subclass"):
        StorageClientFactory.register("Mine")(dict)


@pytest.mark.parametrize("error", [AssertionError, ValueError, UnknownBackendError, ConfigError])
def test_an_unknown_backend_is_the_error_that_older_programs_expect(error):
    with pytest.raises(error, match=r"no storage backend 'Mooncake'. Did you mean 'MooncakeStore'"):
        StorageManagerFactory.create("Mooncake", INFO, {})


def test_an_unknown_client_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"Unknown StorageClient 'Nobody'. Known: .*MooncakeStoreClient, RayStorageClient"
    ):
        StorageClientFactory.create("Nobody", {})


def test_a_key_value_backend_needs_the_name_of_its_client():
    with pytest.raises(ValueError, match="Missing client_name"):
        KVStorageManager(INFO, {"units": []})


def test_an_unknown_backend_of_a_configuration_fails_before_anything_is_started():
    with pytest.raises(UnknownBackendError, match="no storage backend 'Nowhere'"):
        tq.init({"backend": {"storage_backend": "Nowhere"}})


def test_a_backend_that_is_not_available_says_so_at_the_start():
    with pytest.raises(BackendUnavailableError, match="'Yuanrong' is not available"):
        tq.init({"backend": {"storage_backend": "Yuanrong"}})


@pytest.mark.parametrize(
    ("backend", "module", "says"),
    [
        ("RayStore", "ray", "'RayStore' need: install lightning-tq with its extra 'ray'"),
        ("MooncakeStore", "mooncake.store", "extra 'mooncake'.*apt install libibverbs1"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(backend, module, says, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendUnavailableError, match=says):
        tq.init({"backend": {"storage_backend": backend}})


@pytest.mark.parametrize("backend", ["MooncakeStore", "RayStore", "Yuanrong"])
def test_unknown_keys_of_a_backend_s_section_are_refused(backend):
    with pytest.raises(ConfigError, match=rf"unknown configuration key 'backend\.{backend}\.colour'"):
        merge({"backend": {backend: {"colour": "red"}}})


def test_a_section_of_a_backend_of_one_s_own_is_not_checked_and_others_are():
    conf: Any = merge({"backend": {"storage_backend": "Mine", "Mine": {"colour": "red"}}})
    assert conf.backend.Mine.colour == "red"
    with pytest.raises(ConfigError, match=r"unknown configuration key 'backend\.Yours'"):
        merge({"backend": {"storage_backend": "Mine", "Yours": {}}})


def test_a_section_may_be_null():
    assert backends.section_of(merge({"backend": {"storage_backend": "RayStore", "RayStore": None}}).backend) == {}


def test_a_provider_is_found_by_the_backend_s_name(monkeypatch):
    monkeypatch.setattr(backends, "_table", backends._table.copy())
    assert StorageBootstrapProvider.get_provider("Mine") is None
    provider = StorageBootstrapProvider.register_provider("Mine")(lambda conf: None)
    assert StorageBootstrapProvider.get_provider("Mine") is provider


class Bare(StorageManager):
    async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> Any:
        return data

    async def get_data(self, metadata: Any) -> Any:
        raise NotImplementedError

    async def clear_data(self, metadata: Any) -> None:
        return


def test_a_manager_is_made_with_a_session_or_with_the_address_of_a_controller():
    session = Session("me", Peer("controller", "local://controller"))
    assert Bare(session, {}).session is session
    by_address = Bare(INFO, {"a": 1}, None)
    assert (by_address.controller_info, by_address.config) == (INFO, {"a": 1})
    assert by_address.session.controller.address == "ipc:///nowhere/controller"
    for each in (session, by_address.session):
        each.close()


async def _notify(manager: StorageManager, meta: Any) -> None:
    await manager.notify_data_update("p", [1], {}, meta)


def test_backend_metadata_that_nobody_keeps_is_refused():
    from transfer_queue.transport.blocking import run_blocking

    manager = Bare(INFO, {})
    run_blocking(_notify(manager, None))
    with pytest.raises(NotImplementedError, match="derive the backend from KVStorageManager"):
        run_blocking(_notify(manager, {1: {"x": "meta"}}))
    manager.session.close()


def test_a_client_of_one_s_own_needs_three_methods():
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (StorageKVClient,), {"put": lambda *_: None})({})
