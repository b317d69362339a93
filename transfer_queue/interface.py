# SPDX-License-Identifier: Apache-2.0
"""The module functions: init, close, get_client and kv_*, over one client per process."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transfer_queue import own_files
from transfer_queue.client import TransferQueueClient, connect, kv
from transfer_queue.client.key_watch import KeyWatch
from transfer_queue.config import announce_address, client_id, merge, queue_address, queue_key_file
from transfer_queue.errors import NotInitializedError
from transfer_queue.launch import ray as on_ray
from transfer_queue.launch.local import LocalQueue
from transfer_queue.launch.running import running_at
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.transport.blocking import blocking
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.utils.zmq_utils import ZMQServerInfo

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from tensordict import TensorDict

    from transfer_queue.storage.unpack import DataParser

_log = get_logger(__name__)
_TQ_CLIENT: TransferQueueClient | None = None
_TQ_STORAGE: Any = None
_TQ_CONTROLLER: Any = None
_TQ_CONFIG: Any = None
_ended: set[str] = set()
# Users set the names above to None to make a process join anew; that must not end what it started.
_started: set[LocalQueue | on_ray.RayQueue] = set()
_lock = threading.RLock()

Tag = dict[str, Any]


def init(conf: DictConfig | Mapping[str, Any] | str | None = None) -> DictConfig:
    """Start a queue, or join a running one.

    Args:
        conf: Configuration over the defaults of config.yaml, or the address of a running queue. A queue is joined
            if an address is given or TQ_ADDRESS is set. In a process that uses Ray, the cluster's queue is joined if
            there is one. The rest of ``conf`` is then ignored, as it is if this process has already joined a queue.
            If its client was closed by hand, this process joins that queue again.
    Returns:
        The running queue's configuration, server addresses included.
    Raises:
        ConfigError: unknown key, with the nearest known one.
        QueueUnreachableError: no server answers at the address.
        LaunchError: a server process did not start.
    Examples:
        >>> tq.close()  # the queue of this process, if it has one
        >>> conf = tq.init({"backend": {"SimpleStorage": {"memory": "1GiB"}}})
        >>> conf.backend.SimpleStorage.memory
        '1GiB'
    """
    with _lock:
        if any(isinstance(queue, on_ray.RayQueue) and not queue.is_current for queue in _started):
            close()  # Ray may reuse a process, so the cluster may have a later queue
        if _TQ_CLIENT is None or _TQ_CONFIG is None or _TQ_CLIENT.session.is_closed:
            own_files.warn_of_other()
            _start_or_join(merge({"address": conf} if isinstance(conf, str) else conf))
        elif isinstance(conf, str) and conf not in (_TQ_CONFIG.get("address"), _TQ_CONFIG.get("listen")):
            _log.warning(
                f"init({conf!r}) changed nothing: this process is in the queue at {_TQ_CONFIG.get('address')}."
            )
        running: DictConfig = _TQ_CONFIG
        return running


def _start_or_join(merged: DictConfig) -> None:
    global _TQ_CLIENT, _TQ_CONFIG, _TQ_CONTROLLER, _TQ_STORAGE
    before = _TQ_CONFIG or merged  # the queue whose client was closed by hand
    address = merged.address or before.address or queue_address()
    if address is not None and address not in _ended:  # else: a queue that this process closed
        _TQ_CLIENT, _TQ_CONFIG = _join(str(address), merged.key_file or before.key_file or queue_key_file())
        return
    queue = on_ray.RayQueue(merged) if on_ray.is_wanted(merged.launch) else LocalQueue(merged)
    _started.add(queue)
    key_file = queue.key_file if isinstance(queue, on_ray.RayQueue) else None
    try:
        _TQ_CLIENT, _TQ_CONFIG = _join(queue.address, key_file)
        metrics = _TQ_CONFIG.metrics  # with the endpoint
    except BaseException:
        _started.discard(queue)
        queue.close()
        raise
    if isinstance(queue, on_ray.RayQueue):
        _TQ_CONTROLLER, _TQ_STORAGE = queue.actor, queue if queue.is_started_here else None
    else:
        _TQ_CONTROLLER, _TQ_STORAGE, _TQ_CONFIG = queue, queue, queue.conf
        _TQ_CONFIG.metrics = metrics
    announce_address(queue.address, key_file)


def _join(address: str, key_file: str | None = None) -> tuple[TransferQueueClient, Any]:
    conf = running_at(address, key_file)
    return connect(client_id(), conf), conf


def seen_from_here(conf: Any) -> Any:
    """A running queue's configuration, which a process on another node of a Ray cluster may have passed to this one.

    Returns:
        The configuration with addresses and keys that work here.
    Raises:
        NotInitializedError: they don't, and no such queue runs on Ray.
    """
    info = conf["controller"]["zmq_info"]
    if conf.get("launch") != "ray" or (info is not None and _can_reach(info)):
        return conf
    get_client()
    return _TQ_CONFIG


def _can_reach(info: ZMQServerInfo) -> bool:
    address = info.to_addr("request_handle_socket")
    needed = address.removeprefix("ipc://") if address.startswith("ipc://") else info.key_file
    return needed is None or os.path.exists(needed)


def close() -> None:
    """Leave the queue; the process that started it also ends it. Idempotent, never raises; init() may follow.

    Examples:
        >>> tq.close()
    """
    global _TQ_CLIENT, _TQ_CONFIG, _TQ_CONTROLLER, _TQ_STORAGE
    with _lock:
        client, own = _TQ_CLIENT, [queue for queue in _started if queue.is_owner]  # a fork also has its parent's queues
        _TQ_CLIENT = _TQ_CONFIG = _TQ_CONTROLLER = _TQ_STORAGE = None
        _started.clear()
        if client is not None:
            client.close()
        for queue in own:
            if queue_address() == queue.address:
                announce_address(None)
            queue.close()
            _ended.add(queue.address)


def get_client() -> TransferQueueClient:
    """This process's client. If there is none yet, joins the queue that TQ_ADDRESS names, or the Ray cluster's.

    Raises:
        NotInitializedError: neither ``init`` nor TQ_ADDRESS nor a queue on Ray; an AssertionError, too.
    Examples:
        >>> client = tq.get_client()
        >>> client.get_partition_list()
        []
    """
    if any(isinstance(queue, on_ray.RayQueue) and not queue.check() for queue in _started):
        close()
    if _TQ_CLIENT is None and (queue_address() is not None or (on_ray.is_in_use() and on_ray.find() is not None)):
        init()
    if _TQ_CLIENT is None:
        raise NotInitializedError(
            "TransferQueue is not initialized in this process, and TQ_ADDRESS is not set. Please call init() first."
        )
    return _TQ_CLIENT


def save_checkpoint(
    checkpoint_dir: str | os.PathLike[str], *, include_storage: bool = True, metadata: Mapping[str, Any] | None = None
) -> None:
    """Save the whole queue as it is at one moment; see ``TransferQueueClient.save_checkpoint``.

    Raises:
        NotInitializedError: neither ``init`` nor TQ_ADDRESS; a RuntimeError, too.
    Examples:
        >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
        >>> tq.save_checkpoint("runs/queue", metadata={"step": 100})
    """
    _client_of_queue().save_checkpoint(checkpoint_dir, include_storage=include_storage, metadata=metadata)


def load_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Replace the whole queue by a saved one; see ``TransferQueueClient.load_checkpoint``.

    Raises:
        CheckpointError: it is damaged, foreign or of a newer version. The queue is as it was.
        NotInitializedError: neither ``init`` nor TQ_ADDRESS; a RuntimeError, too.
    Examples:
        >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
        >>> tq.save_checkpoint("runs/queue")
        >>> client.clear_partition("train")
        >>> tq.load_checkpoint("runs/queue")
        >>> client.get_partition_list()
        ['train']
    """
    _client_of_queue().load_checkpoint(checkpoint_dir)


def _client_of_queue() -> TransferQueueClient:
    if _TQ_STORAGE is not None and _TQ_CONTROLLER is None:  # users detach this process from the queue by this name
        raise NotInitializedError("TransferQueue is not initialized in this process. Please call init() first.")
    return get_client()


def get_metrics_endpoint() -> str | None:
    """ "host:port" of the queue's metrics; None without metrics, or if this process has joined no queue.

    Examples:
        >>> tq.close()
        >>> conf = tq.init({"metrics": {"enabled": False}})
        >>> tq.get_metrics_endpoint() is None
        True
    """
    if _TQ_CONFIG is None:
        return None
    endpoint = _TQ_CONFIG["metrics"].get("endpoint")
    return None if endpoint is None else str(endpoint)


async def async_kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | Mapping[str, Any] | None = None,
    tag: Tag | None = None,
    data_parser: DataParser | None = None,
) -> KVBatchMeta:
    """Put fields of one sample by its key, and merge the tag into existing ones. The key's other fields stay.

    Args:
        fields: ``{name: value}`` without a batch dimension, or a TensorDict of one row, [1, ...]. None: only the tag.
        tag: Plain data; it merges into what the key has.
        data_parser: See ``put``.
    Raises:
        ValueError: neither fields nor a tag, more than one row, or a value that the field's declaration excludes.
        StorageFullError: there was no room in time.
    Examples:
        >>> meta = tq.kv_put("q7", "train", fields={"ids": torch.arange(3), "text": "a b c"}, tag={"done": False})
        >>> meta = tq.kv_put("q7", "train", fields={"reward": torch.tensor(1.0)}, tag={"done": True})
        >>> tq.kv_list("train")
        {'train': {'q7': {'done': True}}}
    """
    tags = None if tag is None else [tag]
    rows = await kv.rows_of(kv.one_row(fields), data_parser)
    return await kv.batch_put(get_client(), [key], partition_id, rows, tags)


async def async_kv_batch_put(
    keys: Sequence[str] | str,
    partition_id: str,
    fields: TensorDict | None = None,
    tags: Sequence[Tag] | None = None,
    data_parser: DataParser | None = None,
) -> KVBatchMeta:
    """Put one row of ``fields`` and one tag per key; known keys get more fields, new ones become samples.

    More than 2048 keys are several puts, one after the other. Each of them is whole or not there.

    Args:
        fields: One row per key, [len(keys), ...] each.
        tags: One mapping per key.
        data_parser: See ``put``.
    Raises:
        ValueError: as ``kv_put``, or another number of rows or tags than of keys, or a key that is given twice.
        StorageFullError: there was no room in time.
    Examples:
        >>> tags = [{"done": True}, {"done": False}]
        >>> meta = tq.kv_batch_put(["q1", "q2"], "train", {"x": torch.arange(2)}, tags=tags)
        >>> meta.keys
        ['q1', 'q2']
    """
    return await kv.batch_put(get_client(), keys, partition_id, await kv.rows_of(fields, data_parser), tags)


async def async_kv_batch_get(
    keys: Sequence[str] | str, partition_id: str, select_fields: Sequence[str] | str | None = None
) -> TensorDict:
    """Values by key, a TensorDict of batch size [len(keys)] with rows in the order of the keys.

    Without ``select_fields``, every field that all of the keys have. Selected fields that one of the samples lacks are
    left out; a warning names those that others have.

    Raises:
        ValueError: a key is unknown ("not found"), or no field is left ("not ready").
    Examples:
        >>> meta = tq.kv_batch_put(["q1", "q2"], "train", {"x": torch.arange(2), "y": torch.arange(2)})
        >>> tq.kv_batch_get(["q2", "q1"], "train", select_fields="x")["x"]
        tensor([1, 0])
    """
    return await kv.batch_get(get_client(), keys, partition_id, select_fields)


async def async_kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: Sequence[str] | str | None = None) -> TensorDict:
    """Values of the keys and fields that a put or a list returned, a TensorDict of batch size [len(meta.keys)].

    Raises:
        ValueError: as ``kv_batch_get``, or one of ``select_fields`` is no field of the metadata ("not found").
    Examples:
        >>> meta = tq.kv_batch_put(["q1", "q2"], "train", {"x": torch.arange(2)})
        >>> tq.kv_batch_get_by_meta(meta.select_keys(["q2"]))["x"]
        tensor([1])
    """
    return await kv.batch_get_by_meta(get_client(), meta, select_fields)


async def async_kv_list(partition_id: str | None = None, where: str | None = None) -> dict[str, dict[str, Tag]]:
    """{partition: {key: tag}}, in order of insertion; an unknown partition gives {}.

    Args:
        where: Only keys whose tags match, such as ``"done == true"``.
    Raises:
        InvalidRequestError: ``where`` is no filter; says at which character.
    Examples:
        >>> meta = tq.kv_batch_put(["q1", "q2"], "train", tags=[{"done": True}, {"done": False}])
        >>> tq.kv_list("train", where="done == true")
        {'train': {'q1': {'done': True}}}
    """
    return await get_client().async_kv_list(partition_id, where)


async def async_kv_wait_keys(
    partition_id: str, where: str | None = None, count: int = 1, timeout_s: float = 60.0
) -> dict[str, Tag]:
    """Keys and tags that match, as soon as at least ``count`` do; see ``TransferQueueClient.wait_keys``.

    Raises:
        KeysTimeoutError: fewer matched for ``timeout_s`` seconds.
        EndOfPartitionError: the partition was cleared meanwhile.
    Examples:
        >>> meta = tq.kv_batch_put(["q1", "q2"], "train", tags=[{"done": True}, {"done": True}])
        >>> list(tq.kv_wait_keys("train", where="done == true", count=2, timeout_s=5.0))
        ['q1', 'q2']
    """
    return await get_client().async_wait_keys(partition_id, where, count, timeout_s)


def async_kv_watch(partition_id: str, where: str | None = None, timeout_s: float | None = None) -> KeyWatch:
    """Follow the keys of a partition and their tags, without polling; see ``TransferQueueClient.kv_watch``.

    Raises:
        InvalidRequestError: ``timeout_s`` is NaN. An invalid ``where`` is an error of the first answer.
    Examples:
        >>> meta = tq.kv_put("q1", "train", tag={"done": True})
        >>> next(tq.kv_watch("train", where="done == true", timeout_s=5.0)).changed
        {'q1': {'done': True}}
    """
    return get_client().async_kv_watch(partition_id, where, timeout_s)


async def async_kv_clear(keys: Sequence[str] | str, partition_id: str) -> None:
    """Delete samples by key, including their values; unknown keys are ignored.

    Raises:
        InvalidRequestError: no key is given.
    Examples:
        >>> meta = tq.kv_batch_put(["q1", "q2"], "train", {"x": torch.arange(2)})
        >>> tq.kv_clear("q1", "train")
        >>> list(tq.kv_list("train")["train"])
        ['q2']
    """
    await kv.clear(get_client(), keys, partition_id)


kv_put = blocking(async_kv_put)
kv_batch_put = blocking(async_kv_batch_put)
kv_batch_get = blocking(async_kv_batch_get)
kv_batch_get_by_meta = blocking(async_kv_batch_get_by_meta)
kv_list = blocking(async_kv_list)
kv_clear = blocking(async_kv_clear)
kv_wait_keys = blocking(async_kv_wait_keys)
kv_watch = async_kv_watch
