# SPDX-License-Identifier: Apache-2.0
"""Checks of values, and what messages have in common: names, sizes, the end of one about an unknown name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from transfer_queue.errors import InvalidRequestError


def check_int(name: str, value: object, least: int, optional: bool = False) -> None:
    """Raise InvalidRequestError (a ValueError) unless the value is an int of at least ``least``, or an allowed None."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequestError(f"{name} must be an int of at least {least}, got {value!r}.")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise InvalidRequestError (a ValueError) unless the value is one of the choices."""
    if value not in choices:
        raise InvalidRequestError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def are_names(names: object) -> bool:
    """Whether this is a list of texts, at least one, none of them empty."""
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    return is_list and bool(names) and all(isinstance(name, str) and name for name in names)  # type: ignore[attr-defined]


def did_you_mean(name: str, known: Iterable[str], otherwise: str = ".", likeness: float = 0.6) -> str:
    """How a message about an unknown name ends: with the known one that is most like it, or ``otherwise``.

    Args:
        likeness: How alike both must be, up to 1. 0: however different they are.
    """
    near = difflib.get_close_matches(name, list(known), 1, likeness)
    return f"; did you mean {near[0]!r}?" if near else otherwise


def list_names(names: Collection[str], most: int = 6) -> str:
    """Names in order, for a message: the first ``most`` of them and the number of the others."""
    shown = ", ".join(map(repr, sorted(names)[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: "1 lease", "1,200 leases"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def with_host(address: str, name: str) -> str:
    """The address of a server that listens on all networks, for other hosts, which know this one by that name."""
    return re.sub(r"^tcp://(0\.0\.0\.0|\*|\[::\]|::):", f"tcp://{name}:", address)


def byte_text(number: int) -> str:
    """A number of bytes, as "1.5 MiB"."""
    power = min(max(0, number.bit_length() - 1) // 10, 4)
    size = number / 1024**power
    digits = 0 if power == 0 or size >= 100 else 1
    return f"{size:.{digits}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
