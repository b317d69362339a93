# SPDX-License-Identifier: Apache-2.0
"""How fast are puts and gets of one 1 KiB sample, for one client and for several processes at once?"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.common import DEADLINE_S, arguments, end, joined_client, median_ms, report

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

OPERATIONS = 1000
CLIENTS = (1, 2, 4)


def one_sample() -> TensorDict:
    return TensorDict({"x": torch.zeros(1, 256)}, batch_size=[1])


def get_one(client: tq.TransferQueueClient, partition: str) -> None:
    client.get_data(client.get_meta(["x"], 1, partition, task_name="read"))["x"].sum()


def p50_ms(client: tq.TransferQueueClient, operations: int) -> dict[str, float]:
    """Of one client, the queue being otherwise idle."""
    data = one_sample()
    put = median_ms(lambda: client.put(data, partition_id="small"), operations)
    get = median_ms(lambda: get_one(client, "small"), operations // 2)
    client.clear_partition("small")
    return {"put_p50_ms": put, "fetch_and_get_p50_ms": get}


def put_and_get(conf: Any, partition: str, operations: int, barrier: Barrier) -> None:
    torch.set_num_threads(1)
    client, data = joined_client(conf), one_sample()
    client.put(data, partition_id=partition)
    get_one(client, partition)
    barrier.wait(DEADLINE_S)
    for _ in range(operations // 2):
        client.put(data, partition_id=partition)
        get_one(client, partition)
    barrier.wait(DEADLINE_S)
    client.close()


def operations_per_s(client: tq.TransferQueueClient, conf: Any, clients: int, operations: int) -> float:
    """Puts and gets of so many processes together, each in a partition of its own."""
    context = multiprocessing.get_context("spawn")
    barrier, partitions = context.Barrier(clients + 1), [f"small-{number}" for number in range(clients)]
    processes = [
        context.Process(target=put_and_get, args=(conf, partition, operations, barrier)) for partition in partitions
    ]
    for process in processes:
        process.start()
    try:
        barrier.wait(DEADLINE_S)
        started = time.perf_counter()
        barrier.wait(DEADLINE_S)
        elapsed = time.perf_counter() - started
    finally:
        for process in processes:
            end(process)
    for partition in partitions:
        client.clear_partition(partition)
    return clients * operations / elapsed


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--servers", choices=("auto", "one", "each"), default="auto", help="server_processes")
    args = parser.parse_args(argv)
    operations, clients = (20, (1,)) if args.quick else (OPERATIONS, CLIENTS)
    conf = tq.init({"server_processes": args.servers})
    client = tq.get_client()
    report(
        "small puts and gets",
        servers=args.servers,
        **p50_ms(client, operations),
        operations_per_s={number: operations_per_s(client, conf, number, operations) for number in clients},
    )
    tq.close()


if __name__ == "__main__":
    main()
