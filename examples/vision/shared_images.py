# SPDX-License-Identifier: Apache-2.0
"""Eight answers to a question about an image: the image is a field of the group, and stored once.

``python -m examples.vision.shared_images`` does the same twice, with the image in the group's head and in each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import transfer_queue as tq

IMAGES, ANSWERS, SIZE = 16, 8, 64


def make_images() -> Tensor:
    """[IMAGES, 3, SIZE, SIZE] uint8: black, with a white square of a random width each."""
    images = torch.zeros(IMAGES, 3, SIZE, SIZE, dtype=torch.uint8)
    for image, width in zip(images, torch.randint(4, SIZE, (IMAGES,)).tolist(), strict=True):
        image[:, :width, :width] = 255
    return images


def answer(image: Tensor) -> Tensor:
    """[ANSWERS] Guesses of the square's width. In your program: a vision-language model, sampled."""
    width = image[0, 0].gt(0).sum()
    return width + torch.randint(-3, 4, (ANSWERS,))


def work(client: tq.TransferQueueClient, partition: str, is_shared: bool) -> None:
    """A rollout worker: the image comes with the lease."""
    for lease in client.leases(partition):
        image = lease.head["image"][0]
        rows = {"answer": answer(image)}
        if not is_shared:
            rows["image"] = image.expand(ANSWERS, -1, -1, -1)
        lease.close(rows)


def read(client: tq.TransferQueueClient, partition: str, is_shared: bool) -> tuple[Tensor, Tensor]:
    """A trainer's batch: images [B, 3, SIZE, SIZE] and answers [B] of all rows."""
    fields = ["answer"] if is_shared else ["answer", "image"]
    meta = client.get_meta(fields, 1, partition, task_name="update_actor", timeout_s=60)
    data = client.get_data(meta, layout="dense")
    if not is_shared:
        return data["image"], data["answer"]
    images = client.get_heads(meta, "image", layout="dense")["image"]  # one per group
    return images[meta.group_index], data["answer"]  # better: encode each image once, and index what comes out


def bytes_held(client: tq.TransferQueueClient) -> int:
    return sum(unit["live_nbytes"] for unit in client.get_storage_stats())


def run(is_shared: bool) -> dict[str, Any]:
    tq.init()
    client = tq.get_client()
    torch.manual_seed(0)
    images = make_images()
    client.register_task("update_actor", tq.GroupSampler(groups=IMAGES))
    client.add_groups({"image": images}, "train", tasks=["update_actor"])
    client.seal_partition("train")
    work(client, "train", is_shared)
    held = bytes_held(client)
    seen, answers = read(client, "train", is_shared)
    right = seen[:, 0, 0].gt(0).sum(1)
    tq.close()
    return {"rows": len(answers), "held": held, "error": (answers - right).abs().float().mean().item()}


def main() -> None:
    for is_shared in (True, False):
        found = run(is_shared)
        where = "in the head" if is_shared else "in each row"
        print(
            f"image {where}: {found['rows']} rows, {found['held'] / 1e6:.2f} MB held, mean error {found['error']:.2f}"
        )
    print(f"one image has {3 * SIZE * SIZE / 1e6:.3f} MB; there are {IMAGES} images with {ANSWERS} answers each")


if __name__ == "__main__":
    main()
