"""The processes that fill the queue. The trainer starts them, and they end with it. Replace ``samples``."""

import time

import torch

import transfer_queue as tq

ROWS = 32  # samples per put


def samples(rows):
    """Inputs with what is learned of them. In your program: a reward model, a teacher, an environment."""
    x = torch.randn(rows, 8)
    return {"x": x, "y": x.sum(dim=1, keepdim=True)}


def held_out():
    """Fills the partition that each validation reads, unless a checkpoint has brought it back."""
    client = tq.get_client()
    if "val" not in client.get_partition_list():
        client.create_partition("val", num_samples=4 * ROWS)  # the last sample seals it
        client.put(samples(4 * ROWS), partition_id="val")


def produce():
    """Never ends: when the queue is full, a put waits. Any number of such processes share the work."""
    client = tq.get_client()
    while not client.get_stats()["partitions"].get("val", {}).get("sealed"):
        time.sleep(0.1)  # a full queue would have no room for the held-out samples, so they come first
    while True:
        client.put(samples(ROWS), partition_id="train")
