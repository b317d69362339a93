# SPDX-License-Identifier: Apache-2.0
"""Keys: users' own names of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata_wire import to_meta
from transfer_queue.verbs.line import Line


class Keys(Line):
    """Verbs that find samples by key, and the steps that a put by key is made of."""

    async def async_kv_retrieve_meta(
        self, keys: Sequence[str] | str, partition_id: str, create: bool = False
    ) -> BatchMeta:
        """Samples of keys. Unknown ones are left out, or made with ``create``, in the order given."""
        names = check_keys(keys)
        wait_s = await self.put_timeout_s()
        return to_meta(
            await self.session.ask(
                p.ResolveKeys, p.Batch, partition_id, names, create, False, {}, wait_s, wait_s=wait_s
            )
        )

    async def hold_keys(
        self, keys: Sequence[str], partition_id: str, specs: Mapping[str, p.FieldSpec], writes: Sequence[str]
    ) -> p.Batch:
        """Samples of keys for a put that ``writes`` these fields; new ones stay invisible until ``publish``."""
        wait_s = await self.put_timeout_s()
        return await self.session.ask(
            p.ResolveKeys, p.Batch, partition_id, list(keys), True, True, dict(specs), wait_s, list(writes),
            wait_s=wait_s,
        )  # fmt: skip

    def publication(
        self, meta: BatchMeta, specs: Mapping[str, p.FieldSpec], tags: Mapping[int, Mapping[str, Any]]
    ) -> p.Publish:
        """Makes stored fields and tags of one partition's samples visible, and asks what they have then."""
        indexes = p.pack_indexes(meta.global_indexes)
        return self.session.message(p.Publish, meta.partition_ids[0], indexes, dict(specs), dict(tags), 0, True)

    async def publish(self, message: p.Publish, said: bytes = b"") -> p.Batch:
        """What the samples have now. ``said``: what the controller answered already, if it was told."""
        if said:
            return self.session.read(said, message, p.Batch)
        return await self.session.send(message, p.Batch)

    async def async_kv_retrieve_keys(self, global_indexes: Sequence[int] | int, partition_id: str) -> list[str | None]:
        """Keys of samples, None for one without."""
        indexes = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        if not isinstance(indexes, list) or not all(type(index) is int for index in indexes):
            raise TypeError(f"global_indexes must be an int or a list of int, got {global_indexes!r}.")
        if not indexes:
            raise InvalidRequestError("global_indexes is empty.")
        return (await self.session.ask(p.KeysOf, p.Names, partition_id, p.pack_indexes(indexes))).names

    async def async_kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """{partition: {key: tag}}, keys in order of insertion; unknown partition: {}."""
        return (await self.session.ask(p.ListKeys, p.KeyList, partition_id)).keys


def check_keys(keys: Sequence[str] | str) -> list[str]:
    """A list of key names; one string is one key."""
    names = [keys] if isinstance(keys, str) else keys
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"keys must be a string or a list of strings, got {keys!r}.")
    if not names:
        raise InvalidRequestError("the list of keys is empty.")
    return names
