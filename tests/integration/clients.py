# SPDX-License-Identifier: Apache-2.0
"""Further clients of a running queue, and what its storage units say, both through public names only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import transfer_queue as tq


def connect(name: str, conf: Any, layout: str | None = None) -> tq.TransferQueueClient:
    """One more client of the queue that ``init`` returned this configuration of."""
    client = tq.TransferQueueClient(name, conf["controller"]["zmq_info"])
    backend, settings = conf["backend"]["storage_backend"], conf["client"]
    client.initialize_storage_manager(
        backend,
        conf["backend"].get(backend, {}),
        layout=layout or settings["layout"],
        timeout_s=settings["timeout_s"],
    )
    return client


def units(client: tq.TransferQueueClient | None = None) -> list[Any]:
    """The numbers of each storage unit, as attributes; by default asked by this process' own client."""
    return [SimpleNamespace(**unit) for unit in (client or tq.get_client()).get_storage_stats()]
