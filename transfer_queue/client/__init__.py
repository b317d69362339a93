# SPDX-License-Identifier: Apache-2.0
"""The client: every verb once, as a coroutine; TransferQueueClient adds the blocking twins, one line each."""

from __future__ import annotations

from typing import Any

# TransferQueue's transfer_queue/__init__.py imports this folder first: it raises an error that says so.
from transfer_queue import own_files as own_files  # isort: skip

from transfer_queue.client.checkpoint import Checkpoints
from transfer_queue.client.group_verbs import GroupVerbs
from transfer_queue.client.key_watch import KeyChanges, KeyWaits
from transfer_queue.client.partitions import Partitions
from transfer_queue.storage.backends import section_of
from transfer_queue.transport.blocking import blocking, starting
from transfer_queue.utils.zmq_utils import process_zmq_server_info

__all__ = ["AsyncTransferQueueClient", "KeyChanges", "TransferQueueClient", "connect", "process_zmq_server_info"]


class AsyncTransferQueueClient(Partitions, GroupVerbs, KeyWaits, Checkpoints):
    """Talks to two parties: asks the controller what is where, moves values to and from the storage.

    A put starts in ``client/put.py``, a get in ``client/get.py``.

    Examples:
        >>> async def double(client: tq.AsyncTransferQueueClient) -> None:
        ...     meta = await client.async_get_meta(["x"], 2, "train", task_name="doubling")
        ...     data = await client.async_get_data(meta)
        ...     await client.async_put({"doubled": 2 * data["x"]}, metadata=meta)
        >>> meta = client.put({"x": torch.arange(2)}, partition_id="train")
        >>> asyncio.run(double(client))
    """


class TransferQueueClient(AsyncTransferQueueClient):
    """The blocking client; each method waits in the calling thread, which may run an event loop.

    Examples:
        >>> client = tq.get_client()
        >>> meta = client.put({"x": torch.arange(4)}, partition_id="train")
        >>> batch = client.get_meta(["x"], 4, "train", task_name="update_actor")
        >>> client.get_data(batch)["x"]
        tensor([0, 1, 2, 3])
    """

    get_config = blocking(AsyncTransferQueueClient.async_get_config)
    put = blocking(AsyncTransferQueueClient.async_put)
    get_meta = blocking(AsyncTransferQueueClient.async_get_meta)
    fetch_batch = blocking(AsyncTransferQueueClient.async_fetch_batch)
    start_fetch_batch = starting(AsyncTransferQueueClient.async_fetch_batch)
    take = blocking(AsyncTransferQueueClient.async_take)
    get_data = blocking(AsyncTransferQueueClient.async_get_data)
    ack = blocking(AsyncTransferQueueClient.async_ack)
    ack_before = blocking(AsyncTransferQueueClient.async_ack_before)
    create_partition = blocking(AsyncTransferQueueClient.async_create_partition)
    seal_partition = blocking(AsyncTransferQueueClient.async_seal_partition)
    register_task = blocking(AsyncTransferQueueClient.async_register_task)
    clear_samples = blocking(AsyncTransferQueueClient.async_clear_samples)
    clear_consumed = blocking(AsyncTransferQueueClient.async_clear_consumed)
    held_up_by = blocking(AsyncTransferQueueClient.async_held_up_by)
    clear_partition = blocking(AsyncTransferQueueClient.async_clear_partition)
    get_partition_list = blocking(AsyncTransferQueueClient.async_get_partition_list)
    forget_task = blocking(AsyncTransferQueueClient.async_forget_task)
    expect_producers = blocking(AsyncTransferQueueClient.async_expect_producers)
    note_exit = blocking(AsyncTransferQueueClient.async_note_exit)
    evict_client = blocking(AsyncTransferQueueClient.async_evict_client)
    get_stats = blocking(AsyncTransferQueueClient.async_get_stats)
    get_lost_samples = blocking(AsyncTransferQueueClient.async_get_lost_samples)
    watch_run = blocking(AsyncTransferQueueClient.async_watch_run)
    leave_run = blocking(AsyncTransferQueueClient.async_leave_run)
    get_storage_stats = blocking(AsyncTransferQueueClient.async_get_storage_stats)
    get_consumption_status = blocking(AsyncTransferQueueClient.async_get_consumption_status)
    get_production_status = blocking(AsyncTransferQueueClient.async_get_production_status)
    check_consumption_status = blocking(AsyncTransferQueueClient.async_check_consumption_status)
    check_production_status = blocking(AsyncTransferQueueClient.async_check_production_status)
    reset_consumption = blocking(AsyncTransferQueueClient.async_reset_consumption)
    set_custom_meta = blocking(AsyncTransferQueueClient.async_set_custom_meta)
    kv_retrieve_meta = blocking(AsyncTransferQueueClient.async_kv_retrieve_meta)
    kv_retrieve_keys = blocking(AsyncTransferQueueClient.async_kv_retrieve_keys)
    kv_list = blocking(AsyncTransferQueueClient.async_kv_list)
    wait_keys = blocking(AsyncTransferQueueClient.async_wait_keys)
    kv_watch = AsyncTransferQueueClient.async_kv_watch
    add_groups = blocking(AsyncTransferQueueClient.async_add_groups)
    lease = blocking(AsyncTransferQueueClient.async_lease)
    leases = AsyncTransferQueueClient.leases
    advance = blocking(AsyncTransferQueueClient.async_advance)
    note_trained = blocking(AsyncTransferQueueClient.async_note_trained)
    move_on = blocking(AsyncTransferQueueClient.async_move_on)
    retry_groups = blocking(AsyncTransferQueueClient.async_retry_groups)
    reject = blocking(AsyncTransferQueueClient.async_reject)
    get_heads = blocking(AsyncTransferQueueClient.async_get_heads)
    save_checkpoint = blocking(AsyncTransferQueueClient.async_save_checkpoint)
    save_batches = blocking(AsyncTransferQueueClient.async_save_batches)
    load_checkpoint = blocking(AsyncTransferQueueClient.async_load_checkpoint)
    save_controller_checkpoint = blocking(AsyncTransferQueueClient.async_save_controller_checkpoint)
    load_controller_checkpoint = blocking(AsyncTransferQueueClient.async_load_controller_checkpoint)
    save_storage_checkpoint = blocking(AsyncTransferQueueClient.async_save_storage_checkpoint)
    load_storage_checkpoint = blocking(AsyncTransferQueueClient.async_load_storage_checkpoint)


def connect(client_id: str, conf: Any, layout: str | None = None) -> TransferQueueClient:
    """Make a separate client for a running queue's configuration, as ``init`` returned it."""
    client = TransferQueueClient(client_id, conf["controller"]["zmq_info"])
    backend = conf["backend"]
    settings = conf["client"]
    client.initialize_storage_manager(
        backend["storage_backend"],
        section_of(backend),
        layout=layout or settings["layout"],
        timeout_s=settings["timeout_s"],
    )
    return client
