# SPDX-License-Identifier: Apache-2.0
"""Trains the agent while its workers die: ``python -m examples.agents.train``; see README.md."""

from __future__ import annotations

import argparse
import multiprocessing
import threading
from multiprocessing import connection
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

import transfer_queue as tq
from examples.agents.policy import Policy, episode_advantages, policy_loss
from examples.agents.report import Report
from examples.agents.worker import work
from lightning_tq import PublishWeights, Stream, TQDataModule

GROUPS, EPISODES = 8, 8
FIELDS = ["state", "guess", "log_prob", "part", "reward"]
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["examples.agents.worker", "transfer_queue.interface"])  # so that one starts at once


class Agent(L.LightningModule):
    """Group-relative policy gradient: an episode is compared with the others of the same secret number."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        data, meta = batch
        log_probs = self.policy(data["state"])
        advantages = episode_advantages(data["reward"], torch.tensor(meta.group_index), data["part"])
        loss = policy_loss(log_probs.gather(1, data["guess"][:, None])[:, 0], data["log_prob"], advantages)
        return loss + 0.005 * (log_probs.exp() * log_probs).sum(-1).mean()  # some curiosity

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Workers:
    """Worker processes. One that is killed is replaced."""

    def __init__(self, count: int, turns_to_live: int) -> None:
        self.killed = 0
        self._turns_to_live = turns_to_live
        self._living = [self._start() for _ in range(count)]
        self._thread = threading.Thread(target=self._replace, daemon=True)
        self._thread.start()

    def _start(self) -> Any:
        process = PROCESSES.Process(target=work, args=(self._turns_to_live,), daemon=True)
        process.start()
        return process

    def _replace(self) -> None:
        while self._living:
            connection.wait([process.sentinel for process in self._living])
            for process in [process for process in self._living if not process.is_alive()]:
                self._living.remove(process)
                if process.exitcode < 0:  # by a signal
                    self.killed += 1
                    self._living.append(self._start())

    def join(self) -> None:
        """Wait until all have ended by themselves."""
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns-to-live", type=int, default=2000, help="a worker's turns until it is killed; 0: never")
    parser.add_argument("--folder", type=Path, default=Path("runs/agents"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    tq.init({"controller": {"producer_grace_s": 30.0}})  # if all workers die at once, others come in that time
    client = tq.get_client()
    sampler = tq.GroupSampler(groups=GROUPS)
    client.register_task("update_actor", sampler)
    heads = {"seed": torch.randint(1 << 30, (options.steps * GROUPS,))}  # a secret number each
    client.add_groups(heads, "train", parts=EPISODES, worker_attempts=20, tasks=["update_actor"])
    client.seal_partition("train")
    workers = Workers(options.workers, options.turns_to_live)
    report = Report(options.folder)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, callbacks=[PublishWeights(module="policy"), report],
    )  # fmt: skip
    trainer.fit(
        Agent(), TQDataModule(train=Stream(partition="train", task="update_actor", fields=FIELDS, sampler=sampler))
    )
    workers.join()
    report.finish(workers.killed)
    tq.close()


if __name__ == "__main__":
    main()
