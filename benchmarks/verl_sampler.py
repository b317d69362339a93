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


def measured(sampler: Any, prompts: int, rounds: int, line: Connection) -> dict[str, float]:
    pauses, waits_ms, rollouts_ms, busy_ms = random.Random(0), [], [], []
    for _ in range(rounds):
        line.send(pauses.uniform(0.0, sampler.poll_interval))
        began = time.process_time()
        batch, _ = sampler.sample(global_steps=1, partition_id=PARTITION, batch_size=prompts)
        held = time.monotonic()
        busy_ms.append((time.process_time() - began) * 1e3)
        finished, took_ms = received(line)
        waits_ms.append((held - finished) * 1e3)
        rollouts_ms.append(took_ms)
        tq.kv_clear(batch.keys, PARTITION)
    return {
        "p50_ms": statistics.median(waits_ms),
        "longest_ms": max(waits_ms),
        "sampler_cpu_ms": statistics.median(busy_ms),
        "rollouts_ms": statistics.median(rollouts_ms),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--sessions", type=int, default=8, help="trajectories of each prompt")
    parser.add_argument("--rounds", type=int, default=12)
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
    figures = {}
    try:
        for name, kind in (("polling", ReplayBuffer), ("told", WatchingReplayBuffer)):
            sampler = kind("sync", {}, 8, "drop", {}, **({"poll_interval": 0.1} if args.quick else {}))
            figures[name] = measured(sampler, prompts, rounds, line)
        line.send(None)
    finally:
        end(producer)
        tq.close()
    report(QUESTION, prompts=prompts, sessions=sessions, rounds=rounds, samplers=figures)


if __name__ == "__main__":
    main()
