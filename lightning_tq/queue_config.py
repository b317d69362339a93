# SPDX-License-Identifier: Apache-2.0
"""QueueConfig: which queue a TQDataModule uses, as a user writes it; becomes the argument of transfer_queue.init."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from transfer_queue.errors import ConfigError

_SECTIONS = ("address", "launch", "server_processes", "metrics", "client", "controller", "backend")
_FOREIGN = {"MooncakeStore", "RayStore", "Yuanrong"}
"""Sections of backends that this version doesn't have; a shared configuration may hold them."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """A queue to join (address), or how to start one on this host (everything else)."""

    address: str | None = None
    """Join the queue at this address instead of starting one. The environment variable TQ_ADDRESS does the same."""
    units: int = 2
    """Storage units, which hold the values."""
    memory: str | int | None = None
    """Most memory that all units together may hold: "4GiB", "500MB" or bytes. A put waits when it is full. Default: no
    limit."""
    total_storage_size: int | None = None
    """Most samples held at once; a put waits when it is full. Default: no limit."""
    put_timeout_s: float = 60.0
    """Longest wait of a put for room before StorageFullError."""
    sampler_modules: list[str] = field(default_factory=list)
    """Modules (or packages) whose samplers may be used. Those of the streams are added by themselves."""
    allow_pickle: bool = False
    """Store objects of any class. Readers then unpickle what producers sent: only where all of them are trusted."""
    polling_mode: bool = False
    """get_meta answers at once with empty metadata instead of waiting. Streams wait in any case."""
    producer_grace_s: float = 5.0
    """Seconds in which a dead producer may be replaced before those who wait for its fields get an error."""
    timeout_s: float = 30.0
    """Longest wait for a server's answer, on top of the wait that was asked for."""
    options: dict[str, Any] | None = None
    """Anything else of transfer_queue's config.yaml, laid over what the rest says."""

    def __post_init__(self) -> None:
        if isinstance(self.units, bool) or not isinstance(self.units, int) or self.units < 1:
            raise ConfigError(f"queue.units must be an int of at least 1, got {self.units!r}.")
        self.capacity_bytes()
        for key in self.options or {}:
            if key not in _SECTIONS:
                raise _unknown(f"options.{key}", str(key), _SECTIONS)

    def capacity_bytes(self) -> int | None:
        """Most bytes of one unit; None without a limit."""
        if self.memory is None:
            return None
        return max(1, parse_bytes(self.memory) // self.units)

    def conf(self, sampler_modules: Iterable[str] = ()) -> dict[str, Any]:
        """The argument of ``transfer_queue.init``."""
        storage = {
            "num_data_storage_units": self.units, "capacity_bytes": self.capacity_bytes(),
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
        return _overlaid(conf, self.options or {})


def as_queue_config(queue: QueueConfig | Mapping[str, Any] | str | None) -> QueueConfig:
    """A QueueConfig from any form a user may give.

    Args:
        queue: Fields of QueueConfig and sections of config.yaml in one mapping, the path of a YAML file that holds
            such a mapping, the address of a running queue, or None for the defaults.
    Raises:
        ConfigError: unknown key, with the nearest known one; no such file; an impossible value.
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
        values["options"] = _overlaid(sections, values.get("options") or {})
    return QueueConfig(**values)


def differences(config: QueueConfig, running: Mapping[str, Any]) -> list[str]:
    """What was asked for, beside the address, that a queue which runs already has otherwise.

    Raises:
        ConfigError: a key that no queue has, with the nearest known one.
    """
    usual = dict(_leaves(QueueConfig().conf()))
    found = []
    for path, value in _leaves(config.conf()):
        if path == ("address",) or (path in usual and usual[path] == value) or not _FOREIGN.isdisjoint(path):
            continue
        has = _at(path, running)
        if value != has and not (path[-1] == "sampler_modules" and set(value) <= set(has)):
            found.append(f"{'.'.join(path)}: {value!r} (it has {has!r})")
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


def parse_bytes(text: str | int) -> int:
    """ "4GiB" -> 4294967296. Raises ConfigError for anything that isn't a positive size."""
    number = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(text).upper())
    if isinstance(text, bool) or number is None or number[2] not in _UNITS or not float(number[1]):
        raise ConfigError(f"queue.memory must be a size like '4GiB', '500MB' or a number of bytes, got {text!r}.")
    return int(float(number[1]) * _UNITS[number[2]])


def _read(path: str) -> Mapping[str, Any]:
    from omegaconf import OmegaConf

    from lightning_tq.yaml_file import load_mapping

    if not Path(path).is_file():
        raise ConfigError(f"queue is {path!r}: no such file, and no address either (ipc://..., tcp://...).")
    plain: Any = OmegaConf.to_container(load_mapping(path), resolve=True)
    return {str(key): value for key, value in plain.items()}


def _overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _overlaid(merged[key], value) if both else value
    return merged


def _unknown(where: str, key: str, known: Iterable[str]) -> ConfigError:
    names = list(known)
    near = difflib.get_close_matches(key, names, 1, 0.0)[0]
    return ConfigError(f"unknown configuration key {where!r}; did you mean {near!r}? Known: {', '.join(names)}.")
