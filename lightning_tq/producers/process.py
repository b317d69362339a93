# SPDX-License-Identifier: Apache-2.0
"""Main program of a producer process: it reads a StartOrder from stdin, then calls a function or runs a command."""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import spawn
from operator import attrgetter
from typing import Any

IMPORTING_MAIN = "TQ_IMPORTING_MAIN"
"""Environment variable that is set while a producer process runs the trainer's main program to find its function."""

NOT_FOUND = 127
"""The exit code of a process whose function or command can't be found, as a shell's."""
_PORT = "MASTER_PORT"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    """What a producer process runs."""

    target: list[str] | str
    """Words of a command, or a function as "module:name"."""
    args: bytes
    """Pickled keyword arguments of the function. They may need ``main`` to unpickle."""
    worker: int
    num_workers: int
    main: dict[str, Any]
    """Where modules are found, and the trainer's main program with its arguments, as ``multiprocessing`` describes them
    to processes that it spawns. The program may define the function, and may read its arguments when imported."""
    parent: int
    """Process id of the trainer."""


def main(order: StartOrder) -> None:
    """Raises what the function raises. The trainer shows the traceback from stderr."""
    _end_with_parent(order.parent)
    if isinstance(order.target, list):
        try:
            os.execvp(order.target[0], order.target)
        except OSError as error:
            sys.stderr.write(f"can't run {order.target[0]!r}: {error}\n")
            sys.exit(NOT_FOUND)
    spawn.prepare({name: order.main[name] for name in ("sys_path", "sys_argv")})
    try:
        function = _find_function(order, order.target)
    except (ModuleNotFoundError, AttributeError, TypeError):
        traceback.print_exc()
        sys.exit(NOT_FOUND)
    gc.freeze()  # or this process, when it ends, looks through all that was imported for garbage: a second of work
    function(**pickle.loads(order.args), **_worker_numbers(function, order))
    import transfer_queue

    transfer_queue.close()  # without it, the queue counts this process as a dead producer


def refuse_to_train() -> None:
    """Raise SystemExit where a producer process runs the main program only to find its function."""
    if IMPORTING_MAIN in os.environ:
        sys.exit(_refusal("got to a training there"))


def _refusal(happened: str) -> str:
    return (
        f"a producer process runs {sys.argv[0]} to find {os.environ[IMPORTING_MAIN]!r}, and {happened}. "
        "Put what trains below 'if __name__ == \"__main__\":', or the function into another module."
    )


def _end_with_parent(parent: int) -> None:
    """End when the parent's thread does that started this process, also if it is killed."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also applies after exec
    if os.getppid() != parent:  # it ended before this process could notice
        os._exit(1)


def _find_function(order: StartOrder, path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if module == "__main__":
        _run_main_program(order, path)
    found: Any = attrgetter(name)(importlib.import_module(module))
    if not callable(found):
        raise TypeError(f"producer target {path!r} is {found!r}, which is not a function.")
    return found  # type: ignore[no-any-return]


def _run_main_program(order: StartOrder, path: str) -> None:
    """Run the trainer's, under another name so that its ``if __name__ == "__main__"`` block is skipped.

    Then it is the module ``__main__``: arguments were pickled with classes of it.
    """
    port = os.environ.get(_PORT)
    # With such a port a process group that the program starts fails at once. Otherwise it would wait for other ranks.
    os.environ.update({IMPORTING_MAIN: path, _PORT: "-1"})
    try:
        spawn.prepare(order.main)
    except Exception:  # of any kind, because the program is the user's
        traceback.print_exc()
        sys.exit(_refusal("failed there"))
    del os.environ[IMPORTING_MAIN]
    if os.environ.pop(_PORT) == "-1" and port is not None:
        os.environ[_PORT] = port


def _worker_numbers(function: Callable[..., Any], order: StartOrder) -> dict[str, int]:
    numbers = {"worker": order.worker, "num_workers": order.num_workers}
    parameters = inspect.signature(function).parameters
    return {name: number for name, number in numbers.items() if name in parameters}


if __name__ == "__main__":
    try:
        _order = StartOrder(**pickle.load(sys.stdin.buffer))
    except EOFError:  # such as a rank that a main program starts while a producer process imports it
        sys.exit("this program is started by a run, which writes an order to its standard input.")
    main(_order)
