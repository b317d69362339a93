# SPDX-License-Identifier: Apache-2.0
"""A server of its own, in the foreground: it outlives the programs that use the queue. Other hosts' servers join it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfer_queue.config import merge, typed
from transfer_queue.errors import ConfigError, LaunchError, TransferQueueError
from transfer_queue.launch.directories import short_directory
from transfer_queue.launch.local import keys_for, orders_for, portable, warn_of_memory, with_servers
from transfer_queue.server.main import main
from transfer_queue.server.orders import Orders
from transfer_queue.storage.backends import is_of_units
from transfer_queue.storage.locked_directories import remove_directory
from transfer_queue.transport.base import Peer
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.session import Session
from transfer_queue.transport.unix import remove_stale

if TYPE_CHECKING:
    from omegaconf import DictConfig

Ready = Callable[[str, str | None, str | None], None]
"""Called with the address for programs of this host, that for other hosts, and "host:port" of the queue's metrics."""


def serve(
    conf: DictConfig | Mapping[str, Any] | None, join: str | None = None, directory: str | None = None,
    ready: Ready = lambda local, remote, metrics: None,
) -> None:  # fmt: skip
    """Serve until SIGTERM, SIGINT or SIGHUP. A server that joins a queue also ends when it loses the controller.

    The process must have blocked these signals before it imported anything that starts threads, such as NumPy.

    Args:
        conf: What ``init`` takes. ``listen`` and ``key_file`` say where other hosts may join.
        join: Address of the queue to which this host's memory is added. None: a queue of its own.
        directory: Directory of the socket for programs of this host. It is made if necessary. None: a new private one.
        ready: Called once the server answers: with the address for programs of this host, that for other hosts, and
            "host:port" of the queue's metrics.
    Raises:
        ConfigError: an unknown key, an impossible value, or a key file that can't be read.
        LaunchError: the server can't listen, or the directory has a server already.
        QueueUnreachableError: no controller answers at ``join``, or it has ended since.
    """
    merged = merge(conf)
    where = short_directory("tq-") if directory is None else own_directory(directory)
    try:
        memory = typed(merged).backend.SimpleStorage.memory_bytes()
        orders = member_orders(merged, join, where, memory) if join else _first(merged, where, memory)
        try:
            main(orders, lambda remote, metrics: ready(orders.address, remote, metrics))
        except TransferQueueError:
            raise
        except OSError as error:
            place = merged.listen or orders.address
            raise LaunchError(f"can't listen at {place}: {error.strerror or error}.") from error
    finally:
        if directory is None:
            remove_directory(where)


def own_directory(path: str) -> str:
    """Make a directory that only this user can enter. Raises LaunchError if it can't, or a server is there."""
    absolute = Path(path).absolute()
    try:
        absolute.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"can't make the directory {absolute}: {error.strerror or error}.") from error
    if absolute.stat().st_uid != os.getuid() or absolute.stat().st_mode & 0o077:
        raise LaunchError(f"other users can enter {absolute}: chmod 700, or choose another directory.")
    for name in ("controller", "unit"):
        at = absolute / name
        remove_stale(str(at))
        if at.is_socket():
            raise LaunchError(f"a server answers at {at} already: choose another directory, or end that server.")
    return str(absolute)


def _first(conf: DictConfig, directory: str, memory: int | None) -> Orders:
    """Orders for a controller with a unit, whose values have at most so many bytes."""
    config = typed(conf)
    _check_of_units(conf.backend.storage_backend)
    sampler = portable(conf.controller.sampler)
    if sampler is None:
        raise ConfigError("controller.sampler must be a name, 'module:Class' or a class of a module, to be served.")
    address = f"ipc://{directory}/controller"
    conf = with_servers(conf, address, {"unit0": address}, dict.fromkeys(("controller", "unit0"), os.getpid()))
    if config.listen is not None:
        conf.key_file = keys_for(config, directory)
    warn_of_memory(memory)
    orders = orders_for(conf, address, directory, memory)
    return replace(orders, controller=True, unit="unit0", sampler=sampler)


def member_orders(conf: DictConfig, join: str, directory: str, memory: int | None) -> Orders:
    """Orders for a unit that joins a queue. Raises QueueUnreachableError if no controller answers at ``join``.

    ``memory``: most bytes of its values; None: no limit.
    """
    config = typed(conf)
    if join.startswith("tcp://") and config.key_file is None and config.encryption == "curve":
        raise ConfigError("--join needs the queue's key file: copy the one of the first server here (--key-file).")
    if config.listen is None and join.startswith("tcp://"):
        raise ConfigError("--join needs --listen tcp://HOST:PORT: programs on other hosts read the values here.")
    if config.encryption == "none":
        conf.key_file = keys_for(config, directory)
    key_file = conf.key_file
    with closing(Session("server", Peer("controller", join), key_file)) as session:
        running = merge(run_blocking(session.plain_config()))
    _check_of_units(running.backend.storage_backend)
    running.backend.SimpleStorage.ssd_offload = conf.backend.SimpleStorage.ssd_offload
    name = f"{socket.gethostname()}-{os.getpid()}"
    running = with_servers(running, join, {"unit0": join}, {}, key_file)
    running.listen, running.key_file = config.listen, key_file
    warn_of_memory(memory)
    orders = orders_for(running, f"ipc://{directory}/unit", directory, memory)
    return replace(orders, unit=name, join=join)


def _check_of_units(backend: str) -> None:
    if not is_of_units(backend):
        raise ConfigError(
            f"values of storage backend {backend!r} don't lie in servers of the queue, so none can be served: start "
            f"the queue by init() in a program."
        )
