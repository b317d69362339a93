# SPDX-License-Identifier: Apache-2.0
"""How fast are puts and gets of one 1 KiB sample, for one client and for several processes at once?"""

from __future__ import annotations

import multiprocessing
import time

import torch
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.common import median_ms, report

OPERATIONS = 1000


def put_and_get(number: int, barrier: multiprocessing.synchronize.Barrier) -> None:
    torch.set_num_threads(1)
    client = tq.get_client()
    data = TensorDict({"x": torch.zeros(1, 256)}, batch_size=[1])
    client.put(data, partition_id=f"client-{number}")
    barrier.wait()
    for _ in range(OPERATIONS // 2):
        client.put(data, partition_id=f"client-{number}")
        client.get_data(client.get_meta(["x"], 1, f"client-{number}", task_name="read"))
    barrier.wait()
    tq.close()


def rate(clients: int) -> float:
    """Puts and gets per second of all clients together."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(clients + 1)
    processes = [context.Process(target=put_and_get, args=(number, barrier)) for number in range(clients)]
    for process in processes:
        process.start()
    barrier.wait()
    started = time.perf_counter()
    barrier.wait()
    elapsed = time.perf_counter() - started
    for process in processes:
        process.join()
    return clients * OPERATIONS / elapsed


def main() -> None:
    tq.init()
    client = tq.get_client()
    data = TensorDict({"x": torch.zeros(1, 256)}, batch_size=[1])
    put = median_ms(lambda: client.put(data, partition_id="p"), OPERATIONS)
    get = median_ms(lambda: client.get_data(client.get_meta(["x"], 1, "p", task_name="read")), OPERATIONS // 2)
    report(
        "small puts and gets",
        put_p50_ms=put,
        fetch_and_get_p50_ms=get,
        operations_per_s={str(clients): rate(clients) for clients in (1, 2, 4)},
    )
    tq.close()


if __name__ == "__main__":
    main()
