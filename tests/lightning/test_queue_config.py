# SPDX-License-Identifier: Apache-2.0
"""The queue configuration of a TQDataModule: its forms, its checks, and a queue that is already running."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

import transfer_queue as tq
from lightning_tq import TQDataModule
from lightning_tq.queue_config import as_queue_config
from transfer_queue import ConfigError


@pytest.mark.parametrize(
    ("queue", "says"),
    [
        ({"unit": 2}, "unknown configuration key 'queue.unit'; did you mean 'units'"),
        ({"options": {"backends": {}}}, "did you mean 'backend'"),
        ({"memory": "4 gigs"}, "a text such as '4GiB'"),
        ({"units": 0}, "units must be an int of at least 1"),
        ("nowhere.yaml", "neither a file nor an address"),
    ],
)
def test_an_invalid_queue_configuration_is_refused_at_once(queue: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TQDataModule(queue=queue)


def test_memory_is_of_all_units_together_and_options_override_everything(tmp_path: Path) -> None:
    file = tmp_path / "queue.yaml"
    file.write_text("units: 4\nmemory: 1GiB\nbackend:\n  SimpleStorage:\n    put_timeout_s: 3\n")
    storage = as_queue_config(str(file)).conf()["backend"]["SimpleStorage"]
    assert (storage["num_data_storage_units"], storage["memory"], storage["put_timeout_s"]) == (4, "1GiB", 3)


def test_a_datamodule_accepts_every_key_of_a_queue() -> None:
    known = yaml.safe_load((files("transfer_queue") / "config.yaml").read_text())
    known["server_processes"] = "each"
    assert as_queue_config(known).conf() == known


def test_a_warning_names_only_settings_that_a_running_queue_does_not_have(caplog: pytest.LogCaptureFixture) -> None:
    with TQDataModule(queue={"units": 1, "put_timeout_s": 5, "options": {"client": {"layout": "dense"}}}) as first:
        requested: list[dict[str, Any]] = [
            {"units": 1, "put_timeout_s": 5, "client": {"layout": "dense"}},
            {"address": first.address, "units": 1},
            {"units": 3, "sampler_modules": ["mine"], "options": {"backend": {"MooncakeStore": {"any": 1}}}},
        ]
        for queue in requested:
            TQDataModule(queue=queue).open()
        address = first.address
    warning = (
        f"the queue at {address} is already running, so these settings are ignored: "
        "controller.sampler_modules: ['mine'] (the queue has []), "
        "backend.SimpleStorage.num_data_storage_units: 3 (the queue has 1). "
        "Start that queue with them, or remove them."
    )
    assert [record.getMessage() for record in caplog.records if "already running" in record.getMessage()] == [warning]


@pytest.mark.parametrize("with_address", [True, False], ids=["by address", "already in it"])
def test_a_misspelt_key_is_refused_where_a_queue_is_joined(with_address: bool) -> None:
    conf = tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    queue = {"client": {"tiemout_s": 3}, **({"address": conf["address"]} if with_address else {})}
    with pytest.raises(ConfigError, match=r"'queue\.client\.tiemout_s'; did you mean 'timeout_s'"):
        TQDataModule(queue=queue).open()


def test_a_misspelt_key_is_refused_before_a_queue_of_another_process_is_joined() -> None:
    with pytest.raises(ConfigError, match=r"'client\.tiemout_s'\. Nearest known key: 'timeout_s'"):
        TQDataModule(queue={"client": {"tiemout_s": 3}, "address": "ipc:///nowhere/controller"}).open()


@pytest.mark.parametrize(
    ("text", "says"), [("units: [4\n", "can't be read as YAML"), ("- 4\n", "its top level is a list")]
)
def test_an_unreadable_queue_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "queue.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"queue.yaml .*{says}"):
        TQDataModule(queue=str(file))
