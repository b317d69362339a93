# SPDX-License-Identifier: Apache-2.0
"""Plain values in tags and extra_info: compares, copies and merges them, including arrays and tensors."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from transfer_queue.errors import InvalidRequestError

_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are equal, also inside containers. NaN equals NaN, and a tuple equals the list it becomes on
    the wire.
    """
    if a is b:
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_value(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and _same_array(a, b)
    if _is_tensor(a) or _is_tensor(b):
        return _is_tensor(a) and _is_tensor(b) and _same_tensor(a, b)
    return _same_scalar(a, b)


def _same_scalar(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)  # the second half: NaN
    except (ValueError, TypeError, RuntimeError):  # no single truth value, so not known to be equal
        return False


def _same_array(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.hasobject:
        return same_value(a.tolist(), b.tolist())
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # never imported here: without torch loaded, no value is a tensor
    return torch is not None and isinstance(value, torch.Tensor)


def _same_tensor(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.is_nested != b.is_nested:
        return False
    if a.is_nested:
        return same_value(a.unbind(), b.unbind())
    if a.shape != b.shape:
        return False
    a, b = a.detach().cpu(), b.detach().cpu()
    return bool(((a == b) | ((a != a) & (b != b))).all())


def copy_tags(tags: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing mutable with ``tags``; cheap if all values are plain scalars."""
    if not tags:
        return {}
    if _ATOMS.issuperset(map(type, tags.values())):
        return dict(tags)
    return copy.deepcopy(dict(tags))


def changed_tags(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``now`` that are new or differ from ``before``. A missing key is no change, because tags merge."""
    if not now:
        return {}
    return {key: value for key, value in now.items() if key not in before or not same_value(value, before[key])}


def merge_extra_info(parts: Iterable[Mapping[str, Any]], *, validate: bool = True) -> dict[str, Any]:
    """The union of the keys of all parts.

    Raises:
        ValueError: two parts have different values under one key (without ``validate`` the last one wins).
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if validate and key in merged and not same_value(merged[key], value):
                raise InvalidRequestError(
                    f"extra_info has conflicting values for {key!r}: {merged[key]!r} and {value!r}. "
                    "Remove or align the key before concatenating."
                )
            merged[key] = value
    return merged
