# SPDX-License-Identifier: Apache-2.0
"""Tags of one partition's samples, kept packed: a dict of its own for each would take most of the controller's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from transfer_queue.protocol import Tags

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Tags)


class TagStore(Mapping[int, Tags]):
    """Global index -> tags, for samples that have some. What is read is a copy."""

    def __init__(self) -> None:
        self._packed: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._packed)

    def __iter__(self) -> Iterator[int]:
        return iter(self._packed)

    def __getitem__(self, index: int) -> Tags:
        return _decoder.decode(self._packed[index])

    def put(self, index: int, tags: Tags, merge: bool) -> None:
        """These are the sample's tags now; ``merge`` keeps those that aren't named."""
        if merge and index in self._packed:
            tags = {**self[index], **tags}
        if tags:
            self._packed[index] = _encoder.encode(tags)
        else:
            self._packed.pop(index, None)

    def of(self, indexes: Iterable[int]) -> dict[int, Tags]:
        """Those of the samples that have some."""
        if not self._packed:
            return {}
        packed = self._packed
        return {index: _decoder.decode(packed[index]) for index in indexes if index in packed}

    def forget(self, indexes: Iterable[int]) -> None:
        """These samples are gone."""
        if self._packed:
            for index in indexes:
                self._packed.pop(index, None)
