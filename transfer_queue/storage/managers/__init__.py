# SPDX-License-Identifier: Apache-2.0
"""Storage managers of clients, under the import path that users of TransferQueue 0.1 know. Names load on first use."""

from __future__ import annotations

from transfer_queue.storage import __getattr__ as __getattr__
