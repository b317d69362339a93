# SPDX-License-Identifier: Apache-2.0
"""A driver on the first of two hosts: starts the queue, uses it from both, and prints what it found as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
import torch

import transfer_queue as tq

ROWS = 4


@ray.remote(num_cpus=0)
class Program:
    """On one of the hosts."""

    def __init__(self) -> None:
        conf = tq.init()
        self.known = {"address": conf.address[:3], "key_file": conf.key_file}

    def put(self, start: int) -> dict[str, Any]:
        rows = torch.arange(start, start + ROWS).unsqueeze(1).repeat(1, 20_000)
        tq.get_client().put({"x": rows}, partition_id="p")
        return self.known

    def units(self) -> dict[str, tuple[int, str]]:
        stats = tq.get_client().get_storage_stats()
        return {unit["unit"]: (unit["samples"], unit["path"]) for unit in stats}

    def leave(self) -> bool:
        tq.close()
        path = self.known["key_file"]
        return path is not None and os.path.exists(path)


@ray.remote(num_cpus=0)
class Reader:
    """Has the configuration of another host alone."""

    def stream(self, conf: Any) -> list[int]:
        dataset = tq.StreamingDataset(conf, ROWS, ROWS, ["x"], "p", "t", 0, should_check_consumption_status=True)
        loader = tq.StreamingDataLoader(dataset, num_workers=2)
        return sorted(int(row[0]) for data, _ in loader for row in data["x"].unbind())


def main() -> dict[str, Any]:
    ray.init(address=sys.argv[1], log_to_driver=False)
    conf = tq.init({"backend": {"SimpleStorage": {"memory": "64MiB"}}})
    here, there = (Program.options(resources={name: 1}).remote() for name in ("a", "b"))
    found = {"known": [ray.get(each.put.remote(ROWS * at)) for at, each in enumerate((here, there))]}
    found["units"] = [ray.get(each.units.remote()) for each in (here, there)]
    found["streamed"] = ray.get(Reader.options(resources={"b": 1}).remote().stream.remote(conf))
    found["mode"] = oct(os.stat(conf.key_file).st_mode & 0o777)
    found["left"] = [ray.get(each.leave.remote()) for each in (there,)]
    tq.close()
    ray.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
