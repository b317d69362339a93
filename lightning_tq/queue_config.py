# SPDX-License-Identifier: Apache-2.0
"""QueueConfig: the queue of a run, as users describe it in Python or YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_tq.checks import did_you_mean
from transfer_queue.errors import ConfigError

_SECTIONS = (
    "address", "listen", "key_file", "encryption", "launch", "server_processes", "metrics", "client", "controller",
    "backend",
)  # fmt: skip
_SIZE = re.compile(r"\s*(?=[\d.]*[1-9])\d+(\.\d+)?\s*([KMGT]i?)?B?\s*", re.IGNORECASE)
_OTHER_BACKENDS = {"MooncakeStore", "RayStore", "Yuanrong"}
"""A shared configuration may have sections of backends that a queue doesn't use."""


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """Either the address of a queue to join, or the settings of a new one on this host.

    Args:
        address: Join the queue at this address instead of starting one. The environment variable TQ_ADDRESS does the
            same.
        units: Number of storage units, which hold the values.
        memory: Most memory that all units together may use: "4GiB", "500MB" or a number of bytes. A put waits for space
            when it is full. "auto": half of what the machine, or the container, has. None: no limit.
        total_storage_size: Most samples held at once. A put waits for space when it is full. Default: no limit.
        put_timeout_s: Longest wait of a put for space before StorageFullError.
        sampler_modules: Modules or packages whose samplers may be used. Those of the streams are added automatically.
        allow_pickle: Store objects of any class. Readers then unpickle what producers sent, so all producers must be
            trusted.
        polling_mode: get_meta returns empty metadata at once instead of waiting. Streams always wait.
        producer_grace_s: Seconds in which a dead producer may be replaced before readers of its fields get an error.
        timeout_s: Longest wait for a server's answer, in addition to a call's own timeout.
        dashboard: Serve a web page that shows the queue while it is used; its address is printed. A text is its title.
            See docs/dashboard.md.
        options: Other keys of transfer_queue's config.yaml. They override the fields above.
    Raises:
        ConfigError: an impossible value, or an unknown key of ``options``; the text names the nearest known one.
    Examples:
        >>> queue = QueueConfig(units=1, memory="4GiB", total_storage_size=10_000)
        >>> dm = TQDataModule(train=Stream(partition="train", task="sft", fields=["x"], batch_size=4), queue=queue)
    """

    address: str | None = None
    units: int = 2
    memory: str | int | None = "auto"
    total_storage_size: int | None = None
    put_timeout_s: float = 60.0
    sampler_modules: list[str] = field(default_factory=list)
    allow_pickle: bool = False
    polling_mode: bool = False
    producer_grace_s: float = 5.0
    timeout_s: float = 30.0
    dashboard: bool | str = False
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.units, int) or self.units < 1:
            raise ConfigError(f"queue.units must be an int of at least 1, got {self.units!r}.")
        if self.memory not in (None, "auto") and not _SIZE.fullmatch(str(self.memory)):
            raise ConfigError(
                f"queue.memory must be 'auto', null, a number of bytes above 0 or a text such as '4GiB', got "
                f"{self.memory!r}."
            )
        for key in self.options or {}:
            if key not in _SECTIONS:
                raise _unknown(f"options.{key}", str(key), _SECTIONS)

    def conf(self, sampler_modules: Iterable[str] = ()) -> dict[str, Any]:
        """The argument of ``transfer_queue.init``."""
        storage = {
            "num_data_storage_units": self.units, "memory": self.memory,
            "total_storage_size": self.total_storage_size, "put_timeout_s": self.put_timeout_s,
            "allow_pickle": self.allow_pickle,
        }  # fmt: skip
        conf = {
            "address": self.address,
            "client": {"timeout_s": self.timeout_s},
            "controller": {
                "sampler_modules": list(dict.fromkeys([*self.sampler_modules, *sampler_modules])),
                "polling_mode": self.polling_mode,
                "producer_grace_s": self.producer_grace_s,
            },
            "backend": {"SimpleStorage": storage},
        }
        merged: dict[str, Any] = _merged(conf, self.options or {})
        return merged


def as_queue_config(queue: QueueConfig | Mapping[str, Any] | str | None) -> QueueConfig:
    """Convert any form that a user may give.

    Args:
        queue: A mapping of QueueConfig's fields and config.yaml's sections, or the path of a YAML file with such a
            mapping. Otherwise the address of a running queue, or None for the defaults.
    Raises:
        ConfigError: an unknown key (the text names the nearest known one), a missing file, or an impossible value.
    """
    if isinstance(queue, QueueConfig):
        return queue
    if isinstance(queue, str) and "://" in queue:
        return QueueConfig(address=queue)
    values = dict(_read(queue) if isinstance(queue, str) else queue or {})
    names = [each.name for each in fields(QueueConfig)]
    known = list(dict.fromkeys([*names, *_SECTIONS]))
    for key in values:
        if key not in known:
            raise _unknown(f"queue.{key}", str(key), known)
    sections = {key: values.pop(key) for key in list(values) if key not in names}
    if sections:
        values["options"] = _merged(sections, values.get("options") or {})
    return QueueConfig(**values)


def differences(config: QueueConfig, running: Mapping[str, Any]) -> list[str]:
    """Settings, except for the address, in which a running queue differs from the requested ones.

    Raises:
        ConfigError: a key that no queue has. The text names the nearest known one.
    """
    defaults = dict(_leaves(QueueConfig().conf()))
    found = []
    for path, value in _leaves(config.conf()):
        is_default = path in defaults and defaults[path] == value
        if is_default or path == ("address",) or not _OTHER_BACKENDS.isdisjoint(path):
            continue
        has = _at(path, running)
        if value != has and not (path[-1] == "sampler_modules" and set(value) <= set(has)):
            found.append(f"{'.'.join(path)}: {value!r} (the queue has {has!r})")
    return found


def _leaves(conf: Mapping[str, Any], within: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in conf.items():
        path = (*within, str(key))
        if isinstance(value, Mapping):
            yield from _leaves(value, path)
        else:
            yield path, value


def _at(path: tuple[str, ...], conf: Mapping[str, Any]) -> Any:
    node: Any = conf
    for depth, key in enumerate(path, 1):
        if not isinstance(node, Mapping):
            break
        if key not in node:
            raise _unknown(f"queue.{'.'.join(path[:depth])}", key, map(str, node))
        node = node[key]
    return node


def load_mapping(path: str | Path) -> DictConfig:
    """Read a user's YAML file.

    Raises:
        ConfigError: the file is not valid YAML, has an unresolvable reference, or is a list. The text names the file.
    """
    try:
        conf = OmegaConf.load(path)
        OmegaConf.to_container(conf, resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} can't be read as YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(conf, DictConfig):
        raise ConfigError(f"{path} must contain keys and values, but its top level is a list.")
    return conf


def _read(path: str) -> Mapping[str, Any]:
    if not Path(path).is_file():
        raise ConfigError(f"queue is {path!r}, which is neither a file nor an address (ipc://..., tcp://...).")
    plain: Any = OmegaConf.to_container(load_mapping(path), resolve=True)
    return {str(key): value for key, value in plain.items()}


def _merged(base: dict[str, Any], override: dict[str, Any]) -> Any:
    return OmegaConf.to_container(OmegaConf.merge(base, override))


def _unknown(where: str, key: str, known: Iterable[str]) -> ConfigError:
    names = list(known)
    return ConfigError(
        f"unknown configuration key {where!r}{did_you_mean(key, names, likeness=0.0)} Known: {', '.join(names)}."
    )
