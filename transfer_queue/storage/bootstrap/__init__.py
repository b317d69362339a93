# SPDX-License-Identifier: Apache-2.0
"""The path at which programs look for StorageBootstrapProvider, which the client that starts a queue uses."""

from __future__ import annotations

from transfer_queue.storage.backends import StorageBootstrapProvider as StorageBootstrapProvider
