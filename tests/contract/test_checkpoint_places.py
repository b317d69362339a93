# SPDX-License-Identifier: Apache-2.0
"""A checkpoint can be saved, replaced, copied, loaded and removed wherever fsspec keeps files like a directory does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from packaging.version import Version

import transfer_queue as tq

PLACES = (
    "{folder}/queue", "file://{folder}/runs/queue", "local://{folder}/runs/queue", "memory://{folder}/queue",
    "dir::file://{folder}/runs/queue", "simplecache::file://{folder}/runs/queue",
    "filecache::memory://{folder}/runs/queue",
)  # fmt: skip
NEEDS = {"dir::": "2025.12", "filecache::": "2024.12"}


@pytest.fixture(scope="module")
def client() -> Iterator[tq.TransferQueueClient]:
    tq.init()
    yield tq.get_client()
    tq.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_lives_at_any_place_like_a_directory(
    client: tq.TransferQueueClient, tmp_path: Path, place: str
) -> None:
    least = next((version for name, version in NEEDS.items() if place.startswith(name)), "0")
    if Version(fsspec.__version__) < Version(least):
        pytest.skip(f"fsspec before {least} makes no folders there")
    url = place.format(folder=tmp_path)
    client.put({"x": torch.arange(4)}, partition_id="p")
    for step in range(2):
        client.save_checkpoint(url, metadata={"step": step})
    client.clear_partition("p")
    assert tq.describe_checkpoint(url, verify=True)["metadata"] == {"step": 1}
    client.load_checkpoint(url)
    batch = client.get_meta(["x"], 4, "p", task_name="t")
    assert client.get_data(batch, layout="dense")["x"].flatten().tolist() == [0, 1, 2, 3]
    client.clear_partition("p")
    client.save_checkpoint(tmp_path / "copied")
    tq.upload_checkpoint(tmp_path / "copied", url)
    assert tq.describe_checkpoint(url)["metadata"] == {}
    tq.remove_checkpoint(url)
    with pytest.raises(tq.CheckpointNotFoundError):
        client.load_checkpoint(url)


def test_a_place_where_nothing_can_be_written_is_no_missing_checkpoint(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for url in (f"file://{tmp_path}/file/queue", f"simplecache::file://{tmp_path}/file/queue"):
        with pytest.raises(tq.CheckpointError, match=r"could not be written|other place") as raised:
            client.save_checkpoint(url)
        assert not isinstance(raised.value, tq.CheckpointNotFoundError)
