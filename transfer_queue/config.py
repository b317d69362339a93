# SPDX-License-Identifier: Apache-2.0
"""The configuration: the user's over config.yaml, checked. The only file that reads os.environ."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from transfer_queue.errors import ConfigError
from transfer_queue.utils.machine import host_and_port, machine_memory, parse_bytes

if TYPE_CHECKING:
    from omegaconf import DictConfig

ADDRESS_VARIABLE = "TQ_ADDRESS"
KEY_FILE_VARIABLE = "TQ_KEY_FILE"
_log = logging.getLogger(__name__)
_FREE_SECTIONS = ("zmq_info", "ucx_env_vars")
_TYPO_CUTOFF = 0.75
_STORAGE = ("memory", "total_storage_size", "put_timeout_s", "allow_pickle")
_CONTROLLER = ("sampler_modules", "polling_mode", "producer_grace_s")
_ELSEWHERE = {
    **{name: f"set backend.SimpleStorage.{name}" for name in _STORAGE},
    **{name: f"set controller.{name}" for name in _CONTROLLER},
    "units": "set backend.SimpleStorage.num_data_storage_units",
    "timeout_s": "set client.timeout_s",
    "dashboard": "run lightning-tq dashboard",
}
"""Keys that have another place here, and what to do."""
_Count = Annotated[int, msgspec.Meta(gt=0)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_MOST_PORT = 65535
_SHARE_OF_MACHINE = 2
"""By default the queue may use this fraction (one half) of the machine's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """Prometheus metrics at ``http://<endpoint>/metrics``; needs the package prometheus-client."""

    enabled: bool = False
    port: Annotated[int, msgspec.Meta(ge=0, le=_MOST_PORT)] = 0
    """0: a free one."""
    host: str | None = None
    """The address to serve at, "0.0.0.0" for all networks. None: that of ``listen``, or else 127.0.0.1."""
    endpoint: str | None = None
    """"host:port"; filled by init()."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientConfig:
    """Defaults of every client of the queue."""

    layout: Literal["jagged", "dense"] = "jagged"
    """Layout of tensors with at least one dim: always nested, or dense if the rows' shapes agree."""
    timeout_s: _Seconds = 30.0
    """Longest wait for a server's answer, on top of the requested wait; then QueueUnreachableError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerConfig:
    """The control plane."""

    sampler: Any = "SequentialSampler"
    """Default sampler of tasks: a name, "module:Class", an instance or a class."""
    sampler_modules: list[str] = field(default_factory=list)
    """Modules with samplers that clients may name for a task. The server imports them."""
    polling_mode: bool = False
    """True: get_meta returns an empty BatchMeta at once if nothing is ready."""
    producer_grace_s: float = 5.0
    """Seconds in which a dead producer may be replaced before its consumers get an error."""
    zmq_info: Any = None
    """The controller's address; filled by init()."""


def _parsed(amount: str | int, rule: str) -> int:
    """A number of bytes. Raises ConfigError with the rule that this option of SimpleStorage breaks."""
    nbytes = parse_bytes(amount)
    if nbytes is None or nbytes < 1:
        raise ConfigError(f"backend.SimpleStorage.{rule}, got {amount!r}.")
    return nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillConfig:
    """Values on disk where ``memory`` is full: the oldest ones go to a file, and are read from there."""

    enabled: bool = False
    path: str | None = None
    """The directory of the files, which are in its folder ``transfer_queue_ssd_offload`` and have no name. None: the
    system's temporary directory.
    """
    max_bytes: str | int | None = None
    """Most bytes on disk of all units, as a number or "100GiB"; a put waits if they are full, too. None: half of what
    is free when the queue starts.
    """
    threshold_bytes: int = 64 << 10
    """Smaller blocks stay in memory. A block is one field of one put."""

    def most_bytes(self) -> int | None:
        """Most bytes on disk of all units; None: half of what is free."""
        if self.max_bytes is None:
            return None
        rule = "ssd_offload.max_bytes must be null, a number of bytes or a text such as '100GiB'"
        return _parsed(self.max_bytes, rule)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemoryConfig:
    """Storage in the memory of server processes, which clients of the same host map."""

    total_storage_size: _Count | None = None
    """Most samples stored at once; a put waits if the queue is full. None: no limit."""
    num_data_storage_units: _Count = 2
    """Number of storage units. Units that share a process are one unit."""
    memory: str | int | None = "auto"
    """Most bytes of values in all units, as a number or "4GiB"; a put waits if they are full. "auto": half of the
    memory of the machine, or of this process's cgroup. None: no limit.
    """
    capacity_bytes: _Count | None = None
    """Most bytes per unit, instead of ``memory``."""
    arena: bool = True
    """Clients of this host map the units' memory. False: values always travel in messages, which is slower."""
    put_timeout_s: _Seconds = 60.0
    """Longest wait of a put for room, then StorageFullError."""
    allow_pickle: bool = False
    """True: objects of any class may be stored. Readers then unpickle what producers sent."""
    required_node_resource: str | None = None
    """With Ray: only nodes that offer this resource get a storage unit."""
    zmq_info: Any = None
    """The units' addresses; filled by init()."""
    ssd_offload: SpillConfig = field(default_factory=SpillConfig)

    def host_bytes(self, hosts: int) -> int | None:
        """Most bytes of values on this host, if so many hosts have one unit each; None: no limit."""
        if self.capacity_bytes is not None and hosts > 1:
            return self.capacity_bytes
        nbytes = self.memory_bytes()
        return nbytes if nbytes is None or self.memory == "auto" else max(1, nbytes // hosts)

    def memory_bytes(self) -> int | None:
        """Most bytes of values in all units; None: no limit."""
        if self.capacity_bytes is not None:
            return self.capacity_bytes * self.num_data_storage_units
        if self.memory is None:
            return None
        if self.memory == "auto":
            return machine_memory() // _SHARE_OF_MACHINE
        return _parsed(self.memory, "memory must be 'auto', null, a number of bytes or a text such as '4GiB'")


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeOffloadConfig:
    """Values that Mooncake itself keeps on disk. config.yaml has more keys, which change nothing."""

    enabled: bool = False
    eviction_high_watermark_ratio: float = 0.9
    eviction_ratio: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeConfig:
    """Values in a Mooncake store."""

    auto_init: bool = True
    """True: the queue starts a master of its own, on free ports of this host. False: one runs at the addresses."""
    metadata_server: str = "localhost:50050"
    """Address of the metadata server, or ``P2PHANDSHAKE``."""
    master_server_address: str = "localhost:50051"
    local_hostname: str = ""
    """The name by which other hosts reach this one. Empty: this host's own address."""
    protocol: str = "tcp"
    global_segment_size: int = 4 << 30
    """Bytes of memory that each process of the queue contributes. Its values are lost when it ends."""
    local_buffer_size: int = 1 << 30
    """Bytes that a process may have under way."""
    device_name: str = ""
    hard_pin: bool | None = None
    """True: values are never evicted. None: as long as ``offload`` is off."""
    offload: MooncakeOffloadConfig = field(default_factory=MooncakeOffloadConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendConfig:
    """Where values are stored. A backend of one's own has a section of its own name, which is not checked."""

    storage_backend: str = "SimpleStorage"
    SimpleStorage: SharedMemoryConfig = field(default_factory=SharedMemoryConfig)
    MooncakeStore: MooncakeConfig | None = None
    Yuanrong: dict[str, Any] | None = None
    """Not available; its keys are known so that a configuration that has them still loads."""
    RayStore: dict[str, Any] | None = None
    """Values in Ray's object store. All of it is filled by init()."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FullConfig:
    """The whole configuration of ``init``; the defaults are those of config.yaml."""

    address: str | None = None
    """Join the queue at this address instead of starting one."""
    key_file: str | None = None
    """File of the CURVE keys for ``tcp://`` addresses, which only its owner may read. A queue that listens creates it
    if necessary; a client on another host needs a copy.
    """
    listen: str | None = None
    """``tcp://HOST:PORT`` where clients of other hosts may join, besides this host's sockets. Port 0 takes a free
    one. None: no other host can join.
    """
    encryption: Literal["curve", "none"] = "curve"
    """Of connections between hosts. none: any program that reaches the address can read and change everything."""
    launch: Literal["auto", "local", "ray"] = "auto"
    """How the servers are started. "local": as child processes of this one. "ray": as actors of the Ray cluster, where
    every process finds them. "auto": "ray" in a process that uses Ray, otherwise "local".
    """
    server_processes: Literal["auto", "one", "each"] = "auto"
    """one: controller and unit share a process. each: every server has its own. auto: one if there is an arena."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)


# msgspec prepares a type at its first use, and crashes the process if two threads do so at once. An import is one's.
msgspec.json.Decoder(FullConfig)


def environment_text(name: str, default: str) -> str:
    """A variable's value, or the default if it is unset or empty."""
    return os.environ.get(name) or default


def environment_number(name: str, default: float) -> float:
    """A variable as a number. Raises ConfigError for anything else."""
    text = environment_text(name, str(default))
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {name} must be a number, got {text!r}.") from error


def queue_address() -> str | None:
    """The queue's address in TQ_ADDRESS."""
    return os.environ.get(ADDRESS_VARIABLE) or None


def queue_key_file() -> str | None:
    """The file of the queue's keys in TQ_KEY_FILE."""
    return os.environ.get(KEY_FILE_VARIABLE) or None


def announce_address(address: str | None, key_file: str | None = None) -> None:
    """Announce the queue's address, and the file of its keys if it needs one, to child processes; None: remove both."""
    for name, value in ((ADDRESS_VARIABLE, address), (KEY_FILE_VARIABLE, key_file)):
        if value is not None:
            os.environ[name] = value
        elif address is None:
            os.environ.pop(name, None)


def preallocated_samples() -> int:
    """TQ_PRE_ALLOC_SAMPLE_NUM: the room, in samples, that a new partition allocates at its first insert."""
    return max(1, int(environment_number("TQ_PRE_ALLOC_SAMPLE_NUM", 1)))


def client_id() -> str:
    """The id of this process' first client, such as "TransferQueueClient_71". A program can set another name."""
    name = re.sub(r"[^\w.-]+", "-", environment_text("TQ_CLIENT_NAME", "TransferQueueClient"))
    return f"{name[:64]}_{os.getpid()}"


def fetch_wait_s() -> float:
    """TQ_CONTROLLER_GET_METADATA_TIMEOUT: how long get_meta waits for a batch when not polling."""
    return environment_number("TQ_CONTROLLER_GET_METADATA_TIMEOUT", 1.0)


def merge(conf: DictConfig | Mapping[str, Any] | None) -> DictConfig:
    """Merge the user's configuration over the defaults.

    Unknown keys at the top level and of ``controller`` are allowed, unless they look like a typo: larger programs keep
    their own there.

    Raises:
        ConfigError: an unknown key anywhere else, with the nearest known one; an impossible value.
    """
    from omegaconf import OmegaConf

    if not (conf is None or isinstance(conf, Mapping) or OmegaConf.is_config(conf)):
        raise ConfigError(f"a configuration is a mapping, got {conf!r}.")
    flags = {"allow_objects": True}
    defaults: Any = OmegaConf.create(files("transfer_queue").joinpath("config.yaml").read_text(), flags=flags)
    # A section may refer to its larger configuration, so it is resolved before it is detached.
    plain: Any = OmegaConf.to_container(conf, resolve=True) if OmegaConf.is_config(conf) else dict(conf or {})
    given: Any = OmegaConf.create(plain, flags=flags)
    known: Any = OmegaConf.to_container(defaults)
    _check_keys(given, known)
    merged: Any = OmegaConf.merge(defaults, given)
    merged._set_flag("allow_objects", True)
    typed(merged)
    result: DictConfig = merged
    return result


def _check_keys(given: Any, known: Mapping[str, Any], path: str = "") -> None:
    """``path``: of the section, with a dot at its end. Raises ConfigError for an unknown key."""
    from omegaconf import DictConfig

    if not isinstance(given, DictConfig) or given._is_none() or given._is_missing():
        return
    free = [*_FREE_SECTIONS, str(given.get("storage_backend"))] if path == "backend." else _FREE_SECTIONS
    cutoff = _TYPO_CUTOFF if path in ("", "controller.") else 0.0
    for key in map(str, given):
        if isinstance(known.get(key), dict):
            _check_keys(given._get_node(key), known[key], f"{path}{key}.")
        elif not path and key in _ELSEWHERE:
            _log.warning(
                "key %r, of TQDataModule(queue=...), has no effect at the top level: %s.", key, _ELSEWHERE[key]
            )
        elif key not in known and key not in free and (near := difflib.get_close_matches(key, known, 1, cutoff)):
            raise ConfigError(
                f"unknown configuration key {path + key!r}. Nearest known key: {near[0]!r}. Known: {', '.join(known)}."
            )


def typed(conf: DictConfig | Mapping[str, Any]) -> FullConfig:
    """The merged configuration as frozen dataclasses; objects in it become their type's name.

    Raises:
        ConfigError: a value of the wrong type, or an impossible one; it names the key.
    """
    plain = conf if isinstance(conf, dict) else to_plain(conf)  # type: ignore[arg-type]
    try:
        config = msgspec.convert(plain, FullConfig)
    except msgspec.ValidationError as error:
        from omegaconf import OmegaConf

        text, _, path = str(error).rstrip("`").partition(" - at `$.")
        given = f" is {OmegaConf.select(OmegaConf.create(plain), path)!r}" if path else ""
        raise ConfigError(f"{path or 'the configuration'}{given}: {text}.") from None
    config.backend.SimpleStorage.memory_bytes()
    config.backend.SimpleStorage.ssd_offload.most_bytes()
    if config.listen is not None and not _is_listening_address(config.listen):
        raise ConfigError(
            f"listen must be an address tcp://HOST:PORT or null, with a port from 0 to 65535, got {config.listen!r}."
        )
    return config


def _is_listening_address(address: str) -> bool:
    """ZeroMQ would take a port of more than 16 bits for another one."""
    host, port = host_and_port(address)
    is_port = port == "*" or (port.isascii() and port.isdigit() and int(port) <= _MOST_PORT)
    return address.startswith("tcp://") and bool(host) and is_port


def to_plain(conf: DictConfig) -> dict[str, Any]:
    """The configuration as JSON-able data, which the controller sends to every client; objects become their type's
    name.
    """
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
