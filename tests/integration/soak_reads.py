# SPDX-License-Identifier: Apache-2.0
"""The soak's reads: whole or in parts, kept and looked at again, scribbled over, and their errors judged."""

from __future__ import annotations

import random
from collections.abc import Awaitable
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.soak_state import Kept, Share, known
from tests.integration.soak_values import WrongValueError
from transfer_queue.errors import SampleClearedError, UnknownPartitionError

_KEPT, _ROWS = 12, 64


class Reads:
    """The part of an actor that reads values by metadata."""

    def __init__(self, share: Share, client: Any, rng: random.Random, number: int) -> None:
        self.share = share
        self.client = client
        self.rng = rng
        self.number = number
        self.kept: list[Kept] = []

    def log(self, text: str) -> None:
        self.share.log(self.number, text)

    def positions(self, count: int, repeats: bool) -> list[int]:
        wanted = self.rng.randint(1, min(count, _ROWS))
        return self.rng.choices(range(count), k=wanted) if repeats else self.rng.sample(range(count), wanted)

    async def read(self, meta: tq.BatchMeta, exact: bool = False) -> None:
        """Whole, or rows in any order; ``exact``: nobody else can have replaced these values."""
        if "big" in meta.field_names or self.rng.random() < 0.5:
            count = min(meta.size, 24) if "big" in meta.field_names else meta.size
            meta = meta[:count].select_samples(self.positions(count, self.rng.random() < 0.3))
        if self.rng.random() < 0.3:
            meta = meta.select_fields(self.rng.choice(meta.field_names))
        kept = await self._got(meta, exact)
        if self.rng.random() < 0.2:  # what was got is the reader's own
            scribble(kept.data)
            await self._got(meta, exact)
            return
        self.keep(kept)

    async def _got(self, meta: tq.BatchMeta, exact: bool) -> Kept:
        self.log(f"read {meta.field_names} of {meta.global_indexes}")
        return self.seen(await self.judged(meta, self.client.async_get_data(meta)), meta, exact)

    def seen(self, data: TensorDict, meta: tq.BatchMeta, exact: bool = False) -> Kept:
        """Look at every byte."""
        kept = Kept.checked(data, meta, exact)
        self.share.count("nbytes_checked", kept.nbytes)
        return kept

    def keep(self, kept: Kept) -> None:
        """Some of what was got is looked at again later."""
        if self.rng.random() < 0.4 and kept.nbytes < self.share.largest_kept:
            self.kept.append(kept)
            if len(self.kept) > _KEPT:
                self._recheck()

    async def recheck(self) -> None:
        self._recheck()

    def _recheck(self) -> None:
        """What was got some time ago is as it was."""
        if self.kept:
            kept = self.kept.pop(self.rng.randrange(len(self.kept)))
            kept.check_again()
            self.share.count("nbytes_checked", kept.nbytes)

    def finish(self) -> None:
        """Look at everything that was kept once more."""
        for kept in self.kept:
            kept.check_again()
        self.kept.clear()

    async def judged(self, meta: tq.BatchMeta, verb: Awaitable[Any]) -> Any:
        """A sample may be gone because somebody cleared it, and for no other reason."""
        try:
            return await verb
        except SampleClearedError as error:
            for part in meta.chunk_by_partition():
                if not set(part.global_indexes) <= await self._alive(part.partition_ids[0]):
                    raise
            raise WrongValueError(f"nobody cleared any of {meta}, yet: {error}") from error

    async def _alive(self, partition: str) -> set[int]:
        try:
            every = await self.client.async_get_meta(["num"], partition_id=partition, mode="force_fetch")
        except UnknownPartitionError:
            return set()
        return set(every.global_indexes)


def scribble(data: TensorDict) -> None:
    """Overwrite every tensor."""
    for name in known(data):
        column = data[name]
        if isinstance(column, torch.Tensor):
            (column.values() if column.is_nested and column.layout == torch.jagged else column).fill_(1)
