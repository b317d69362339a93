# SPDX-License-Identifier: Apache-2.0
"""A queue that spills: real servers put their oldest values into a file, and give all of them back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from plain_rows import rows
from tensordict import NonTensorStack

import transfer_queue as tq
from tests.integration.noticing import WAIT_S, until

MIB = 1 << 20


FOLDER = "transfer_queue_ssd_offload"
"""Below ``ssd_offload.path``."""


def spilling(directory: Path, **more: Any) -> dict[str, Any]:
    spill = {"enabled": True, "path": str(directory), "max_bytes": "200MiB", **more.pop("ssd_offload", {})}
    storage = {"memory": "16MiB", "num_data_storage_units": 1, "ssd_offload": spill, **more.pop("storage", {})}
    return {"backend": {"SimpleStorage": storage}, **more}


WAYS: dict[str, dict[str, Any]] = {
    "mapped": {},
    "in frames": {"storage": {"arena": False}},
    "two units": {"storage": {"num_data_storage_units": 2}, "server_processes": "each"},
}


@pytest.fixture(params=WAYS)
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tq.TransferQueueClient]:
    tq.init(spilling(tmp_path, **WAYS[request.param]))
    yield tq.get_client()
    tq.close()


def megabytes(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(0, 255, (1, MIB), dtype=torch.uint8, generator=generator) for _ in range(count)]


def total(client: tq.TransferQueueClient, name: str) -> int:
    return sum(unit[name] for unit in client.get_storage_stats())


@pytest.mark.programs
def test_four_times_as_much_as_memory_is_read_back_equal_and_leaves_nothing(client, tmp_path):
    data = megabytes(64)
    metas = [client.put(rows(x=each), partition_id="p") for each in data]
    assert total(client, "held_nbytes") == 64 * MIB
    assert total(client, "held_nbytes") - total(client, "spilled_nbytes") <= 16 * MIB
    assert os.listdir(tmp_path / FOLDER) == []
    for meta, each in zip(reversed(metas), reversed(data), strict=True):
        assert torch.equal(client.get_data(meta)["x"].values(), each[0])
    together = client.get_data(tq.BatchMeta.concat(metas))["x"]
    assert torch.equal(together.values().view(64, MIB), torch.cat(data))
    client.clear_partition("p")
    assert (total(client, "held_nbytes"), total(client, "spilled_nbytes")) == (0, 0)


def test_a_batch_in_any_order_mixes_values_of_memory_and_disk(client):
    data = torch.arange(3 * MIB).view(64, -1)  # 24 MiB
    metas = [client.put(rows(x=data[n : n + 16], s=[f"{n + m}" * 9000 for m in range(16)]), partition_id="p")
             for n in range(0, 64, 16)]  # fmt: skip
    assert total(client, "spilled_nbytes")
    meta, order = tq.BatchMeta.concat(metas), torch.randperm(64).tolist()
    got = client.get_data(meta.select_samples(order))
    assert torch.equal(got["x"].values().view(64, -1), data[order])
    assert list(got["s"]) == [f"{n}" * 9000 for n in order]


def test_a_checkpoint_has_the_values_on_disk_and_loads_into_less_memory_than_they_take(tmp_path):
    tq.init(spilling(tmp_path, storage={"memory": "40MiB"}))
    client, data = tq.get_client(), megabytes(64)
    for each in data:
        client.put(rows(x=each), partition_id="p")
    client.save_checkpoint(tmp_path / "saved")
    client.clear_partition("p")
    client.load_checkpoint(tmp_path / "saved")
    assert total(client, "spilled_nbytes")
    meta = client.get_meta(["x"], 64, "p", task_name="t")
    assert torch.equal(client.get_data(meta)["x"].values().view(64, MIB), torch.cat(data))
    tq.close()


def test_a_checkpoint_of_small_puts_loads_into_the_memory_that_they_were_put_into(client, tmp_path):
    data = megabytes(24)  # of 16, or of 8 in each of two units
    for each in data:
        client.put(rows(x=each), partition_id="p")
    client.save_checkpoint(tmp_path / "saved")
    client.clear_partition("p")
    client.load_checkpoint(tmp_path / "saved")
    meta = client.get_meta(["x"], 24, "p", task_name="t")
    read = [client.get_data(meta[at : at + 1])["x"].values() for at in range(24)]
    assert torch.equal(torch.stack(read), torch.cat(data))


def test_others_are_served_while_values_go_to_disk_and_come_back(tmp_path):
    tq.init(spilling(tmp_path))
    client, longest = tq.get_client(), 0.0
    data = torch.zeros(12, MIB, dtype=torch.uint8)
    metas = []

    def work() -> None:
        for _ in range(8):
            metas.append(client.put(rows(x=data), partition_id="p"))
        for meta in metas:
            client.get_data(meta)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        begin = time.monotonic()
        client.get_partition_list()
        longest = max(longest, time.monotonic() - begin)
    thread.join()
    assert len(metas) == 8
    assert longest < WAIT_S, "it never waits for all of it"
    tq.close()


def test_nothing_is_left_on_the_disk_when_the_server_is_killed(tmp_path):
    conf = tq.init(spilling(tmp_path))
    for each in megabytes(32):
        tq.get_client().put(rows(x=each), partition_id="p")
    assert total(tq.get_client(), "spilled_nbytes") == 16 * MIB
    pid = conf.controller.zmq_info.pid
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert os.listdir(tmp_path / FOLDER) == []
    tq.close()
    assert [path.name for path in tmp_path.rglob("*")] == [FOLDER]


def test_a_put_waits_where_memory_and_disk_are_full(tmp_path):
    tq.init(spilling(tmp_path, ssd_offload={"max_bytes": "8MiB"}, storage={"put_timeout_s": 0.5}))
    client, data = tq.get_client(), megabytes(24)
    metas = [client.put(rows(x=each), partition_id="p") for each in data]
    with pytest.raises(tq.StorageFullError, match=r"take 16 MiB of 16 MiB in memory, and 8 MiB of 8 MiB on disk"):
        client.put(rows(x=data[0]), partition_id="p")
    client.clear_samples(metas[0])
    client.put(rows(x=data[0]), partition_id="p")
    for meta, each in zip(metas[1:], data[1:], strict=True):
        assert torch.equal(client.get_data(meta)["x"].values(), each[0])
    tq.close()


@pytest.mark.parametrize("value", ["lots", 0])
def test_an_impossible_bound_is_refused(tmp_path, value):
    with pytest.raises(tq.ConfigError, match=r"ssd_offload\.max_bytes must be null"):
        tq.init(spilling(tmp_path, ssd_offload={"max_bytes": value}))


def test_a_directory_that_can_not_be_made_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(tq.ConfigError, match=r"ssd_offload.*Set ssd_offload\.path"):
        tq.init(spilling(tmp_path / "file"))


@pytest.mark.programs
def test_objects_go_to_disk_and_come_back_with_their_types(client):
    values = [{"k": bytes(300_000), "n": n} for n in range(64)]
    metas = [client.put(rows(o=NonTensorStack(each)), partition_id="p") for each in values]
    assert total(client, "spilled_nbytes")
    assert [client.get_data(meta)["o"].tolist() for meta in metas] == [[each] for each in values]
