# SPDX-License-Identifier: Apache-2.0
"""Every message between client and controller: requests, replies, and their encoding."""

from transfer_queue.protocol.codec import *  # noqa: F403
from transfer_queue.protocol.group_requests import *  # noqa: F403
from transfer_queue.protocol.replies import *  # noqa: F403
from transfer_queue.protocol.request_parts import *  # noqa: F403
from transfer_queue.protocol.requests import *  # noqa: F403
