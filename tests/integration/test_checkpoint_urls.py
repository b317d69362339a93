# SPDX-License-Identifier: Apache-2.0
"""A checkpoint at a URL: whole or not there, tried again, and the same as one in a directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import transfer_queue as tq
from tests.console import lightning_tq
from tests.flaky_files import FlakyFileSystem, flaky_files
from tests.integration.checkpoint_support import held, numbers, started

pytestmark = pytest.mark.timeout(120)
URL = "flaky://bucket/run/queue.tq"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakyFileSystem]]:
    with flaky_files(monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def client() -> Iterator[tq.TransferQueueClient]:
    with started(units=1) as own:
        yield own


@pytest.fixture
def filled(client: tq.TransferQueueClient, files: object) -> tq.TransferQueueClient:
    """20 samples in "p", of which task "train" was given 4."""
    for name in client.get_partition_list():
        client.clear_partition(name)
    client.put(numbers(20), partition_id="p")
    client.get_meta(["x"], 4, "p", task_name="train")
    return client


def saves() -> list[str]:
    fs = fsspec.filesystem("flaky")
    return [name.rsplit("/", 1)[1] for name in fs.ls(fs._strip_protocol(URL), detail=False)]


def test_a_queue_comes_back_as_it_was_saved(filled: tq.TransferQueueClient) -> None:
    before = held(filled)
    tq.save_checkpoint(URL, metadata={"step": 3})
    filled.clear_partition("p")
    tq.load_checkpoint(URL)
    assert held(filled) == before


def test_a_later_save_replaces_the_earlier_one_and_leaves_nothing_of_it(filled: tq.TransferQueueClient) -> None:
    for step in range(3):
        filled.save_checkpoint(URL, metadata={"step": step})
        assert sorted(name.split("-")[0] for name in saves()) == ["metadata.json", "save"]
    assert tq.describe_checkpoint(URL)["metadata"] == {"step": 2}


def test_a_copy_that_fails_three_times_is_tried_again(
    filled: tq.TransferQueueClient, files: type[FlakyFileSystem]
) -> None:
    files.failures = 3
    filled.save_checkpoint(URL)
    assert files.failures == 0
    assert tq.describe_checkpoint(URL, verify=True)["partitions"]["p"]["samples"] == 20


@pytest.mark.parametrize("copied", range(4))
def test_a_save_that_fails_keeps_the_earlier_checkpoint_and_leaves_nothing(
    filled: tq.TransferQueueClient, files: type[FlakyFileSystem], copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.save_checkpoint(URL, metadata={"step": 1})
    before = saves()
    put_file = FlakyFileSystem.put_file
    start = files.copied

    def fail_later(self: FlakyFileSystem, *args: object, **kwargs: object) -> None:
        files.failures = int(files.copied - start >= copied)
        put_file(self, *args, **kwargs)

    monkeypatch.setattr(FlakyFileSystem, "put_file", fail_later)
    with pytest.raises(tq.CheckpointError, match=r"queue.tq could not be written: ConnectionResetError: the network"):
        filled.save_checkpoint(URL, metadata={"step": 2})
    assert saves() == before
    assert tq.describe_checkpoint(URL, verify=True)["metadata"] == {"step": 1}


def test_a_save_whose_last_answer_is_lost_leaves_a_whole_checkpoint(
    filled: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.save_checkpoint(URL, metadata={"step": 1})
    pipe_file = FlakyFileSystem.pipe_file

    def write_and_fail(self: FlakyFileSystem, *args: object, **kwargs: object) -> None:
        pipe_file(self, *args, **kwargs)
        raise TimeoutError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(FlakyFileSystem, "pipe_file", write_and_fail)
        with pytest.raises(tq.CheckpointError, match="no answer"):
            filled.save_checkpoint(URL, metadata={"step": 2})
    assert tq.describe_checkpoint(URL, verify=True)["metadata"] == {"step": 2}
    filled.save_checkpoint(URL, metadata={"step": 3})
    assert len(saves()) == 2


def test_something_else_at_the_url_is_kept(filled: tq.TransferQueueClient) -> None:
    fsspec.filesystem("flaky").pipe_file(f"{URL}/model.bin", b"mine")
    with pytest.raises(tq.CheckpointError, match=r"holds something else \(model.bin\), so it is not replaced"):
        filled.save_checkpoint(URL)
    tq.remove_checkpoint(URL)
    assert saves() == ["model.bin"]


def test_a_removed_checkpoint_leaves_nothing(filled: tq.TransferQueueClient) -> None:
    filled.save_checkpoint(URL)
    tq.remove_checkpoint(URL)
    tq.remove_checkpoint(URL)
    fs = fsspec.filesystem("flaky")
    assert (fs.find("/bucket"), fs.exists(URL)) == ([], False)
    with pytest.raises(tq.CheckpointNotFoundError, match=r"no checkpoint at flaky://bucket/run/queue.tq"):
        filled.load_checkpoint(URL)


def test_copies_made_by_hand_are_checkpoints_both_ways(filled: tq.TransferQueueClient, tmp_path: Path) -> None:
    fs, before = fsspec.filesystem("flaky"), held(filled)
    filled.save_checkpoint(URL)
    fs.get(URL, str(tmp_path / "down"), recursive=True)
    filled.clear_partition("p")
    filled.load_checkpoint(tmp_path / "down")
    assert held(filled) == before
    filled.save_checkpoint(tmp_path / "down")  # over the copy
    fs.put(str(tmp_path / "down"), "flaky://bucket/up", recursive=True)
    filled.clear_partition("p")
    filled.load_checkpoint("flaky://bucket/up")
    assert held(filled) == before


def test_a_copy_made_by_hand_is_replaced_and_removed_as_any_other(
    filled: tq.TransferQueueClient, tmp_path: Path
) -> None:
    fs = fsspec.filesystem("flaky")
    filled.save_checkpoint(tmp_path / "here", metadata={"step": 1})
    fs.put(str(tmp_path / "here"), URL, recursive=True)
    assert sorted(saves()) == ["controller_state.msgpack", "metadata.json", "simple_storage"]
    filled.save_checkpoint(URL, metadata={"step": 2})
    assert sorted(name.split("-")[0] for name in saves()) == ["metadata.json", "save"]
    assert tq.describe_checkpoint(URL, verify=True)["metadata"] == {"step": 2}
    fs.put(str(tmp_path / "here"), "flaky://bucket/up", recursive=True)
    tq.remove_checkpoint("flaky://bucket/up")
    assert not fs.exists("flaky://bucket/up")


def test_a_local_checkpoint_is_uploaded_and_a_missing_one_is_not(
    filled: tq.TransferQueueClient, tmp_path: Path
) -> None:
    filled.save_checkpoint(tmp_path / "here", metadata={"step": 7})
    tq.upload_checkpoint(tmp_path / "here", URL)
    assert tq.describe_checkpoint(URL) == tq.describe_checkpoint(tmp_path / "here")
    with pytest.raises(tq.CheckpointNotFoundError, match="no such directory"):
        tq.upload_checkpoint(tmp_path / "nowhere", URL)
    assert tq.describe_checkpoint(URL)["metadata"] == {"step": 7}


@pytest.mark.parametrize("change", [b"", b"x" * 500], ids=["shorter", "longer"])
def test_a_damaged_file_is_named(filled: tq.TransferQueueClient, change: bytes) -> None:
    fs = fsspec.filesystem("flaky")
    filled.save_checkpoint(URL)
    (path,) = (name for name in fs.find(URL) if name.endswith("controller_state.msgpack"))
    fs.pipe_file(path, change)
    with pytest.raises(tq.CheckpointError, match=rf"{URL}: .*controller_state.msgpack has {len(change)} bytes"):
        filled.load_checkpoint(URL)
    fs.rm(path)
    with pytest.raises(tq.CheckpointNotFoundError, match=r"controller_state.msgpack: was it copied whole"):
        filled.load_checkpoint(URL)


def test_verify_finds_a_changed_value(filled: tq.TransferQueueClient, tmp_path: Path) -> None:
    filled.save_checkpoint(tmp_path / "here")
    (path,) = (tmp_path / "here").rglob("*-x.npy")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert tq.describe_checkpoint(tmp_path / "here")["partitions"]["p"]["fields"]["x"]["samples"] == 20
    with pytest.raises(tq.CheckpointError, match="its checksum differs"):
        tq.describe_checkpoint(tmp_path / "here", verify=True)


def test_a_description_counts_what_the_queue_held(filled: tq.TransferQueueClient, tmp_path: Path) -> None:
    filled.save_checkpoint(tmp_path / "here", metadata={"step": 3})
    found = tq.describe_checkpoint(tmp_path / "here")
    assert (found["version"], found["metadata"]) == (tq.__distribution_version__, {"step": 3})
    partition = found["partitions"]["p"]
    assert (partition["samples"], partition["keys"], partition["sealed"]) == (20, 0, False)
    assert partition["tasks"] == {"train": {"given": 4, "consumed": 4}}
    assert found["nbytes"] == sum(field["nbytes"] for field in partition["fields"].values()) > 0


def test_a_url_that_nothing_opens_is_refused_before_anything_is_saved(filled: tq.TransferQueueClient) -> None:
    with pytest.raises(tq.ConfigError, match=r"nothing://a can't be reached: Protocol not known: nothing"):
        filled.save_checkpoint("nothing://a")
    with pytest.raises(tq.ConfigError, match="'s3://' names no place for a checkpoint: add a bucket and a path"):
        filled.save_checkpoint("s3://")


@pytest.mark.parametrize("name", ["..", "a/b"])
def test_metadata_does_not_lead_out_of_the_checkpoint(filled: tq.TransferQueueClient, name: str) -> None:
    filled.save_checkpoint(URL)
    fs = fsspec.filesystem("flaky")
    metadata = fs.cat_file(f"{URL}/metadata.json").decode()
    (save,) = (each for each in saves() if each.startswith("save-"))
    fs.pipe_file(f"{URL}/metadata.json", metadata.replace(save, name).encode())
    with pytest.raises(tq.CheckpointError, match="outside of its directory"):
        filled.load_checkpoint(URL)


def test_the_command_shows_verifies_and_tells_damage_from_absence(
    filled: tq.TransferQueueClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here"
    filled.save_checkpoint(path, metadata={"step": 3})
    assert lightning_tq(["checkpoint", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert ("not verified; step=3" in shown, "train" in shown) == (True, True)
    assert lightning_tq(["checkpoint", "verify", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(tq.describe_checkpoint(path)))
    assert lightning_tq(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 2
    filled.save_checkpoint(tmp_path / "last.ckpt.tq")
    capsys.readouterr()
    assert lightning_tq(["checkpoint", "show", str(tmp_path / "last.ckpt")]) == 2
    assert f"The queue is saved beside it: {tmp_path}/last.ckpt.tq." in capsys.readouterr().err
    (path / "controller_state.msgpack").write_bytes(b"")
    assert lightning_tq(["checkpoint", "show", str(path)]) == 1
    assert "controller_state.msgpack has 0 bytes" in capsys.readouterr().err
