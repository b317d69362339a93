# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at a random moment of a call: nothing is held afterwards, and what was put or cleared is whole."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from calls import fetch_of
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.faults import client_of, comes_true
from tests.integration.given_up import nothing_occupied, occupied

# A batch that Ctrl-C takes from its caller between two bytecodes stays pinned until the session ends: seldom, but seen.
pytestmark = pytest.mark.slow

CONF = {"backend": {"SimpleStorage": {"num_data_storage_units": 1, "put_timeout_s": 1.0}}}
ROUNDS = 80


def is_interrupted(call: Callable[[], None], after_s: float) -> bool:
    """Call it; Ctrl-C comes after so many seconds. Was that before the call had ended?"""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


def duration_s(call: Callable[[], None]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def values(number: int, width: int) -> dict[str, torch.Tensor]:
    return {"x": torch.from_numpy(np.full((2, width), number, np.float32))}


def put(client: tq.TransferQueueClient, partition: str, number: int, width: int) -> None:
    client.put(values(number, width), partition_id=partition)


def put_by_key(client: tq.TransferQueueClient, partition: str, number: int, width: int) -> None:
    from transfer_queue.client import kv
    from transfer_queue.transport.blocking import run_blocking

    rows = TensorDict(values(number, width), batch_size=[2])
    run_blocking(kv.batch_put(client, [f"{number} a", f"{number} b"], partition, rows, None))


def fetch(client: tq.TransferQueueClient, partition: str, number: int, width: int) -> None:
    batch = client.fetch_batch(fetch_of(["x"], 2, partition, "t"))
    client.take(batch)


def get(client: tq.TransferQueueClient, partition: str, number: int, width: int) -> None:
    client.get_data(client.get_meta(["x"], partition_id=partition, mode="force_fetch"))


def insert(client: tq.TransferQueueClient, partition: str, number: int, width: int) -> None:
    client.get_meta(["x"], 2, partition, mode="insert")


Act = Callable[[tq.TransferQueueClient, str, int, int], None]


@pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")  # Ctrl-C came before a call had begun
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("width", [1, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("act", [put, put_by_key, fetch, get, insert])
def test_what_was_interrupted_at_any_moment_is_whole_and_holds_nothing(queue, client, name, act: Act, width):
    seed = random.randrange(10**6)
    print("seed", seed)
    moments, own, interrupts = random.Random(seed), client_of(queue, "interrupted"), 0
    if act in (fetch, get):
        for number in range(ROUNDS + 3 if act is fetch else 2):
            put(client, name, number, width)
    longest_s = 1.5 * min(duration_s(lambda n=n: act(own, name, -1 - n, width)) for n in range(3))
    for number in range(ROUNDS):
        call = partial(act, own, name, number, width)
        interrupts += is_interrupted(call, moments.uniform(1e-5, longest_s))
    assert interrupts
    check_whole(client, name)
    own.get_partition_list()  # one more call, as any user's program goes on
    held = comes_true(lambda: nothing_occupied(client, name))
    assert held, (occupied(client), client.get_stats()["partitions"][name]["held"])
    own.close()


def check_whole(client: tq.TransferQueueClient, partition: str) -> None:
    """Both rows of each put are there, or none; once."""
    meta = client.get_meta(None, partition_id=partition, mode="force_fetch")
    if not meta.field_names:  # inserted samples without values
        return
    found = [int(row.flatten()[0]) for row in client.get_data(meta)["x"].unbind()]
    assert {number: found.count(number) for number in found} == dict.fromkeys(found, 2)
    stored = sum(unit["samples"] for unit in client.get_storage_stats())
    assert stored >= len(found)
