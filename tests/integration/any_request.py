# SPDX-License-Identifier: Apache-2.0
"""Requests of every type in the protocol, of any contents."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np

from transfer_queue import protocol as p
from transfer_queue.storage import messages


def every_request() -> list[p.Request]:
    """One of each kind, with plain contents."""
    kinds = [kind for kind in p.AnyRequest.__args__ if kind not in (p.Put,)]
    kinds += [kind for kind in messages.UnitRequest.__args__ if kind is not messages.EndSession]
    return [some(kind, number) for number, kind in enumerate(kinds, 1)]


def some(kind: Any, number: int, chance: random.Random | None = None) -> Any:
    """A request of this kind; with ``chance``, of contents that are right only in their types."""
    values = [number]
    for field in msgspec.structs.fields(kind)[1:]:
        values.append(value_of(field.type, chance or random.Random(number)))
    return kind(*values)


INTEGERS = [0, 1, 2, -1, 7, 2**15, 2**24, 2**31 - 1, -(2**31), 2**40, 2**53, 2**63 - 1, -(2**63), 2**64 - 1]
TEXTS = ["", "p", "x", "t", "\0writers", "\0freezers", "é" * 50, "SequentialSampler"]
INDEXES = [[], [0], [0, 1, 2], [5, 3, 5], [-1], [2**62], [-(2**63)], list(range(1000))]


def value_of(annotation: Any, chance: random.Random) -> Any:
    text = str(annotation)
    if text.startswith("typing.Optional") or " | None" in text:
        return None if chance.random() < 0.3 else value_of(annotation.__args__[0], chance)
    if annotation is bool:
        return chance.random() < 0.5
    if annotation is bytes:
        return chance.choice([b"", b"abc", b"\x80" * 9, *(np.array(each, "<i8").tobytes() for each in INDEXES)])
    if annotation is str or annotation == (str | dict[str, Any]):
        return chance.choice(TEXTS)
    if "float" in text:
        return chance.choice([0.0, 0.01, 0.2, 1e9, -1.0, float("nan"), float("inf")])
    return container_of(annotation, text, chance)


def container_of(annotation: Any, text: str, chance: random.Random) -> Any:
    if text.startswith("list["):
        return [value_of(annotation.__args__[0], chance) for _ in range(chance.randrange(4))]
    if text.startswith("dict["):
        key, value = annotation.__args__
        return {value_of(key, chance): value_of(value, chance) for _ in range(chance.randrange(3))}
    if annotation is Any:
        return chance.choice([None, 1, "a", [1, 2], {"a": {"b": []}}, 0.5])
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        values = [value_of(field.type, chance) for field in msgspec.structs.fields(annotation)]
        return annotation(*values)
    return chance.choice(INTEGERS)
