# SPDX-License-Identifier: Apache-2.0
"""The client: every verb once, as a coroutine, and its blocking twin."""

from transfer_queue.client.client import AsyncTransferQueueClient, TransferQueueClient

__all__ = ["AsyncTransferQueueClient", "TransferQueueClient"]
