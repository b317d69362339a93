# SPDX-License-Identifier: Apache-2.0
"""Up to what size are values cheaper in the message than in the arena? Both ways by turns, prints one JSON line."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks import cases
from benchmarks.common import arguments, report, timed_ms
from transfer_queue.client.get import FetchedBatch, fetch_request
from transfer_queue.config import merge
from transfer_queue.launch.local import LocalQueue

WAYS = {"inline": 64 << 20, "arena": 0}
"""The threshold below which values travel in the message, so that all do, or none."""
KIB = (1, 4, 16, 64, 128, 256, 1024)
BLOCKS = 12  # turns of each way, for each size
PER_BLOCK = 50
WARMUP = 5  # rounds of a block that aren't counted: the other way's servers ran before

Took = dict[str, list[float]]


def round_trip(client: tq.TransferQueueClient, data: TensorDict, took: Took) -> None:
    """One put; a fetch of its metadata and then its values; another put, and a batch as a stream takes it.

    What comes is looked at, every page of it.
    """
    put = partial(client.put, data, partition_id="inline")
    took["put_ms"].append(timed_ms(put))
    took["fetch_and_get_ms"].append(timed_ms(lambda: got(client)))
    put()
    took["take_ms"].append(timed_ms(lambda: taken(client)))


def got(client: tq.TransferQueueClient) -> None:
    cases.touch(client.get_data(client.get_meta(["x"], 1, "inline", task_name="read")))


def taken(client: tq.TransferQueueClient) -> None:
    batch = client.fetch_batch(fetch_request(["x"], 1, "inline", "read", None, wait_s=0.0))
    assert isinstance(batch, FetchedBatch)
    cases.touch(client.take(batch))


def block(client: tq.TransferQueueClient, data: TensorDict, rounds: int) -> Took:
    """So many round trips of one way."""
    counted: Took = {}
    for number in range(WARMUP + rounds):
        if number in (0, WARMUP):
            counted = {"put_ms": [], "fetch_and_get_ms": [], "take_ms": []}
        round_trip(client, data, counted)
    client.clear_partition("inline")
    return counted


def medians(clients: dict[str, tq.TransferQueueClient], kib: int, blocks: int, rounds: int) -> dict[str, float]:
    """Of one sample of so many KiB."""
    data = TensorDict({"x": torch.zeros(1, kib * 256)}, batch_size=[1])
    all_of: Took = {}
    for _ in range(blocks):
        for way, client in clients.items():
            for what, times in block(client, data, rounds).items():
                all_of.setdefault(f"{way}_{what}", []).extend(times)
    return {what: statistics.median(times) for what, times in sorted(all_of.items())}


def started(inline_nbytes: int, servers: str, stack: ExitStack) -> tq.TransferQueueClient:
    """A client of a queue of its own with this threshold; both end with the stack."""
    queue = LocalQueue(merge({"server_processes": servers}), inline_nbytes)
    stack.callback(queue.close)
    client = tq.TransferQueueClient(f"benchmark-{inline_nbytes}", queue.conf.controller.zmq_info)
    stack.callback(client.close)
    client.initialize_storage_manager("SimpleStorage", queue.conf.backend.SimpleStorage, inline_nbytes=inline_nbytes)
    return client


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--servers", choices=("one", "each"), default="one", help="server_processes")
    args = parser.parse_args(argv)
    sizes, blocks, rounds = ((4, 256), 1, 3) if args.quick else (KIB, BLOCKS, PER_BLOCK)
    with ExitStack() as stack:
        clients = {way: started(nbytes, args.servers, stack) for way, nbytes in WAYS.items()}
        found = {kib: medians(clients, kib, blocks, rounds) for kib in sizes}
    report("one sample in the message, and in the arena", servers=args.servers, by_kib=found)


if __name__ == "__main__":
    main()
