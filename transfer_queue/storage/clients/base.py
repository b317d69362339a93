# SPDX-License-Identifier: Apache-2.0
"""The path at which programs look for the interface of a store's client and its factory. Both are used in clients."""

from __future__ import annotations

from transfer_queue.storage.backends import StorageClientFactory as StorageClientFactory
from transfer_queue.storage.base import StorageKVClient as StorageKVClient
