# SPDX-License-Identifier: Apache-2.0
"""How a coroutine of the client waits: by blocking this thread, or on the running event loop.

Every verb is written once, as a coroutine. Its blocking twin drives that coroutine in the calling thread: all it
awaits are transport calls, which then block instead of suspending, so no event loop and no second thread is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_blocking: ContextVar[bool] = ContextVar("transfer_queue_blocking", default=False)

_cancel: ContextVar[int | None] = ContextVar("transfer_queue_cancel", default=None)


def is_blocking() -> bool:
    """True inside ``run_blocking``: the transport must not suspend."""
    return _blocking.get()


@contextmanager
def cancel_on(descriptor: int) -> Iterator[None]:
    """Inside, a blocking call of this thread fails with ClosedError once this file descriptor is readable."""
    token = _cancel.set(descriptor)
    try:
        yield
    finally:
        _cancel.reset(token)


def cancel_descriptor() -> int | None:
    """What ``cancel_on`` named."""
    return _cancel.get()


def run_blocking(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run to the end in this thread, which waits; works inside a running event loop, too.

    Raises:
        RuntimeError: the coroutine awaited something else than transport calls.
    """
    token = _blocking.set(True)
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: R = stop.value
        return result
    finally:
        _blocking.reset(token)
        coroutine.close()
    raise RuntimeError(f"{coroutine!r} awaited an event loop inside a blocking call; use the async method instead.")


def blocking(method: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    """The blocking twin of an async method."""

    @functools.wraps(method)
    def twin(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_blocking(method(*args, **kwargs))

    twin.__name__ = method.__name__.removeprefix("async_")
    return twin
