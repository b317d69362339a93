# SPDX-License-Identifier: Apache-2.0
"""What a client may ask of the controller, and what messages are made of. Adding a verb starts here.

Arrays travel as raw little-endian bytes: ``indexes`` are int64, ``status`` int8, ``row_shapes`` int32.
"""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any

import msgspec

from transfer_queue.protocol.group_requests import (
    EndLease,
    LeaseGroups,
    Members,
    RejectGroups,
    RetryGroups,
    Role,
    Terms,
)
from transfer_queue.protocol.request_parts import (
    Call,
    Count,
    DeclaredField,
    FewIndexes,
    FewNames,
    FieldSpec,
    NumRanks,
    Position,
    Request,
    Seconds,
    Size,
    TagsOf,
)


class Hello(Request, frozen=True):
    """A client is here. ``version``: the protocol it speaks. ``namespace``: where it has this ``pid``."""

    pid: Call
    version: Call = 0
    namespace: Call | None = None


class Goodbye(Request, frozen=True):
    """A client ends its session on purpose. That is as if it died, but it doesn't count as a dead producer."""


class CreatePartition(Request, frozen=True):
    """Make a partition; with ``num_samples`` it seals itself when that many samples are published.

    ``fields``: writes of these are checked.
    """

    partition: str
    num_samples: Position | None = None
    fields: dict[str, DeclaredField] = {}


class SealPartition(Request, frozen=True):
    """No more samples will come into this partition."""

    partition: str


class RegisterTask(Request, frozen=True):
    """How ``task`` draws its batches: sampler spec, data-parallel size, tail policy. Missing parts stay as they are.

    ``follows``: it draws none, and is given whatever this other task is given, under the same numbers.
    """

    task: str
    sampler: str | dict[str, Any] | None = None
    dp_size: NumRanks | None = None
    tail: str | None = None
    follows: str | None = None


class Reserve(Request, frozen=True):
    """Indexes for ``count`` new samples, ascending. Waits while the queue is full. ``fields``: checked if declared."""

    partition: str
    count: Count
    fields: dict[str, FieldSpec] = {}
    wait_s: Seconds = 60.0
    role: Members | None = None


class CheckFields(Request, frozen=True):
    """Is a write of these fields onto existing samples allowed? Asked before values are replaced.

    It waits up to ``wait_s`` while these values are being read for a checkpoint. A client that may replace values holds
    a permit. It ends with the Publish that names this call, or when this call is cancelled.
    """

    partition: str
    indexes: bytes
    fields: dict[str, FieldSpec]
    wait_s: Seconds = 0.0


class Publish(Request, frozen=True):
    """These fields of these samples are stored whole. The only message that makes data visible.

    Tags merge into those the samples have. ``describe`` asks for a Batch in place of Published. ``completes``: the call
    (Reserve, CheckFields, ResolveKeys) of the same session that this completes; it may be this call itself. It can't be
    reverted from then on, and reserved samples that aren't published here are released.
    ``uncommitted``: values for samples that exist are committed later; their permit lasts until the client has this
    answer. ``role``: the samples are new members of a group, or the heads of new groups.
    """

    partition: str
    indexes: bytes
    fields: dict[str, FieldSpec]
    tags: TagsOf = {}
    describe: bool = False
    completes: Call = 0
    uncommitted: bool = False
    role: Role | None = None


class Insert(Request, frozen=True):
    """New samples without values yet (``get_meta`` in mode "insert")."""

    partition: str
    count: Count
    fields: FewNames = []
    wait_s: Seconds = 60.0


class Fetch(Request, frozen=True):
    """The next batch for a consumer, or the one it was given before. It waits up to ``wait_s`` seconds.

    ``finite``: the stream also ends when every sample the partition has is consumed, sealed or not. ``first_index``:
    the batches from there up to this one are drawn first, in their order, where nobody asked for them yet. ``skip``:
    rows at the start of a batch given before that the caller doesn't need again; they may be cleared. ``pass_start``:
    the batch that the caller's pass over a finite stream began with; all readers that began before an end get it.
    ``after``: token of the batch that the caller was given last; once that partition is cleared, the stream has ended.
    ``trained``: the reader has trained its batches below this one; None: all that it was given before.
    ``with_values``: the values travel with the answer, where the server that draws the batch holds them, too;
    ``mapped``: large ones as offsets in memory that the client has mapped. ``where``: a filter; a batch that is drawn
    for this fetch has only samples whose tags match. ``waited_s``: how long the caller has waited before this request.
    ``adds``: fields that the caller will put onto the batch's samples. What lacks one when its session ends is given
    again, and other sessions get the end only once nothing lacks one. ``starved_s``: how long the reader of the
    caller's stream has waited for batches so far, in all; None: unknown. It may be busy while this fetch waits.
    ``small_values``: the values travel with the answer where they are few bytes. The caller has mapped the unit's page
    of changes, by which it sees whether they are still those.
    """

    partition: str
    task: str
    fields: FewNames
    batch_size: Count
    dp_rank: Position | None = None
    batch_index: Position | None = None
    dp_size: NumRanks | None = None
    wait_s: Seconds = 0.0
    finite: bool = False
    sampler_args: dict[str, Any] = {}
    first_index: Position | None = None
    skip: Position = 0
    pass_start: Position | None = None
    after: str | None = None
    with_values: bool = False
    mapped: bool = False
    where: str | None = None
    waited_s: Seconds = 0.0
    trained: Position | None = None
    adds: FewNames = []
    starved_s: Seconds | None = None
    small_values: bool = False


class Cancel(Request, frozen=True):
    """The caller no longer waits for this call of its own. It is not carried out, or is reverted.

    Done says what became of it: "removed" (it waited), "undone", or "kept": there was nothing to revert, because it
    took effect for good or was never seen. The values of samples that it cleared are deleted by the server then.
    """

    call: Call


class Ack(Request, frozen=True):
    """No reader asks for these batches again; ``earlier``: nor for those before them of their rank.

    ``before``: nor for the batches of ``dp_rank`` before this one.
    """

    partition: str
    task: str
    tokens: FewNames
    earlier: bool = False
    before: Position = 0
    dp_rank: Position | None = None


class Describe(Request, frozen=True):
    """Metadata of given samples, or of all: consumed or not, marks nothing (``get_meta`` in mode "force_fetch").

    That of all comes in pages: the samples that come ``after`` this index. The reply says whether there are more.
    """

    partition: str
    fields: FewNames | None = None
    indexes: FewIndexes | None = None
    after: Position | None = None


class ConsumptionStatus(Request, frozen=True):
    """Which samples ``task`` has consumed, in pages as Describe gives all; ``summary``: whether it has all, as Done."""

    partition: str
    task: str
    summary: bool = False
    after: Position | None = None


class FieldStatus(Request, frozen=True, tag="ProductionStatus"):
    """Which fields each sample has, in pages as Describe gives all; ``summary``: whether all have all, as Done."""

    partition: str
    fields: FewNames
    summary: bool = False
    after: Position | None = None


class ResetConsumption(Request, frozen=True):
    """Make consumed samples available again, for one task or all. The ledger stays: equal questions, equal answers."""

    partition: str
    task: str | None = None


class SetTags(Request, frozen=True):
    """Tags of samples by partition; ``merge`` keeps keys that aren't named."""

    tags: Annotated[dict[str, TagsOf], msgspec.Meta(max_length=64)]
    merge: bool = False


class ClearSamples(Request, frozen=True):
    """Delete samples. Unknown and already cleared ones are ignored."""

    partition: str
    indexes: FewIndexes


class ClearConsumed(Request, frozen=True):
    """Delete the samples that every task of the partition has consumed and acknowledged, and each of ``tasks``.

    ``dry_run``: clear nothing, only say what holds samples up.
    """

    partition: str
    tasks: FewNames
    dry_run: bool = False


class ClearPartition(Request, frozen=True):
    """Delete a partition and all it holds. Unknown: nothing."""

    partition: str


class ListPartitions(Request, frozen=True):
    """Names of all partitions."""


class ResolveKeys(Request, frozen=True):
    """Samples of user keys; with ``create``, unknown keys get new samples, in the order given.

    ``hold``: new ones stay invisible until published, and can be cancelled. ``writes``: fields whose values will be
    written, maybe over others; then the request asks for a permit, as CheckFields does. ``role``: the samples become
    heads of new groups, so their keys must be new.
    """

    partition: str
    keys: FewNames
    create: bool = False
    hold: bool = False
    fields: dict[str, FieldSpec] = {}
    wait_s: Seconds = 60.0
    writes: FewNames = []
    role: Terms | None = None


class Put(Request, frozen=True):
    """``begin``, the write of the values and their publish in one turn, where one server does all three.

    ``tags`` by row of the put. ``write``: the storage unit's own message. All steps are one call, so ``begin`` has the
    same ``id``.
    """

    begin: Reserve | CheckFields | ResolveKeys
    tags: TagsOf = {}
    write: bytes = b""


class KeysOf(Request, frozen=True):
    """User keys of samples, None where a sample has none."""

    partition: str
    indexes: FewIndexes


class ListKeys(Request, frozen=True):
    """A page of the keys of a partition and their tags: those of samples that come ``after`` this index.

    A key that is cleared and put again between two pages may come twice, and none is left out. ``where``: only keys
    whose tags match this filter.
    """

    partition: str
    after: Position = -1
    where: str | None = None


class WatchKeys(Request, frozen=True):
    """What changed about the keys of a partition since ``position``, of an earlier ChangedKeys. It waits for that.

    ``position`` None: list all keys, as soon as there is such a partition. ``where``: only keys whose tags match this
    filter; those that match no more count as removed. A request without an effect: it may be sent again.
    """

    partition: str
    position: tuple[Call, Call, Call] | None = None
    where: str | None = None
    wait_s: Seconds = 0.0


class WaitKeys(Request, frozen=True):
    """The first page of keys whose tags match the filter, as ListKeys gives it, once there are ``count`` of them."""

    partition: str
    where: str | None = None
    count: Count = 1
    wait_s: Seconds = 0.0


class ForgetTask(Request, frozen=True):
    """No partition keeps samples for this task any more: its name was misspelt, or it will never read again.

    Done with the number of partitions that knew it. For its waiting fetches, their stream has ended.
    """

    task: str


class ExpectProducers(Request, frozen=True):
    """New producers are about to start. Until one of them comes and dies, no fetch fails for producers that died."""


class NoteExit(Request, frozen=True):
    """The process of a producer has ended, as the one who watches it says.

    ``client``: what the names of its clients begin with, up to the last "_". ``planned``: its run is over, and has
    ended it.
    """

    client: str
    how: str
    last_line: str = ""
    planned: bool = False


class GetStats(Request, frozen=True):
    """Statistics of everything, in pages of partitions in the order in which they were made.

    A page that others follow says which was its last one (``more``), and the next page begins ``after`` that. So a
    partition that stays comes once, whatever others come and go. All else comes with the first page (``after`` 0).
    """

    after: Size = 0


class EvictClient(Request, frozen=True):
    """End the session of a client that hangs, as if it had died. Done says whether it held anything.

    ``unit``: also if the client is a storage unit, whose values are lost then.
    """

    client: str
    unit: bool = False


class JoinUnit(Request, frozen=True):
    """A storage unit is here. Done says its number. It is a unit of the queue until its session ends.

    ``host``: the same for all processes of one host. ``addresses``: where it listens, at best one for its own host and
    one for others. ``capacity_nbytes``: of its values.
    """

    name: str
    host: str
    addresses: list[str]
    capacity_nbytes: Annotated[int, msgspec.Meta(ge=1, le=2**62)] | None = None


class ListLost(Request, frozen=True):
    """The samples of a partition whose values were lost with a storage unit, and that were not put again.

    Done with their packed indexes by field.
    """

    partition: str


class ListUnits(Request, frozen=True):
    """The storage units of the queue. ``known``: the version that the client has. It gets the next one, when there is
    one; until then the request waits up to ``wait_s`` seconds.
    """

    known: Position | None = None
    wait_s: Seconds = 0.0


class WatchRun(Request, frozen=True):
    """This process is a member of a run. It waits until the run has lost a member, up to ``wait_s`` seconds.

    A member is in the run from its first request to LeaveRun or the end of its session, also between its requests.
    Done names the lost member, or None. ``name``: the others get it if this member is lost; None: it is a member
    already. ``opens``: the run begins with this member; to others an unknown run is an error.
    """

    run: str
    name: str | None = None
    opens: bool = False
    wait_s: Seconds = 0.0


class LeaveRun(Request, frozen=True):
    """This process leaves the run. ``failed``: the others can't go on without it, and get its name."""

    run: str
    failed: bool = False


class Freeze(Request, frozen=True):
    """The state of the whole queue at one moment, to be saved with the values that belong to it.

    Until Thaw, a Cancel, or the end of the session these values stay. What is cleared is hidden but not deleted, and a
    write that would replace one waits. Freeze itself waits up to ``wait_s`` for writes with a permit to replace values.
    ``task``: only the samples of this task's open batches, and the heads of their groups.
    """

    wait_s: Seconds = 30.0
    task: str | None = None


class ReadFrozen(Request, frozen=True):
    """A further part of the state that a Freeze was answered with. ``call``: number of the Freeze."""

    call: Call
    part: Position


class Thaw(Request, frozen=True):
    """The values of this Freeze are read. The reply names those that were cleared since: they may be deleted now."""

    call: Call


class Stage(Request, frozen=True):
    """Samples with these indexes are about to be restored; their values come first.

    Done with how much to add to each index: none was ever in use in this queue then.
    """

    indexes: bytes


class RestorePart(Request, frozen=True):
    """A part of a saved state, in order; nothing changes before Restore brings the last one.

    ``first_call``: number of the call with the first part, which a Cancel of the whole names. ``shift``: see Restore.
    """

    first_call: Call
    part: Position
    state: bytes
    shift: Position = 0


class Restore(Request, frozen=True):
    """Replace the state of the queue by a saved one, whose values are stored. Cleared names what was here before.

    ``shift``: what Stage answered. ``first_call``: of the first RestorePart, where ``state`` is the last part only.
    """

    state: bytes
    shift: Position = 0
    first_call: Call = 0


AnyRequest: Any = functools.reduce(operator.or_, Request.__subclasses__())
"""One of the classes above, or of those of groups."""
KEPT = (
    Fetch, Reserve, CheckFields, ResolveKeys, Publish, Put, Insert, ClearSamples, ClearConsumed, ClearPartition, Freeze,
    Thaw, Stage, RestorePart, Restore, LeaseGroups, EndLease, RetryGroups, RejectGroups,
)  # fmt: skip
"""Requests whose answers a server may keep until the client says that it has them."""
