# SPDX-License-Identifier: Apache-2.0
"""A Ray actor class that needs Ray only once it is used, so that its module can be imported without."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from transfer_queue.errors import ConfigError
from transfer_queue.storage.clients.ray_client import import_ray

AT_ONCE = "at_once"
"""Concurrency group of methods that are answered although another method waits."""
_AT_ONCE_THREADS = 8
_INSTALLERS = ("pip", "uv", "conda", "py_executable")
"""What a runtime_env installs packages with."""
_PIN = re.compile(r"[^'\"]*TransferQueue[^'\"]*", re.IGNORECASE)


class ActorClass:
    """Has ``remote`` and ``options``, like a class decorated with ``ray.remote``."""

    def __init__(self, path: str, at_once: Sequence[str] = (), **defaults: Any) -> None:
        """
        Args:
            path: Path of the class, as "module:Class".
            at_once: Methods that never wait for others.
            defaults: Options of the actors, as ``ray.remote`` takes them.
        """
        self._path = path
        self._at_once = at_once
        self._defaults: Mapping[str, Any] = defaults
        self._made: Any = None

    def options(self, **options: Any) -> Any:
        """As of Ray's actor classes. Raises ConfigError if the actor's runtime_env installs TransferQueue."""
        _refuse_pins(options.get("runtime_env"))
        return self._actor_class().options(**options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start an actor; as of Ray's actor classes. Raises ConfigError if Ray is not installed, and as ``options``."""
        _refuse_pins(None)
        return self._actor_class().remote(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self._path.partition(':')[2]} is a Ray actor: start it with remote().")

    def _actor_class(self) -> Any:
        if self._made is None:
            ray = import_ray()
            cls = resolve_name(self._path)
            for method in self._at_once:
                ray.method(concurrency_group=AT_ONCE)(getattr(cls, method))
            self._made = ray.remote(concurrency_groups={AT_ONCE: _AT_ONCE_THREADS}, **self._defaults)(cls)
        return self._made


def _refuse_pins(own: Mapping[str, Any] | None) -> None:
    """Raise ConfigError if Ray would install TransferQueue for an actor with this runtime_env in this process's job."""
    ray = import_ray()
    of_job = ray.get_runtime_context().runtime_env if ray.is_initialized() else {}
    runtime_env = {**of_job, **ray.runtime_env.RuntimeEnv(**own or {})}  # which reads files of requirements
    pins = [pin for name in _INSTALLERS for pin in _PIN.findall(str(runtime_env.get(name)))]
    if pins:
        raise ConfigError(
            f"Ray's runtime_env installs {pins[0]!r} where the queue's actors run, and that distribution's package "
            "transfer_queue would take the place of lightning-tq's. Remove it from runtime_env, and install "
            "lightning-tq on every node (docs/migration.md)."
        )
