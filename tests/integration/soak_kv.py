# SPDX-License-Identifier: Apache-2.0
"""The soak's operations by key: an actor's own keys, whose version it knows, and keys that all processes fight for."""

from __future__ import annotations

import random
import zlib

import numpy as np
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration import soak_values as values
from tests.integration.soak_state import KEYED_FIELDS, NEWEST, Share, tags_for
from transfer_queue.errors import InvalidRequestError

PARTITIONS = ("soak-a", "soak-k")
_SHARED_KEYS, _OWN_KEYS = 24, 40


class Keyed:
    """The part of an actor that knows samples by key."""

    def __init__(self, share: Share, rng: random.Random, number: int) -> None:
        self.share = share
        self.rng = rng
        self.number = number
        self._newest: dict[tuple[str, str], int] = {}
        self._version = 0

    def _sids(self, partition: str, keys: list[str]) -> np.ndarray:
        return np.array([1 << 42 | zlib.crc32(f"{partition}/{key}".encode()) << 9 for key in keys], np.int64)

    def _own_keys(self) -> list[str]:
        first = self.rng.randrange(_OWN_KEYS)
        return [
            f"{self.share.serial}.{self.number}.{at}" for at in range(first, first + self.rng.choice((1, 1, 4, 16)))
        ]

    def _shared_keys(self) -> list[str]:
        return [f"k{at}" for at in self.rng.sample(range(_SHARED_KEYS), self.rng.choice((1, 1, 3, 8)))]

    async def kv_put(self) -> None:
        partition, mine = self.rng.choice(PARTITIONS), self.rng.random() < 0.6
        keys = self._own_keys() if mine else self._shared_keys()
        sids = self._sids(partition, keys)
        self._version += 1
        made = {name: values.make(self.rng, name, sids, self._version, 300) for name in KEYED_FIELDS}
        tags = tags_for(sids, **({f"v.{name}": self._version for name in KEYED_FIELDS} if mine else {"w": 1}))
        self.share.log(self.number, f"kv_put {partition} {keys} version {self._version}")
        for key in keys:
            self._newest.pop((partition, key), None)  # unknown until this put has returned
        await tq.async_kv_batch_put(keys, partition, TensorDict(made, batch_size=[len(keys)]), tags)
        if mine:
            self._newest.update({(partition, key): self._version for key in keys})

    async def kv_get(self) -> None:
        partition = self.rng.choice(PARTITIONS)
        mine = [key for at, key in self._newest if at == partition]
        exact = bool(mine) and self.rng.random() < 0.7
        keys = self.rng.choices(mine, k=self.rng.choice((1, 3, 9))) if exact else self._shared_keys()
        fields = self.rng.choice((None, "num", ["ids", "text"]))
        self.share.log(self.number, f"kv_get {partition} {keys} {fields}")
        try:
            data = await tq.async_kv_batch_get(keys, partition, fields)
        except InvalidRequestError as error:
            if "not found" not in str(error) and "not ready" not in str(error):
                raise
            for key in keys:
                self._newest.pop((partition, key), None)
            self.share.count("KeyGone")
            return
        low = np.array([self._newest[partition, key] if exact else 0 for key in keys])
        high = low if exact else np.full(len(keys), NEWEST)
        for name in data.keys():  # noqa: SIM118 (iterating a TensorDict gives rows)
            if name in KEYED_FIELDS:
                nbytes = values.check(name, data[name], keys, self._sids(partition, keys), low, high)[1]
                self.share.count("nbytes_checked", nbytes)

    async def kv_clear(self) -> None:
        partition = self.rng.choice(PARTITIONS)
        keys = self._shared_keys() if self.rng.random() < 0.6 else self._own_keys()
        self.share.log(self.number, f"kv_clear {partition} {keys}")
        for key in keys:
            self._newest.pop((partition, key), None)
        await tq.async_kv_clear(keys, partition)
