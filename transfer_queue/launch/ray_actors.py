# SPDX-License-Identifier: Apache-2.0
"""The actors of a queue on Ray. Each hosts one server process, which ends with it; values never pass through Ray."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from transfer_queue.config import merge, typed
from transfer_queue.errors import InvalidRequestError, SamplerError, TransferQueueError, from_wire, to_wire
from transfer_queue.launch.controller_verbs import ControllerVerbs
from transfer_queue.launch.local import LocalQueue
from transfer_queue.launch.member import MemberServer
from transfer_queue.launch.ray_units import START_TIMEOUT_S, eligible_nodes, end_units, has_started, start_unit
from transfer_queue.sampler.sequential_sampler import SequentialSampler
from transfer_queue.storage.backends import is_of_units
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.machine import host_id
from transfer_queue.utils.zmq_utils import ZMQServerInfo

if TYPE_CHECKING:
    from transfer_queue.client import TransferQueueClient
    from transfer_queue.server.exporter import Exporter

CONTROLLER_NAME = "TransferQueueController"
Keys = tuple[str, str] | None


class ControllerActor(ControllerVerbs):
    """Hosts the server with the controller, and with the storage unit of its node.

    If the start fails, every request for the connection raises its error.
    """

    def __init__(
        self,
        sampler: Any = SequentialSampler,
        polling_mode: bool = False,
        conf: Mapping[str, Any] | None = None,
        nodes: Sequence[str] = (),
    ) -> None:
        """
        Args:
            sampler: The default sampler of tasks: a name, an instance or a class, or one of them pickled.
            polling_mode: ``get_metadata`` returns an empty BatchMeta at once if nothing is ready.
            conf: The rest of the configuration, as ``init`` takes it.
            nodes: Those that get a storage unit at the start, this one first. None: only this one.
        """
        self._given = conf
        self._nodes = list(nodes) or [own_node()]
        self._hosts = len(self._nodes)
        self._later_units: list[Any] = []
        self._adding = threading.Lock()
        self._queue: LocalQueue | None = None
        self._failed: tuple[str, str] | None = None
        self._config: Any = None
        self._client: TransferQueueClient | None = None
        self._exporter: Exporter | None = None
        self._ending = ExitStack()
        try:
            self._queue = LocalQueue(_with_defaults(conf, sampler, polling_mode), hosts=self._hosts)
            self._ending.callback(self._queue.close)
            self._ending.callback(end_units, self._later_units)
            self._config = self._queue.conf
        except Exception as error:  # the guard of the start: a request for the connection raises it
            self._failed = to_wire(error)

    @property
    def queue(self) -> LocalQueue:
        """Raises what the start raised."""
        if self._failed is not None:
            raise from_wire(*self._failed)
        if self._queue is None:
            raise InvalidRequestError("this queue has been shut down.")
        return self._queue

    @property
    def client(self) -> TransferQueueClient:
        from transfer_queue.client import connect  # it loads torch

        conf = self.queue.conf
        if self._client is None:
            self._client = connect(CONTROLLER_NAME, conf)
            self._ending.callback(self._client.close)
        return self._client

    # ---- for processes that attach; these methods are answered although another one waits ----

    def connection(self) -> dict[str, Any]:
        """How a process of the cluster reaches the queue, or why it did not start ("failed").

        "remote" is None if only processes of this host can.
        """
        if self._failed is not None:
            return {"failed": self._failed}
        conf = self.queue.conf
        keys = self.keys()
        return {
            "host": host_id(), "local": self.queue.address, "remote": conf.listen,
            "public_key": None if keys is None else keys[0], "nodes": list(self._nodes),
        }  # fmt: skip

    def add_unit(self, node: str) -> tuple[str, str] | None:
        """Start a storage unit on this node, unless it has one or lacks the required resource.

        The unit gets the share of memory that each of the first nodes has.

        Returns:
            Why it did not start, for ``from_wire``; None if it runs, or if none is wanted.
        """
        conf = self.queue.conf
        if not is_of_units(conf.backend.storage_backend):
            return None
        with self._adding:
            if node in self._nodes or node not in eligible_nodes(conf.backend.SimpleStorage.required_node_resource):
                return None
            deadline = time.monotonic() + START_TIMEOUT_S
            arguments = {"conf": self._given, "join": str(conf.listen), "keys": self.keys(), "hosts": self._hosts}
            unit = start_unit(len(self._nodes), node, arguments, deadline)
            try:
                if has_started(unit, node, deadline):
                    self._nodes.append(node)
                    self._later_units.append(unit)
            except TransferQueueError as error:
                return to_wire(error)
            return None

    def keys(self) -> Keys:
        """The public and the secret key, for servers of the queue. None: without encryption."""
        from transfer_queue.transport.tcp_wire import read_keys  # it loads ZMQ

        path = self.queue.conf.key_file
        if path is None:
            return None
        pair = read_keys(path)
        return pair.public, pair.secret

    def get_config(self) -> DictConfig:
        """The running queue's configuration, with addresses for processes of this node."""
        _ = self.queue
        config: DictConfig = self._config
        return config

    def store_config(self, conf: Any) -> None:
        """Replace what ``get_config`` returns."""
        self._config = conf

    def get_zmq_server_info(self) -> ZMQServerInfo:
        """The controller's address for processes of this node."""
        info: ZMQServerInfo = self.queue.conf.controller.zmq_info
        return info

    def start_metrics(self, port: int = 0) -> str:
        """Serve metrics from this actor's process, unless the queue does so already. Returns "host:port".

        Raises:
            ConfigError: prometheus-client isn't installed.
            LaunchError: the port is in use.
        """
        from transfer_queue.client import connect  # it loads torch
        from transfer_queue.server.exporter import Exporter, metrics_host

        config = run_blocking(self.client.session.config())
        if config.metrics.endpoint is not None:
            return config.metrics.endpoint
        if self._exporter is None:
            host = metrics_host(config)
            self._exporter = Exporter(host, port, lambda: connect("metrics", self.queue.conf).storage_manager)
            self._ending.callback(self._exporter.close)
        return self._exporter.endpoint

    def shutdown(self) -> None:
        """End the server. Idempotent."""
        self._queue = None
        self._ending.close()


class UnitActor:
    """Hosts the server with the storage unit of its node, which joins the controller's."""

    def __init__(self, conf: Mapping[str, Any], name: str, join: str, keys: Keys, hosts: int = 1) -> None:
        """
        Args:
            conf: The configuration, as ``init`` takes it.
            name: Name of the unit.
            join: Address of the controller.
            keys: The queue's public and secret key.
            hosts: Number of nodes that get a storage unit, this one included.
        """
        self._failed: tuple[str, str] | None = None
        self._name = name
        try:
            merged = merge(conf)
            merged.listen = free_port()
            capacity = typed(merged).backend.SimpleStorage.host_bytes(hosts)
            self._server = MemberServer(merged, name, join, keys, capacity)
        except Exception as error:  # the guard of the start: the process that started this actor gets the error
            self._failed = to_wire(error)

    def failed(self) -> tuple[str, str] | None:
        """Why it did not start, for ``from_wire``; None if it runs."""
        return self._failed

    def get_zmq_server_info(self) -> ZMQServerInfo:
        """The unit's address for processes of other nodes."""
        if self._failed is not None:
            raise from_wire(*self._failed)
        ports = {"put_get_socket": self._server.address}
        return ZMQServerInfo(Role.STORAGE.value, self._name, node_ip(), ports, self._server.pid)

    def shutdown(self) -> None:
        """End the server; its values are gone. Idempotent."""
        if self._failed is None:
            self._server.close()


def own_node() -> str:
    """The id of this actor's node in the cluster."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def node_ip() -> str:
    """The address of this actor's node in the cluster."""
    import ray

    found = [node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own_node()]
    return str(found[0])


def free_port() -> str:
    """Where a server of this node may listen for other nodes."""
    return f"tcp://{node_ip()}:0"


def _with_defaults(conf: Mapping[str, Any] | None, sampler: Any, polling_mode: bool) -> DictConfig:
    """The configuration of the server with the controller."""
    merged = merge(conf)
    merged.launch = "ray"
    if is_of_units(merged.backend.storage_backend):
        merged.server_processes, merged.listen = "one", free_port()
    merged.controller.sampler = unpickled(sampler) if isinstance(sampler, bytes) else sampler
    merged.controller.polling_mode = polling_mode
    return merged


def unpickled(sampler: bytes) -> Any:
    """A sampler of the process that starts the queue. Raises SamplerError if its module is missing here."""
    try:
        return pickle.loads(sampler)
    except Exception as error:  # whatever the module, or the sampler, does
        raise SamplerError(
            f"the sampler can't be loaded on the controller's node: {type(error).__name__}: {error}. Its module must "
            f"be there, too: see working_dir and py_modules of Ray's runtime_env."
        ) from error
