# SPDX-License-Identifier: Apache-2.0
"""A run of several ranks: all find the first one's queue, and learn through it that one of them is lost."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_tq.queue_config import QueueConfig
from lightning_tq.queue_connection import QueueConnection
from lightning_tq.rank_watchdog import RankGoneError
from transfer_queue.errors import ConfigError, InvalidRequestError, TransferQueueError

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer

    from transfer_queue import TransferQueueClient

_WAIT_S = 3600.0
_LEAVE_S = 5.0
"""Seconds that the thread gets to hear that this rank has left; it holds nothing, and ends with its process."""
_HEAD_START_S = 1.0
"""A rank that failed ends first, so that its launcher reports its error and not the others'."""
_EVERYWHERE = ("0.0.0.0", "*", "[::]", "::")
"""Hosts of an address that listens on all networks."""


@dataclass(frozen=True, slots=True)
class SharedQueue:
    """The first rank's description of the queue that it has opened, for the others."""

    address: str
    """For processes of its own host."""
    remote: str | None
    """For other hosts. None: none of them can join."""
    run: str | None
    """The run that all ranks join in this queue. None: there is one rank."""
    spans_hosts: bool

    @classmethod
    def of(cls, owner: Trainer | Fabric, connection: QueueConnection) -> SharedQueue:
        """On the first rank, which opens the run if there are several ranks."""
        address, listen = connection.address, connection.conf["listen"]
        remote = address if address.startswith("tcp://") else _reachable(owner, listen)
        run = uuid.uuid4().hex if owner.world_size > 1 else None
        if run is not None:
            connection.client.watch_run(run, _name(owner), opens=True)
        spans_hosts = run is not None and int(getattr(owner.strategy, "num_nodes", 1)) > 1
        return cls(address, remote, run, spans_hosts)

    def address_here(self) -> str:
        """Where this process joins. Raises ConfigError if it can't."""
        path = self.address.removeprefix("ipc://")
        is_here = path == self.address or os.path.exists(path)
        if self.remote is not None and (self.spans_hosts or not is_here):
            return self.remote  # a join by it takes the queue's own socket on the first rank's host
        if not is_here:
            raise ConfigError(
                f"this rank runs on host {socket.gethostname()!r}, and the first rank's queue at {self.address} serves "
                f"its own host only. Run 'lightning-tq serve --listen' on every host and set TQ_ADDRESS, or let the "
                f"first rank's queue listen: queue={{'listen': 'tcp://0.0.0.0:0', 'key_file': a file in a folder that "
                f"all hosts share}}. See docs/several_hosts.md."
            )
        return self.address


class RunMembers:
    """This rank's membership in a run, which it has joined. A thread waits until another one or the queue is lost."""

    def __init__(self, client: TransferQueueClient, run: str, rank: int) -> None:
        self._client = client
        self._run = run
        self._rank = rank
        self._error: TransferQueueError | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning-tq-run", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        lost: str | None = None
        found: TransferQueueError
        try:
            while lost is None and not self._left.is_set():
                lost = self._client.watch_run(self._run, timeout_s=_WAIT_S)
            found = RankGoneError(
                f"{lost} failed or ended in the middle of the run, so rank {self._rank} ends too. See that rank's own "
                f"output for the reason."
            )
        except TransferQueueError as error:
            found = error  # streams say so, too; but the main thread may be in a collective with the queue's owner
        if not self._left.wait(_HEAD_START_S):
            self._error = found

    def check(self) -> TransferQueueError | None:
        """The reason to end the run: another rank is lost, or the queue. It is one of the watchdog's checks."""
        return self._error

    def leave(self, failed: bool) -> None:
        """The run has ended here; ``failed`` ends it on all ranks. Idempotent, never raises."""
        self._left.set()
        try:
            self._client.leave_run(self._run, failed)
        except TransferQueueError:
            return  # the queue is gone, or this process has left it
        self._thread.join(_LEAVE_S)


def join_queue(
    owner: Trainer | Fabric, connection: QueueConnection, config: QueueConfig, shared: SharedQueue
) -> RunMembers | None:
    """Join the queue that the first rank has opened, and its run. Returns None if there is one rank.

    Raises:
        ConfigError: this rank can't reach that queue, or is in another one.
    """
    # On another host the same queue may have another address: that of this host's own server.
    connection.open(config, (), shared.address_here(), may_differ=shared.spans_hosts)
    if shared.run is None:
        return None
    if not owner.is_global_zero:
        try:
            connection.client.watch_run(shared.run, _name(owner))
        except InvalidRequestError:
            raise ConfigError(
                f"rank {owner.global_rank} is in the queue at {connection.address}, the first rank in another one at "
                f"{shared.address}. Give all ranks the address of one queue (TQ_ADDRESS)."
            ) from None
    return RunMembers(connection.client, shared.run, owner.global_rank)


def _name(owner: Trainer | Fabric) -> str:
    return f"rank {owner.global_rank} (pid {os.getpid()} of host {socket.gethostname()!r})"


def _reachable(owner: Trainer | Fabric, listen: str | None) -> str | None:
    """The listening queue's address for other hosts, which reach the first rank's host as the launcher says."""
    if listen is None:
        return None
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    environment: Any = getattr(owner.strategy, "cluster_environment", None)
    if host not in _EVERYWHERE or environment is None:
        return listen
    return f"tcp://{environment.main_address}:{port}"
