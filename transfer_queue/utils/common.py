# SPDX-License-Identifier: Apache-2.0
"""Small helpers for programs that use the queue: flags in the environment, and torch's threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transfer_queue.config import environment_number, environment_text
from transfer_queue.errors import InvalidRequestError
from transfer_queue.utils.logging_utils import get_logger

_TRUE = frozenset({"true", "1", "yes", "y", "on"})
_log = get_logger(__name__)


def get_env_bool(key: str, default: bool = False) -> bool:
    """Whether a variable is true, 1, yes, y or on, in any case; ``default`` if it is unset or empty."""
    return environment_text(key, str(default)).strip().lower() in _TRUE


@contextmanager
def limit_pytorch_auto_parallel_threads(target_num_threads: int | None = None, info: str = "") -> Iterator[None]:
    """Limit torch's threads inside the block, and restore their number afterwards.

    Args:
        target_num_threads: None: TQ_NUM_THREADS, 8 by default. It never raises the current number.
        info: Named in the debug log.
    """
    import torch

    wanted = int(environment_number("TQ_NUM_THREADS", 8)) if target_num_threads is None else target_num_threads
    if wanted < 1:
        raise InvalidRequestError(f"torch needs at least 1 thread, got {wanted}.")
    before = torch.get_num_threads()
    _log.debug("%s: torch threads %d -> %d", info, before, min(before, wanted))
    torch.set_num_threads(min(before, wanted))
    try:
        yield
    finally:
        torch.set_num_threads(before)
