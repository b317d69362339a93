# SPDX-License-Identifier: Apache-2.0
"""Long agents: 4 096 episodes of log-normal length, 60K tokens on average, through half a GiB of memory.

Where the workers are faster than the trainer, somebody has to make them wait. Ours bounds bytes. With Ray a queue of so
many episodes does it, and the store spills what is more. The peer makes nobody wait, so its memory grows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
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
    jagged,
    load,
    queue,
    ray_cluster,
    total,
)  # fmt: skip
from benchmarks.loads.maths import nothing

EPISODES, MEAN_TOKENS, SPREAD = 4096, 60_000, 0.8
BATCH, WORKERS = 16, 2
BOUND = 512 << 20
PARTITION, FIELDS = "agents", ["ids", "logprobs", "mask"]


def episode(number: int) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(number)
    tokens = int(random.lognormal(np.log(MEAN_TOKENS) - SPREAD**2 / 2, SPREAD)) + 1
    return {
        "ids": torch.ones(tokens, dtype=torch.int64),
        "logprobs": torch.ones(tokens),
        "mask": torch.ones(tokens, dtype=torch.uint8),
    }


def produce(conf: Any, first: int, episodes: int) -> None:
    client = client_of(conf)
    for number in range(first, episodes, WORKERS):
        columns = {name: jagged(values, [len(values)]) for name, values in episode(number).items()}
        client.put(TensorDict(columns, batch_size=[1]), partition_id=PARTITION)
    client.close()


def by_queue(system: str, scale: float, folder: str) -> Figures:
    episodes, read = size(scale), 0.0
    bound = {"backend": {"SimpleStorage": {"memory": BOUND}}} if system == OURS else None
    with queue(system, folder, bound) as conf, Team() as team:
        team.start(nothing)
        team.ended()
        usage, client = Usage(folder), tq.get_client()
        for first in range(WORKERS):
            team.start(produce, conf, first, episodes)
        for _ in range(episodes // BATCH):
            meta = fetched(client, FIELDS, BATCH, PARTITION, "actor")
            read += total(client.get_data(meta))
            usage.look()
            client.clear_samples(meta)
        found = usage.figures()
    return figures(found, episodes, read)


def by_ray(scale: float, folder: str) -> Figures:
    episodes, read = size(scale), 0.0
    with ray_cluster(folder, ROOT, object_store_memory=BOUND) as ray:
        from ray.util.queue import Queue

        lane = Queue(maxsize=2 * BATCH)
        workers = [ray.remote(Worker).remote() for _ in range(WORKERS)]
        ray.get([worker.ready.remote() for worker in workers])
        usage = Usage(folder)
        done = [worker.produce.remote(lane, first, episodes) for first, worker in enumerate(workers)]
        for _ in range(episodes // BATCH):
            for _ in range(BATCH):
                rows = ray.get(lane.get()[0])
                read += sum(float(torch.tensor(array).sum()) for array in rows.values())
            usage.look()
        ray.get(done)
        found = usage.figures()
    return figures(found, episodes, read)


class Worker:
    def ready(self) -> None:
        torch.set_num_threads(1)

    def produce(self, lane: Any, first: int, episodes: int) -> None:
        import ray

        for number in range(first, episodes, WORKERS):
            lane.put([ray.put({name: values.numpy() for name, values in episode(number).items()})])


def size(scale: float) -> int:
    return max(BATCH, int(EPISODES * scale) // BATCH * BATCH)


def figures(found: Figures, episodes: int, read: float) -> Figures:
    tokens = sum(len(episode(number)["ids"]) for number in range(episodes))
    if read != 3 * tokens:
        raise RuntimeError(f"all values add up to {read}, not to {3 * tokens}")
    mib = tokens * 13 / (1 << 20)
    return {"episodes": episodes, "mib": mib, **found, "mib_per_s": mib / found["seconds"], "load": load()}


SYSTEMS = {OURS: partial(by_queue, OURS), PEER: partial(by_queue, PEER), RAY_STORE: by_ray}
