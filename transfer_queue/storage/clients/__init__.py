# SPDX-License-Identifier: Apache-2.0
"""Key-value stores, as a queue's clients reach them. Names load on first use."""

from __future__ import annotations

from transfer_queue.storage import __getattr__ as __getattr__
