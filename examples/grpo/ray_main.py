# SPDX-License-Identifier: Apache-2.0
"""The same run on a Ray cluster: the trainer and its producers are actors, which Ray places on its nodes.

``python -m examples.grpo.ray_main [--trainer.max_epochs=3 ...]`` takes the options of ``lightning-tq fit``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
import yaml

import transfer_queue as tq
from lightning_tq.queue_config import as_queue_config

CONFIGS = [Path(__file__).parents[2] / "configs" / name for name in ("grpo.yaml", "grpo_ray.yaml")]


@ray.remote
class Worker:
    """A process somewhere in the cluster. Whatever it runs finds the queue by itself."""

    def run(self, target: str, **settings: Any) -> Any:
        module, _, function = target.partition(":")
        return getattr(import_module(module), function)(**settings)


def main(options: list[str]) -> int:
    """Start the queue and the actors, wait for the training. Returns the exit code of ``lightning-tq fit``."""
    ray.init(ignore_reinit_error=True)
    of_the_run, on_ray = (yaml.safe_load(config.read_text())["data"] for config in CONFIGS)
    tq.init(as_queue_config(on_ray["queue"]).conf())
    workers = [Worker.options(num_cpus=0.5).remote() for _ in of_the_run["producers"]]
    try:
        for worker, producer in zip(workers, of_the_run["producers"], strict=True):
            worker.run.remote(producer["target"], **producer.get("args", {}))
        trainer = Worker.options(num_cpus=1).remote()
        fit = ["fit", *(f"--config={config}" for config in CONFIGS), *options]
        return int(ray.get(trainer.run.remote("lightning_tq.cli:main", args=fit)))
    finally:
        for worker in workers:
            ray.kill(worker)
        tq.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
