"""The processes that make samples while the model trains: token sequences that count upwards. Replace ``sequences``."""

import time

import torch

import transfer_queue as tq

VOCABULARY = 32
ROWS = 16  # samples per put


def sequences(seed):
    """Sequences of different lengths, as a jagged tensor: no padding is stored or sent."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(4, 20, (ROWS, 2), generator=generator).tolist()
    rows = [(torch.arange(length) + start) % VOCABULARY for length, start in pairs]
    return {"tokens": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}


def held_out(puts=4):
    """Fills the partition that each validation reads, unless a checkpoint has brought it back."""
    client = tq.get_client()
    if "val" not in client.get_partition_list():
        client.create_partition("val", num_samples=puts * ROWS)  # the last sample seals it
        for put in range(puts):
            client.put(sequences(seed=put), partition_id="val")


def produce(epochs, puts):
    """Fills and seals train@0, train@1 and so on. After a resume it completes what the checkpoint has brought back."""
    client = tq.get_client()
    while not client.get_stats()["partitions"].get("val", {}).get("sealed"):
        time.sleep(0.1)  # a full queue would have no room for the held-out samples, so they come first
    there = client.get_stats()["partitions"]  # empty in a new queue
    first = max((int(name.removeprefix("train@")) for name in there if name.startswith("train@")), default=0)
    for epoch in range(first, epochs):  # earlier ones are complete, or were cleared
        name = f"train@{epoch}"
        before = there.get(name, {"published": 0, "sealed": False})
        for put in range(before["published"] // ROWS, puts):
            client.put(sequences(seed=1000 + epoch * puts + put), partition_id=name)
        if not before["sealed"]:
            client.seal_partition(name)
