# SPDX-License-Identifier: Apache-2.0
"""A run of several ranks: all find the first one's queue, and learn through it that one of them is lost."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from dataclasses import dataclass
from typing import Any

from lightning.fabric import Fabric
from lightning.pytorch import Trainer

from lightning_tq.checks import with_host
from lightning_tq.queue_config import QueueConfig
from lightning_tq.queue_connection import QueueConnection
from lightning_tq.rank_watchdog import RankGoneError
from transfer_queue import TransferQueueClient
from transfer_queue.errors import ConfigError, InvalidRequestError, TransferQueueError

_WAIT_S = 3600.0
_LEAVE_S = 5.0
"""Seconds that the thread gets to hear that this rank has left; it holds nothing, and ends with its process."""
_HEAD_START_S = 1.0
"""A rank that failed ends first, so that its launcher reports its error and not the others'."""


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
    """The ranks of a run. Where there are several, a thread waits until another one or the queue is lost."""

    def __init__(self) -> None:
        self._error: TransferQueueError | None = None
        self._left = threading.Event()
        self._watching: tuple[TransferQueueClient, str, threading.Thread] | None = None

    def __reduce__(self) -> tuple[type[RunMembers], tuple[()]]:
        return RunMembers, ()  # a spawned rank joins by itself

    def join(
        self, owner: Trainer | Fabric, connection: QueueConnection, config: QueueConfig, shared: SharedQueue
    ) -> None:
        """Join the queue that the first rank has opened, and its run, if there are several ranks.

        Raises:
            ConfigError: this rank can't reach that queue, or is in another one.
        """
        # On another host the same queue may have another address: that of this host's own server.
        connection.open(config, (), shared.address_here(), may_differ=shared.spans_hosts)
        if shared.run is None:
            return
        if not owner.is_global_zero:
            try:
                connection.client.watch_run(shared.run, _name(owner))
            except InvalidRequestError:
                raise ConfigError(
                    f"rank {owner.global_rank} is in the queue at {connection.address}, the first rank in another one "
                    f"at {shared.address}. Give all ranks the address of one queue (TQ_ADDRESS)."
                ) from None
        self.watch(connection.client, shared.run, owner.global_rank)

    def watch(self, client: TransferQueueClient, run: str, rank: int) -> None:
        """Watch a run that this process has joined as this rank."""
        thread = threading.Thread(target=self._watch, args=(client, run, rank), name="lightning-tq-run", daemon=True)
        self._watching = client, run, thread
        thread.start()

    def _watch(self, client: TransferQueueClient, run: str, rank: int) -> None:
        lost: str | None = None
        found: TransferQueueError
        try:
            while lost is None and not self._left.is_set():
                lost = client.watch_run(run, timeout_s=_WAIT_S)
            found = RankGoneError(
                f"{lost} failed or ended in the middle of the run, so rank {rank} ends too. See that rank's own "
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
        watching, self._watching = self._watching, None
        if watching is None:
            return
        client, run, thread = watching
        self._left.set()
        with contextlib.suppress(TransferQueueError):  # the queue is gone, or this process has left it
            client.leave_run(run, failed)
            thread.join(_LEAVE_S)


def _name(owner: Trainer | Fabric) -> str:
    return f"rank {owner.global_rank} (pid {os.getpid()} of host {socket.gethostname()!r})"


def _reachable(owner: Trainer | Fabric, listen: str | None) -> str | None:
    """The listening queue's address for other hosts, which reach the first rank's host as the launcher says."""
    if listen is None:
        return None
    environment: Any = getattr(owner.strategy, "cluster_environment", None)
    return listen if environment is None else with_host(listen, environment.main_address)
