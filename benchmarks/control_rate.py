# SPDX-License-Identifier: Apache-2.0
"""Do a fetch and a reward take longer the more samples and partitions there are? What does a sample cost the server?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, pairwise

import psutil
import torch
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.common import arguments, bounded, median_ms, report, timed_ms

BATCH = 32
PER_TASK = 25  # fetches until the next task takes over: 1000 samples are enough for 31
BESIDE = 1000  # samples in the fetched partition and in each one beside it
AT_ONCE = 50_000
SIBLINGS = 8  # answers to one prompt
DRAWS = 100  # fetches by which a task draws half of the samples whose memory is measured


def fill(client: tq.TransferQueueClient, partition: str, samples: int) -> None:
    """So many ready samples of four bytes each, in few large puts."""
    for start in range(0, samples, AT_ONCE):
        size = min(AT_ONCE, samples - start)
        client.put(TensorDict({"x": torch.zeros(size)}, batch_size=[size]), partition_id=partition)


def fetch_ms(client: tq.TransferQueueClient, partition: str, repeats: int, budget_s: float = 20.0) -> dict[str, float]:
    """Medians of a fetch of 32, and of the first fetch of a task, which makes the task known."""
    first: list[float] = []
    later: list[float] = []
    tasks = (f"task-{number}" for number in count())
    for number in bounded(repeats, budget_s):
        if number % PER_TASK == 0:
            task = next(tasks)
        took = timed_ms(partial(client.get_meta, ["x"], BATCH, partition, task_name=task))
        (later if number % PER_TASK else first).append(took)
    return {"p50_ms": statistics.median(later), "first_of_a_task_ms": statistics.median(first)}


def fetch_among_ms(client: tq.TransferQueueClient, samples: int, repeats: int) -> dict[str, float]:
    """Of a partition with so many ready samples, alone in the queue."""
    fill(client, "large", samples)
    found = fetch_ms(client, "large", repeats)
    client.clear_partition("large")
    return found


def fetch_beside_ms(client: tq.TransferQueueClient, partitions: int, repeats: int) -> dict[str, float]:
    """Of a partition of 1000 samples beside so many others of that size, which have been fetched from, too."""
    names = [f"beside-{number}" for number in range(partitions)]
    for name in names:
        fill(client, name, BESIDE)
        client.get_meta(["x"], BATCH, name, task_name="task-0")
    fill(client, "fetched", BESIDE)
    found = fetch_ms(client, "fetched", repeats)
    for name in ["fetched", *names]:
        client.clear_partition(name)
    return found


def rewards_one_by_one_ms(client: tq.TransferQueueClient, pid: int, prompts: int) -> dict[str, float]:
    """What one reward costs while a task waits for whole groups, and what of it is the server's CPU time.

    The last answer of each prompt gets its reward last, so that nearly all samples are ready and few groups are whole.
    """
    samples, server = prompts * SIBLINGS, psutil.Process(pid)
    meta = client.put({"prompt": torch.zeros(samples)}, partition_id="rewards")
    client.register_task("groups", sampler=tq.GRPOGroupNSampler(SIBLINGS))
    order = [prompt * SIBLINGS + answer for answer in range(SIBLINGS) for prompt in range(prompts)]
    with ThreadPoolExecutor(1) as reader:
        fetch = partial(client.get_meta, ["prompt", "reward"], BATCH, "rewards", task_name="groups", timeout_s=600.0)
        rounds = [reader.submit(fetch) for _ in range(samples // BATCH)]
        before = server.cpu_times()
        took = [
            timed_ms(partial(client.put, {"reward": torch.zeros(1)}, metadata=meta[position])) for position in order
        ]
        used = sum(server.cpu_times()[:2]) - sum(before[:2])
        drawn = {index for one in rounds for index in one.result().global_indexes}
    if len(drawn) != samples:
        raise RuntimeError(f"{len(drawn)} of {samples} samples were drawn")
    client.clear_partition("rewards")
    return {"put_p50_ms": statistics.median(took), "server_ms": used * 1e3 / samples}


def fill_named(partition: str, samples: int) -> None:
    """So many ready samples of four bytes, each with a key and a tag."""
    for start in range(0, samples, AT_ONCE):
        numbers = range(start, min(samples, start + AT_ONCE))
        keys, tags = [f"rollout-{number:07d}" for number in numbers], [{"score": number / 8} for number in numbers]
        tq.kv_batch_put(keys, partition, TensorDict({"x": torch.zeros(len(keys))}, batch_size=[len(keys)]), tags)


def memory(samples: int, named: int) -> dict[str, float]:
    """What the controller of a queue holds for so many samples, also with names; no value is read.

    The process' size tells, so samples must be so many that what it keeps for the next message is little beside them.
    """
    conf = tq.init({"server_processes": "each"})  # so that its memory can be told from that of the values
    client, process = tq.get_client(), psutil.Process(conf.controller.zmq_info.pid)
    fill(client, "counted", AT_ONCE)
    sizes = [process.memory_info().rss]
    fill(client, "counted", samples)
    sizes.append(process.memory_info().rss)
    for _ in range(DRAWS):
        client.get_meta(["x"], samples // DRAWS // 2, "counted", task_name="task")
    sizes.append(process.memory_info().rss)
    fill_named("named", named)
    sizes.append(process.memory_info().rss)
    tq.close()
    stored, drawn, with_names = (after - before for before, after in pairwise(sizes))
    return {
        "controller_bytes_per_sample": stored / samples,
        "controller_bytes_per_sample_and_task": drawn / samples,
        "controller_bytes_per_sample_with_key_and_tag": with_names / named,
    }


def rates(client: tq.TransferQueueClient, samples: int, updates: int) -> dict[str, float]:
    """How fast the controller takes in news of so many samples; no value is read."""
    fill(client, "counted", BESIDE)
    filled_s = timed_ms(lambda: fill(client, "counted", samples)) / 1e3
    meta = client.get_meta(["x"], BATCH, "counted", task_name="task")
    versions = count()

    def update() -> None:
        meta.update_custom_meta([{"version": next(versions)}] * BATCH)
        client.set_custom_meta(meta)

    update_ms = median_ms(update, updates)
    client.clear_partition("counted")
    return {"published_samples_per_s": samples / filled_s, "tag_updates_of_32_samples_per_s": 1e3 / update_ms}


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__).parse_args(argv)
    sizes, beside, repeats, updates, measured = (1000, 10**4, 10**5, 10**6), (200, 1000), 300, 300, (10**6, 200_000)
    prompts = (64, 256, 1024)
    if args.quick:
        sizes, beside, repeats, updates, measured = (1000, 20_000), (3,), 30, 10, (200_000, 100_000)
        prompts = (8,)
    costs = memory(*measured)
    conf = tq.init()
    client = tq.get_client()
    costs |= rates(client, max(sizes), updates)
    report(
        "fetch of 32 samples",
        among={samples: fetch_among_ms(client, samples, repeats) for samples in sizes},
        beside_partitions_of_1000={number: fetch_beside_ms(client, number, repeats) for number in beside},
        rewards_one_by_one={
            number: rewards_one_by_one_ms(client, conf.controller.zmq_info.pid, number) for number in prompts
        },
        samples=max(sizes),
        measured_samples=measured[0],
        measured_samples_with_key_and_tag=measured[1],
        **costs,
    )
    tq.close()


if __name__ == "__main__":
    main()
