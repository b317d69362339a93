# SPDX-License-Identifier: Apache-2.0
"""Small helpers for programs around the queue: flags in the environment, torch's threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transfer_queue.config import environment_number, environment_text
from transfer_queue.errors import InvalidRequestError
from transfer_queue.utils.logging_utils import get_logger

_TRUE = frozenset({"true", "1", "yes", "y", "on"})
_log = get_logger(__name__)


def get_env_bool(key: str, default: bool = False) -> bool:
    """Whether a variable says true, 1, yes, y or on, in any case; ``default`` where it is unset or empty."""
    return environment_text(key, str(default)).strip().lower() in _TRUE


@contextmanager
def limit_pytorch_auto_parallel_threads(target_num_threads: int | None = None, info: str = "") -> Iterator[None]:
    """Let torch use at most so many threads inside the block; the number it had before comes back.

    Args:
        target_num_threads: None: what TQ_NUM_THREADS says, 8 by default. Never raises the number there is.
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
