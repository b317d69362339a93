# SPDX-License-Identifier: Apache-2.0
"""Names for who a process is and whether a field is there."""

from __future__ import annotations

from enum import Enum, IntEnum


class Role(str, Enum):
    """What a process is to the queue; the value is what ``ZMQServerInfo.role`` says."""

    CONTROLLER = "controller"
    STORAGE = "storage unit"
    CLIENT = "client"


class ProductionStatus(IntEnum):
    """One entry of ``BatchMeta.production_status`` and of ``get_production_status``."""

    NOT_PRODUCED = 0
    READY_FOR_CONSUME = 1
