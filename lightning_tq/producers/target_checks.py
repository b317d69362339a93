# SPDX-License-Identifier: Apache-2.0
"""Checks of a producer's function before its process starts: whether it exists, and takes the arguments."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lightning_tq.checks import did_you_mean
from transfer_queue.errors import InvalidRequestError

_WORKER_NUMBERS = ("worker", "num_workers")


def loaded_function(path: str) -> Callable[..., Any] | None:
    """The function "module:name", if its module is loaded. Nothing is imported, since that may take long.

    Raises:
        InvalidRequestError: there is no such module or function.
    """
    name, _, function = path.partition(":")
    module = sys.modules.get(name)
    if module is None:
        _check_module_exists(path, name.partition(".")[0])
        return None
    if name in ("__main__", "__mp_main__") or getattr(getattr(module, "__spec__", None), "_initializing", False):
        return None  # it may still define the function
    found: Any = module
    for part in function.split("."):
        known = dir(found)
        found = getattr(found, part, None)
        if found is None:
            advice = did_you_mean(part, known, ". Compare with the functions of that module.")
            where = getattr(module, "__file__", None) or "no file"
            raise InvalidRequestError(f"producer target {path!r}: module {name!r} ({where}) has no {part!r}{advice}")
    if not callable(found):
        raise InvalidRequestError(f"producer target {path!r} is {found!r}, which is not a function. Name a function.")
    return found  # type: ignore[no-any-return]


def _check_module_exists(path: str, package: str) -> None:
    if package in sys.modules:
        return
    importlib.invalidate_caches()  # its file may have been written a moment ago
    if importlib.util.find_spec(package) is None:
        raise InvalidRequestError(
            f"producer target {path!r}: there is no module {package!r} in the directories of sys.path. Compare the "
            f"spelling, or set PYTHONPATH to the directory that has it."
        )


def check_call(path: str, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError where the function doesn't take these keyword arguments, or needs others."""
    try:
        asked = inspect.signature(function).parameters
        taken = inspect.signature(function, follow_wrapped=False)  # a decorator may take or add arguments
    except (TypeError, ValueError):  # written in C
        return
    numbers = [name for name in _WORKER_NUMBERS if name in asked]
    own = [name for name in numbers if name in args]
    if own:
        raise InvalidRequestError(f"producer target {path!r} gets {own[0]!r} from its group, so args can't set it too.")
    try:
        taken.bind(**args, **dict.fromkeys(numbers, 0))
    except TypeError as error:
        raise InvalidRequestError(
            f"producer target {path!r} can't be called with args of the names {list(args)}: {error}. Its parameters "
            f"are {list(asked)}."
        ) from None
