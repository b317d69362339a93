"""The processes that fill the queue. The trainer starts them, and they end with it."""

from contextlib import suppress

import torch
from grpo_policy import Policy, all_prompts

import transfer_queue as tq
from lightning_tq import WeightsReader


def training_prompts():
    """Never ends: the training decides how many it needs."""
    while True:
        yield from ({"prompt": prompt} for prompt in all_prompts()[200:])


def held_out():
    """Fills the partition that each validation reads, unless a checkpoint has brought it back."""
    client = tq.get_client()
    if "val" not in client.get_partition_list():
        prompts = all_prompts()[:200]
        client.create_partition("val", num_samples=len(prompts))
        client.put({"prompt": prompts, "solution": prompts.flip(1)}, partition_id="val")


def rollout(answers=16, at_once=8, worker=0):
    """Answers prompts with the newest weights. Any number of such processes share the work."""
    torch.set_num_threads(1)
    torch.manual_seed(worker)
    client, weights, policy = tq.get_client(), WeightsReader(), Policy()
    with suppress(tq.EndOfPartitionError):  # the training is over
        while True:
            leases = client.lease("train", at_once)  # waits rather than running too far ahead
            policy.load_state_dict(weights.latest(least=max(lease.version or 0 for lease in leases)).state_dict)
            prompts = torch.stack([lease.head["prompt"][0] for lease in leases]).repeat_interleave(answers, dim=0)
            answer, log_probs = policy.answer(prompts)
            reward = (answer == prompts.flip(1)).float().mean(1)
            for number, lease in enumerate(leases):
                own = slice(number * answers, (number + 1) * answers)
                with lease:
                    lease.close({"answer": answer[own], "old_log_probs": log_probs[own], "reward": reward[own]})
