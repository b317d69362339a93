# SPDX-License-Identifier: Apache-2.0
"""A queue that listens at a tcp:// address: clients with its key join there, strangers get nothing."""

from __future__ import annotations

import multiprocessing
import os
import socket
from typing import Any

import numpy as np
import pytest
import torch

import transfer_queue as tq
from tests.integration.noticing import ended
from tests.own_processes import SLOW
from transfer_queue.errors import ConfigError, QueueUnreachableError

NUMBERS = np.arange(64 * 1024).reshape(64, 1024)


def join(address: str, key_file: str) -> tq.TransferQueueClient:
    tq.close()  # the client of its parent
    tq.init({"address": address, "key_file": key_file})
    return tq.get_client()


def put_and_get(address: str, key_file: str, pipe: Any) -> None:
    client = join(address, key_file)
    client.put({"x": torch.from_numpy(NUMBERS)}, partition_id="from elsewhere")
    meta = client.get_meta(["y"], 4, "from here", task_name="t", timeout_s=30.0)
    pipe.send((client.get_data(meta)["y"].tolist(), client.get_storage_stats()[0]["path"]))
    tq.close()


def test_a_client_with_the_key_puts_and_gets_and_uses_shared_memory_on_the_server_s_host(start, fork):
    conf = start({"listen": "tcp://127.0.0.1:0"})
    client = tq.get_client()
    client.put({"y": torch.arange(4)}, partition_id="from here")
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    assert ended(fork(put_and_get, conf.listen, conf.key_file, there)) == 0
    assert here.recv() == ([0, 1, 2, 3], "arena")
    meta = client.get_meta(["x"], 64, "from elsewhere", task_name="t")
    assert torch.equal(client.get_data(meta)["x"].to_padded_tensor(-1), torch.from_numpy(NUMBERS))


def test_the_file_of_the_keys_is_for_its_owner_alone(start, tmp_path):
    file = tmp_path / "keys"
    conf = start({"listen": "tcp://127.0.0.1:0", "key_file": str(file)})
    assert (conf.key_file, file.stat().st_mode & 0o777) == (str(file), 0o600)


def be_refused(address: str, key_file: str) -> None:
    with pytest.raises(QueueUnreachableError):
        join(address, key_file)


def test_a_client_with_another_key_is_refused_and_the_queue_goes_on(start, fork, tmp_path):
    conf = start({"listen": "tcp://127.0.0.1:0"})
    tq.make_key_file(tmp_path / "wrong")
    refused = fork(be_refused, conf.listen, str(tmp_path / "wrong"))
    refused.join(60.0 * SLOW)
    assert refused.exitcode == 0
    host, port = conf.listen.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(os.urandom(4096))
        assert tq.get_client().get_partition_list() == []


@pytest.mark.parametrize(
    ("conf", "what"),
    [
        ({"listen": "ipc:///tmp/x"}, "listen must be an address tcp://HOST:PORT"),
        ({"listen": "tcp://127.0.0.1"}, "listen must be an address tcp://HOST:PORT"),
        ({"listen": "tcp://127.0.0.1:-1"}, "with a port from 0 to 65535, got 'tcp://127.0.0.1:-1'"),
        ({"listen": "tcp://127.0.0.1:65537"}, "with a port from 0 to 65535, got 'tcp://127.0.0.1:65537'"),
        ({"listen": "tcp://127.0.0.1:0", "server_processes": "each"}, "listen needs controller and storage in one"),
    ],
)
def test_what_cannot_be_listened_at_is_refused(conf, what):
    with pytest.raises(ConfigError, match=what):
        tq.init(conf)
