# SPDX-License-Identifier: Apache-2.0
"""How a coroutine of the client waits: it blocks this thread, or suspends on the running event loop.

Every verb is written once, as a coroutine. Its blocking twin drives that coroutine in the calling thread.
All it awaits are transport calls, which then block instead of suspending. So it needs no event loop and no second
thread.
"""

from __future__ import annotations

import asyncio
import functools
import math
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_driver: ContextVar[Callable[[], None] | None] = ContextVar("transfer_queue_driver", default=None)
"""None if an event loop drives the coroutine. Otherwise a thread does, and ``look`` calls this while it is blocked."""
_LOOK_EVERY_S = 0.25


def _waits() -> None:
    """Drives a call to its end, however long that takes."""


def _starts() -> None:
    """Drives a call until it waits."""


def is_blocking() -> bool:
    """True inside ``run_blocking``: the transport must not suspend."""
    return _driver.get() is not None


@types.coroutine
def pause() -> Generator[None, None, None]:
    """Everything is sent: suspend here if the call was only started, until it is finished."""
    if _driver.get() is _starts:
        yield


def look() -> float:
    """Let the caller of a blocked thread look whether to go on; it raises otherwise. Returns when to look again."""
    driver = _driver.get()
    if driver is None or driver is _waits:
        return math.inf
    driver()
    return _LOOK_EVERY_S


def run_blocking(coroutine: Coroutine[Any, Any, R], look: Callable[[], None] = _waits) -> R:
    """Run to the end in this thread, which waits; works inside a running event loop, too.

    ``look`` is called now and then while the thread waits. What it raises ends the wait, and cancels the call.

    Raises:
        RuntimeError: the coroutine awaited something other than transport calls.
    """
    try:
        _run(coroutine, look)
    except StopIteration as stop:
        result: R = stop.value
        return result
    finally:
        coroutine.close()
    raise RuntimeError(f"{coroutine!r} awaited an event loop inside a blocking call; use the async method instead.")


def _run(coroutine: Coroutine[Any, Any, Any], driver: Callable[[], None]) -> Any:
    before = _driver.get()
    try:  # includes the "set": Ctrl-C in between would make the thread block in its event loops
        _driver.set(driver)
        return coroutine.send(None)
    finally:
        _driver.set(before)


async def off_loop(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run work that blocks in a thread if an event loop is running. A cancelled caller waits for its end."""
    if is_blocking():
        return function(*args, **kwargs)
    running = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        # The caller undoes the work next, so the thread must have finished with it.
        await asyncio.wait([running])
        raise


class PendingCall(Generic[R]):
    """A pending blocking call that has sent its first requests. The thread that finishes it waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, R]) -> None:
        """Raises what the call raises before it waits for anything."""
        self._coroutine = coroutine
        self._results: list[R] = []
        try:
            _run(coroutine, _starts)
        except StopIteration as stop:  # it had nothing to send
            self._results.append(stop.value)

    def finish(self, look: Callable[[], None] | None = None) -> R:
        """Return or raise what the blocking call does; once. ``look``: see ``run_blocking``."""
        return self._results.pop() if self._results else run_blocking(self._coroutine, look or _waits)

    def close(self) -> None:
        """Cancel the call. Idempotent."""
        self._coroutine.close()


def blocking(method: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    """The blocking twin of an async method."""

    @functools.wraps(method)
    def twin(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            coroutine = method(*args, **kwargs)
        except TypeError as error:  # arguments that it doesn't have
            raise TypeError(str(error).replace(method.__qualname__, twin.__name__)) from None
        return run_blocking(coroutine)

    twin.__name__ = method.__name__.removeprefix("async_")
    return twin


def starting(method: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, PendingCall[R]]:
    """The twin of an async method that starts a call, to be finished elsewhere."""

    @functools.wraps(method)
    def twin(*args: P.args, **kwargs: P.kwargs) -> PendingCall[R]:
        return PendingCall(method(*args, **kwargs))

    twin.__name__ = method.__name__.replace("async_", "start_", 1)
    return twin
