# SPDX-License-Identifier: Apache-2.0
"""The main program of a server process: reads its orders from stdin, says "ready", serves until it is stopped."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from transfer_queue.errors import QueueUnreachableError, TransferQueueError, to_wire

if TYPE_CHECKING:
    from transfer_queue.config import SharedMemoryConfig
    from transfer_queue.server.exporter import Exporter
    from transfer_queue.server.front import Front
    from transfer_queue.server.orders import Orders
    from transfer_queue.storage.base import StorageManager
    from transfer_queue.storage.unit.spill import SpillFile
    from transfer_queue.storage.unit.unit import StorageUnit
    from transfer_queue.transport.server import SocketServer

_UNIT_TIMEOUT_S = 30.0
_COLLECTIONS = (10_000, 2, 700)
"""Thresholds of the garbage collector: it looks at 30 000 new objects at most in one go, and hardly ever at all."""


def main(orders: Orders, ready: Callable[[str | None, str | None], None]) -> None:
    """Serve what ``orders`` says. Returns when stopped or when the parent process has ended.

    ``ready`` is called once clients can connect: with the address for other hosts and "host:port" of the queue's
    metrics, as far as there are any.

    Raises:
        QueueUnreachableError: it had joined a queue, and has lost it.
    """
    # Before any import that starts threads (NumPy's does): one that did not block the signals would take them, and die.
    signal.pthread_sigmask(signal.SIG_BLOCK, _stop_signals(orders))
    _allow_many_clients()
    from transfer_queue.transport.server import SocketServer

    server = SocketServer(orders.address)
    _stop_with(server, orders)
    with ExitStack() as ending:
        ending.callback(_tidy_up, server, orders)
        front, listening = open_front(server, orders, ending)
        ready(listening, front.conf["metrics"].get("endpoint"))
        collect_rarely()
        server.serve(front)


def _tidy_up(server: SocketServer, orders: Orders) -> None:
    Path(server.address.removeprefix("ipc://")).unlink(missing_ok=True)
    if orders.parent is not None:  # it may end at the same moment, and does not tidy up then: the last process does
        with contextlib.suppress(OSError):  # the sockets of others are still there, or all is gone already
            os.rmdir(orders.directory)


def open_front(server: SocketServer, orders: Orders, ending: ExitStack) -> tuple[Front, str | None]:
    """What ``server`` is to serve, and the address for other hosts.

    ``ending`` gets what ends the rest once nothing is served any more.
    """
    exporter = _export(orders)
    if exporter is not None:
        ending.callback(exporter.close)
        metrics = {**orders.conf["metrics"], "endpoint": exporter.endpoint}
        orders = replace(orders, conf={**orders.conf, "metrics": metrics})
    front = _make_front(server, orders, ending)
    listening = _listen(server, front, orders)
    _join(server, front, listening, orders, ending)
    return front, listening


def _export(orders: Orders) -> Exporter | None:
    """Serve metrics, if they are enabled and this is the controller's process."""
    config = orders.config
    if not (orders.controller and config.metrics.enabled):
        return None
    from transfer_queue.server.exporter import ANSWER_S, Exporter, metrics_host

    host, port = metrics_host(config), config.metrics.port
    return Exporter(host, port, lambda: _storage_client("metrics", orders, None, ANSWER_S))


def _listen(server: SocketServer, front: Front, orders: Orders) -> str | None:
    """Serve other hosts, too, where the orders say so. Returns the address with its real port."""
    if orders.listen is None:
        return None
    from transfer_queue.transport.tcp_wire import read_keys

    keys = None if orders.key_file is None else read_keys(orders.key_file)
    address = server.listen(orders.listen, keys)
    front.listens_at(address)
    return address


def _join(server: SocketServer, front: Front, listening: str | None, orders: Orders, ending: ExitStack) -> None:
    """Make the unit of this process known: to its own controller, or to that of another process."""
    if front.unit is None:
        return
    from transfer_queue.server.membership import Membership, advertised
    from transfer_queue.utils.machine import host_id

    controller = orders.join or server.address
    addresses = [server.address, *([] if listening is None else [advertised(listening, controller)])]
    name, capacity = front.unit.name, orders.capacity_bytes
    if front.plane is not None:
        front.plane.state.units.add_own(name, host_id(), addresses, capacity)
        return
    member = Membership(controller, orders.key_file, name)

    def lost() -> None:
        if orders.parent is not None:
            if orders.listen is None:  # its owner, which has the controller, ends it, or has ended itself
                return
            shutil.rmtree(orders.directory, ignore_errors=True)  # the owner is a host's own, and may live on
        server.stop()

    def leave() -> None:
        member.leave()
        if member.lost is not None and orders.parent is None:  # else its owner knows
            raise QueueUnreachableError(member.lost)

    ending.callback(leave)
    member.join(addresses, capacity, lost)


def _make_front(server: SocketServer, orders: Orders, ending: ExitStack) -> Front:
    """The handler for this server."""
    from transfer_queue.calls import Turn
    from transfer_queue.config import preallocated_samples
    from transfer_queue.control.draw import running
    from transfer_queue.control.plane import ControlPlane
    from transfer_queue.control.state import plane_config
    from transfer_queue.server.front import Front
    from transfer_queue.server.janitor import Janitor
    from transfer_queue.server.watchdog import Watchdog

    unit = None if orders.unit is None else _unit(server, orders.unit, orders)
    plane = None
    if orders.controller:
        settings = plane_config(orders.config, orders.sampler, preallocated_samples())
        plane = ControlPlane(replace(settings, server=secrets.randbelow(2**24)))

    def janitor() -> Janitor:
        return Janitor(_storage_client("controller", orders, orders.backend_path))

    front = Front(orders.conf, plane, unit, janitor, Turn(time.monotonic))
    ending.callback(front.close)
    server.turned = front.meter.turn
    front.disconnect, front.connections = server.disconnect, server.clients
    if plane is not None:
        watchdog = Watchdog(running)
        ending.callback(watchdog.close)
        front.watch, front.alarms = server.watch, watchdog.alarms
        if unit is None:
            front.start_janitor()
    return front


def _unit(server: SocketServer, name: str, orders: Orders) -> StorageUnit:
    """The storage unit of this server."""
    from transfer_queue.storage.messages import INLINE_NBYTES
    from transfer_queue.storage.unit.lend import lend_arena
    from transfer_queue.storage.unit.unit import StorageUnit

    storage = orders.config.backend.SimpleStorage
    file = _spill_file(storage)
    arena = lend_arena(server, file) if storage.arena else None
    inline_nbytes = INLINE_NBYTES if orders.inline_nbytes is None else orders.inline_nbytes
    return StorageUnit(name, orders.capacity_bytes, arena, inline_nbytes, file)


def _spill_file(storage: SharedMemoryConfig) -> SpillFile | None:
    """This unit's share of the disk; None if nothing is spilled."""
    from transfer_queue.storage.unit.spill import SpillFile

    spill = storage.ssd_offload
    if not spill.enabled:
        return None
    most, units = spill.most_bytes(), len(storage.zmq_info)
    return SpillFile(spill.path, None if most is None else max(1, most // units), spill.threshold_bytes, units)


def _storage_client(
    name: str, orders: Orders, backend_path: str | None, timeout_s: float = _UNIT_TIMEOUT_S
) -> StorageManager:
    """A client of the storage for one thread of this process, in a session of its own.

    ``backend_path``: the module and class of the backend; None if they are unknown here: then of the units only.
    """
    from transfer_queue.storage.backends import StorageManagerFactory, adopt, section_of, storage_settings
    from transfer_queue.transport.session import Session
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    config, backend = orders.config, "SimpleStorage"
    if backend_path is not None:
        backend = config.backend.storage_backend
        adopt(backend, backend_path)
    section = section_of({**orders.conf["backend"], "storage_backend": backend})  # it may be one of the user's own
    key_file = None if orders.listen is None else orders.key_file  # units of other hosts have the same keys
    session = Session(name, ZMQServerInfo.from_dict(config.controller.zmq_info).peer(), key_file)
    return StorageManagerFactory.create(backend, session, storage_settings(section, timeout_s=timeout_s))


def _allow_many_clients() -> None:
    """Every client takes some descriptors of this process, and the usual limit is a low one."""
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def collect_rarely() -> None:
    """Objects made so far stay, and requests leave no cycles, so a search every 700 objects would be in vain."""
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)


def _stop_with(server: SocketServer, orders: Orders) -> None:
    # A handler would run between two bytecodes only: a signal that comes just before the loop waits would be slept
    # over. A thread that waits for the signal itself misses none.
    threading.Thread(target=_stop_at_signal, args=(server, _stop_signals(orders)), daemon=True).start()
    if orders.parent is None:
        return
    from transfer_queue.utils.machine import pid_namespace

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle: it ends its servers itself

    def parent_ended() -> None:
        server.stop()
        shutil.rmtree(orders.directory, ignore_errors=True)

    server.watch(orders.parent, pid_namespace(), parent_ended)
    if os.getppid() != orders.parent:  # it ended before we could watch it
        parent_ended()


def _stop_signals(orders: Orders) -> set[signal.Signals]:
    """What ends a server: if it has no owner, also Ctrl-C and the end of its terminal, unless nohup ignores that."""
    if orders.parent is not None:
        return {signal.SIGTERM}
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return {signal.SIGTERM, signal.SIGINT, *([] if ignores_hangup else [signal.SIGHUP])}


def _stop_at_signal(server: SocketServer, signals: set[signal.Signals]) -> None:
    signal.sigwait(signals)
    server.stop()


def _tell(replies: TextIO, **said: Any) -> None:
    """The one line that the process which waits for this server reads. If that has ended, so does the server."""
    try:
        replies.write(json.dumps(said) + "\n")
        replies.close()
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes where a user can see it
    text = sys.stdin.read()
    if not text:  # the owner ended before it gave orders
        shutil.rmtree(sys.argv[1], ignore_errors=True)
        sys.exit(1)
    try:
        sys.path[:] = json.loads(text)["sys_path"]  # first, because it may say where the next import lies
        import msgspec

        from transfer_queue.server.orders import Orders

        orders = msgspec.json.decode(text, type=Orders)
        main(orders, lambda listening, _: _tell(replies, ready=True, listening=listening))
    except Exception as error:  # the guard of the start: the process that waits for "ready" gets the error
        if replies.closed:
            if isinstance(error, TransferQueueError):  # it says why, without a traceback
                sys.exit(f"error: {error}")
            raise
        code, text = to_wire(error)
        _tell(replies, code=code, text=text)
        sys.exit(1)
