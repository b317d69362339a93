# SPDX-License-Identifier: Apache-2.0
"""The local launcher: servers are child processes, and end with this process even if it is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import DictConfig, OmegaConf

from transfer_queue.config import FullConfig, to_plain, typed
from transfer_queue.errors import ConfigError, LaunchError, RemoteError, SamplerError, TransferQueueError, from_wire
from transfer_queue.launch.directories import short_directory
from transfer_queue.sampler.registry import as_sampler
from transfer_queue.server.orders import Orders
from transfer_queue.storage.backends import StorageBootstrapProvider, is_of_units, path_of, resolve
from transfer_queue.storage.locked_directories import remove_directory
from transfer_queue.transport.server import SocketServer
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.utils.machine import machine_memory
from transfer_queue.utils.zmq_utils import ZMQServerInfo

_log = get_logger(__name__)
_CONTROLLER = Role.CONTROLLER.value
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0


class Servers:
    """Server processes with a private directory for their sockets. They end with this process, also if it is killed."""

    def __init__(self) -> None:
        self._directory = short_directory("tq-")  # mode 0700, so only this user reaches the sockets
        self._ending = ExitStack()
        self._ending.callback(remove_directory, self._directory)
        # Unlike atexit alone, this also runs at the end of multiprocessing children. A fork of the owner runs nothing.
        self._finalizer = Finalize(self, self._ending.close, exitpriority=10)

    def _spawn(self) -> subprocess.Popen[str]:
        """Start a server process, which waits for its orders. The one that was started last ends first."""
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-m", "transfer_queue.server.main", self._directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C reaches the owner only
        )
        self._ending.callback(_end_process, process)
        return process

    def close(self) -> None:
        """End the servers; their values are gone. Idempotent; does nothing in a fork of the owner."""
        self._finalizer()


class LocalQueue(Servers):
    """A running queue that this process owns. ``conf`` is the merged configuration with the servers' addresses."""

    def __init__(self, conf: DictConfig, inline_nbytes: int | None = None, hosts: int = 1) -> None:
        """Start everything, or nothing: raises LaunchError with the server's text.

        Args:
            inline_nbytes: See ``StorageUnit``; None: its default. Clients must use the same value.
            hosts: Number of hosts that hold values of the queue, this one included.
        """
        self._owner = os.getpid()
        self._inline_nbytes = inline_nbytes
        self._hosts = hosts
        super().__init__()
        try:
            self.conf = self._start(self._with_backend(conf))
        except BaseException as error:
            self.close()
            if isinstance(error, BlockingIOError) or "can't start new thread" in str(error):
                raise LaunchError(
                    f"the queue did not start, because this user or container may have no more processes and threads "
                    f"({error}). Raise the limit (ulimit -u, or that of the container), or end some."
                ) from error
            raise

    @property
    def is_owner(self) -> bool:
        """False in a fork of the process that started the queue."""
        return os.getpid() == self._owner

    @property
    def address(self) -> str:
        return self._socket(_CONTROLLER)

    def _socket(self, name: str) -> str:
        return f"ipc://{self._directory}/{name}"

    def _with_backend(self, conf: DictConfig) -> DictConfig:
        """Start what the storage backend needs. Returns the configuration with what its provider added."""
        name = conf.backend.storage_backend
        resolve(name)  # an unknown one fails here
        provider = StorageBootstrapProvider.get_provider(name)
        if provider is not None:
            conf = conf.copy()
            started = provider(conf)
            if hasattr(started, "close"):
                self._ending.callback(started.close)
        return conf

    def _start(self, conf: DictConfig) -> DictConfig:
        """Start one process for all servers, or one for the controller and one for each unit."""
        config = typed(conf)
        storage, backend = config.backend.SimpleStorage, config.backend.storage_backend
        sampler = portable(conf.controller.sampler)
        # Other hosts reach one process, so with ``listen`` the unit goes where the controller is.
        together = _together(config) and (sampler is not None or config.listen is not None)
        count = 1 if _together(config) or not is_of_units(backend) else storage.num_data_storage_units
        memory = storage.host_bytes(self._hosts)
        capacity = None if memory is None else max(1, memory // count)
        warn_of_memory(memory)
        units = {f"unit{n}": self._socket(_CONTROLLER if together else f"unit{n}") for n in range(count)}
        others = {} if together else {name: self._spawn() for name in units}
        # It ends before the units do, because it still reports ended clients to them.
        first = None if sampler is None else self._spawn()
        pid = self._owner if first is None else first.pid
        pids = {**dict.fromkeys([_CONTROLLER, *units], pid), **{name: each.pid for name, each in others.items()}}
        conf = with_servers(conf, self.address, units, pids)
        if config.listen is not None:
            if not together:
                raise ConfigError("listen needs controller and storage in one process (server_processes: one).")
            conf.key_file = keys_for(config, self._directory)
        common = self._orders(conf, sampler, capacity)
        own = replace(common, controller=True, unit=next(iter(units)) if together else None, listen=config.listen)
        if first is None:
            own = replace(own, sampler=as_sampler(conf.controller.sampler))
            conf.listen = self._serve_in_thread(own) or conf.listen
        else:
            send_orders(first, own)
            conf.listen = await_ready(first).get("listening") or conf.listen
        for name, process in others.items():  # they join at the controller, which has to be there
            send_orders(process, replace(common, address=units[name], unit=name, join=self.address))
        for process in others.values():
            await_ready(process)
        return conf

    def _orders(self, conf: DictConfig, sampler: Any, capacity_bytes: int | None) -> Orders:
        orders = orders_for(conf, self.address, self._directory, capacity_bytes)
        module = sampler["class"].partition(":")[0] if isinstance(sampler, dict) else ""
        if module and not module.startswith("transfer_queue."):
            orders.conf["controller"]["sampler_modules"].append(module)  # the owner itself named this module
        return replace(
            orders, listen=None, key_file=None if conf.listen is None else conf.key_file, sampler=sampler,
            parent=self._owner, inline_nbytes=self._inline_nbytes,
        )  # fmt: skip

    def _serve_in_thread(self, orders: Orders) -> str | None:
        """Serve the controller in this process, for a sampler that can't be sent (of ``__main__``, or with live
        objects). Returns the address for other hosts.
        """
        from transfer_queue.server.main import open_front

        server = SocketServer(self.address)
        with ExitStack() as opened:
            opened.callback(server.close)
            front, listening = open_front(server, orders, opened)
            ending = opened.pop_all()

        def serve() -> None:
            with ending:
                server.serve(front)

        thread = threading.Thread(target=serve, name="tq-controller", daemon=True)
        thread.start()
        self._ending.callback(thread.join, _STOP_TIMEOUT_S)
        self._ending.callback(server.stop)
        return listening


def warn_of_memory(nbytes: int | None) -> None:
    """Warn where the system would kill the servers before the queue is full. ``nbytes``: of values, on this host."""
    most = machine_memory()
    if nbytes is not None and nbytes > most:
        _log.warning(
            "the queue may hold %.1f GiB of values (backend.SimpleStorage.memory), but the machine, or this process's "
            "cgroup, has %.1f GiB: the system will kill servers before the queue is full. Lower memory, or raise the "
            "container's limit.", nbytes / 2**30, most / 2**30,
        )  # fmt: skip


def keys_for(config: FullConfig, directory: str) -> str | None:
    """The file of the queue's keys, created if it does not exist. None: without encryption."""
    if config.encryption == "none":
        _log.warning(
            "encryption is off: any program that reaches %s can read and change all values (encryption: none)",
            config.listen,
        )
        return None
    path = config.key_file or f"{directory}/keys"
    if not os.path.exists(path):
        from transfer_queue.transport.tcp_wire import make_key_file  # it loads ZMQ

        try:
            make_key_file(path)
        except ConfigError:
            if not os.path.exists(path):  # else another server has made it meanwhile
                raise
    return path


def _end_process(process: subprocess.Popen[str]) -> None:
    with process:  # which closes its pipes
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def send_orders(process: subprocess.Popen[str], orders: Orders) -> None:
    """Tell a spawned server what to serve. Raises LaunchError if it has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(orders).decode())
        process.stdin.close()
    except BrokenPipeError:
        raise LaunchError(f"a server process ended at its start with exit code {process.wait()}; see stderr.") from None


def await_ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait until it serves. Returns what it says; ``listening`` is its address for other hosts.

    Raises:
        LaunchError: it ended, or took too long; otherwise the error that it met.
    """
    assert process.stdout is not None
    watchdog = threading.Timer(_START_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
    finally:
        watchdog.cancel()
        watchdog.join()
    if not line:
        code = process.wait(_STOP_TIMEOUT_S)
        raise LaunchError(
            f"a server process of the queue ended with exit code {code} before it was ready (it has "
            f"{_START_TIMEOUT_S:.0f} s to start); look at what it printed to stderr."
        )
    answer: dict[str, Any] = json.loads(line)
    if "ready" not in answer:
        raise start_error(answer["code"], answer["text"], "a server process of the queue")
    return answer


def start_error(code: str, text: str, what: str = "the queue") -> TransferQueueError:
    """Why this did not start. ``code`` and ``text``: of the error there, by ``to_wire``."""
    said = f"{what} did not start: {text}"
    return LaunchError(said) if code == RemoteError.__name__ else from_wire(code, said)


def _together(config: FullConfig) -> bool:
    """Whether all servers share a process. Units without an arena copy every byte themselves, and would block the
    others. Where other stores hold values, the clients must see what is cleared, so the units are apart.
    """
    if not is_of_units(config.backend.storage_backend):
        return False
    if config.server_processes == "auto":
        return config.backend.SimpleStorage.arena
    return config.server_processes == "one"


def portable(sampler: Any) -> str | dict[str, Any] | None:
    """The sampler in a form that can be sent to another process; None if it must stay in this one."""
    if isinstance(sampler, str):
        return sampler
    if OmegaConf.is_config(sampler):
        plain: dict[str, Any] = OmegaConf.to_container(sampler)  # type: ignore[assignment]
        return plain
    instance = as_sampler(sampler)
    cls = type(instance)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        return None
    try:
        return instance.spec()
    except SamplerError:
        return None


def with_servers(
    conf: DictConfig, address: str, units: Mapping[str, str], pids: Mapping[str, int], key_file: str | None = None
) -> DictConfig:
    """The configuration of a running queue: with its address and its servers.

    Args:
        address: Of the controller.
        units: Addresses by name.
        pids: Process ids by name, where they are known.
        key_file: Of the servers' keys, as far as a client needs one.
    """

    def info(role: Role, name: str, port: str, at: str) -> ZMQServerInfo:
        return ZMQServerInfo(role.value, name, ports={port: at}, pid=pids.get(name), key_file=key_file)

    conf, infos = conf.copy(), {name: info(Role.STORAGE, name, "put_get_socket", at) for name, at in units.items()}
    conf.address = address
    conf.controller.zmq_info = info(Role.CONTROLLER, _CONTROLLER, "request_handle_socket", address)
    conf.backend.SimpleStorage.zmq_info = infos
    backend = conf.backend.storage_backend
    if not is_of_units(backend):
        OmegaConf.update(conf.backend, backend, {"zmq_info": infos}, merge=True, force_add=True)
    return conf


def orders_for(conf: DictConfig, address: str, directory: str, capacity_bytes: int | None) -> Orders:
    """What servers of a queue with this configuration have in common. ``address``: of its socket, in ``directory``."""
    return Orders(
        conf=to_plain(conf),
        address=address,
        directory=directory,
        listen=conf.listen,
        key_file=conf.key_file,
        sys_path=sys.path,
        backend_path=path_of(conf.backend.storage_backend),
        capacity_bytes=capacity_bytes,
    )
