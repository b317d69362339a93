# SPDX-License-Identifier: Apache-2.0
"""Annotations that users attach to a batch: tags per row (``custom_meta``) and ``extra_info`` per batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from transfer_queue.utils.rows import check_length
from transfer_queue.utils.values import changed_tags, copy_tags

Tags: TypeAlias = dict[str, Any]

NO_TAGS: Tags = {}  # shared by all snapshots, and never written to


class Annotations:
    """The part of BatchMeta that handles tags and extra_info."""

    __slots__ = ("_padding", "_tags_as_made", "custom_meta", "extra_info", "global_indexes")

    global_indexes: list[int]
    custom_meta: list[Tags]
    extra_info: dict[str, Any]
    _padding: list[bool] | None  # None: no row is padding
    _tags_as_made: list[Tags] | None  # None: no row came with tags

    # --- tags ---

    def get_all_custom_meta(self) -> list[Tags]:
        """Deep copy of the tags, one dict per row."""
        return list(map(copy_tags, self.custom_meta))

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any] | None] | None) -> None:
        """Merge these tags into the rows' tags, one mapping (or None) per row; None changes nothing."""
        if custom_meta is None:
            return
        check_length("custom_meta", custom_meta, len(self.custom_meta))
        self.custom_meta = [
            {**tags, **copy_tags(update)} if update else tags
            for tags, update in zip(self.custom_meta, custom_meta, strict=True)
        ]

    def clear_custom_meta(self) -> None:
        self.custom_meta = [{} for _ in range(len(self.custom_meta))]

    def changed_custom_meta(self) -> dict[int, Tags]:
        """Per global index, the tags that are new or differ since this metadata was created or marked clean.

        A put sends only these, so that tags written by other clients stay. Removed tags are no change,
        and padding rows write nothing.
        """
        changed: dict[int, Tags] = {}
        if not any(self.custom_meta):
            return changed
        fillers = self._padding or [False] * len(self.custom_meta)
        rows = zip(self.global_indexes, self.custom_meta, self._made_tags(), fillers, strict=True)
        for index, now, before, filler in rows:
            update = {} if filler else changed_tags(now, before)
            if update:
                changed.setdefault(index, {}).update(update)
        return changed

    def mark_custom_meta_clean(self) -> None:
        """Treat the current tags as those that the queue has."""
        self._tags_as_made = None
        if any(self.custom_meta):
            self._tags_as_made = [copy_tags(tags) if tags else NO_TAGS for tags in self.custom_meta]

    def _made_tags(self) -> list[Tags]:
        return [NO_TAGS] * len(self.custom_meta) if self._tags_as_made is None else self._tags_as_made

    # --- extra_info ---

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        self.extra_info[key] = value

    def has_extra_info(self, key: str) -> bool:
        return key in self.extra_info

    def remove_extra_info(self, key: str) -> Any:
        """Remove and return the value, or None."""
        return self.extra_info.pop(key, None)

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        self.extra_info.update(info_dict)

    def clear_extra_info(self) -> None:
        self.extra_info.clear()

    def get_all_extra_info(self) -> dict[str, Any]:
        """Deep copy."""
        return copy.deepcopy(self.extra_info)
