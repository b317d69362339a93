# SPDX-License-Identifier: Apache-2.0
"""ValueFiles taken from a storage as they lie there, through files, and stored elsewhere: what a checkpoint does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack

from tests.contract.storage_kit import BACKENDS, Backend, assert_same, rows, some
from tests.contract.test_storage_contract import DTYPES
from transfer_queue.checkpoint.field_files import BlockReader, FieldWriter
from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.storage.base import StorageManager
from transfer_queue.transport.blocking import run_blocking

SHIFT = 1000


@pytest.fixture(params=BACKENDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with BACKENDS[request.param](tmp_path) as backend:
        yield backend
        run_blocking(backend.manager.close())


async def move(manager: StorageManager, indexes: range, fields: list[str], directory: Path, way: type) -> None:
    """Store the values of these samples again, under indexes greater by SHIFT. ``way``: whose methods to use."""
    samples = np.array(indexes)
    for field in fields:
        writer = FieldWriter(directory, field, field, ragged=False)
        for at in range(0, len(samples), 40):
            chunk = samples[at : at + 40]
            async with way.stored(manager, chunk.tolist(), [field]) as parts:
                writer.add(chunk, parts[field])
        for block in writer.close(samples).blocks:
            for own, wire in BlockReader(directory, block, samples).chunks():
                await way.store(manager, (own + SHIFT).tolist(), {field: wire})


@pytest.mark.parametrize("own_way", [True, False], ids=["its own way", "the general way"])
def test_every_kind_of_value_survives(storage, tmp_path, own_way):
    data = {str(dtype): some(dtype, 150, 3) for dtype in DTYPES}
    data["numbers"] = some(torch.int64, 150)
    data["large"] = some(torch.float32, 150, 700)
    data["empty"] = some(torch.float32, 150, 0)
    data["jagged"] = torch.nested.as_nested_tensor([some(torch.int64, n % 5) for n in range(150)], layout=torch.jagged)
    data["objects"] = NonTensorStack(*[{"n": n, "t": (n, "x" * n)} for n in range(150)])
    for start in range(0, 150, 50):
        part = {name: column[start : start + 50] for name, column in data.items() if name != "jagged"}
        part["jagged"] = torch.nested.as_nested_tensor(
            list(data["jagged"].unbind()[start : start + 50]), layout=torch.jagged
        )
        storage.put(part, range(start, start + 50))
    manager = storage.manager
    (tmp_path / "files").mkdir()
    way = type(manager) if own_way else StorageManager
    run_blocking(move(manager, range(150), list(data), tmp_path / "files", way))
    moved = range(SHIFT, SHIFT + 150)
    for name in data:
        assert_same(rows(storage.column(moved, name)), rows(storage.column(range(150), name)))


@pytest.mark.parametrize("way", [None, StorageManager], ids=["its own way", "the general way"])
def test_what_is_not_there_is_told(storage, tmp_path, way):
    storage.put({"x": some(torch.float32, 4)}, range(4))
    with pytest.raises(StorageKeyNotFoundError, match="sample 4"):
        run_blocking(move(storage.manager, range(5), ["x"], tmp_path, way or type(storage.manager)))
