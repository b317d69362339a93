# SPDX-License-Identifier: Apache-2.0
"""Test data, and producers that put it. It does not import lightning, so that processes start faster."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from tensordict import TensorDict

import transfer_queue as tq

FIELDS = ["x", "text"]


def rows(count: int, start: int = 0) -> TensorDict:
    """Row i holds the number i and the text "row i"."""
    numbers = range(start, start + count)
    x = torch.tensor([[float(number)] * 4 for number in numbers])
    return TensorDict({"x": x, "text": [f"row {number}" for number in numbers]}, batch_size=[count])


def fill(client: tq.TransferQueueClient, partition: str, count: int, start: int = 0) -> list[int]:
    """Put ``count`` rows and seal the partition. Returns their indexes."""
    indexes = client.put(rows(count, start), partition_id=partition).global_indexes if count else []
    client.seal_partition(partition)
    return list(indexes)


def produce(partition: str, count: int, seal: bool = True, worker: int = 0) -> None:
    client = tq.get_client()
    client.put(rows(count, start=worker * count), partition_id=partition)
    if seal:
        client.seal_partition(partition)


def produce_late(partition: str, count: int, start_s: float) -> None:
    """It takes so long until it joins the queue, as one does that loads a model. It stays until its run ends."""
    time.sleep(start_s)
    produce(partition, count)
    threading.Event().wait()


def produce_then_fail(partition: str, count: int) -> None:
    produce(partition, count, seal=False)
    raise RuntimeError("the reward model fell over")


def produce_then_stay(partition: str, count: int, pid_file: str) -> None:
    Path(pid_file).write_text(str(os.getpid()))  # before the puts, because the trainer may finish before the last one
    produce(partition, count, seal=False)
    threading.Event().wait()


def tell_name(folder: str) -> None:
    """Makes a file with its client's name, with the main program's arguments and the number of ranks; one batch."""
    told = [sys.argv, os.environ.get("MASTER_PORT"), os.environ.get("WORLD_SIZE")]
    Path(folder, tq.get_client().client_id).write_text(json.dumps(told))
    produce("train", 4, seal=False)


def produce_then_die(partition: str, count: int) -> None:
    produce(partition, count, seal=False)
    sys.stderr.write("about to be killed\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def produce_epochs(epochs: int, train: int, val: int) -> None:
    """Sealed partitions train@0, val@0, train@1, … with ``train`` rows (in 3 puts) and ``val`` rows each."""
    client = tq.get_client()
    for epoch in range(epochs):
        for part in range(3):
            count = train // 3 if part else train - 2 * (train // 3)
            client.put(rows(count, start=100 * part), partition_id=f"train@{epoch}")
        client.seal_partition(f"train@{epoch}")
        fill(client, f"val@{epoch}", val)


def produce_on_policy(partition: str, steps: int) -> None:
    """Four rows per step, made after the weights of that step are published, and tagged with their version."""
    from lightning_tq import WeightsReader

    client, reader = tq.get_client(), WeightsReader()
    for step in range(steps):
        version = reader.latest(least=step, timeout_s=30).version
        client.put(rows(4, start=4 * step), partition_id=partition, tags=[{"policy_version": version}] * 4)


def feed_numbers(count: int) -> None:
    """Groups of the task "learn" with the heads 0, 1, …"""
    from lightning_tq import feed_groups

    feed_groups([{"number": number} for number in range(count)], "train", tasks=["learn"], waiting=4)


def work_on_groups() -> None:
    """Group n gets 1 to 3 rows, with the numbers from 100 n on."""
    for lease in tq.get_client().leases("train"):
        number = int(lease.head["number"][0])
        lease.close(rows(1 + number % 3, start=100 * number))


def work_until_killed(folder: str, worker: int) -> None:
    """Each process makes a file named by its worker and pid. The first one is killed while it holds its second lease.

    Worker 1 has nothing to do.
    """
    is_first = not any(Path(folder).glob("0-*"))
    Path(folder, f"{worker}-{os.getpid()}").touch()
    for done, lease in enumerate(tq.get_client().leases("train") if worker == 0 else ()):
        if done == 1 and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        lease.close(rows(2, start=100 * int(lease.head["number"][0])))


def produce_numbers(count: int) -> None:
    """The field "x" alone."""
    client = tq.get_client()
    client.put(rows(count).select("x"), partition_id="train")
    client.seal_partition("train")


def add_text_until_killed(folder: str, worker: int) -> None:
    """Adds the field "text". The worker that has samples first is killed with them, when it has done one of them."""
    client = tq.get_client()
    while True:
        try:
            meta = client.get_meta(["x"], 4, "train", task_name="add", adds=["text"], timeout_s=60)
        except tq.EndOfPartitionError:
            return
        numbers = client.get_data(meta, layout="dense")["x"][:, 0].int().tolist()
        dies = asked_first(folder)
        own = meta.select_samples([0]) if dies else meta
        client.put({"text": [f"row {number}" for number in numbers[: own.size]]}, metadata=own)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


def asked_first(folder: str) -> bool:
    """Whether no other process has asked before, with this folder."""
    try:
        Path(folder, "asked").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def produce_sizes(train: list[int], val: list[int]) -> None:
    """Rows of train@0, val@0, train@1, ... by these counts per epoch, put one by one while readers wait."""
    client = tq.get_client()
    for epoch, counts in enumerate(zip(train, val, strict=True)):
        for name, count in zip(("train", "val"), counts, strict=True):
            for number in range(count):
                client.put(rows(1, start=number), partition_id=f"{name}@{epoch}")
            client.seal_partition(f"{name}@{epoch}")


def fill_all(client: tq.TransferQueueClient) -> None:
    """40 rows of train@0 to train@2 and of step@0, step@4, step@8; 120 of train, 4 of val; all sealed."""
    for epoch in range(3):
        fill(client, f"train@{epoch}", 40, start=1000 * epoch)
        fill(client, f"step@{4 * epoch}", 40, start=1000 * epoch)
    fill(client, "train", 120, start=5000)
    fill(client, "val", 4)
