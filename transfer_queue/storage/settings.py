# SPDX-License-Identifier: Apache-2.0
"""Reads a backend's section of the configuration for its manager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import ConfigError
from transfer_queue.utils.zmq_utils import ZMQServerInfo


def section_of(backend: Mapping[str, Any]) -> Any:
    """Return the section of the chosen backend. It has the current name even if the backend was chosen by its former
    one.
    """
    name = backend["storage_backend"]
    return backend[name] if name in backend else backend["SimpleStorage"]


def storage_settings(section: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the section as a plain dict, with ``units`` made from its ``zmq_info`` (name -> server info, or a list).

    Raises:
        ConfigError: there is no ``zmq_info``, so this isn't the configuration of a running queue.
    """
    settings = {str(key): section[key] for key in section}
    servers = settings.pop("zmq_info", None)
    if not servers:
        raise ConfigError("the storage section has no zmq_info: take the configuration that init() returned.")
    infos = [servers[name] for name in servers] if isinstance(servers, Mapping) else list(servers)
    settings["units"] = [_unit(info) for info in infos]
    return {**settings, **more}


def _unit(info: Any) -> dict[str, Any]:
    server = info if isinstance(info, ZMQServerInfo) else ZMQServerInfo.from_dict(info)
    peer = server.peer()
    return {"name": peer.name, "address": peer.address}
