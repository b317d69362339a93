# SPDX-License-Identifier: Apache-2.0
"""Producer processes of a run, what they use (model weights), and how they wait in the queue."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from transfer_queue.errors import BatchTimeoutError

if TYPE_CHECKING:
    from transfer_queue import BatchMeta

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 30.0
T = TypeVar("T")


def deadline_after(timeout_s: float | None) -> float:
    """Monotonic seconds of a deadline; infinite without a timeout."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def wait_until(deadline: float, ask: Callable[[float], T | None], waits_for: Callable[[], str], advice: str = "") -> T:
    """Ask until there is an answer, and report every 30 s what it waits for.

    Args:
        ask: Waits up to that many seconds in the queue, and returns None without an answer.
    Raises:
        BatchTimeoutError: no answer before the deadline; the text ends with ``advice``.
    """
    started = time.monotonic()
    while (answer := ask(max(0.0, min(deadline - time.monotonic(), REPORT_EVERY_S)))) is None:
        now = time.monotonic()
        if now >= deadline:
            raise BatchTimeoutError(f"waited {now - started:.1f} s for {waits_for()}{advice}")
        logger.warning("waiting for %s", waits_for())
    return answer


def next_samples(get_meta: Callable[..., BatchMeta], wait_s: float) -> BatchMeta | None:
    """A task's next samples, or None if they are not there in time. ``get_meta``: a client's, with its arguments."""
    try:
        meta = get_meta(timeout_s=wait_s)
    except BatchTimeoutError:
        return None
    return meta if meta.size else None  # empty where the queue is in polling mode
