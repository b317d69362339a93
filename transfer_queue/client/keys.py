# SPDX-License-Identifier: Apache-2.0
"""Keys: users' own names of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transfer_queue import protocol as p
from transfer_queue.client.put import Puts, RowTags
from transfer_queue.errors import InvalidRequestError
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata_wire import to_meta

if TYPE_CHECKING:
    from tensordict import TensorDict


class Keys(Puts):
    """Verbs that find samples by key."""

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

    async def put_by_key(
        self,
        keys: Sequence[str],
        partition_id: str,
        rows: TensorDict | None,
        specs: Mapping[str, p.FieldSpec],
        tags: RowTags,
    ) -> p.Batch:
        """Write rows and tags of keys, of which unknown ones get new samples. Returns what the samples have then."""
        wait_s = await self.put_timeout_s()
        writes = sorted(specs)
        begin = p.ResolveKeys(
            self.session.number(), partition_id, list(keys), True, True, dict(specs), wait_s, writes
        )  # fmt: skip
        reply = await self.write(begin, rows, tags)
        assert isinstance(reply, p.Batch)
        return reply

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
        names = [partition_id] if partition_id is not None else await self._partitions()
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for name in names:
            page = await self.session.ask(p.ListKeys, p.KeyList, name)
            found.update(page.keys)
            while page.more:  # in pages, so that a long list holds up no other client
                page = await self.session.ask(p.ListKeys, p.KeyList, name, page.last)
                found.setdefault(name, {}).update(page.keys.get(name, {}))
        return found

    async def _partitions(self) -> list[str]:
        return [str(name) for name in (await self.session.ask(p.ListPartitions, p.Names)).names]


def check_keys(keys: Sequence[str] | str) -> list[str]:
    """A list of key names; one string is one key."""
    names = [keys] if isinstance(keys, str) else keys
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"keys must be a string or a list of strings, got {keys!r}.")
    if not names:
        raise InvalidRequestError("the list of keys is empty.")
    return names
