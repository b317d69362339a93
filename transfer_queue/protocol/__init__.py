# SPDX-License-Identifier: Apache-2.0
"""Every message between client and controller: requests, replies, and their encoding."""

from transfer_queue.protocol.base import *  # noqa: F403
from transfer_queue.protocol.codec import *  # noqa: F403
from transfer_queue.protocol.groups import *  # noqa: F403
from transfer_queue.protocol.replies import *  # noqa: F403
from transfer_queue.protocol.requests import *  # noqa: F403
