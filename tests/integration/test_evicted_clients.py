# SPDX-License-Identifier: Apache-2.0
"""A client whose session was ended may live: memory that it still copies into belongs to nobody else meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from clients import connect

import transfer_queue as tq
from tests.integration.noticing import until

ROWS, WIDTH = 4, 100_000


@pytest.fixture(params=["one", "each"])
def queue(request: pytest.FixtureRequest) -> Iterator[Any]:
    storage = {"num_data_storage_units": 1, "capacity_bytes": 16 << 20}
    yield tq.init({"server_processes": request.param, "backend": {"SimpleStorage": storage}})
    tq.close()


def full(value: int) -> dict[str, torch.Tensor]:
    return {"x": torch.from_numpy(np.full((ROWS, WIDTH), value, np.float32))}


def leased(client: tq.TransferQueueClient) -> int:
    return int(client.get_storage_stats()[0]["leased_nbytes"])


def test_what_an_evicted_client_copies_late_changes_no_value_of_another(queue, client, name):
    writer = connect("writer", queue)
    copying, metas = writer.session.using_memory, []

    def evict_and_put() -> None:
        assert leased(client) > 0
        (known,) = [each for each in client.get_stats()["clients"] if each.startswith("writer")]
        client.evict_client(known)
        assert until(lambda: leased(client) == 0)
        metas.extend(client.put(full(-1), partition_id=name) for _ in range(4))

    @contextmanager
    def after_its_end() -> Iterator[None]:
        writer.session.using_memory = copying
        other = threading.Thread(target=evict_and_put)
        other.start()
        other.join()
        with copying():
            yield

    writer.session.using_memory = after_its_end
    with suppress(tq.QueueUnreachableError):  # where the controller closed its connections; else it puts again
        writer.put(full(1), partition_id=f"{name}/late")
    assert len(metas) == 4
    for meta in metas:
        assert client.get_data(meta, layout="dense")["x"].eq(-1).all()
    writer.close()
