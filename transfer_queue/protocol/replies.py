# SPDX-License-Identifier: Apache-2.0
"""What the controller answers."""

from __future__ import annotations

import functools
import operator
from typing import Any

import msgspec

from transfer_queue.protocol.request_parts import FieldSpec, Tags, WriteName


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """``id`` is the id of the request this answers."""

    id: int


class Done(Reply, frozen=True):
    """The request was carried out. ``value`` is the verb's own small result."""

    value: Any = None


class Failed(Reply, frozen=True):
    """Refused or failed; nothing changed. ``code`` names a class of ``errors``."""

    code: str
    text: str


class Welcome(Reply, frozen=True):
    """The queue's configuration as JSON, server addresses included."""

    config: bytes


class Reserved(Reply, frozen=True):
    """Indexes for a put, ascending, and the dtypes of those of its fields that have several, counting this put."""

    indexes: bytes
    dtypes: dict[str, list[str | None]] = {}


class Published(Reply, frozen=True):
    """Visible now. ``committing``: earlier writes that are published and may not be committed yet. Who goes on has them
    committed first, in this order.
    """

    committing: list[WriteName] = []


class Batch(Reply, frozen=True):
    """Samples and what is known of them. ``padding`` marks rows that repeat others to fill a round (uint8).

    ``tags``: see ``pack_tags``. ``heads``: by row the index of its group's head, -1 for a sample without a group; None:
    the partition has no groups.
    ``versions``: by head, the policy version of its first lease. ``most_rows``: of a rank's batch in a round of groups.
    ``more``: this is a page of a Describe, and not the last one. ``partial``, of samples that were named by their keys:
    fields that some of them have and others lack. ``remains``: by row of the batch as it was drawn, whether it is still
    there (uint8); None: all are. ``committing``: see ``Published``. ``cut``: rows of each micro-batch of the batch
    as it was drawn, if the sampler says so.
    """

    partition: str
    indexes: bytes
    fields: dict[str, FieldSpec]
    status: bytes
    tags: bytes = b""
    token: str | None = None
    batch_index: int | None = None
    padding: bytes | None = None
    keys: list[str] = []
    more: bool = False
    partial: list[str] = []
    heads: bytes | None = None
    versions: dict[int, int] = {}
    most_rows: int = 0
    remains: bytes | None = None
    committing: list[WriteName] = []
    cut: list[int] = []

    @property
    def lies_in_front(self) -> bool:
        """Whether all values lie in unit 0, which shares the controller's process."""
        return all(spec.units is None for spec in self.fields.values())


class GrantedLease(msgspec.Struct, frozen=True, array_like=True):
    """A lease of a group, or of some of its parts. ``members``: by part, the packed indexes of rows that are there.

    ``attempt`` counts from 1.
    """

    token: int
    partition: str
    head: int
    key: str
    attempt: int
    version: int | None
    parts: list[int]
    members: dict[int, bytes] = {}


class LeasedGroups(Reply, frozen=True):
    """One lease at least. ``heads``: by partition, the groups' own rows, in the order of their leases."""

    leases: list[GrantedLease]
    heads: list[Batch] = []


class NotReady(Reply, frozen=True):
    """No batch yet; try again. Of ``samples`` that the task has still to get, ``lacking`` counts those without a field.

    ``ready`` of them have every field; ``wanted`` is what a round needs, for all data-parallel ranks together.
    Where the batch was drawn before, for other fields, the numbers are about its samples. ``reserved`` samples of the
    partition are being written, by the clients ``owed_by`` (five at most are named). ``unmatched`` have every field,
    and tags that don't match the fetch's filter. ``sealed``: the partition gets no more samples. ``lost`` counts, by
    field of the fetch, the samples of the partition that lost it with a storage unit. ``groups``: as statistics have
    them, for a task that draws groups. ``in_hand``: by client, the samples that it has taken to add such a field.
    ``elsewhere``: what the queue holds, if not the partition. So many ``parked_puts`` wait for room.
    """

    wanted: int
    ready: int
    samples: int
    lacking: dict[str, int] = {}
    last_published_s: float | None = None
    known_fields: list[str] = []
    reserved: int = 0
    owed_by: list[str] = []
    unmatched: int = 0
    sealed: bool = False
    lost: dict[str, int] = {}
    groups: dict[str, Any] = {}
    in_hand: dict[str, int] = {}
    elsewhere: str = ""
    parked_puts: int = 0


class Ended(Reply, frozen=True):
    """No batch will come any more. ``dropped`` samples were left over by the tail policy."""

    reason: str
    dropped: int = 0


class Status(Reply, frozen=True):
    """``status`` is int8 [samples] or [samples, columns]; ``known`` False for an unknown partition or field.

    ``more``: there are samples behind these.
    """

    known: bool
    indexes: bytes = b""
    status: bytes = b""
    columns: int = 1
    more: bool = False


class Cleared(Reply, frozen=True):
    """Samples that are deleted; the storage may now delete their values.

    Of ClearConsumed: ``held_by`` counts by task the samples that stay because the task has not consumed or not
    acknowledged them; ``not_begun`` names tasks that must be done and never fetched; ``more``: ask again for the rest;
    ``unread`` samples stay because no task has fetched from the partition. ``readers`` counts by client the samples of
    fetches without batch_index that it may still read; ``held_by`` counts them, too.
    """

    indexes: bytes
    held_by: dict[str, int] = {}
    not_begun: list[str] = []
    more: bool = False
    unread: int = 0
    readers: dict[str, int] = {}


class Names(Reply, frozen=True):
    """Names or keys."""

    names: list[str | None]


class KeyList(Reply, frozen=True):
    """By partition, user keys and their tags in order of insertion.

    ``last``: there are others, of samples after this index, which may be one that isn't published yet.
    """

    keys: dict[str, dict[str, Tags]]
    last: int | None = None


class UnitInfo(msgspec.Struct, frozen=True, array_like=True):
    """A storage unit: see JoinUnit."""

    number: int
    name: str
    host: str
    addresses: list[str]
    capacity_nbytes: int | None = None


class Units(Reply, frozen=True):
    """The storage units that are there. ``version`` counts the changes."""

    version: int
    units: list[UnitInfo]


class ChangedKeys(Reply, frozen=True):
    """Keys that are new or have new tags, and keys that were removed or match no more; ``position``: up to here.

    The watcher may not have known a removed key. ``fresh``: these are all keys, as changes that far back are no longer
    known; where there are more, ListKeys gives those after index ``last``. Equal positions: nothing has changed.
    """

    position: tuple[int, int, int] | None
    keys: dict[str, Tags] = {}
    removed: list[str] = []
    fresh: bool = False
    last: int | None = None


class Frozen(Reply, frozen=True):
    """A part of the queue's state; the first one is number 0. ``num_parts``: there is one more, or this is the last.

    ``committing``: see ``Published``.
    """

    state: bytes
    num_parts: int = 1
    committing: list[WriteName] = []


AnyReply: Any = functools.reduce(operator.or_, Reply.__subclasses__())
"""One of the classes above."""
