# SPDX-License-Identifier: Apache-2.0
"""Workers answer prompts, one of them is killed every second, and yet each prompt is trained once."""

import multiprocessing
import random
import threading
import time
from collections import Counter

import torch

import transfer_queue as tq

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tensordict", "transfer_queue.interface"])  # so that a new worker starts at once
PROMPTS, ANSWERS, PER_STEP, WORKERS = 60, 4, 6, 3


def work() -> None:
    """A worker: it leases a prompt, answers it slowly, and closes the lease with all answers."""
    client = tq.get_client()
    for lease in client.leases("train"):
        prompt = lease.head["prompt"].item()
        if prompt % 20 == 7 and lease.attempt == 1:
            lease.release("the answer was empty", blame="sample")  # for another attempt
        else:
            time.sleep(random.uniform(0.1, 0.9))  # in your program: a language model
            lease.close({"answer": prompt * 10 + torch.arange(ANSWERS)})


def start_worker() -> multiprocessing.Process:
    worker = PROCESSES.Process(target=work)
    worker.start()
    return worker


def kill_workers(workers: list[multiprocessing.Process], killed: list[int], over: threading.Event) -> None:
    """Every second a worker dies, as on a machine that fails, and another one starts."""
    while not over.wait(1.0):
        workers.append(start_worker())
        victim = workers.pop(0)
        killed.append(victim.pid)
        victim.kill()
        victim.join()


def main() -> None:
    tq.init()
    client = tq.get_client()
    client.register_task("update_actor", tq.GroupSampler(groups=PER_STEP))
    keys = [f"prompt {number}" for number in range(PROMPTS)]
    client.add_groups({"prompt": torch.arange(PROMPTS)}, "train", keys=keys, tasks=["update_actor"])
    client.seal_partition("train")  # no more prompts: the workers end with the last one

    workers, killed, over, trained = [start_worker() for _ in range(WORKERS)], [], threading.Event(), Counter()
    killer = threading.Thread(target=kill_workers, args=(workers, killed, over), daemon=True)
    killer.start()
    for step in range(PROMPTS // PER_STEP):
        client.advance("train", step)
        reader = {"dp_rank": 0, "batch_index": step}
        batch = client.get_meta(["answer"], 1, "train", task_name="update_actor", sampling_config=reader, timeout_s=60)
        assert batch.size == PER_STEP * ANSWERS  # whole groups
        trained.update(client.get_heads(batch, "prompt")["prompt"].tolist())  # in your program: an optimizer step
    client.advance("train", step + 1)  # the last step is done
    over.set()
    killer.join()
    for worker in workers:
        worker.join()

    for key, tags in client.kv_list("train")["train"].items():  # the record of each prompt
        if tags["group.attempt"] > 1:
            print(f"{key}: {tags['group.state']} in attempt {tags['group.attempt']}, {tags['group.reason']}")
    print(f"{len(killed)} workers killed; {len(trained)} prompts trained, each once: {set(trained.values()) == {1}}")
    tq.close()


if __name__ == "__main__":
    main()
