# SPDX-License-Identifier: Apache-2.0
"""A sampler that misbehaves in every way a user's sampler might."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

from transfer_queue import BaseSampler

HELD_S = 3.0


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text for you")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class OwnBaseException(BaseException):
    """As frameworks have them, to get past ``except Exception``."""


def _raise(error: BaseException) -> Any:
    raise error


def _recurse(depth: int = 0) -> Any:
    return _recurse(depth + 1)


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _hold() -> Any:
    until = time.monotonic() + HELD_S
    while time.monotonic() < until:
        pass
    return [], []


DEEDS: dict[str, Callable[[], Any]] = {
    "sys.exit": lambda: sys.exit("the sampler says so"),
    "exit without a code": lambda: _raise(SystemExit()),
    "recursion": _recurse,
    "cancelled": lambda: _raise(asyncio.CancelledError()),
    "generator exit": lambda: _raise(GeneratorExit()),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "own base exception": lambda: _raise(OwnBaseException("past you")),
    "stop iteration": lambda: _raise(StopIteration(5)),
    "memory": lambda: _raise(MemoryError()),
    "unprintable error": lambda: _raise(UnprintableError()),
    "surrogates": lambda: _raise(ValueError("\udc80")),
    "None": lambda: None,
    "text": lambda: "abc",
    "number": lambda: 7,
    "three": lambda: ([0], [0], [0]),
    "floats": lambda: ([0.5], [0.5]),
    "nan": lambda: ([float("nan")], []),
    "huge numbers": lambda: ([2**70], [2**70]),
    "unknown samples": lambda: ([2**62], [2**62]),
    "negative": lambda: ([-1], [-1]),
    "nested": lambda: ([[0]], [[0]]),
    "nested deep": lambda: (_nested(20_000), []),
    "unprintable": lambda: (Unprintable(), Unprintable()),
    "list of unprintables": lambda: ([Unprintable()], []),
    "generator": lambda: ((i for i in range(3)), []),
    "very many": lambda: ([2**40] * 3_000_000, []),
}


class HostileSampler(BaseSampler):
    """Does its deed in one of its methods, and is harmless in the others."""

    def __init__(self, deed: str, where: str = "sample") -> None:
        super().__init__()
        self._deed, self._where = deed, where
        self._act("__init__")

    def _act(self, where: str) -> Any:
        if where != self._where:
            return None
        return _hold() if self._deed == "hold" else DEEDS[self._deed]()

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        if self._where == "sample":
            return self._act("sample")
        picked = list(ready_indexes[:batch_size])
        return picked, list(picked)

    def samples_needed(self, batch_size: int, dp_size: int | None) -> Any:
        return self._act("samples_needed") if self._where == "samples_needed" else batch_size

    def check(self, batch_size: int, dp_size: int | None) -> None:
        self._act("check")

    def tail(self, ready_indexes: Any, batch_size: int, *, partition: Any = None) -> Any:
        return self._act("tail") if self._where == "tail" else list(ready_indexes)

    def has_cached_result(self, *args: Any, **kwargs: Any) -> Any:
        return self._act("has_cached_result")

    def forget(self, *args: Any, **kwargs: Any) -> None:
        self._act("forget")

    def clear_cache(self, partition_id: str) -> None:
        self._act("clear_cache")

    def save_checkpoint(self) -> Any:
        return self._act("save_checkpoint") or {}
