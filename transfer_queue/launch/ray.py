# SPDX-License-Identifier: Apache-2.0
"""The queue of a Ray cluster: found by the name of its actor, or started with one storage unit per node."""

from __future__ import annotations

import os
import time
from multiprocessing.util import Finalize
from typing import Any

from omegaconf import DictConfig, OmegaConf

from transfer_queue import controller
from transfer_queue.errors import LaunchError, TransferQueueError
from transfer_queue.launch.directories import short_directory
from transfer_queue.launch.local import portable, start_error
from transfer_queue.launch.member import private_key_file
from transfer_queue.launch.ray_actors import CONTROLLER_NAME
from transfer_queue.launch.ray_units import (
    START_TIMEOUT_S,
    answer,
    at_node,
    await_name,
    eligible_nodes,
    end_units,
    has_started,
    start_unit,
)
from transfer_queue.sampler.registry import as_sampler
from transfer_queue.storage.backends import is_of_units
from transfer_queue.storage.clients.ray_client import NAMESPACE, import_ray, is_in_fork, is_ray_up
from transfer_queue.storage.locked_directories import remove_directory
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.utils.machine import host_id

_log = get_logger(__name__)
_STOP_TIMEOUT_S = 20.0


def is_wanted(launch: str) -> bool:
    """Whether a process with this configuration finds, or starts, its queue on Ray.

    Raises:
        LaunchError: it is a fork of a process that uses Ray, and had to be initialized before.
    """
    if launch == "local" or (launch == "auto" and not is_ray_up()):
        return False
    if is_in_fork():
        raise LaunchError(
            "this process is a fork of one that uses Ray, and Ray doesn't work in forks: call transfer_queue.init() "
            "before the fork, or pass the configuration that init() returned."
        )
    return True


def is_in_use() -> bool:
    """Whether this process uses Ray. A fork of one that does can't."""
    return is_ray_up() and not is_in_fork()


def find() -> Any | None:
    """The actor of the cluster's queue, if there is one."""
    try:
        return import_ray().get_actor(CONTROLLER_NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def _current_task() -> str | None:
    """The Ray task that this thread runs. None in drivers and actors, which aren't used again for other tasks."""
    ray = import_ray()
    context = ray.get_runtime_context() if is_in_use() else None
    if context is None or context.worker.mode != ray.WORKER_MODE or context.get_actor_id():
        return None
    task: str | None = context.get_task_id()
    return task


class RayQueue:
    """The queue of the cluster, as this process has found or started it."""

    def __init__(self, conf: DictConfig) -> None:
        """Find it, or else start it with this configuration. Initializes Ray if necessary.

        Raises:
            ConfigError: no node offers the required resource, or Ray is not installed.
            LaunchError: the queue did not start.
        """
        ray = import_ray()
        if not ray.is_initialized():
            ray.init()
        self._pid = os.getpid()
        self._task = _current_task()
        self._started: list[Any] = []
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            found = None
            while found is None:  # several processes may start it at once: the first one does, and the others find it
                found = _found(deadline) or self._start(conf, deadline)
            self.actor, connection = found
            if not self._started:
                _add_unit_here(self.actor, connection, deadline)
        except BaseException as error:
            self._end_started()
            if not isinstance(error, ray.exceptions.RayError):
                raise
            raise LaunchError(
                f"a node or an actor of the Ray cluster ended while the queue started: {error} Call init() again."
            ) from error
        self.address, self.key_file = _reachable(connection)
        directory = None if self.key_file is None else os.path.dirname(self.key_file)
        self._finalizer = None if directory is None else Finalize(self, remove_directory, [directory], exitpriority=10)

    @property
    def is_started_here(self) -> bool:
        """Whether this process has started it, so its ``close`` ends it."""
        return bool(self._started)

    @property
    def is_owner(self) -> bool:
        """False in a fork of the process that found or started it."""
        return os.getpid() == self._pid

    @property
    def is_current(self) -> bool:
        """Whether this still is the queue of this process's cluster. A fork doesn't look."""
        if not self.is_owner:
            return True
        found = find() if is_in_use() else None
        return found is not None and bool(found._actor_id == self.actor._actor_id)

    def check(self) -> bool:
        """``is_current``, for a process that Ray has given another task since: there may be a later queue by now."""
        task = _current_task() if self.is_owner else None
        if task is None or task == self._task:
            return True
        self._task = task
        return self.is_current

    def _start(self, conf: DictConfig, deadline: float) -> tuple[Any, Any] | None:
        """The new controller's actor and its connection; None if another process was faster."""
        storage = conf.backend.SimpleStorage
        nodes = eligible_nodes(storage.required_node_resource)
        if not is_of_units(conf.backend.storage_backend):
            del nodes[1:]
        plain: Any = OmegaConf.to_container(conf, resolve=True)
        plain["controller"]["sampler"] = "SequentialSampler"
        options = {"name": CONTROLLER_NAME, "namespace": NAMESPACE, "scheduling_strategy": at_node(nodes[0])}
        arguments = {"sampler": _sent(conf.controller.sampler), "polling_mode": bool(conf.controller.polling_mode)}
        try:
            actor = controller.TransferQueueController.options(**options).remote(**arguments, conf=plain, nodes=nodes)
        except ValueError:
            if find() is None:
                raise
            return None
        self._started.append(actor)
        connection = _connection(actor, deadline)
        if len(nodes) > 1:
            keys = answer(actor.keys.remote(), deadline)
            arguments = {"conf": plain, "join": connection["remote"], "keys": keys, "hosts": len(nodes)}
            for number, node in enumerate(nodes[1:], 1):
                self._started.append(start_unit(number, node, arguments, deadline))
            for unit, node in list(zip(self._started[1:], nodes[1:], strict=True)):
                if not has_started(unit, node, deadline):
                    self._started.remove(unit)
        return actor, connection

    def close(self) -> None:
        """End what this process has started; a queue that it has found goes on. Idempotent, never raises."""
        if self.is_owner:
            if self._finalizer is not None:
                self._finalizer()
            self._end_started()

    def _end_started(self) -> None:
        started, self._started = self._started, []
        if not started or not is_in_use():  # the actors end with Ray
            return
        ray = import_ray()
        try:
            found = find()
            if found is None or found._actor_id != started[0]._actor_id:  # the others end without their handles
                return
            first, *units = started
            ray.wait([first.shutdown.remote()], timeout=_STOP_TIMEOUT_S)
            end_units(units)
            ray.kill(first)
            await_name(lambda: find() is None, time.monotonic() + _STOP_TIMEOUT_S, "its controller is still ending")
        except (ray.exceptions.RayError, TransferQueueError, ValueError) as error:
            _log.warning("the queue did not end as it should: %s", error)


def _found(deadline: float) -> tuple[Any, Any] | None:
    """The actor of the cluster's queue and its connection, if there is one."""
    while (actor := find()) is not None:
        try:
            return actor, _connection(actor, deadline)
        except import_ray().exceptions.RayActorError:  # it was ending, so its name will be free
            await_name(lambda: find() is None, deadline, "an earlier queue's controller doesn't end")
    return None


def _add_unit_here(actor: Any, connection: dict[str, Any], deadline: float) -> None:
    """Have a storage unit on this process's node, if the node is a later one of the cluster."""
    node = import_ray().get_runtime_context().get_node_id()
    if node not in connection["nodes"]:
        failed = answer(actor.add_unit.remote(node), deadline)
        if failed is not None:
            raise start_error(*failed)


def _connection(actor: Any, deadline: float) -> dict[str, Any]:
    """What the controller's actor says. Raises RayActorError if it ends, and LaunchError if it did not start."""
    said: dict[str, Any] = answer(actor.connection.remote(), deadline)
    if "failed" in said:
        raise start_error(*said["failed"])
    return said


def _sent(sampler: Any) -> Any:
    """The sampler as the controller's actor gets it: by its name, or else pickled."""
    form = portable(sampler)
    return import_ray().cloudpickle.dumps(as_sampler(sampler)) if form is None else form


def _reachable(connection: dict[str, Any]) -> tuple[str, str | None]:
    """The address at which this process reaches the controller, and the file of the key that it needs there."""
    local: str = connection["local"]
    if connection["host"] == host_id() and os.path.exists(local.removeprefix("ipc://")):
        return local, None
    if connection["remote"] is None:
        raise LaunchError(
            "a queue whose values lie in RayStore, MooncakeStore or a backend of your own can be used only on the node "
            "of its controller. Use SimpleStorage in a cluster of several nodes."
        )
    if connection["public_key"] is None:
        return connection["remote"], None
    return connection["remote"], private_key_file(short_directory("tq-"), (connection["public_key"], ""))
