# SPDX-License-Identifier: Apache-2.0
"""Every message between client and controller. Adding a verb starts here.

Arrays travel as raw little-endian bytes: ``indexes`` are int64, ``status`` int8, ``row_shapes`` int32.
"""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.errors import UnsupportedValueError

Indexes = npt.NDArray[np.int64]
Tags = dict[str, Any]


class FieldSpec(msgspec.Struct, frozen=True, array_like=True):
    """What the controller knows of one field of some rows. ``row_shapes`` is [rows, ndim], only where rows differ."""

    dtype: str | None
    shape: tuple[int, ...] | None
    is_nested: bool = False
    is_non_tensor: bool = False
    row_shapes: bytes | None = None


class Request(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fields are positional on the wire: append with a default, never reorder. No kw_only: it would move ``id``."""

    id: int


class Hello(Request, frozen=True):
    """A client is here. On the same host ``pid`` lets the server notice its death at once."""

    pid: int
    pid_namespace: int | None = None


class Goodbye(Request, frozen=True):
    """A client leaves on purpose: what it reserved is given back, and it isn't counted as a dead producer."""


class CreatePartition(Request, frozen=True):
    """Make a partition; with ``num_samples`` it seals itself when that many samples are published."""

    partition: str
    num_samples: int | None = None


class SealPartition(Request, frozen=True):
    """No more samples will come into this partition."""

    partition: str


class RegisterTask(Request, frozen=True):
    """How ``task`` draws its batches: sampler spec, data-parallel size, tail policy. Missing parts stay as they are."""

    task: str
    sampler: str | dict[str, Any] | None = None
    dp_size: int | None = None
    tail: str | None = None


class Reserve(Request, frozen=True):
    """Indexes for ``count`` new samples, ascending; parked while the queue is full. ``fields``: checked for dtype."""

    partition: str
    count: int
    fields: dict[str, FieldSpec] = {}
    wait_s: float = 60.0


class CheckFields(Request, frozen=True):
    """Is a write of these fields onto existing samples allowed? Asked before values are replaced.

    Parked up to ``wait_s`` while these values are being read for a checkpoint. Whoever got leave ends it with a
    Publish or a Cancel of the same samples.
    """

    partition: str
    indexes: bytes
    fields: dict[str, FieldSpec]
    wait_s: float = 0.0


class Cancel(Request, frozen=True):
    """Give reserved indexes back: their write failed or they aren't needed."""

    partition: str
    indexes: bytes


class Publish(Request, frozen=True):
    """These fields of these samples are stored whole. The only message that makes data visible.

    Tags merge into those the samples have. ``reserve_next`` asks for so many indexes for the next puts, each of which
    publishes all of its samples at once; ``unused`` gives back some that were reserved in this way. ``describe`` asks
    for a Batch in place of Published.
    """

    partition: str
    indexes: bytes
    fields: dict[str, FieldSpec]
    tags: dict[int, Tags] = {}
    reserve_next: int = 0
    describe: bool = False
    unused: bytes = b""


class Insert(Request, frozen=True):
    """New samples without values yet (``get_meta`` in mode "insert")."""

    partition: str
    count: int
    fields: list[str] = []
    wait_s: float = 60.0


class Fetch(Request, frozen=True):
    """The next batch for a consumer, or the one it was given before. Parked up to ``wait_s`` seconds.

    ``finite``: the stream also ends when every sample the partition has is consumed, sealed or not. ``first_index``:
    the batches from there up to this one are drawn first, in their order, where nobody asked for them yet. ``skip``:
    rows at the start of a batch given before that the caller doesn't need again; they may be cleared. ``pass_start``:
    the batch that the caller's pass over a finite stream began with; all who began before an end are told that end.
    ``after``: token of the batch that the caller was given last; once that partition is cleared, the stream has ended.
    """

    partition: str
    task: str
    fields: list[str]
    batch_size: int
    dp_rank: int | None = None
    batch_index: int | None = None
    dp_size: int | None = None
    wait_s: float = 0.0
    finite: bool = False
    sampler_args: dict[str, Any] = {}
    acks: list[str] = []
    first_index: int | None = None
    skip: int = 0
    pass_start: int | None = None
    after: str | None = None


class Withdraw(Request, frozen=True):
    """The caller has given up waiting for its ``request``: it is neither carried out nor answered any more.

    Where its answer was on the way already, what the request reserved, inserted or took from others is given back, and
    the values of samples that it cleared are dropped.
    """

    request: int


class Ack(Request, frozen=True):
    """These batches are settled and won't be asked for again; ``earlier``: those before them of their rank neither."""

    partition: str
    task: str
    tokens: list[str]
    earlier: bool = False


class Describe(Request, frozen=True):
    """Metadata of given samples, or of all: consumed or not, marks nothing (``get_meta`` in mode "force_fetch")."""

    partition: str
    fields: list[str] | None = None
    indexes: bytes | None = None


class ConsumptionStatus(Request, frozen=True):
    """Which samples of the partition ``task`` has consumed; with ``summary`` only whether it has all, as Done."""

    partition: str
    task: str
    summary: bool = False


class ProductionStatus(Request, frozen=True):
    """Which of the fields each sample of the partition has; with ``summary`` only whether all have all, as Done."""

    partition: str
    fields: list[str]
    summary: bool = False


class ResetConsumption(Request, frozen=True):
    """Make consumed samples available again, for one task or all. The ledger stays: equal questions, equal answers."""

    partition: str
    task: str | None = None


class SetTags(Request, frozen=True):
    """Tags of samples; ``merge`` keeps keys that aren't named."""

    tags: dict[str, dict[int, Tags]]
    merge: bool = False


class ClearSamples(Request, frozen=True):
    """Forget samples. Unknown and already cleared ones are ignored."""

    partition: str
    indexes: bytes


class ClearConsumed(Request, frozen=True):
    """Forget the samples that every task of the partition has consumed and settled; ``tasks`` must be among them."""

    partition: str
    tasks: list[str]


class ClearPartition(Request, frozen=True):
    """Forget a partition and all it holds. Unknown: nothing."""

    partition: str


class ListPartitions(Request, frozen=True):
    """Names of all partitions."""


class ResolveKeys(Request, frozen=True):
    """Samples of user keys; with ``create``, unknown keys get new samples, in the order given.

    ``hold``: new ones stay invisible until published, and can be cancelled. ``writes``: fields whose values will be
    written, maybe over others; then the request asks for leave, as CheckFields does.
    """

    partition: str
    keys: list[str]
    create: bool = False
    hold: bool = False
    fields: dict[str, FieldSpec] = {}
    wait_s: float = 60.0
    writes: list[str] = []


class KeysOf(Request, frozen=True):
    """User keys of samples, None where a sample has none."""

    partition: str
    indexes: bytes


class ListKeys(Request, frozen=True):
    """Keys and tags of one partition or all."""

    partition: str | None = None


class GetStats(Request, frozen=True):
    """Numbers of the whole queue: partitions, tasks, waiting fetches and what they lack."""


class Freeze(Request, frozen=True):
    """The state of the whole queue at one moment, to be saved with the values that belong to it.

    Until Thaw, or the client's end, these values stay: what is cleared is hidden but not dropped, and who would replace
    one waits. Waits itself up to ``wait_s`` for those who got leave to replace values before. ``number``: the client's
    own, for Thaw.
    """

    number: int
    wait_s: float = 30.0


class Thaw(Request, frozen=True):
    """The values are read. The reply names those that were cleared meanwhile: they may be dropped now."""

    number: int


class Stage(Request, frozen=True):
    """Samples with these indexes are about to be restored; their values come first.

    Done with how much to add to each index: none was ever in use in this queue then.
    """

    indexes: bytes


class Restore(Request, frozen=True):
    """Replace the state of the queue by a saved one, whose values are stored. Cleared names what was here before."""

    state: bytes
    shift: int = 0


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """``id`` is the id of the request this answers."""

    id: int


class Done(Reply, frozen=True):
    """Carried out. ``value`` is the verb's own small result."""

    value: Any = None


class Failed(Reply, frozen=True):
    """Refused or failed; nothing changed. ``code`` names a class of ``errors``."""

    code: str
    text: str


class Welcome(Reply, frozen=True):
    """The queue's configuration as JSON, server addresses included."""

    config: bytes


class Reserved(Reply, frozen=True):
    """Indexes for a put, ascending, and the dtypes the partition's fields already have."""

    indexes: bytes
    dtypes: dict[str, str | None] = {}


class Published(Reply, frozen=True):
    """Visible now. ``indexes``: neighbours, reserved for the next puts, as many as asked for or none."""

    indexes: bytes = b""


class Batch(Reply, frozen=True):
    """Samples and what is known of them. ``padding`` marks rows that repeat others to fill a round (uint8)."""

    partition: str
    indexes: bytes
    fields: dict[str, FieldSpec]
    status: bytes
    tags: dict[int, Tags] = {}
    token: str | None = None
    batch_index: int | None = None
    padding: bytes | None = None
    keys: list[str] = []


class NotReady(Reply, frozen=True):
    """No batch yet; try again. Of ``samples`` that the task has still to get, ``lacking`` counts those without a field.

    ``ready`` of them have every field; ``wanted`` is what a round needs, for all data-parallel ranks together.
    Where the batch was drawn before, for other fields, the numbers are about its samples.
    """

    wanted: int
    ready: int
    samples: int
    lacking: dict[str, int] = {}
    last_published_s: float | None = None
    known_fields: list[str] = []


class Ended(Reply, frozen=True):
    """No batch will come any more. ``dropped`` samples were left over by the tail policy."""

    reason: str
    dropped: int = 0


class Status(Reply, frozen=True):
    """``status`` is int8 [samples] or [samples, columns]; ``known`` False for an unknown partition or field."""

    known: bool
    indexes: bytes = b""
    status: bytes = b""
    columns: int = 1


class Cleared(Reply, frozen=True):
    """Samples that are forgotten; their values may be dropped from storage."""

    indexes: bytes


class Names(Reply, frozen=True):
    """Names or keys."""

    names: list[str | None]


class KeyList(Reply, frozen=True):
    """Per partition, user keys and their tags in order of insertion."""

    keys: dict[str, dict[str, Tags]]


class Frozen(Reply, frozen=True):
    """The queue's state, for ``Restore``."""

    state: bytes


AnyRequest = (
    Hello | Goodbye | CreatePartition | SealPartition | RegisterTask | Reserve | CheckFields | Cancel | Publish
    | Insert | Fetch | Withdraw | Ack | Describe | ConsumptionStatus | ProductionStatus | ResetConsumption | SetTags
    | ClearSamples | ClearConsumed | ClearPartition | ListPartitions | ResolveKeys | KeysOf | ListKeys | GetStats
    | Freeze | Thaw | Stage | Restore
)  # fmt: skip
AnyReply = (
    Done | Failed | Welcome | Reserved | Published | Batch | NotReady | Ended | Status | Cleared | Names | KeyList
    | Frozen
)  # fmt: skip


def _plain(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0:  # NumPy scalars and 0-dim tensors
        return value.item()
    raise UnsupportedValueError(
        f"a tag or argument holds a {type(value).__name__}: tags are small plain data (str, int, float, bool, None, "
        f"lists and dicts of them). Store it as a field instead."
    )


_PLACE = re.compile(r" - at `\$\[([1-9]\d*)\](.*)`$")
_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_requests = msgspec.msgpack.Decoder(AnyRequest)
_replies = msgspec.msgpack.Decoder(AnyReply)


def encode(message: Request | Reply) -> bytes:
    """The message as it travels. Raises UnsupportedValueError for tags that aren't plain data."""
    return _encoder.encode(message)


def decode_request(data: bytes | memoryview) -> AnyRequest:
    """Raises msgspec.DecodeError for anything that isn't one of our requests; it names a field of the wrong type."""
    try:
        request: AnyRequest = _requests.decode(data)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(_with_name(str(error), data)) from error
    return request


def _with_name(text: str, data: bytes | memoryview) -> str:
    """Fields travel by position, which says nothing to who gave the value."""
    place = _PLACE.search(text)
    if place is None:
        return text
    tag = msgspec.msgpack.decode(data)[0]
    kind = next(kind for kind in get_args(AnyRequest) if kind.__name__ == tag)
    name = kind.__struct_fields__[int(place[1]) - 1]
    return f"{name}{place[2]} of {kind.__name__}: {text[: place.start()]}"


def decode_reply(data: bytes | memoryview) -> AnyReply:
    """Raises msgspec.DecodeError for anything that isn't one of our replies."""
    reply: AnyReply = _replies.decode(data)
    return reply


def pack_indexes(indexes: Any) -> bytes:
    """Indexes as they travel: int64, little-endian."""
    return np.asarray(indexes, dtype="<i8").tobytes()


def unpack_indexes(data: bytes) -> Indexes:
    """Read-only int64 view of packed indexes."""
    return np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False)
