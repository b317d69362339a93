# SPDX-License-Identifier: Apache-2.0
"""Five sources of very different durations share the workers, of which one is killed each second. None is lost.

A partition per source, from 2 to 200 ms an answer. Each group of four answers must be trained exactly once. The peer
has no leases: what a killed worker had is gone there unless its user keeps books.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import torch

import transfer_queue as tq
from benchmarks.loads.common import OURS, Figures, Team, Usage, client_of, load, queue
from benchmarks.loads.maths import nothing

SOURCES = {"grade-school": 0.002, "maths": 0.010, "code": 0.030, "search": 0.080, "agent": 0.200}
"""Mean seconds of an answer, exponentially distributed."""
GROUPS, ANSWERS, BATCH, WORKERS = 400, 4, 5, 6
KILL_EVERY_S = 1.0


def work(conf: Any, seed: int) -> None:
    chance = random.Random(seed)
    client = client_of(conf)
    for held in client.leases(list(SOURCES)):
        with held:
            for _ in range(ANSWERS - 1):
                time.sleep(chance.expovariate(1 / SOURCES[held.partition]))
            held.close({"answer": held.head["prompt"] * ANSWERS + torch.arange(ANSWERS)})
    client.close()


def ours(scale: float, folder: str) -> Figures:
    groups = max(BATCH, int(GROUPS * scale) // BATCH * BATCH)
    with queue(OURS, folder) as conf, Team() as team:
        team.start(nothing)
        team.ended()
        client, usage = tq.get_client(), Usage(folder)
        client.register_task("actor", tq.GroupSampler(groups=BATCH, ahead=8))
        for source in SOURCES:
            heads = {"prompt": torch.arange(groups)}
            client.add_groups(heads, source, parts=ANSWERS, tasks=["actor"], worker_attempts=1000)
            client.seal_partition(source)
        workers, done = [team.start(work, conf, seed) for seed in range(WORKERS)], threading.Event()
        killer = Killer(workers, lambda seed: team.start(work, conf, seed), done)
        killer.start()
        trained = {source: trained_of(client, source) for source in SOURCES}
        done.set()
        killer.join()
        found = usage.figures()
    wrong = {source: rows for source, rows in trained.items() if rows != Counter(range(groups * ANSWERS))}
    if wrong:
        raise RuntimeError(f"these sources had rows that came twice or never: {sorted(wrong)}")
    count = groups * len(SOURCES)
    return {
        "groups": count, "killed": killer.count, "lost": 0, "twice": 0, **found,
        "groups_per_s": count / found["seconds"], "load": load(),
    }  # fmt: skip


def trained_of(client: Any, source: str) -> Counter[int]:
    """How often each row of a source was trained."""
    rows: Counter[int] = Counter()
    while True:
        try:
            meta = client.get_meta(["answer"], partition_id=source, task_name="actor")
        except tq.EndOfPartitionError:
            return rows
        rows.update(client.get_data(meta)["answer"].tolist())


class Killer(threading.Thread):
    """Kills a worker, and starts another in its place."""

    def __init__(self, workers: list[Any], start: Any, done: threading.Event) -> None:
        super().__init__()
        self._workers, self._start, self._done = workers, start, done
        self.count = 0

    def run(self) -> None:
        chance = random.Random(0)
        while not self._done.wait(KILL_EVERY_S):
            at = chance.randrange(len(self._workers))
            self._workers[at].kill()
            self.count += 1
            self._workers[at] = self._start(WORKERS + self.count)


SYSTEMS = {OURS: ours}
