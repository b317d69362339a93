# SPDX-License-Identifier: Apache-2.0
"""``lightning-tq serve``: queues that outlive programs, servers that join them, and what each mistake gets."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import transfer_queue as tq
from tests.integration.faults import client_of

pytestmark = pytest.mark.programs

Serve = Callable[..., subprocess.Popen[str]]
LISTEN = ("--listen", "tcp://127.0.0.1:0")


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return str(tmp_path / "keys")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server with these options, by a command like nohup. It is ended in the end."""
    started = []

    def start(*options: str, below: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*below, sys.executable, "-m", "lightning_tq", "serve", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("TQ_")},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate()


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    tq.close()


def addresses(process: subprocess.Popen[str]) -> list[str]:
    """Where it is ready: for its own host, and for others."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready "), process.communicate()[1]
    return line.split()[1:]


def join(address: str, key_file: str | None = None) -> tq.TransferQueueClient:
    tq.init({"address": address, "key_file": key_file})
    return tq.get_client()


def refused(process: subprocess.Popen[str]) -> str:
    """What it printed to stderr before it ended with exit code 2."""
    _, text = process.communicate()
    assert process.returncode == 2, text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_served_queue_outlives_its_programs_and_ends_cleanly_at_a_signal(serve, tmp_path, number):
    server = serve("--directory", str(tmp_path / "d"))
    (address,) = addresses(server)
    join(address).put({"x": torch.arange(4)}, partition_id="p")
    tq.close()
    client = join(address)
    assert client.get_meta(["x"], 4, "p", task_name="t").size == 4
    tq.close()
    server.send_signal(number)
    assert server.communicate()[1] == ""
    assert (server.returncode, list((tmp_path / "d").iterdir())) == (0, [])


def test_below_nohup_a_served_queue_outlives_its_terminal(serve):
    server = serve(below=("nohup",))
    (address,) = addresses(server)
    client = join(address)
    server.send_signal(signal.SIGHUP)
    client.put({"x": torch.arange(4)}, partition_id="p")
    assert server.poll() is None


def test_a_server_without_free_descriptors_says_so_and_serves_the_next_clients_once_there_are_some(serve):
    server = serve(below=("sh", "-c", 'ulimit -n 64; exec "$0" "$@"'))
    (address,) = addresses(server)
    with contextlib.ExitStack() as open_now:
        for _ in range(80):
            newcomer = open_now.enter_context(socket.socket(socket.AF_UNIX))
            newcomer.connect(address.removeprefix("ipc://"))
        assert re.search(r"no more clients can connect beside \d+ connections: .*ulimit", server.stderr.readline())
    join(address).put({"x": torch.arange(4)}, partition_id="p")


@pytest.mark.parametrize("which", ["first", "second"])
def test_any_server_s_address_leads_to_the_whole_queue(serve, keys, which):
    first = addresses(serve(*LISTEN, "--key-file", keys))
    second = addresses(serve(*LISTEN, "--key-file", keys, "--join", first[1]))
    client = join({"first": first[0], "second": second[0]}[which], keys)
    for number in range(8):
        client.put({"x": torch.full((64, 4096), number)}, partition_id="p")
    held = [unit["samples"] for unit in client.get_storage_stats()]
    assert held == ([512, 0] if which == "first" else [0, 512]), "values go to the server that was joined"
    values = client.get_data(client.get_meta(["x"], 512, "p", task_name="t"))["x"]
    assert [int(row[0]) for row in values.unbind()] == [number for number in range(8) for _ in range(64)]
    client.clear_partition("p")
    (waiting,) = {unit["uncommitted_nbytes"] + unit["leased_nbytes"] for unit in client.get_storage_stats()}
    assert waiting == 0


def test_a_server_that_joined_ends_when_the_first_one_does_and_says_so(serve, keys):
    first = serve(*LISTEN, "--key-file", keys)
    _, remote = addresses(first)
    second = serve(*LISTEN, "--key-file", keys, "--join", remote)
    addresses(second)
    first.terminate()
    assert first.wait() == 0
    _, text = second.communicate()
    assert second.returncode == 2
    assert re.search(r"^error: storage unit \S+ ends, because it lost the queue: .* has ended", text, re.MULTILINE)


def test_more_memory_than_the_machine_has_is_warned_of(serve):
    server = serve("--memory", "900000GiB")
    addresses(server)
    server.terminate()
    _, text = server.communicate()
    assert re.search(r"may hold 900000.0 GiB of values .* has [\d.]+ GiB: the system will kill servers", text)


def test_a_server_that_leaves_takes_its_values_along_by_name(serve, keys):
    _, remote = addresses(serve(*LISTEN, "--key-file", keys))
    second = serve(*LISTEN, "--key-file", keys, "--join", remote)
    client = join(addresses(second)[0], keys)
    samples = client.put({"x": torch.arange(16)}, partition_id="p")
    second.terminate()
    assert second.wait() == 0
    lost = client.get_lost_samples("p")["x"]
    assert lost == samples.global_indexes
    text = re.escape(f"field 'x' of 16 samples, first {lost[:5]}. They count as not produced")
    with pytest.raises(tq.UnitLostError, match=text):
        client.get_data(client.get_meta(["x"], partition_id="p", mode="force_fetch"))
    meta = client.get_meta(["x"], partition_id="p", mode="force_fetch")
    lacking = [row for row, index in enumerate(meta.global_indexes) if index in lost]
    client.put({"x": torch.zeros(len(lacking), dtype=torch.int64)}, meta.select_samples(lacking))
    assert client.get_lost_samples("p") == {}
    assert client.get_data(meta)["x"].shape[0] == 16


def test_what_came_with_a_batch_before_a_server_joined_is_read_where_it_was_replaced_or_lost(serve, keys):
    local, remote = addresses(serve(*LISTEN, "--key-file", keys))
    early = client_of(tq.init({"address": local, "key_file": keys}), "early")
    tq.close()
    early.put({"x": torch.arange(8)}, partition_id="p")
    meta, staying = (early.get_meta(["x"], 4, "p", task_name="t") for _ in range(2))
    second = serve(*LISTEN, "--key-file", keys, "--join", remote)
    join(addresses(second)[0], keys).put({"x": torch.arange(10, 14)}, metadata=meta)
    assert early.get_data(meta)["x"].tolist() == [10, 11, 12, 13]
    second.terminate()
    assert second.wait() == 0
    tq.close()
    late = client_of(tq.init({"address": local, "key_file": keys}), "late")
    for client in (early, late):
        assert client.get_data(staying)["x"].tolist() == [4, 5, 6, 7]
        with pytest.raises(tq.UnitLostError, match="field 'x' of 4 samples"):
            client.get_data(meta)
        client.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_client_of_a_server_that_is_started_again_is_one_of_the_new_queue(serve, tmp_path, number):
    first = serve("--directory", str(tmp_path / "d"))
    conf = tq.init({"address": addresses(first)[0]})
    client = client_of(conf, "lives on")
    tq.close()
    client.put({"x": torch.ones(4, 100_000)}, partition_id="p")
    first.send_signal(number)
    first.wait()
    assert addresses(serve("--directory", str(tmp_path / "d"))) == [conf.address]
    with pytest.raises(tq.QueueUnreachableError, match="has ended"):
        client.get_partition_list()
    client.put({"x": torch.full((4, 100_000), 5.0)}, partition_id="p")
    other = client_of(conf, "other")
    data = other.get_data(other.get_meta(["x"], 4, "p", task_name="t"))
    assert data["x"].values().unique().tolist() == [5.0]
    client.put({"y": torch.zeros(4)}, partition_id="q")
    meta = client.get_meta(["y"], 4, "q", task_name="t")
    other.put({"y": torch.ones(4)}, metadata=meta)
    assert client.get_data(meta)["y"].tolist() == [1.0] * 4
    for each in (client, other):
        each.close()


def test_groups_whose_heads_left_with_a_server_let_others_pass_and_are_named(serve, keys):
    local, remote = addresses(serve(*LISTEN, "--key-file", keys))
    second = serve(*LISTEN, "--key-file", keys, "--join", remote)
    heads = join(addresses(second)[0], keys).add_groups({"x": torch.arange(2)}, "p", keys=["lost 0", "lost 1"])
    second.terminate()
    assert second.wait() == 0
    client = join(local, keys)
    client.add_groups({"x": torch.arange(2)}, "p", keys=["a", "b"])
    with pytest.raises(tq.UnitLostError, match="field 'x' of 2 samples"):
        client.get_data(heads)
    assert [lease.key for lease in client.lease("p", 3)] == ["a", "b"]
    for _ in range(2):
        with pytest.raises(tq.UnitLostError, match="field 'x' of 1 samples"):
            client.lease("p", timeout_s=5)
    client.add_groups({"x": torch.arange(1)}, "p", keys=["c"])
    assert client.lease("p").pop().key == "c"
    client.put({"x": torch.arange(2)}, heads)
    assert sorted(lease.key for lease in client.lease("p", 2)) == ["lost 0", "lost 1"]


def test_a_server_prints_lines_that_lead_other_programs_to_it(serve, keys, tmp_path):
    pytest.importorskip("prometheus_client")
    (tmp_path / "queue.yaml").write_text("metrics: {enabled: true}")
    server = serve(*LISTEN, "--key-file", keys, "--config", str(tmp_path / "queue.yaml"))
    local, remote = addresses(server)
    lines = [server.stdout.readline() for _ in range(5)]
    exported = [dict(re.findall(r"(TQ_\w+)=(\S+)", line)) for line in lines[:2]]
    assert exported == [{"TQ_ADDRESS": local}, {"TQ_ADDRESS": remote, "TQ_KEY_FILE": keys}]
    assert [line.split()[-2:] for line in lines[2:4]] == [["--watch", local], ["dashboard", local]]
    with urllib.request.urlopen(lines[4].split()[1]) as answer:
        assert b"tq_" in answer.read()


def test_a_server_lives_on_when_a_script_has_read_its_first_line(serve):
    server = serve()
    (address,) = addresses(server)
    server.stdout.close()
    assert join(address).get_partition_list() == []
    server.stdout = None  # communicate() must not read it
    server.terminate()
    assert server.wait() == 0


# ---- keys ----


def test_keys_that_are_made_without_a_server_are_those_of_a_queue(serve, keys):
    made = subprocess.run([sys.executable, "-m", "lightning_tq", "keys", keys], capture_output=True, text=True)
    assert (made.returncode, os.stat(keys).st_mode & 0o777) == (0, 0o600)
    content = Path(keys).read_bytes()
    _, remote = addresses(serve(*LISTEN, "--key-file", keys))
    assert join(remote, keys).get_partition_list() == []
    assert Path(keys).read_bytes() == content
    again = subprocess.run([sys.executable, "-m", "lightning_tq", "keys", keys], capture_output=True, text=True)
    assert (again.returncode, Path(keys).read_bytes()) == (2, content)
    assert "exists already" in again.stderr


def test_keys_can_not_be_made_in_a_folder_that_is_missing(tmp_path):
    with pytest.raises(tq.errors.ConfigError, match=r"can't write keys to .*: No such file or directory"):
        tq.make_key_file(tmp_path / "missing" / "keys")


# ---- mistakes ----


def test_no_queue_at_the_address_to_join(serve, keys):
    addresses(serve(*LISTEN, "--key-file", keys))  # a queue that listens makes its keys
    text = refused(serve(*LISTEN, "--key-file", keys, "--join", "tcp://127.0.0.1:1"))
    assert "nothing listens there" in text


def test_keys_of_another_queue(serve, keys, tmp_path):
    _, remote = addresses(serve(*LISTEN, "--key-file", keys))
    addresses(serve(*LISTEN, "--key-file", str(tmp_path / "other")))
    text = refused(serve(*LISTEN, "--key-file", str(tmp_path / "other"), "--join", remote))
    assert "does not accept this client's key" in text


def test_keys_that_others_can_read(serve, keys):
    addresses(serve(*LISTEN, "--key-file", keys))
    os.chmod(keys, 0o644)
    assert "chmod 600" in refused(serve(*LISTEN, "--key-file", keys))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--join", "tcp://127.0.0.1:1"), "--key-file"),
        (("--join", "tcp://127.0.0.1:1", "--no-encryption"), "--listen"),
        (("--listen", "ipc:///tmp/x"), "listen must be an address tcp://HOST:PORT"),
        (("--listen", "tcp://203.0.113.1:0"), "can't listen at tcp://203.0.113.1:0"),
        (("--memory", "lots"), "memory"),
        (("--config", "missing.yaml"), "missing.yaml"),
        (("--directory", "/dev/null/queue"), "can't make the directory /dev/null/queue: Not a directory."),
        ((*LISTEN, "--key-file", "/dev/null/keys"), "can't write keys to /dev/null/keys: Not a directory."),
    ],
)
def test_what_cannot_be_served_is_one_error_that_names_it(serve, options, what):
    assert what in refused(serve(*options))


def test_a_directory_whose_sockets_would_have_too_long_names_is_one_error_that_says_so(serve, tmp_path):
    assert "/controller: AF_UNIX path too long." in refused(serve("--directory", str(tmp_path / ("long" * 30))))


def test_values_of_another_backend_can_not_be_served(serve, tmp_path):
    (tmp_path / "queue.yaml").write_text("backend: {storage_backend: RayStore}")
    assert "backend 'RayStore' don't lie in servers" in refused(serve("--config", str(tmp_path / "queue.yaml")))


def test_a_second_server_in_one_directory_is_refused_and_a_dead_one_s_sockets_are_replaced(serve, tmp_path):
    directory = ("--directory", str(tmp_path / "d"))
    first = serve(*directory)
    addresses(first)
    assert "a server answers" in refused(serve(*directory))
    first.kill()
    first.wait()
    (address,) = addresses(serve(*directory))
    client = join(address)
    client.put({"x": torch.zeros(1, 2**18)}, partition_id="p")
    (unit,) = client.get_storage_stats()
    assert unit["arena_nbytes"] > 0, "its memory is shared again"


def test_without_encryption_anybody_may_join_and_the_server_warns(serve):
    server = serve(*LISTEN, "--no-encryption")
    _, remote = addresses(server)
    join(remote).put({"x": torch.arange(4)}, partition_id="p")
    tq.close()
    server.terminate()
    assert "encryption is off" in server.communicate()[1]
