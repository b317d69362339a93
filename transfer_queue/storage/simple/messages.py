# SPDX-License-Identifier: Apache-2.0
"""What a storage client and a storage unit say to each other. Spoken by this package only.

Values travel beside the header, or lie in the unit's arena, which the client has mapped: then only places travel.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from transfer_queue.errors import ProtocolError, from_wire
from transfer_queue.storage.pieces import IntArray, Layout, Piece, Positions

FieldParts: TypeAlias = list[tuple[str, Positions, Piece]]
"""(field, which of the message's indexes its rows belong to, the rows)."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fields are positional on the wire: append with a default, never reorder."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A piece on the wire. Its rows are ``start`` and following, or those in table ``positions``.

    Its data is the next frame; or, with an ``offset``, so many bytes of the arena, of which table ``picks`` names the
    rows if they don't lie back to back. Its side, unless it is dense, is the next frame.
    """

    field: str
    layout: Layout
    rows: int
    start: int = 0
    positions: int = -1
    offset: int = -1
    nbytes: int = 0
    picks: int = -1


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the arena that a client wants kept, under a number of its own choice.

    ``guest`` is its attachment's number; the hold falls with it, or when the client says so there.
    """

    guest: int
    number: int


class Lease(Message, frozen=True):
    """Memory for a write of these fields of these indexes. Does it not fit, it waits up to ``wait_s`` for room."""

    hold: Hold
    nbytes: int
    indexes: bytes
    fields: list[str]
    wait_s: float = 0.0


class Leased(Message, frozen=True):
    """Where to write; -1: the arena has no such range, send frames instead."""

    offset: int


class Write(Message, frozen=True):
    """Keep these rows. A field that an index already has is replaced. All or nothing.

    ``lease`` is where those parts lie that have an offset; a write without one waits up to ``wait_s`` for room.
    ``ahead``: lease so many bytes for the next write, if there is room now.

    Onto samples that others may know already: ``number`` (positive, of the client's choice) marks the write as open,
    so that it can be taken back, until the client names it as ``settled``; ``absent``: refuse it when a value is there.

    ``then``: when it is kept, tell the controller this in the client's name, where one of its servers is near.

    ``attempt`` (positive, never used twice) names this message. Those that are ``given_up`` must have no effect from
    now on, also where they arrive only later: they were sent over other lines.
    """

    indexes: bytes
    parts: list[Part]
    tables: list[bytes] = []
    wait_s: float = 0.0
    lease: Hold | None = None
    ahead: Hold | None = None
    ahead_nbytes: int = 0
    number: int = 0
    absent: bool = False
    settled: list[int] = []
    attempt: int = 0
    given_up: list[int] = []
    then: bytes = b""


class Written(Message, frozen=True):
    """The write is whole; readers see it from now on. ``ahead``: where the next one may be written, -1 nowhere.

    ``said``: what the controller answered to ``then``; empty: it wasn't told.
    """

    ahead: int = -1
    said: bytes = b""


class Present(Message, frozen=True):
    """Nothing was written: a value is there, and the write was for where there is none."""


class TakeBack(Message, frozen=True):
    """Forget what an open write of this client stored, of these indexes (None: all).

    Not where it replaced a value, which readers may know, nor where it was replaced since. ``given_up``: see ``Write``.
    """

    client: str
    number: int
    indexes: bytes | None = None
    given_up: list[int] = []


class Forsake(Message, frozen=True):
    """This client has ended: nothing that is still on its way from it counts."""

    client: str


class OpenWrite(msgspec.Struct, frozen=True, array_like=True):
    """A write that its client never settled."""

    number: int
    indexes: bytes
    fields: list[str]


class Forsaken(Message, frozen=True):
    """What the client left open; whoever knows what is published takes back the rest."""

    writes: list[OpenWrite]


class Read(Message, frozen=True):
    """Give these fields of all these indexes, which may repeat. With a ``pin``, values may stay in the arena.

    ``small``: only values that travel in a message anyway.
    """

    indexes: bytes
    fields: list[str]
    pin: Hold | None = None
    small: bool = False


class Rows(Message, frozen=True):
    """Every field asked for, in as many parts as it takes. ``pinned``: some lie in the arena.

    ``changes``: the unit's count of changes when it read them, see ``Changes``; 0 where some are pinned.
    """

    parts: list[Part]
    tables: list[bytes] = []
    pinned: bool = False
    changes: int = 0


class NotSmall(Message, frozen=True):
    """Nothing was read."""


class Wish(Message, frozen=True):
    """Beside a fetch: ``Read`` these fields of whatever samples it gets; one pin per unit of the configuration."""

    fields: list[str]
    pins: list[Hold | None]
    small: bool = False


class Granted(Message, frozen=True):
    """Beside the batch: what the units answered, as (unit, header, number of frames); the frames follow."""

    answers: list[tuple[int, bytes, int]]


class Drop(Message, frozen=True):
    """Forget these fields (None: all) of these indexes; unknown ones are no error. ``given_up``: see ``Write``."""

    indexes: bytes
    fields: list[str] | None = None
    given_up: list[int] = []


class Dropped(Message, frozen=True):
    """``values``: how many (index, field) were there."""

    values: int


class Stats(Message, frozen=True):
    """How full are you?"""


class UnitStats(Message, frozen=True):
    """``held_nbytes`` is what buffers take, ``live_nbytes`` what readers can still ask for.

    Of the arena: ``arena_nbytes`` in use, ``recyclable_nbytes`` free pages kept for the next writes, ``leased_nbytes``
    given to writers, ``pins`` of readers, ``attached`` clients that have it mapped. The others get frames.
    """

    unit: str
    samples: int
    values: int
    live_nbytes: int
    held_nbytes: int
    blocks: int
    capacity_bytes: int | None = None
    parked: int = 0
    parked_nbytes: int = 0
    arena_nbytes: int = 0
    recyclable_nbytes: int = 0
    leased_nbytes: int = 0
    pins: int = 0
    attached: int = 0


class Failed(Message, frozen=True):
    """``errors.to_wire`` of what went wrong. ``later``: there was no room, and the request would not wait for any."""

    code: str
    text: str
    later: bool = False


Request: TypeAlias = Lease | Write | Read | Drop | TakeBack | Forsake | Stats
Expected = TypeVar("Expected")
Answer: TypeAlias = Leased | Written | Present | Forsaken | Rows | NotSmall | Dropped | UnitStats | Failed

encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)
_wishes = msgspec.msgpack.Decoder(Wish)
_granted = msgspec.msgpack.Decoder(Granted)


def decode_request(header: bytes) -> Request:
    request: Request = _decode(_requests, header)
    return request


def decode_answer(header: bytes) -> Answer:
    answer: Answer = _decode(_answers, header)
    return answer


def decode_wish(message: Any) -> Wish:
    wish: Wish = _decode(_wishes, message)
    return wish


def decode_granted(message: Any) -> Granted:
    granted: Granted = _decode(_granted, message)
    return granted


def accepted(answer: Answer) -> Answer:
    """The answer; raises what a unit refused with."""
    if isinstance(answer, Failed):
        raise from_wire(answer.code, answer.text)
    return answer


def expect(answer: Answer, kind: type[Expected]) -> Expected:
    """The answer, which must be of this kind; raises what a unit refused with."""
    answer = accepted(answer)
    if not isinstance(answer, kind):
        raise ProtocolError(f"a storage unit answered {type(answer).__name__}, expected {kind.__name__}")
    return answer


def _decode(decoder: Any, header: bytes) -> Any:
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a storage message of {len(header)} bytes can't be decoded: {error}") from error


def pack_indexes(indexes: IntArray) -> bytes:
    return np.ascontiguousarray(indexes, np.int64).tobytes()


def unpack_indexes(packed: bytes) -> IntArray:
    if len(packed) % 8:
        raise ProtocolError(f"{len(packed)} bytes of indexes are no whole number of int64")
    return np.frombuffer(packed, np.int64)
