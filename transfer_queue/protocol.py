# SPDX-License-Identifier: Apache-2.0
"""Every message between client and controller. Adding a verb starts here.

Arrays travel as raw little-endian bytes: ``indexes`` are int64, ``status`` int8, ``row_shapes`` int32.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.errors import InvalidRequestError, ProtocolError, UnsupportedValueError

PROTOCOL_VERSION = 2
"""Client and server must have the same one."""
MAX_DEPTH = 64
"""Levels of lists and dicts in a tag or an argument."""

Indexes = npt.NDArray[np.int64]
Tags = dict[str, Any]
# Bounds keep what a server does with a number small. What is below 0 or 1 is refused where it is used, which says more.
Call = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Number of a call within its client's session: ascending, never reused."""
Count = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Position = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
NumRanks = Annotated[int, msgspec.Meta(ge=-(2**16), le=2**16)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class FieldSpec(msgspec.Struct, frozen=True, array_like=True):
    """What the controller knows of one field of some rows. ``row_shapes`` is [rows, ndim], only where rows differ."""

    dtype: str | None
    shape: tuple[int, ...] | None
    is_nested: bool = False
    is_non_tensor: bool = False
    row_shapes: bytes | None = None


class Request(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fields are positional on the wire: append with a default, never reorder. No kw_only: it would move ``id``."""

    id: Call


class Hello(Request, frozen=True):
    """A client is here. ``version``: the protocol it speaks."""

    pid: Call
    version: Call = 0


class Goodbye(Request, frozen=True):
    """A client leaves on purpose: its session ends as when it dies, but it isn't counted as a dead producer."""


class CreatePartition(Request, frozen=True):
    """Make a partition; with ``num_samples`` it seals itself when that many samples are published."""

    partition: str
    num_samples: Position | None = None


class SealPartition(Request, frozen=True):
    """No more samples will come into this partition."""

    partition: str


class RegisterTask(Request, frozen=True):
    """How ``task`` draws its batches: sampler spec, data-parallel size, tail policy. Missing parts stay as they are."""

    task: str
    sampler: str | dict[str, Any] | None = None
    dp_size: NumRanks | None = None
    tail: str | None = None


class Reserve(Request, frozen=True):
    """Indexes for ``count`` new samples, ascending; parked while the queue is full. ``fields``: checked for dtype."""

    partition: str
    count: Count
    fields: dict[str, FieldSpec] = {}
    wait_s: Seconds = 60.0


class CheckFields(Request, frozen=True):
    """Is a write of these fields onto existing samples allowed? Asked before values are replaced.

    Parked up to ``wait_s`` while these values are being read for a checkpoint. A client that may replace values holds
    a leave; it ends with the Publish that names this call, or when this call is cancelled.
    """

    partition: str
    indexes: bytes
    fields: dict[str, FieldSpec]
    wait_s: Seconds = 0.0


class Publish(Request, frozen=True):
    """These fields of these samples are stored whole. The only message that makes data visible.

    Tags merge into those the samples have. ``describe`` asks for a Batch in place of Published. ``begun``: number of
    the call (Reserve, CheckFields, ResolveKeys) of the same session that this completes; it may be this call's own. It
    can't be undone from then on, and samples that it reserved and that aren't published here are given back.
    ``uncommitted``: the client commits the values afterwards; a leave to replace some lasts until it has this answer.
    """

    partition: str
    indexes: bytes
    fields: dict[str, FieldSpec]
    tags: dict[int, Tags] = {}
    describe: bool = False
    begun: Call = 0
    uncommitted: bool = False


class Insert(Request, frozen=True):
    """New samples without values yet (``get_meta`` in mode "insert")."""

    partition: str
    count: Count
    fields: list[str] = []
    wait_s: Seconds = 60.0


class Fetch(Request, frozen=True):
    """The next batch for a consumer, or the one it was given before. Parked up to ``wait_s`` seconds.

    ``finite``: the stream also ends when every sample the partition has is consumed, sealed or not. ``first_index``:
    the batches from there up to this one are drawn first, in their order, where nobody asked for them yet. ``skip``:
    rows at the start of a batch given before that the caller doesn't need again; they may be cleared. ``pass_start``:
    the batch that the caller's pass over a finite stream began with; all who began before an end are told that end.
    ``after``: token of the batch that the caller was given last; once that partition is cleared, the stream has ended.
    ``with_values``: the values travel with the answer, where the server that draws the batch holds them, too;
    ``mapped``: large ones as places in memory that the client has mapped.
    """

    partition: str
    task: str
    fields: list[str]
    batch_size: Count
    dp_rank: Position | None = None
    batch_index: Position | None = None
    dp_size: NumRanks | None = None
    wait_s: Seconds = 0.0
    finite: bool = False
    sampler_args: dict[str, Any] = {}
    acks: list[str] = []
    first_index: Position | None = None
    skip: Position = 0
    pass_start: Position | None = None
    after: str | None = None
    with_values: bool = False
    mapped: bool = False


class Cancel(Request, frozen=True):
    """The caller no longer waits for this call of its own: it is not carried out, or is undone.

    Done says what became of it: "removed" (it was parked), "undone", or "kept": there was nothing to undo, because it
    took effect for good or was never seen. The values of samples that it cleared are deleted by the server then.
    """

    call: Call


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
    wait_s: Seconds = 60.0
    writes: list[str] = []


class Put(Request, frozen=True):
    """``begin``, the write of the values and their publish in one turn, where one server does all three.

    ``tags`` by row of the put. ``write``: the storage unit's own message. All steps are one call, so ``begin`` has the
    same ``id``.
    """

    begin: Reserve | CheckFields | ResolveKeys
    tags: dict[int, Tags] = {}
    write: bytes = b""


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

    Until Thaw, a Cancel, or the end of the session these values stay: what is cleared is hidden but not deleted, and a
    write that would replace one waits. Waits itself up to ``wait_s`` for writes that hold a leave to replace values.
    """

    wait_s: Seconds = 30.0


class Thaw(Request, frozen=True):
    """The values are read. The reply names those that were cleared meanwhile: they may be deleted now.

    ``call``: number of the Freeze.
    """

    call: Call


class Stage(Request, frozen=True):
    """Samples with these indexes are about to be restored; their values come first.

    Done with how much to add to each index: none was ever in use in this queue then.
    """

    indexes: bytes


class Restore(Request, frozen=True):
    """Replace the state of the queue by a saved one, whose values are stored. Cleared names what was here before."""

    state: bytes
    shift: Position = 0


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
    """Visible now."""


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
    Hello | Goodbye | CreatePartition | SealPartition | RegisterTask | Reserve | CheckFields | Publish | Insert | Fetch
    | Cancel | Ack | Describe | ConsumptionStatus | ProductionStatus | ResetConsumption | SetTags | ClearSamples
    | ClearConsumed | ClearPartition | ListPartitions | ResolveKeys | Put | KeysOf | ListKeys | GetStats | Freeze | Thaw
    | Stage | Restore
)  # fmt: skip
AnyReply = (
    Done | Failed | Welcome | Reserved | Published | Batch | NotReady | Ended | Status | Cleared | Names | KeyList
    | Frozen
)  # fmt: skip
KEPT = (
    Fetch, Reserve, CheckFields, ResolveKeys, Publish, Put, Insert, ClearSamples, ClearConsumed, ClearPartition, Freeze,
    Thaw, Stage, Restore,
)  # fmt: skip
"""Requests whose answers a server may keep until the client says that it has them."""
R = TypeVar("R")


class Message(msgspec.Struct, Generic[R], frozen=True, array_like=True):
    """What a client sends. ``received``: earlier calls of its session whose answers it has, or no longer needs."""

    received: list[Call]
    request: R


# ---- encoding ----


def _plain(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0:  # NumPy scalars and 0-dim tensors
        return value.item()
    raise UnsupportedValueError(
        f"a tag or argument holds a {type(value).__name__}: tags are small plain data (str, int, float, bool, None, "
        f"lists and dicts of them). Store it as a field instead."
    )


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_FREE_FORM: dict[type[Any], str] = {
    Publish: "tags",
    SetTags: "tags",
    Put: "tags",
    Fetch: "sampler_args",
    RegisterTask: "sampler",
}
"""Requests with a part that may be nested as the caller likes."""


def encode(message: Any) -> bytes:
    """The message as it travels. Raises UnsupportedValueError for tags that aren't plain data."""
    try:
        return _encoder.encode(message)
    except RecursionError:
        raise UnsupportedValueError(_too_deep("a value")) from None
    except OverflowError as error:
        raise UnsupportedValueError(f"a number in a request needs more than 64 bits: {error}. Use a float.") from error


def encode_request(request: Any, received: Sequence[int] = ()) -> bytes:
    """A request as it travels. Raises UnsupportedValueError for tags that aren't plain data or are nested too deep."""
    _check_depth(request, UnsupportedValueError)
    return encode(Message(list(received), request))


def _check_depth(request: Any, error: type[Exception]) -> None:
    name = _FREE_FORM.get(type(request))
    if name is not None and _is_too_deep(getattr(request, name)):
        raise error(_too_deep(f"{name} of {type(request).__name__}"))


def _is_too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        inside = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in inside if isinstance(inner, _CONTAINERS)]
    return bool(level)


def _too_deep(name: str) -> str:
    return f"{name} is nested deeper than {MAX_DEPTH} levels. Flatten it, or store it as a field."


# ---- decoding ----

Decode = Callable[[bytes | memoryview], Message[Any]]
_PLACE = re.compile(r" - at (?:`key` in )?`\$\[1\]((?:\[[^`]*\])+)`$")
_STEP = re.compile(r"\[([^\]]*)\]")


def message_decoder(*more: type[msgspec.Struct]) -> Decode:
    """A decoder for messages whose request is one of ours, or of these types of another server's.

    It raises InvalidRequestError, which names the field, for a value of the wrong type or out of range; ProtocolError
    for what is no message at all.
    """
    types = (*get_args(AnyRequest), *more)
    kinds = {str(kind.__struct_config__.tag): kind for kind in types}
    union = functools.reduce(operator.or_, types)
    decoder: msgspec.msgpack.Decoder[Message[Any]] = msgspec.msgpack.Decoder(Message[union])  # type: ignore[valid-type]

    def decode(data: bytes | memoryview) -> Message[Any]:
        try:
            message = decoder.decode(data)
        except RecursionError:
            raise ProtocolError(_too_deep("a request")) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            named = _with_name(str(error), data, kinds) if isinstance(error, msgspec.ValidationError) else None
            if named is not None:
                raise InvalidRequestError(named) from error
            raise ProtocolError(
                f"this is no request of protocol version {PROTOCOL_VERSION}: {error}. Use the same version of "
                f"lightning-tq on both sides."
            ) from error
        _check_depth(message.request, ProtocolError)
        return message

    return decode


decode_message = message_decoder()


def _with_name(text: str, data: bytes | memoryview, kinds: dict[str, type[msgspec.Struct]]) -> str | None:
    """Fields travel by position, which says nothing to the caller that gave the value."""
    place = _PLACE.search(text)
    if place is None:
        return None
    try:
        value, names, rest = msgspec.msgpack.decode(data)[1], [], ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # behind the place there may be anything
        return None
    for step in _STEP.findall(place[1]):
        kind = kinds.get(str(value[0])) if isinstance(value, list) and value and not rest else None
        if kind is not None and step.isdecimal() and int(step):
            names.append(f"{kind.__struct_fields__[int(step) - 1]} of {kind.__name__}")
            value = value[int(step)]
        else:
            rest += f"[{step}]"
    if not names:
        return None
    name, _, of = names[-1].partition(" of ")
    return f"{name}{rest} of {of}: {text[: place.start()]}"


def check_version(hello: Hello) -> None:
    """Raises ProtocolError, which names both versions, where the client speaks another protocol than this server."""
    if hello.version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the client speaks version {hello.version} of the protocol, this server version {PROTOCOL_VERSION}. Use "
            f"the same version of lightning-tq on both sides."
        )


_replies = msgspec.msgpack.Decoder(AnyReply)


def decode_reply(data: bytes | memoryview) -> AnyReply:
    """Raises msgspec.DecodeError for anything that isn't one of our replies."""
    reply: AnyReply = _replies.decode(data)
    return reply


def pack_indexes(indexes: Any) -> bytes:
    """Indexes as they travel: int64, little-endian."""
    return np.asarray(indexes, dtype="<i8").tobytes()


def unpack_indexes(data: bytes) -> Indexes:
    """Read-only int64 view of packed indexes. Raises ProtocolError where the bytes can't be any."""
    if len(data) % 8:
        raise ProtocolError(f"indexes are 8 bytes each, got {len(data)} bytes.")
    return np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False)
