# SPDX-License-Identifier: Apache-2.0
"""How long after a batch's last rollout has finished does verl's trainer hold the batch? Prints one JSON line.

Its own replay buffer, which polls every 2 s, beside ``transfer_queue.contrib.verl``. Without verl it says so.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

import transfer_queue as tq
from benchmarks.common import arguments, end, received, report

QUESTION = "last rollout finished until its batch is sampled, in verl"
PARTITION = "train"


def roll_out(prompts: int, sessions: int, line: Connection) -> None:
    """In a process of its own. Each number received is a pause between all trajectories and the last prompt's end."""
    torch.set_num_threads(1)
    tq.init()
    while (pause_s := line.recv()) is not None:
        uids = [f"{time.monotonic_ns():x}x{number}" for number in range(prompts)]
        for uid in uids:
            tell(uid, "running")
        began = time.monotonic()
        for uid in uids:
            for session in range(sessions):
                row = {"response_ids": torch.zeros(64, dtype=torch.int64)}
                tq.kv_put(f"{uid}_{session}_0", PARTITION, row, {"seq_len": 64, "global_steps": 1})
            if uid != uids[-1]:
                tell(uid, "finished")
        took_ms = (time.monotonic() - began) * 1e3
        time.sleep(pause_s)
        tell(uids[-1], "finished")
        line.send((time.monotonic(), took_ms))


def tell(uid: str, status: str) -> None:
    tq.kv_put(uid, PARTITION, tag={"is_prompt": True, "status": status, "global_steps": 1})


def measured(sampler: Any, prompts: int, pause_s: float, line: Connection) -> dict[str, float]:
    """One batch. ``rollouts_ms``: what the producer took for the trajectories, while the sampler waited."""
    line.send(pause_s)
    began = time.process_time()
    batch, _ = sampler.sample(global_steps=1, partition_id=PARTITION, batch_size=prompts)
    held, busy_s = time.monotonic(), time.process_time() - began
    finished, rollouts_ms = received(line)
    tq.kv_clear(batch.keys, PARTITION)
    return {"late_ms": (held - finished) * 1e3, "sampler_cpu_ms": busy_s * 1e3, "rollouts_ms": rollouts_ms}


def summary(batches: list[dict[str, float]]) -> dict[str, float]:
    medians = {name: statistics.median(each[name] for each in batches) for name in batches[0]}
    return {**medians, "longest_late_ms": max(each["late_ms"] for each in batches)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--sessions", type=int, default=8, help="trajectories of each prompt")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    if importlib.util.find_spec("verl") is None:
        report(QUESTION, samplers=None, why="verl is not installed")
        return
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from transfer_queue.contrib.verl import WatchingReplayBuffer

    prompts, sessions, rounds = (4, 2, 2) if args.quick else (args.prompts, args.sessions, args.rounds)
    tq.init()
    context = multiprocessing.get_context("spawn")
    line, other = context.Pipe()
    producer = context.Process(target=roll_out, args=(prompts, sessions, other))
    producer.start()
    poll_s = 0.1 if args.quick else 2.0  # verl's own, which its configuration can't change
    samplers = {
        name: kind("sync", {}, 8, "drop", {}, poll_interval=poll_s)
        for name, kind in (("polling", ReplayBuffer), ("told", WatchingReplayBuffer))
    }
    batches: dict[str, list[dict[str, float]]] = {name: [] for name in samplers}
    pauses = random.Random(0)
    try:
        for _ in range(rounds):
            for name, sampler in samplers.items():
                batches[name].append(measured(sampler, prompts, pauses.uniform(0.0, poll_s), line))
        line.send(None)
    finally:
        end(producer)
        tq.close()
    report(
        QUESTION,
        prompts=prompts,
        sessions=sessions,
        rounds=rounds,
        samplers={name: summary(each) for name, each in batches.items()},
    )


if __name__ == "__main__":
    main()
