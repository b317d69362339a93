# SPDX-License-Identifier: Apache-2.0
"""The process of one package: starts its queue, does the rows it is told over a pipe, ends its queue."""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Connection
from typing import Any

import transfer_queue as tq
from benchmarks.versus.rows import ROWS

# The peer waits for ever for a CPU when Ray counts fewer than controller and units ask for.
RAY = {"address": "local", "num_cpus": 4, "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
# What the peer's tutorial sets for its loader: every rank draws by itself, and a fetch of nothing returns at once.
STREAMING = {"controller": {"sampler": "RankAwareSampler", "polling_mode": True}}


class Queue:
    """The package's queue, set up for fetches or for loaders; set up anew when the other is asked for."""

    def __init__(self, ray_folder: str | None) -> None:
        self._ray_folder, self._streaming = ray_folder, False
        if ray_folder is not None:
            import ray

            ray.init(_temp_dir=ray_folder, **RAY)
        self.conf: Any = tq.init()

    def set_up(self, streaming: bool) -> None:
        if streaming != self._streaming:
            tq.close()
            self.conf, self._streaming = tq.init(STREAMING if streaming else None), streaming

    def close(self) -> None:
        tq.close()
        if self._ray_folder is not None:
            import ray

            ray.shutdown()


def main(arguments: list[str]) -> None:
    """``arguments``: descriptor of the pipe, and Ray's folder when the package needs Ray."""
    line, queue = Connection(int(arguments[0])), Queue(arguments[1] if len(arguments) > 1 else None)
    try:
        _say(line, {"package": tq.__file__, "version": getattr(tq, "__distribution_version__", tq.__version__)})
        while order := json.loads(line.recv_bytes()):
            row = ROWS[order["row"]]
            queue.set_up(row.streaming)
            _say(line, row.measure(tq.get_client(), queue.conf, order["quick"]))
    except EOFError:  # the process that gives the orders is gone
        print("the other end of the pipe is gone", file=sys.stderr)
    finally:
        queue.close()


def _say(line: Connection, answer: dict[str, Any]) -> None:
    line.send_bytes(json.dumps(answer).encode())
