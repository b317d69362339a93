"""The processes that fill the queue: one makes samples, another adds a field to them."""

import torch

import transfer_queue as tq

ROWS = 32


def target(x):
    """What is learned. In your program: a reward model, a teacher, an environment."""
    return x.sum(dim=1, keepdim=True)


def held_out():
    """Fills the partition that each validation reads, unless a checkpoint has brought it back."""
    client = tq.get_client()
    if "val" not in client.get_partition_list():
        x = torch.randn(4 * ROWS, 8)
        client.create_partition("val", num_samples=len(x))
        client.put({"x": x, "y": target(x)}, partition_id="val")


def produce():
    """Never ends: when the queue is full, a put waits. Any number of such processes share the work."""
    while True:
        tq.get_client().put({"x": torch.randn(ROWS, 8)}, partition_id="train")


def label():
    """Adds the field y to samples as they come."""
    client = tq.get_client()
    size = {"batch_size": ROWS, "micro_batch_size": ROWS}
    dataset = tq.StreamingDataset(None, **size, data_fields=["x"], partition_id="train", task_name="label", dp_rank=0)
    for data, meta in tq.StreamingDataLoader(dataset):
        client.put({"y": target(torch.stack(data["x"].unbind()))}, metadata=meta)
        client.ack(meta, "label")  # a labeller that was killed before gets them again
