# SPDX-License-Identifier: Apache-2.0
"""New samples on their way into a queue: the rows, what is known of them, and the metadata that their put returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from tensordict import TensorDict

from transfer_queue.metadata import BatchMeta
from transfer_queue.protocol import FieldSpec
from transfer_queue.schema import Schema
from transfer_queue.utils.values import copy_tags

T = TypeVar("T")


class NewSamples(NamedTuple):
    """Rows of one put, one sample each."""

    partition: str
    rows: TensorDict
    specs: dict[str, FieldSpec]
    schema: Schema
    tags: Sequence[Mapping[str, Any]] | None

    def tags_of(self, indexes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """By index, where there are any."""
        return {index: copy_tags(tags) for index, tags in zip(indexes, self.tags or (), strict=False) if tags}

    def described(self, indexes: Sequence[int]) -> BatchMeta:
        """Their metadata once they are published."""
        meta = BatchMeta(indexes, [self.partition] * len(indexes))
        meta.add_described(self.schema)
        meta.update_custom_meta(self.tags)
        meta.mark_custom_meta_clean()
        return meta


class Aside(Generic[T]):
    """Work for a time when there is nothing to do but wait. What it raises comes up where its result is asked for."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done: list[T] = []
        self._error: Exception | None = None

    def __call__(self) -> None:
        try:
            self._done.append(self._work())
        except Exception as error:  # raised in ``result``
            self._error = error

    def result(self) -> T:
        """Of the work, which is done now if there was no time for it before."""
        if self._error is not None:
            raise self._error
        if not self._done:
            self._done.append(self._work())
        return self._done[0]
