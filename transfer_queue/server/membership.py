# SPDX-License-Identifier: Apache-2.0
"""A storage unit's membership in a queue: it joins at the controller, and ends when it loses the controller."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from transfer_queue import protocol as p
from transfer_queue.errors import ClosedError, TransferQueueError
from transfer_queue.transport.base import Peer
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.session import Session
from transfer_queue.utils.machine import host_and_port, host_id, is_any_host


class Membership:
    """Its session with the controller. A thread of its own waits for the end of the queue."""

    def __init__(self, controller: str, key_file: str | None, name: str) -> None:
        self._session = Session(f"unit {name}", Peer("controller", controller), key_file)
        self._name = name
        self._thread: threading.Thread | None = None
        self.lost: str | None = None
        """Why the unit ends, once the controller is gone."""

    def join(self, addresses: list[str], capacity_nbytes: int | None, lost: Callable[[], None]) -> None:
        """From now on clients use this unit. ``lost`` is called in another thread once the controller is gone.

        Raises:
            QueueUnreachableError: no controller answers.
        """
        run_blocking(self._session.ask(p.JoinUnit, p.Done, self._name, host_id(), addresses, capacity_nbytes))
        self._thread = threading.Thread(target=self._watch, args=(lost,), name="tq-membership", daemon=True)
        self._thread.start()

    def _watch(self, lost: Callable[[], None]) -> None:
        """The controller answers this only if units come or go. It fails when the controller has ended."""
        known: int | None = None
        try:
            while True:
                ask = self._session.ask(p.ListUnits, p.Units, known, p.LONGEST_WAIT_S, wait_s=p.LONGEST_WAIT_S)
                known = run_blocking(ask).version
        except ClosedError:
            return  # by ``leave``
        except TransferQueueError as error:
            self.lost = f"storage unit {self._name} ends, because it lost the queue: {error}"
            lost()

    def leave(self) -> None:
        """The unit ends: its values are gone."""
        self._session.close()


def advertised(address: str, controller: str) -> str:
    """The address for other hosts. A server that listens everywhere is reached as the controller reaches this host."""
    host, port = host_and_port(address)
    if not address.startswith("tcp://") or not is_any_host(host):
        return address
    own = "127.0.0.1"
    if controller.startswith("tcp://"):
        where, to = host_and_port(controller)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((where, int(to)))  # sends nothing
            own = probe.getsockname()[0]
    return f"tcp://{own}:{port}"
