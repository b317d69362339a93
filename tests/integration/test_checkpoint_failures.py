# SPDX-License-Identifier: Apache-2.0
"""Saves and loads that fail: nothing half is left, the earlier checkpoint and the queue stay as they were."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.checkpoint_support import ROWS, every_kind, fetch, held, numbers, started, values, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def client() -> Iterator[tq.TransferQueueClient]:
    with started(units=2) as client:
        yield client


@pytest.fixture
def filled(client: tq.TransferQueueClient) -> Iterator[tq.TransferQueueClient]:
    """Eight samples in "p", of which the task has had two."""
    client.put(numbers(8), partition_id="p")
    fetch(client, 2, 0)
    yield client
    for name in client.get_partition_list():
        client.clear_partition(name)
    wait_until(lambda: held(client) == (0, 0))  # nothing is kept for a save or a load that is over


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# ---- saves ----


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """As on a disk that is full: the kernel refuses what is written beyond this length of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("nbytes", [0, 100, 2000])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_save_that_runs_out_of_room_leaves_nothing_and_the_earlier_checkpoint(filled, tmp_path, nbytes, earlier):
    target, before = tmp_path / "c", {}
    if earlier:
        filled.save_checkpoint(target)
        before = contents(tmp_path)
    filled.put(TensorDict({"large": torch.zeros(8, 1000)}, batch_size=[8]), partition_id="q")
    with files_of_at_most(nbytes), pytest.raises(tq.CheckpointError, match=r"could not be written: .*File too large"):
        tq.save_checkpoint(target)
    assert contents(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == (["c"] if earlier else [])
    tq.save_checkpoint(target)
    tq.load_checkpoint(target)
    assert values(filled, fetch(filled, 2, 0)) == [0, 1]


def test_a_save_that_runs_out_of_room_closes_all_its_files(filled, tmp_path):
    columns = {name: torch.zeros(8, 100) for name in ("a", "b", "c")}  # they fit the buffers of their files
    filled.put(columns, partition_id="q")
    with files_of_at_most(3000), pytest.raises(tq.CheckpointError) as error:
        tq.save_checkpoint(tmp_path / "c")
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert [path for path in opened if path.startswith(str(tmp_path))] == [], error.value


def test_a_save_into_a_place_that_cannot_be_is_refused(filled, tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "c"):
        with pytest.raises(tq.CheckpointError, match="could not be written"):
            filled.save_checkpoint(place)
    no_path = "is no path: (embedded null byte|lstat: embedded null character in path)"  # the second since Python 3.13
    for place, why in (("/", "is the root of a file system"), ("a\0b", no_path)):
        with pytest.raises(tq.CheckpointError, match=why):
            filled.save_checkpoint(place)
    assert contents(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize("place", ["c", "c.tmp", "c.old"])
def test_a_directory_with_something_else_in_it_is_never_replaced_or_removed(filled, tmp_path, place):
    filled.save_checkpoint(tmp_path / "c")
    shutil.rmtree(tmp_path / place, ignore_errors=True)
    (tmp_path / place).mkdir()
    (tmp_path / place / "thesis.tex").write_text("mine")
    with pytest.raises(tq.CheckpointError, match=r"holds something else \(thesis.tex\)"):
        filled.save_checkpoint(tmp_path / "c")
    assert (tmp_path / place / "thesis.tex").read_text() == "mine"


def test_an_empty_directory_becomes_the_checkpoint(filled, tmp_path):
    (tmp_path / "c").mkdir()
    filled.save_checkpoint(tmp_path / "c")
    filled.load_checkpoint(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


def test_two_saves_to_one_place_at_a_time_are_told_apart(filled, tmp_path):
    (tmp_path / "c.tmp").mkdir()
    other = os.open(tmp_path / "c.tmp", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(tq.CheckpointError, match="another process is saving"):
        filled.save_checkpoint(tmp_path / "c")
    os.close(other)
    filled.save_checkpoint(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


def test_an_error_of_the_storage_part_leaves_nothing(filled, tmp_path):
    part = "transfer_queue.client.TransferQueueClient.save_storage_checkpoint"  # a name that users replace
    with mock.patch(part, side_effect=RuntimeError("no")), pytest.raises(RuntimeError, match=r"^no$"):
        tq.save_checkpoint(tmp_path / "c")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("wrong", [object(), float("nan"), "\ud800"])
def test_metadata_must_be_json(filled, tmp_path, wrong):
    with pytest.raises(ValueError, match="must be JSON"):
        filled.save_checkpoint(tmp_path / "c", metadata={"x": wrong})
    assert os.listdir(tmp_path) == []


def test_without_a_queue_neither_works(tmp_path, monkeypatch, filled):
    monkeypatch.setattr("transfer_queue.interface._TQ_CONTROLLER", None)
    for verb in (tq.save_checkpoint, tq.load_checkpoint):
        with pytest.raises(RuntimeError, match="not initialized"):
            verb(tmp_path / "c")


OTHER = """
import sys
import transfer_queue as tq

class Client(tq.TransferQueueClient):
    def save_storage_checkpoint(self, directory):
        super().save_storage_checkpoint(directory)
        print("stopped", flush=True)
        sys.stdin.read()

    async def _restore(self, data):
        print("stopped", flush=True)
        sys.stdin.read()

conf = tq.init()
client = Client("other", conf.controller.zmq_info)
client.initialize_storage_manager("SimpleStorage", conf.backend.SimpleStorage)
getattr(client, sys.argv[1])(sys.argv[2])
"""


@contextmanager
def killed_in_the_middle(verb: str, place: Path) -> Iterator[None]:
    """Another process does this, until all values are copied; inside it stands still, then it is killed."""
    command = [sys.executable, "-c", OTHER, verb, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"stopped\n"
        yield
        other.send_signal(signal.SIGKILL)


@pytest.mark.programs
def test_a_loader_killed_in_the_middle_leaves_the_queue_as_it_was(filled, good):
    with killed_in_the_middle("load_checkpoint", good):
        assert held(filled)[1] == 8 + 12 * ROWS
        assert values(filled, fetch(filled, 2, 0)) == [0, 1]
    wait_until(lambda: held(filled) == (8, 8))
    assert values(filled, fetch(filled, 2, 1)) == [2, 3]


@pytest.mark.programs
def test_a_saver_killed_in_the_middle_leaves_the_earlier_checkpoint_and_a_queue_that_goes_on(filled, tmp_path):
    filled.save_checkpoint(tmp_path / "c")
    filled.put(numbers(3, 100), partition_id="q")
    with killed_in_the_middle("save_checkpoint", tmp_path / "c"):
        filled.clear_partition("q")
        assert held(filled) == (11, 11), "kept for the saver"
    wait_until(lambda: held(filled) == (8, 8))
    filled.load_checkpoint(tmp_path / "c")
    assert values(filled, fetch(filled, 2, 0)) == [0, 1]
    assert sorted(os.listdir(tmp_path)) == ["c", "c.tmp"]
    filled.save_checkpoint(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("killed_after", ["first rename", "first rename of an unfinished save", "second rename"])
def test_a_swap_that_broke_off_is_finished_by_the_load(filled, tmp_path, killed_after):
    old, new, target = tmp_path / "c.old", tmp_path / "c.tmp", tmp_path / "c"
    filled.save_checkpoint(old)
    filled.put(numbers(1), partition_id="new")
    filled.save_checkpoint(target if killed_after == "second rename" else new)
    if killed_after == "first rename of an unfinished save":
        (new / "metadata.json").unlink()
    tq.load_checkpoint(target)
    expected = ["p"] if "unfinished" in killed_after else ["p", "new"]
    assert filled.get_partition_list() == expected
    filled.save_checkpoint(target)
    assert os.listdir(tmp_path) == ["c"]


# ---- loads ----


@pytest.fixture(scope="module")
def good(client: tq.TransferQueueClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every kind of value."""
    path = tmp_path_factory.mktemp("good") / "c"
    client.put(every_kind(), partition_id="all")
    client.save_checkpoint(path)
    client.clear_partition("all")
    return path


def edit(path: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def newer_state(directory: Path) -> None:
    path = directory / "controller_state.msgpack"
    state = msgspec.msgpack.encode(msgspec.msgpack.decode(path.read_bytes()[5:]) | {"format": 9})
    data = b"\xc6" + len(state).to_bytes(4, "big") + state
    path.write_bytes(data)
    restate(directory, data)


def shorter_state(directory: Path, nbytes: int) -> None:
    """One that was written so short."""
    path = directory / "controller_state.msgpack"
    os.truncate(path, nbytes)
    restate(directory, path.read_bytes())


def restate(directory: Path, data: bytes) -> None:
    import zlib

    described = {"nbytes": len(data), "crc32": zlib.crc32(data)}
    edit(directory / "metadata.json", lambda metadata: metadata["controller"].update(described))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def end_header(path: Path, at: int) -> None:
    """As if what follows in the file had never reached the disk."""
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes(len(data) - at))


def value_file(directory: Path, name: str) -> Path:
    (found,) = directory.rglob(f"*-{name}")
    return found


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "no such directory"),
    "no metadata": (lambda path: (path / "metadata.json").unlink(), "has no metadata.json"),
    "foreign metadata": (lambda path: (path / "metadata.json").write_text("{}"), "metadata.json is none of ours"),
    "garbage": (lambda path: (path / "metadata.json").write_bytes(b"\xff\x00"), "metadata.json is none of ours"),
    "too new": (lambda path: edit(path / "metadata.json", lambda m: m.update(format=3)), "has format 3, "),
    "state too new": (newer_state, "format 9, this version reads"),
    "state cut": (lambda path: shorter_state(path, 90), "can't be read: .* ends within a slice"),
    "state cut early": (lambda path: shorter_state(path, 3), "can't be read: .* ends within a slice"),
    "state empty": (lambda path: shorter_state(path, 0), "is none of ours, or damaged"),
    "state missing": (lambda path: (path / "controller_state.msgpack").unlink(), "lacks .*controller_state.msgpack"),
    "state truncated": (lambda path: os.truncate(path / "controller_state.msgpack", 90), "has 90 bytes"),
    "state changed": (lambda path: flip(path / "controller_state.msgpack"), "checksum differs"),
    "state of another": (lambda path: restate(path, (path / "controller_state.msgpack").read_bytes()[:9]), "bytes"),
    "list missing": (lambda path: (path / "simple_storage" / "values.json").unlink(), "lacks .*values.json"),
    "values missing": (lambda path: value_file(path, "large.npy").unlink(), "lacks .*large.npy"),
    "values truncated": (lambda path: os.truncate(value_file(path, "large.npy"), 5000), "has 5000 bytes"),
    "values changed": (lambda path: flip(value_file(path, "large.npy")), "checksum differs"),
    "header changed": (lambda path: value_file(path, "large.npy").write_bytes(
        value_file(path, "large.npy").read_bytes().replace(b"(150, 2048)", b"(150, 1024)", 1)), "expected float32"),
    "header ends early": (lambda path: end_header(next(path.rglob("samples.npy")), 60), "samples.npy is no .npy file"),
    "header empty": (lambda path: end_header(value_file(path, "large.npy"), 10), "large.npy is no .npy file"),
    "header not Python": (lambda path: value_file(path, "large.npy").write_bytes(
        value_file(path, "large.npy").read_bytes().replace(b"{'descr'", b"['descr'", 1)), "large.npy is no .npy file"),
    "offsets changed": (lambda path: flip(value_file(path, "text.offsets.npy")), "checksum differs"),
    "samples changed": (lambda path: flip(next(path.rglob("samples.npy"))), "checksum differs"),
    "objects changed": (lambda path: flip(value_file(path, "object.msgpack")), "checksum differs"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_whole_checkpoint_is_refused_and_the_queue_unharmed(filled, good, tmp_path, what):
    damage, text = BAD[what]
    shutil.copytree(good, tmp_path / "c")
    damage(tmp_path / "c")
    with pytest.raises(tq.CheckpointError, match=text):
        tq.load_checkpoint(tmp_path / "c")
    assert values(filled, fetch(filled, 2, 0)) == [0, 1]
    assert filled.get_partition_list() == ["p"]
    wait_until(lambda: held(filled) == (8, 8))  # what was stored before the damage was found is deleted


@pytest.mark.parametrize("what", ["no directory", "no metadata", "state missing", "values missing"])
def test_what_is_missing_is_a_file_not_found(filled, good, tmp_path, what):
    shutil.copytree(good, tmp_path / "c")
    BAD[what][0](tmp_path / "c")
    with pytest.raises(FileNotFoundError):
        tq.load_checkpoint(tmp_path / "c")


@pytest.mark.programs
def test_a_file_outside_of_the_checkpoint_is_not_read(filled, good, tmp_path):
    shutil.copytree(good, tmp_path / "c")
    edit(tmp_path / "c" / "metadata.json", lambda metadata: metadata["controller"].update(name="../secret"))
    with pytest.raises(tq.CheckpointError, match="outside of its directory"):
        tq.load_checkpoint(tmp_path / "c")
