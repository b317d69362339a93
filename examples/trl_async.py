# SPDX-License-Identifier: Apache-2.0
"""TRL's AsyncGRPOTrainer on rollouts of leased prompts, while a worker is killed: python -m examples.trl_async

TRL has the loop and the loss. Which prompt is answered next, how old an answer may be, and what becomes of a dead
worker's prompt, the queue decides. It needs no GPU and no server of vLLM, but Python 3.11 and pip install -e '.[hf]'.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import torch
from jsonargparse import auto_cli
from torch import Tensor
from transformers.trainer_callback import PrinterCallback, TrainerCallback

import transfer_queue as tq
from examples.hf.models import TINY, jagged, load_model, load_tokenizer
from examples.hf.questions import encode_question, make_questions, reward_of
from examples.hf.rollout import GenerateEngine
from examples.trl_on_cpu import let_trl_run_on_cpu
from lightning_tq import Producer, ProducerGroup, WeightsReader
from lightning_tq.producers.model_weights import WEIGHTS_PARTITION, WeightsSnapshot

PROMPTS, ANSWERS, WORKERS = 8, 8, 2  # per step; per prompt; processes
MAX_STALENESS = 2  # the workers are one step ahead of what TRL reads, and TRL reads one batch ahead of what it trains


def questions(count: int) -> Iterator[dict[str, str]]:
    """The data set. Each row becomes the head of a group."""
    return ({"question": question} for question, _ in make_questions(count, random.Random(0)))


def work(worker: int, kill_at: int) -> None:
    """Answer prompts with the newest weights until none is left. Worker 0 dies at version ``kill_at``, with a lease."""
    torch.manual_seed(worker)
    client, weights, tokenizer = tq.get_client(), WeightsReader(), load_tokenizer(TINY)
    engine = GenerateEngine(TINY, lora=False, max_tokens=8)
    for lease in client.leases("train"):
        version = lease.version or 0
        state = weights.latest(least=version).state_dict
        engine.load({**state, "lm_head.weight": state["model.embed_tokens.weight"]})  # TRL sends tied weights once
        prompt = encode_question(tokenizer, lease.head["question"][0])
        tokens, log_probs = engine.answer([prompt], ANSWERS)
        if worker == 0 and 0 < kill_at <= version:
            os.kill(os.getpid(), signal.SIGKILL)  # as if its machine had failed
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        rows = jagged([torch.cat([torch.tensor(prompt), answer]) for answer in tokens])
        tags = [{"reward": reward_of(text)} for text in texts]
        with lease:
            lease.close({"tokens": rows, "log_probs": jagged(log_probs)}, tags)  # log_probs: of the answers' tokens


class QueueWeights:
    """TRL's ``weight_transfer``: each version of the weights is a sample, which every WeightsReader sees."""

    def __init__(self) -> None:
        self._snapshot, self._keys, self._version = WeightsSnapshot(), deque[str](), 0

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        tensors, self._version = dict(iterator), self._version + 1
        for name, view in self._snapshot.prepare(tensors, dtype=None, pinned=False).items():
            view.copy_(tensors[name])
        self._keys.append(self._snapshot.put(WEIGHTS_PARTITION, self._version, info={}))
        while len(self._keys) > 2:
            tq.kv_clear([self._keys.popleft()], WEIGHTS_PARTITION)

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


class LeasedRollouts:
    """TRL's ``rollout_worker``. It is also the ``rollout_buffer`` from which TRL reads: whole groups of the queue."""

    def __init__(self, prompts: int, kill_at: int) -> None:
        """``prompts``: how many there are. ``kill_at``: see ``work``; 0: no worker is killed."""
        self.rollout_buffer, self.metrics_queue = self, queue.Queue[dict[str, float]]()
        self.read, self.retried = Counter[int](), dict[str, Any]()  # how often each prompt; tags of those leased twice
        self._samples, self._untrained, self._num_batches = deque[Any](), deque[tq.BatchMeta](), 0
        self._client = tq.get_client()
        sampler = tq.GroupSampler(groups=PROMPTS, ahead=1, max_staleness=MAX_STALENESS, stale="wait")
        self._client.register_task("trl", sampler, dp_size=1)
        rows = {"rows": "examples.trl_async:questions", "args": {"count": prompts}}
        self._processes = ProducerGroup([
            Producer(target="lightning_tq.prompts:feed", args={**rows, "partition": "train", "tasks": ["trl"]}),
            Producer(target="examples.trl_async:work", args={"kill_at": kill_at}, count=WORKERS),
        ])  # fmt: skip

    # ---- what TRL calls of a rollout_worker; update_model_version after each send_weights, and before start ----

    def start(self) -> None:
        self._processes.start(tq.init().address)

    def stop(self) -> None:
        self._processes.end()

    def update_model_version(self, model_version: int) -> None:
        """From now on leases have this version. What was drawn for earlier steps is trained, and deleted."""
        self._client.advance("train", model_version)
        self.retried |= self._client.kv_list("train", where="group.attempt > 1").get("train", {})
        trained = model_version - 1  # the first version is 1
        while self._num_batches - len(self._untrained) < trained:
            self._client.ack(self._untrained.popleft(), "trl")

    def check_health(self, stale_after_s: float) -> None:
        """Nothing to do: without a living worker, ``get`` raises a ProducersGoneError."""

    # ---- what TRL calls of a rollout_buffer ----

    def get(self, timeout: float) -> Any:
        """The next sample. Groups are drawn when the trainer wants them, so they are as young as can be."""
        if not self._samples:
            position = {"dp_rank": 0, "batch_index": self._num_batches}
            try:
                meta = self._client.get_meta(
                    ["tokens", "log_probs"], partition_id="train", task_name="trl", sampling_config=position,
                    timeout_s=timeout,
                )  # fmt: skip
            except tq.BatchTimeoutError:
                raise queue.Empty from None
            self._num_batches += 1
            self._untrained.append(meta)
            self._samples.extend(self._as_samples(meta))
        return self._samples.popleft()

    def qsize(self) -> int:
        return len(self._samples)

    def _as_samples(self, meta: tq.BatchMeta) -> Iterator[Any]:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        rewards = torch.tensor([tags["reward"] for tags in meta.custom_meta]).view(-1, ANSWERS)  # groups stay together
        centred, spread = rewards - rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True, correction=0)
        advantages = (centred / (spread + 1e-8)).flatten().tolist()
        self.read.update(set(meta.heads))
        self.metrics_queue.put({"queue/staleness_max": float(self._num_batches - min(meta.group_versions.values()))})
        data = self._client.get_data(meta)
        rows = zip(meta.heads, data["tokens"].unbind(), data["log_probs"].unbind(), strict=True)
        for row, (head, tokens, log_probs) in enumerate(rows):
            of_prompt = torch.zeros(len(tokens) - len(log_probs))
            yield RolloutSample(
                prompt=[], completion=[],  # texts, which TRL only logs
                input_ids=tokens.numpy(),
                completion_mask=torch.cat([of_prompt, torch.ones(len(log_probs))]).long().numpy(),
                old_log_probs=torch.cat([of_prompt, log_probs]).numpy(),
                advantage=advantages[row],
                model_version=meta.group_versions[head],
                group_id=head,
                metrics={"reward": meta.custom_meta[row]["reward"]},
            )  # fmt: skip


class Table(TrainerCallback):
    """Prints a line of what TRL logs, which has what was in ``metrics_queue``, too."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            print(f"{state.global_step:6}  {logs['reward']:6.3f}  {logs['queue/staleness_max']:13.0f}", flush=True)


def main(steps: int = 50, kill_at: int = 10) -> None:
    """Train the tiny model of examples/hf to answer in digits only. A worker is killed at version ``kill_at``."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    tq.init()
    let_trl_run_on_cpu()
    prompts = (steps + 1) * PROMPTS  # TRL reads one batch more than it trains
    tokenizer, rollouts = load_tokenizer(TINY), LeasedRollouts(prompts, kill_at)
    with tempfile.TemporaryDirectory() as folder:
        load_model(TINY, tokenizer).save_pretrained(folder)  # TRL takes no model, but the folder of one
        config = AsyncGRPOConfig(
            folder, max_steps=steps, per_device_train_batch_size=PROMPTS * ANSWERS, learning_rate=3e-3,
            token_budget=0, max_staleness=MAX_STALENESS, logging_steps=max(1, steps // 10), use_cpu=True, bf16=False,
            gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = AsyncGRPOTrainer(
            folder, args=config, processing_class=tokenizer, rollout_worker=rollouts, weight_transfer=QueueWeights(),
            callbacks=[Table()], train_dataset=Dataset.from_dict({"prompt": []}),  # not read: the queue has the prompts
        )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    print("  step  reward  max staleness")
    trainer.train()
    for name, tags in rollouts.retried.items():
        print(f"{name}: attempt {tags['group.attempt']}, {tags['group.reason']}")
    once = set(rollouts.read.values()) == {1}
    print(f"{len(rollouts.read)} of {prompts} prompts read, each once: {once}")
    tq.close()


if __name__ == "__main__":
    auto_cli(main)
