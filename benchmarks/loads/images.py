# SPDX-License-Identifier: Apache-2.0
"""Images: 256 images of 5 MB, 16 answers to each. The image is a field of the group's head, which its answers share.

The peer has no such field, so each answer carries the image; it gets an eighth of the images. Ray shares a reference.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.loads.common import (
    OURS,
    PEER,
    RAY_STORE,
    ROOT,
    Figures,
    Team,
    Usage,
    client_of,
    fetched,
    load,
    queue,
    ray_cluster,
    total,
)  # fmt: skip
from benchmarks.loads.maths import nothing

IMAGES, ANSWERS, NBYTES = 256, 16, 5_000_000
TOKENS, GROUPS, WORKERS = 512, 4, 2
PARTITION = "images"
PEERS_SHARE = 8


def image(number: int) -> torch.Tensor:
    return torch.full((NBYTES,), number % 251, dtype=torch.uint8)


def answers(seen: int) -> torch.Tensor:
    return torch.full((ANSWERS, TOKENS), seen, dtype=torch.int64)


def seen(pixels: Any) -> int:
    """What a worker's model makes of the image: it reads all of it."""
    return int(pixels.sum(dtype=torch.int64)) // NBYTES


def lease(conf: Any) -> None:
    client = client_of(conf)
    for held in client.leases(PARTITION):
        with held:
            held.close({"answer": answers(seen(held.head["image"][0]))})
    client.close()


def ours(scale: float, folder: str) -> Figures:
    images, rows, right = size(scale), 0, True
    with queue(OURS, folder) as conf, Team() as team:
        team.start(nothing)
        team.ended()
        client, usage = tq.get_client(), Usage(folder)
        client.register_task("actor", tq.GroupSampler(groups=GROUPS))
        for _ in range(WORKERS):
            team.start(lease, conf)
        for at in range(0, images, GROUPS):
            heads = torch.stack([image(at + number) for number in range(GROUPS)])
            client.add_groups({"image": heads}, PARTITION, parts=ANSWERS, tasks=["actor"])
        client.seal_partition(PARTITION)
        for _ in range(images // GROUPS):
            meta = client.get_meta(["answer"], partition_id=PARTITION, task_name="actor")
            data = client.get_data(meta, layout="dense")
            heads = client.get_heads(meta, "image", layout="dense")["image"]
            saw = torch.tensor([seen(each) for each in heads])
            right = right and bool((data["answer"][:, 0] == saw[meta.group_index]).all())
            rows += meta.size
            usage.look()
        found = usage.figures()
    return figures(found, images, rows, right)


def copies(conf: Any, first: int, images: int) -> None:
    client = client_of(conf)
    for number in range(first, images, WORKERS):
        pixels = image(number)
        rows = {"image": pixels.expand(ANSWERS, NBYTES).contiguous(), "answer": answers(seen(pixels))}
        client.put(TensorDict(rows, batch_size=[ANSWERS]), partition_id=PARTITION)
    client.close()


def peer(scale: float, folder: str) -> Figures:
    images, rows, right = max(GROUPS, size(scale) // PEERS_SHARE), 0, True
    with queue(PEER, folder) as conf, Team() as team:
        team.start(nothing)
        team.ended()
        client, usage = tq.get_client(), Usage(folder)
        for number in range(WORKERS):
            team.start(copies, conf, number, images)
        for _ in range(images):
            meta = fetched(client, ["image", "answer"], ANSWERS, PARTITION, "actor")
            data = client.get_data(meta)
            total(data)
            rows += meta.size
            usage.look()
            client.clear_samples(meta)
        found = usage.figures()
    return figures(found, images, rows, right)


def by_ray(scale: float, folder: str) -> Figures:
    images, rows, right = size(scale), 0, True
    with ray_cluster(folder, ROOT, object_store_memory=4 << 30) as ray:
        workers = [ray.remote(Worker).remote() for _ in range(WORKERS)]
        ray.get([worker.ready.remote() for worker in workers])
        usage, flying = Usage(folder), []
        for number in range(images + GROUPS):
            if number < images:
                pixels = ray.put(image(number).numpy())
                flying.append((pixels, workers[number % WORKERS].answer.remote(pixels)))
            if number >= GROUPS:
                pixels, made = map(ray.get, flying.pop(0))
                right = right and int(made[0, 0]) == seen(torch.tensor(pixels))
                rows += len(made)
                usage.look()
        found = usage.figures()
    return figures(found, images, rows, right)


class Worker:
    def ready(self) -> None:
        torch.set_num_threads(1)

    def answer(self, pixels: Any) -> Any:
        return answers(seen(torch.tensor(pixels))).numpy()


def size(scale: float) -> int:
    return max(GROUPS, int(IMAGES * scale) // GROUPS * GROUPS)


def figures(found: Figures, images: int, rows: int, right: bool) -> Figures:
    if rows != images * ANSWERS or not right:
        raise RuntimeError(f"{rows} rows of {images} images came, and they are {'right' if right else 'wrong'}")
    return {"images": images, **found, "ms_per_image": found["seconds"] / images * 1e3, "load": load()}


SYSTEMS = {OURS: ours, PEER: peer, RAY_STORE: by_ray}
