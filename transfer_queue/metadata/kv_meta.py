# SPDX-License-Identifier: Apache-2.0
"""KVBatchMeta: a handle to samples by their user-given keys, with their tags."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transfer_queue.errors import InvalidRequestError
from transfer_queue.metadata.annotations import copy_tags, merge_extra_info
from transfer_queue.metadata.meta_rows import as_ints, check_permutation, consecutive, even_sizes, pick


@dataclass
class KVBatchMeta:
    """Keys of one partition, each with its tags; tags and extra_info are the batch's own copies.

    Raises:
        ValueError: keys and tags differ in number, or a key or field is named twice.
    Examples:
        >>> meta = tq.kv_batch_put(["q1", "q2"], "train", {"x": torch.arange(2)})
        >>> second = meta.select_keys(["q2"])
        >>> tq.kv_batch_get_by_meta(second)["x"]
        tensor([1])
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise InvalidRequestError(
                f"keys and tags must have same length, got {len(self.keys)} and {len(self.tags)}. No tags: {{}}."
            )
        self.keys = list(self.keys)
        # One by one, because a deep copy of [{}] * n would keep all rows one dict.
        self.tags = [copy_tags(tags) for tags in self.tags]
        self.extra_info = copy.deepcopy(self.extra_info) if self.extra_info else {}
        if self.fields is not None:
            self.fields = [self.fields] if isinstance(self.fields, str) else list(self.fields)
        _refuse_repeats("Got duplicated keys", self.keys)
        _refuse_repeats("Got duplicated fields", self.fields or [])

    @property
    def size(self) -> int:
        """Number of keys."""
        return len(self.keys)

    def __len__(self) -> int:
        return self.size

    def select_keys(self, keys_to_select: Iterable[str]) -> KVBatchMeta:
        """The rows of these keys, in this order.

        Raises:
            ValueError: a key is given twice.
            RuntimeError: a key is not in this batch.
        """
        wanted = list(keys_to_select)
        _refuse_repeats("Contain duplicate keys", wanted)
        positions = {key: position for position, key in enumerate(self.keys)}
        missing = [key for key in wanted if key not in positions]
        if missing:
            raise InvalidRequestError(
                f"{len(missing)} keys not found in current batch of {self.size}, first of them {missing[:5]}. "
                "Select from meta.keys."
            )
        return self._take([positions[key] for key in wanted])

    def reorder(self, indexes: Iterable[int]) -> None:
        """Reorder the rows in place; ValueError unless every position is named once."""
        positions = as_ints(indexes)
        check_permutation(positions, self.size)
        self.keys = pick(self.keys, positions)
        self.tags = pick(self.tags, positions)

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Consecutive parts, the first ``size % chunks`` one row larger; too many give empty ones and a warning."""
        return [self._take(rows) for rows in consecutive(even_sizes(self.size, chunks), self.size)]

    @classmethod
    def concat(cls, data: Iterable[KVBatchMeta | None]) -> KVBatchMeta:
        """The rows of all parts, one part after the other; None and empty parts are skipped.

        Raises:
            ValueError: the parts differ in partition, fields or a value in extra_info, or share a key.
        """
        parts = [part for part in data if part is not None and part.size]
        if not parts:
            return cls()
        first = parts[0]
        for part in parts[1:]:
            _check_same_source(first, part)
        return replace(
            first,
            keys=[key for part in parts for key in part.keys],
            tags=[tags for part in parts for tags in part.tags],
            extra_info=merge_extra_info(part.extra_info for part in parts),
        )

    def _take(self, positions: slice | list[int]) -> KVBatchMeta:
        return replace(self, keys=pick(self.keys, positions), tags=pick(self.tags, positions))


def _check_same_source(first: KVBatchMeta, part: KVBatchMeta) -> None:
    if _as_set(part.fields) != _as_set(first.fields):
        raise InvalidRequestError(f"Field names do not match: {first.fields} and {part.fields}. Align them first.")
    if part.partition_id != first.partition_id:
        raise InvalidRequestError(
            f"Partition do not match: {first.partition_id!r} and {part.partition_id!r}. Concatenate per partition."
        )


def _as_set(fields: list[str] | None) -> set[str] | None:
    return None if fields is None else set(fields)


def _refuse_repeats(text: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        repeated = [name for name, times in Counter(names).items() if times > 1][:5]
        raise InvalidRequestError(f"{text}: {repeated}. Name each once.")
