# SPDX-License-Identifier: Apache-2.0
"""Put samples, add a field to them later, and get a batch whose fields are all there."""

import torch
from tensordict import TensorDict

import transfer_queue as tq

tq.init()  # starts a server process, which ends with this one
client = tq.get_client()

prompts = TensorDict({"prompt": torch.arange(8)}, batch_size=[8])
meta = client.put(prompts, partition_id="train@0")

rewards = TensorDict({"reward": torch.rand(8)}, batch_size=[8])
client.put(rewards, metadata=meta)  # another field of the same samples, later

batch = client.get_meta(["prompt", "reward"], 4, "train@0", task_name="update_actor")
print(client.get_data(batch)["prompt"])  # 4 samples that have both fields
tq.close()
