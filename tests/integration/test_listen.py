# SPDX-License-Identifier: Apache-2.0
"""A queue that listens at a tcp:// address: clients with its key join there, strangers get nothing."""

from __future__ import annotations

import os
import socket

import pytest
import torch

import transfer_queue as tq
from transfer_queue.errors import ConfigError, QueueUnreachableError
from transfer_queue.transport.tcp_wire import write_keys

JOINED = """
import sys, torch, transfer_queue as tq
conf = tq.init({"address": sys.argv[1], "key_file": sys.argv[2]})
client = tq.get_client()
client.put({"x": torch.arange(64 * 1024).reshape(64, 1024)}, partition_id="from elsewhere")
meta = client.get_meta(["y"], 4, "from here", task_name="t", timeout_s=30.0)
print(client.get_data(meta)["y"].tolist(), client.get_storage_stats()[0]["path"], flush=True)
tq.close()
"""


def test_a_client_with_the_key_puts_and_gets_over_tcp(start, script):
    conf = start({"listen": "tcp://127.0.0.1:0"})
    client = tq.get_client()
    client.put({"y": torch.arange(4)}, partition_id="from here")
    other = script(JOINED, conf.listen, conf.key_file, env={"TQ_ADDRESS": ""})
    out, err = other.communicate(timeout=120)
    assert (out, other.returncode) == ("[0, 1, 2, 3] frames\n", 0), err
    meta = client.get_meta(["x"], 64, "from elsewhere", task_name="t")
    assert torch.equal(client.get_data(meta)["x"].to_padded_tensor(-1), torch.arange(64 * 1024).reshape(64, 1024))


def test_the_file_of_the_keys_is_for_its_owner_alone(start, tmp_path):
    file = tmp_path / "keys"
    conf = start({"listen": "tcp://127.0.0.1:0", "key_file": str(file)})
    assert (conf.key_file, file.stat().st_mode & 0o777) == (str(file), 0o600)


def test_a_client_with_another_key_is_refused_and_the_queue_goes_on(start, script, tmp_path):
    conf = start({"listen": "tcp://127.0.0.1:0"})
    write_keys(tmp_path / "wrong")
    code = "import sys, transfer_queue as tq\ntq.init({'address': sys.argv[1], 'key_file': sys.argv[2]})"
    other = script(code, conf.listen, str(tmp_path / "wrong"), env={"TQ_ADDRESS": ""})
    _, err = other.communicate(timeout=120)
    assert other.returncode == 1
    assert QueueUnreachableError.__name__ in err
    host, port = conf.listen.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(os.urandom(4096))
        assert tq.get_client().get_partition_list() == []


@pytest.mark.parametrize(
    ("conf", "what"),
    [
        ({"listen": "ipc:///tmp/x"}, "listen must be an address tcp://HOST:PORT"),
        ({"listen": "tcp://127.0.0.1:0", "server_processes": "each"}, "listen needs controller and storage in one"),
    ],
)
def test_what_cannot_be_listened_at_is_refused(conf, what):
    with pytest.raises(ConfigError, match=what):
        tq.init(conf)
