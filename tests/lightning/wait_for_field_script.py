# SPDX-License-Identifier: Apache-2.0
"""Waits for a field of some samples, then writes its values to a file.

Arguments: address, partition, field, count, file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import transfer_queue as tq


def main(address: str, partition: str, field: str, count: str, path: str) -> None:
    tq.init(address)
    client = tq.get_client()
    meta = client.get_meta([field], int(count), partition, task_name="waits", timeout_s=40)
    Path(path).write_text(str([float(value) for value in client.get_data(meta)[field]]))
    tq.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
