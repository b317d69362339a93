# SPDX-License-Identifier: Apache-2.0
"""The main program of a producer process: reads its orders from stdin, then calls a function or becomes a command."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import pickle
import runpy
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

_PR_SET_PDEATHSIG = 1


def main(orders: Mapping[str, Any]) -> None:
    """Raises whatever the function raises; its traceback on stderr is what the trainer shows."""
    _die_with(orders["parent"])
    if orders["command"] is not None:
        os.execvp(orders["command"][0], orders["command"])
    sys.path[:] = orders["sys_path"]
    function = _find(orders)
    function(**pickle.loads(orders["args"]), **_numbers(function, orders))
    import transfer_queue

    transfer_queue.close()  # says goodbye: a process that vanishes counts as a dead producer


def _die_with(parent: int) -> None:
    """End when the parent does, even if it is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # survives exec
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before we could watch it
        os._exit(1)


def _watch_parent(parent: int) -> None:
    never = threading.Event()
    while not never.wait(1.0):
        if os.getppid() != parent:
            os._exit(1)


def _find(orders: Mapping[str, Any]) -> Callable[..., Any]:
    module, _, name = str(orders["where"]).partition(":")
    found: Any = _main_module(orders) if module == "__main__" else importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"producer target {orders['where']!r} is {found!r}, no function.")
    return found  # type: ignore[no-any-return]


def _main_module(orders: Mapping[str, Any]) -> types.ModuleType:
    """The trainer's main program, imported under another name so that its ``if __name__ == "__main__"`` doesn't run."""
    module = types.ModuleType("__mp_main__")
    if orders["main_name"] is not None:
        names = runpy.run_module(orders["main_name"], run_name="__mp_main__", alter_sys=True)
    else:
        names = runpy.run_path(orders["main_path"], run_name="__mp_main__")
    module.__dict__.update(names)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module  # arguments were pickled with classes of __main__
    return module


def _numbers(function: Callable[..., Any], orders: Mapping[str, Any]) -> dict[str, int]:
    parameters = inspect.signature(function).parameters
    return {name: orders[name] for name in ("worker", "num_workers") if name in parameters}


if __name__ == "__main__":
    main(pickle.load(sys.stdin.buffer))
