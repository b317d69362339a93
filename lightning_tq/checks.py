# SPDX-License-Identifier: Apache-2.0
"""Checks of argument values that several classes share."""

from __future__ import annotations

from collections.abc import Sequence

from transfer_queue.errors import InvalidRequestError


def check_int(name: str, value: object, least: int) -> None:
    """Raise InvalidRequestError (a ValueError) unless the value is an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequestError(f"{name} must be an int of at least {least}, got {value!r}.")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise InvalidRequestError (a ValueError) unless the value is one of the choices."""
    if value not in choices:
        raise InvalidRequestError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
