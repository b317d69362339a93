# SPDX-License-Identifier: Apache-2.0
"""Keys, tags, filters, and waiting for keys without polling."""

import threading

import torch

import transfer_queue as tq

tq.init()
client = tq.get_client()


def rollout() -> None:
    for number in range(8):
        tags = {"env": ("math", "code")[number % 2], "policy_version": number // 4, "status": "running"}
        tq.kv_put(f"prompt-{number}", "train", tag=tags)
    for number in range(8):
        tq.kv_put(f"prompt-{number}", "train", {"tokens": torch.arange(4)}, tag={"status": "done"})


producer = threading.Thread(target=rollout)
producer.start()

# Returns as soon as three math samples are done.
done = client.wait_keys("train", "status == 'done' and env == 'math'", count=3, timeout_s=60)
print(sorted(done)[:3])

# Follows every change of the list.
known: dict[str, dict] = {}
for changed, removed, _fresh in client.kv_watch("train", timeout_s=60):
    known = {**{key: tags for key, tags in known.items() if key not in removed}, **changed}
    if len(known) == 8 and all(tags["status"] == "done" for tags in known.values()):
        break
producer.join()
assert known == tq.kv_list("train")["train"]

# A task draws only what matches; the other samples stay for other fetches.
batch = client.get_meta(["tokens"], 2, "train", task_name="actor", where="env == 'math' and policy_version >= 1")
print(batch.custom_meta)
tq.close()
