# SPDX-License-Identifier: Apache-2.0
"""Annotations that users attach to a batch: tags per row (``custom_meta``) and ``extra_info`` per batch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from transfer_queue.errors import InvalidRequestError
from transfer_queue.metadata.meta_rows import check_lengths

Tags: TypeAlias = dict[str, Any]

NO_TAGS: Tags = {}  # shared by all snapshots, and never written to

_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})


class Annotations:
    """The part of BatchMeta that handles tags and extra_info."""

    global_indexes: list[int]
    custom_meta: list[Tags]
    extra_info: dict[str, Any]
    _padding: list[bool]
    _tags_as_made: list[Tags]
    __slots__ = tuple(__annotations__)

    # --- tags ---

    def get_all_custom_meta(self) -> list[Tags]:
        """Deep copy of the tags, one dict per row."""
        return list(map(copy_tags, self.custom_meta))

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any] | None] | None) -> None:
        """Merge these tags into the rows' tags, one mapping (or None) per row; None changes nothing."""
        if custom_meta is None:
            return
        check_lengths({"custom_meta": custom_meta}, len(self.custom_meta))
        self.custom_meta = [
            {**tags, **copy_tags(update)} if update else tags
            for tags, update in zip(self.custom_meta, custom_meta, strict=True)
        ]

    def clear_custom_meta(self) -> None:
        """Remove the tags of all rows here; the queue keeps its own."""
        self.custom_meta = [{} for _ in range(len(self.custom_meta))]

    def changed_custom_meta(self) -> dict[int, Tags]:
        """Per global index, the tags that are new or differ since this metadata was created or marked clean.

        A put sends only these, so that tags written by other clients stay. Removed tags are no change,
        and padding rows write nothing.
        """
        changed: dict[int, Tags] = {}
        if not any(self.custom_meta):
            return changed
        rows = zip(self.global_indexes, self.custom_meta, self._tags_as_made, self._padding, strict=True)
        for index, now, before, filler in rows:
            # A missing key is no change, because tags merge.
            update = {key: tag for key, tag in now.items() if key not in before or not same_value(tag, before[key])}
            if update and not filler:
                changed.setdefault(index, {}).update(update)
        return changed

    def mark_custom_meta_clean(self) -> None:
        """Treat the current tags as those that the queue has."""
        has_some = any(self.custom_meta)
        self._tags_as_made = list(map(copy_tags, self.custom_meta)) if has_some else [NO_TAGS] * len(self.custom_meta)

    # --- extra_info ---

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, or ``default``. ``extra_info`` is about the whole batch; the queue never gets it."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Set one value of ``extra_info``."""
        self.extra_info[key] = value

    def has_extra_info(self, key: str) -> bool:
        """Whether ``extra_info`` has this key."""
        return key in self.extra_info

    def remove_extra_info(self, key: str) -> Any:
        """Remove and return the value, or None."""
        return self.extra_info.pop(key, None)

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        """Set several values of ``extra_info``."""
        self.extra_info.update(info_dict)

    def clear_extra_info(self) -> None:
        """Remove all values of ``extra_info``."""
        self.extra_info.clear()

    def get_all_extra_info(self) -> dict[str, Any]:
        """Deep copy."""
        return copy.deepcopy(self.extra_info)


# ---- plain values, arrays and tensors included ----


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are equal, also inside containers. NaN equals NaN, and a tuple equals a list."""
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
