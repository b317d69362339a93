# SPDX-License-Identifier: Apache-2.0
"""A member server: a child process that adds this host's memory to a running queue, and ends with its owner."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from transfer_queue.launch.local import Servers, await_ready, send_orders
from transfer_queue.launch.serve import member_orders

if TYPE_CHECKING:
    from omegaconf import DictConfig


class MemberServer(Servers):
    """A storage unit in a child process, which has joined the queue."""

    def __init__(
        self, conf: DictConfig, name: str, join: str, keys: tuple[str, str] | None, capacity_nbytes: int | None
    ) -> None:
        """
        Args:
            conf: The merged configuration. ``listen``: where other hosts read the values.
            name: Name of the unit.
            join: Address of the controller.
            keys: The queue's public and secret key; None: without encryption.
            capacity_nbytes: Most bytes of its values; None: no limit.
        Raises:
            LaunchError: the server did not start.
            QueueUnreachableError: no controller answers at ``join``.
        """
        super().__init__()
        try:
            conf.key_file = private_key_file(self._directory, keys)
            orders = member_orders(conf, join, self._directory, capacity_nbytes)
            orders = replace(orders, unit=name, parent=os.getpid())
            process = self._spawn()
            send_orders(process, orders)
            self.address: str = await_ready(process)["listening"]
        except BaseException:
            self.close()
            raise
        self.pid = process.pid


def private_key_file(directory: str, keys: tuple[str, str] | None) -> str | None:
    """Write the public and the secret key to a file in this private directory; a client needs no secret ("").

    Returns:
        The file's path. None if there are no keys, as nothing is encrypted.
    """
    if keys is None:
        return None
    from transfer_queue.transport.tcp_wire import ServerKeys, write_keys  # it loads ZMQ

    path = f"{directory}/keys"
    write_keys(path, ServerKeys(*keys))
    return path
