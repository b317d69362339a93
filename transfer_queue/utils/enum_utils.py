# SPDX-License-Identifier: Apache-2.0
"""Names for the roles of processes and the status of fields."""

from __future__ import annotations

from enum import Enum, IntEnum


class Role(str, Enum):
    """The role of a process in the queue; the value is used as ``ZMQServerInfo.role``."""

    CONTROLLER = "controller"
    STORAGE = "storage unit"
    CLIENT = "client"


class ProductionStatus(IntEnum):
    """One entry of ``BatchMeta.production_status`` and of ``get_production_status``."""

    NOT_PRODUCED = 0
    READY_FOR_CONSUME = 1
