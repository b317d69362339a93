# SPDX-License-Identifier: Apache-2.0
"""Checks of what users say."""

from __future__ import annotations

from transfer_queue.errors import InvalidRequestError


def check_int(name: str, value: object, least: int) -> None:
    """Raises InvalidRequestError (a ValueError) for what is no int, or a smaller one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequestError(f"{name} must be an int of at least {least}, got {value!r}.")
