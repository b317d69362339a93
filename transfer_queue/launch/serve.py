# SPDX-License-Identifier: Apache-2.0
"""The main program of a server process: reads orders as JSON from stdin, says "ready", serves until told to stop."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from transfer_queue.errors import to_wire
from transfer_queue.utils.enum_utils import Role

if TYPE_CHECKING:
    from transfer_queue.storage.base import StorageManager
    from transfer_queue.storage.simple.unit import Told
    from transfer_queue.transport.base import Caller
    from transfer_queue.transport.server import SocketServer
    from transfer_queue.transport.serving_loop import ServingLoop

_UNIT_TIMEOUT_S = 5.0
_OBJECTS_PER_COLLECTION = 50_000


def main(orders: Mapping[str, Any], ready: TextIO) -> None:
    """Serve what ``orders["servers"]`` says; returns when told to stop or when the parent process has ended."""
    # Before any import that starts threads (NumPy's does): one that did not block the signal would take it, and die.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    sys.path[:] = orders["sys_path"]
    _allow_many_clients()
    from transfer_queue.transport.server import SocketServer
    from transfer_queue.transport.serving_loop import ServingLoop

    loop, plain = ServingLoop(), orders["conf"]["client"]["sockets"] == "auto"
    servers = {server["name"]: SocketServer(server["address"], plain, loop) for server in orders["servers"]}
    _stop_with(loop, next(iter(servers.values())), orders)
    for name, server in servers.items():
        if name != Role.CONTROLLER.value:
            server.open(_unit(name, orders, server, servers.get(Role.CONTROLLER.value)))
    if Role.CONTROLLER.value in servers:
        servers[Role.CONTROLLER.value].open(_controller(orders, servers))
    ready.write(json.dumps({"ready": True}) + "\n")
    ready.close()
    _collect_rarely()
    loop.run()
    # The owner may have been told to end at the same moment, and does not tidy up then: the last process does.
    for server in servers.values():
        Path(server.address.removeprefix("ipc://")).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the sockets of others are still there, or all is gone already
        os.rmdir(orders["directory"])


def _allow_many_clients() -> None:
    """Every client takes some descriptors of this process, and the usual limit is a low one."""
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _collect_rarely() -> None:
    """What is there now stays, and requests leave no cycles: to search for some every 700 objects is in vain."""
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION, 20, 20)


def _stop_with(loop: ServingLoop, server: SocketServer, orders: Mapping[str, Any]) -> None:
    # A handler would run between two bytecodes only: a signal that comes just before the loop waits would be slept
    # over. A thread that waits for the signal itself misses none.
    threading.Thread(target=_stop_at_sigterm, args=(loop,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle: it ends its servers itself

    def parent_ended(_: float) -> tuple[()]:
        loop.stop()
        shutil.rmtree(orders["directory"], ignore_errors=True)
        return ()

    server.watch(orders["parent"], orders["pid_namespace"], parent_ended)
    if os.getppid() != orders["parent"]:  # it ended before we could watch it
        parent_ended(0.0)


def _stop_at_sigterm(loop: ServingLoop) -> None:
    signal.sigwait({signal.SIGTERM})
    loop.stop()


def _controller(orders: Mapping[str, Any], servers: Mapping[str, SocketServer]) -> Any:
    from transfer_queue.control.plane import ControlPlane
    from transfer_queue.controller import TransferQueueController, plane_config
    from transfer_queue.storage.settings import storage_settings
    from transfer_queue.storage.simple.near import NearValues
    from transfer_queue.storage.simple.routing import routing_run
    from transfer_queue.transport.inside import InsideCaller

    conf = orders["conf"]
    plane = ControlPlane(plane_config(conf, orders["sampler"], orders["preallocate"]))
    units = [server for name, server in servers.items() if name != Role.CONTROLLER.value]
    # Units of this very loop can't answer while the controller waits for them.
    inside = InsideCaller("controller", units) if units else None
    near = NearValues(units, routing_run(storage_settings(conf["backend"]["SimpleStorage"]))) if units else None
    controller = TransferQueueController(plane, conf, stored_values(conf, inside), near)
    controller.watch = servers[Role.CONTROLLER.value].watch
    return controller


def _unit(name: str, orders: Mapping[str, Any], server: SocketServer, controller: SocketServer | None) -> Any:
    from transfer_queue.storage.simple.hosting import host_unit
    from transfer_queue.storage.simple.unit import INLINE_NBYTES

    section, most = orders["conf"]["backend"]["SimpleStorage"], orders["inline_nbytes"]
    tell = None if controller is None else partial(_tell, controller)
    inline_nbytes = INLINE_NBYTES if most is None else most
    return host_unit(name, section["capacity_bytes"], section["arena"], server, inline_nbytes, tell)


def _tell(controller: SocketServer, client: str, message: bytes) -> Told:
    from transfer_queue import protocol as p
    from transfer_queue.storage.simple.unit import Told

    answer = controller.ask(client, message)
    if answer is None:
        return Told(b"", False)
    return Told(answer.header, not isinstance(p.decode_reply(answer.header), p.Failed))


def stored_values(conf: Mapping[str, Any], caller: Caller | None = None) -> StorageManager:
    """The controller's own storage client: what a vanished writer stored must go. ``caller`` None: over sockets."""
    from transfer_queue.storage.registry import create
    from transfer_queue.storage.settings import section_of, storage_settings
    from transfer_queue.transport.caller import SocketCaller

    backend = conf["backend"]
    # Everybody waits for the controller while it waits for a unit, and units answer at once.
    settings = storage_settings(section_of(backend), timeout_s=_UNIT_TIMEOUT_S)
    return create(backend["storage_backend"], caller or SocketCaller("controller"), settings)


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes where a user can see it
    told = sys.stdin.read()
    if not told:  # the owner ended before it gave orders
        shutil.rmtree(sys.argv[1], ignore_errors=True)
        sys.exit(1)
    try:
        main(json.loads(told), replies)
    except Exception as error:  # told to the process that waits for "ready"
        if replies.closed:
            raise
        code, text = to_wire(error)
        replies.write(json.dumps({"code": code, "text": text}) + "\n")
        replies.close()
        sys.exit(1)
