# SPDX-License-Identifier: Apache-2.0
"""The path at which programs look for the actor class of a unit's server. Names load on first use."""

from __future__ import annotations

from transfer_queue.storage import __getattr__ as __getattr__
