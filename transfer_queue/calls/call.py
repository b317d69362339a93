# SPDX-License-Identifier: Apache-2.0
"""Call: one numbered request of a session, what it holds, and its reply until the client has received that."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from enum import Enum
from typing import Any, ClassVar

import msgspec

from transfer_queue.calls.wait import Wait
from transfer_queue.protocol import Reply, Request

Steps = Generator[Wait | None, Any, Reply]
"""A call that takes several steps. It yields what it waits for, and is sent the reply to that. It yields None where the
rest of its work may be done in a later turn."""


class Until(Enum):
    """How long a call keeps what it has taken."""

    RECEIVED = "until the client has the answer"
    DONE = "until the client says that it is done with it"
    SESSION = "until the session ends"


class Holding:
    """One thing that a call has taken. Either ``keep`` or ``undo`` ends it."""

    until: ClassVar[Until] = Until.RECEIVED
    outlives_session: ClassVar[bool] = False
    """Whether it is kept rather than undone if the session ends while it is held: its client may have the answer."""

    def keep(self) -> None:
        """Its time is over, and what was done stays."""

    def undo(self) -> bool:
        """Give it back, because nobody has the answer. Returns False if what was done stays all the same."""
        return True

    def end(self, died: bool) -> bool | None:
        """The session has ended while this is held. ``died``: without a goodbye. True: it is held even so."""
        if self.outlives_session:
            self.keep()
        else:
            self.undo()
        return False


class Effect(Holding):
    """The answer itself, kept so that a retry gets the same one. What was done stays, whatever becomes of the call."""

    def undo(self) -> bool:
        return False


class Call:
    """A request under way, or one whose answer or holdings are kept.

    ``envelope``: where the answer goes. ``reply``: the answer, until the client has it. ``values``: frames that travel
    with it. ``is_registered``: whether its session has it in its table, because it waits, goes on, or holds something.
    """

    __slots__ = ("client", "envelope", "frames", "holdings", "is_registered", "kind", "number", "reply", "request",
                 "since", "steps", "values", "wait")  # fmt: skip

    def __init__(
        self, client: str, request: Request, since: float = 0.0, frames: Sequence[memoryview] = (), envelope: Any = None
    ) -> None:
        self.client = client
        self.request: Any = request
        self.kind = type(request)
        self.number = request.id
        self.since = since
        self.frames = frames
        self.envelope = envelope
        self.values: Sequence[Any] = ()
        self.holdings: list[Holding] = []
        self.is_registered = False
        self.reply: Reply | None = None
        self.wait: Wait | None = None
        self.steps: Steps | None = None

    @property
    def is_under_way(self) -> bool:
        return self.wait is not None or self.steps is not None


class Answer(msgspec.Struct, frozen=True):
    """The reply to a call, the values that travel with it, and where they go."""

    call: Call
    request: Any
    envelope: Any
    reply: Reply
    values: Sequence[Any] = ()
