# SPDX-License-Identifier: Apache-2.0
"""Configuration: what the user gave merged over config.yaml, checked; and the only reader of os.environ."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from transfer_queue.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

ADDRESS_VARIABLE = "TQ_ADDRESS"
_FREE_SECTIONS = ("zmq_info", "MooncakeStore", "Yuanrong", "RayStore")
_TYPO_CUTOFF = 0.75


def environment_text(name: str, default: str) -> str:
    """A variable's value, or the default where it is unset or empty."""
    return os.environ.get(name) or default


def environment_number(name: str, default: float) -> float:
    """A variable as a number. Raises ConfigError for anything else."""
    text = environment_text(name, str(default))
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {name} must be a number, got {text!r}.") from error


def queue_address() -> str | None:
    """Where TQ_ADDRESS says the queue is."""
    return os.environ.get(ADDRESS_VARIABLE) or None


def announce_address(address: str | None) -> None:
    """Let child processes find the queue; None: it is gone."""
    if address is None:
        os.environ.pop(ADDRESS_VARIABLE, None)
    else:
        os.environ[ADDRESS_VARIABLE] = address


def preallocated_samples() -> int:
    """TQ_PRE_ALLOC_SAMPLE_NUM: room that a new partition makes at its first insert, in samples."""
    return max(1, int(environment_number("TQ_PRE_ALLOC_SAMPLE_NUM", 1)))


def fetch_wait_s() -> float:
    """TQ_CONTROLLER_GET_METADATA_TIMEOUT: how long get_meta waits for a batch when not polling."""
    return environment_number("TQ_CONTROLLER_GET_METADATA_TIMEOUT", 1.0)


def merge(conf: DictConfig | Mapping[str, Any] | None) -> DictConfig:
    """The user's configuration over the defaults.

    Unknown keys at the top level pass (a larger program may keep its own beside ours), unless they look like a typo.

    Raises:
        ConfigError: an unknown key in one of our sections, with the nearest known one; an impossible value.
    """
    from omegaconf import OmegaConf

    flags = {"allow_objects": True}
    defaults: Any = OmegaConf.create(files("transfer_queue").joinpath("config.yaml").read_text(), flags=flags)
    # A section of a larger configuration may refer to its whole: resolved while it still knows it.
    plain: Any = OmegaConf.to_container(conf, resolve=True) if OmegaConf.is_config(conf) else dict(conf or {})
    given: Any = OmegaConf.create(plain, flags=flags)
    known: Any = OmegaConf.to_container(defaults)
    top = list(known)
    for key in given:
        if key not in known and (near := difflib.get_close_matches(str(key), top, 1, _TYPO_CUTOFF)):
            raise _unknown(str(key), near, top)
        if key in known and isinstance(known[key], dict):
            _check_keys(given._get_node(key), known[key], str(key))
    merged: Any = OmegaConf.merge(defaults, given)
    merged._set_flag("allow_objects", True)
    _check_values(merged)
    result: DictConfig = merged
    return result


def _check_keys(given: Any, known: Mapping[str, Any], path: str) -> None:
    from omegaconf import DictConfig

    if not isinstance(given, DictConfig) or given._is_none() or given._is_missing():
        return
    for key in map(str, given):
        if key in _FREE_SECTIONS:
            continue
        if key not in known:
            names = list(known)
            raise _unknown(f"{path}.{key}", difflib.get_close_matches(str(key), names, 1, 0.0), names)
        if isinstance(known[key], dict):
            _check_keys(given._get_node(key), known[key], f"{path}.{key}")


def _unknown(key: str, near: Iterable[str], known: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"unknown configuration key {key!r}. Nearest known key: {', '.join(near)!r}. Known: {', '.join(known)}."
    )


def _check_values(conf: DictConfig) -> None:
    storage = conf.backend.SimpleStorage
    positive = {
        "backend.SimpleStorage.num_data_storage_units": storage.num_data_storage_units,
        "backend.SimpleStorage.total_storage_size": storage.total_storage_size,
        "backend.SimpleStorage.capacity_bytes": storage.capacity_bytes,
        "backend.SimpleStorage.put_timeout_s": storage.put_timeout_s,
        "client.timeout_s": conf.client.timeout_s,
    }
    for name, value in positive.items():
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise ConfigError(f"{name} must be a number above 0 or null, got {value!r}.")
    if storage.num_data_storage_units is None:
        raise ConfigError("backend.SimpleStorage.num_data_storage_units must be at least 1, got null.")
    if conf.client.layout not in ("jagged", "dense"):
        raise ConfigError(f"client.layout must be 'jagged' or 'dense', got {conf.client.layout!r}.")
    if conf.launch not in ("local",):
        raise ConfigError(f"launch must be 'local', got {conf.launch!r}.")
    if conf.server_processes not in ("auto", "one", "each"):
        raise ConfigError(f"server_processes must be 'auto', 'one' or 'each', got {conf.server_processes!r}.")
    if conf.backend.storage_backend not in ("SimpleStorage", "AsyncSimpleStorageManager"):
        raise ConfigError(
            f"unknown storage backend {conf.backend.storage_backend!r}; this version has 'SimpleStorage'."
        )
    if conf.metrics.enabled or storage.ssd_offload.enabled:
        raise ConfigError(
            "metrics.enabled and ssd_offload.enabled aren't available in this version; set them to false."
        )


def to_plain(conf: DictConfig) -> dict[str, Any]:
    """As JSON-able data, for the controller to hand to every client; objects become their type's name."""
    from omegaconf import OmegaConf

    container: Any = OmegaConf.to_container(conf, resolve=True)
    return {str(key): _plain(value) for key, value in container.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    return f"<{(value if isinstance(value, type) else type(value)).__qualname__}>"
