# SPDX-License-Identifier: Apache-2.0
"""How long from import to the first put, and how large are the servers without data?"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.common import report

FIRST_PUT = """
import time; started = time.perf_counter()
import transfer_queue as tq
imported = time.perf_counter() - started
import torch; from tensordict import TensorDict
torch_in = time.perf_counter() - started
tq.init()
up = time.perf_counter() - started
tq.get_client().put(TensorDict({"x": torch.zeros(1, 4)}, batch_size=[1]), partition_id="p")
put = time.perf_counter() - started
import psutil
sizes = [child.memory_info().rss / 2**20 for child in psutil.Process().children()]
print(imported, up - torch_in, put, sum(sizes), max(sizes))
"""


def main(repeats: int = 5) -> None:
    runs = []
    for _ in range(repeats):
        done = subprocess.run([sys.executable, "-c", FIRST_PUT], capture_output=True, text=True, check=True)
        runs.append([float(figure) for figure in done.stdout.split()])
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, tensordict"], check=True)
    imported, init, put, servers, largest = (statistics.median(column) for column in zip(*runs, strict=True))
    report(
        "startup",
        import_s=imported,
        init_s=init,
        import_to_first_put_s=put,
        interpreter_with_torch_s=time.perf_counter() - started,
        servers_mib=servers,
        largest_server_mib=largest,
    )


if __name__ == "__main__":
    main()
