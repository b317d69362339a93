# SPDX-License-Identifier: Apache-2.0
"""Front: steps of ours that fail, of any kind and anywhere, answer their caller alone and leave nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.server.front_kit import Client, batch_of, failed, front_of, got, held
from transfer_queue import protocol as p
from transfer_queue.calls import replied
from transfer_queue.server.front import Front
from transfer_queue.storage.unit.unit import StorageUnit


def test_a_batch_that_can_not_be_encoded_is_given_back():
    front = front_of()
    me, other = Client(front, "me"), Client(front, "other")
    me.stored([7])
    verb = front.calls.verbs[p.Fetch]

    def odd(call: Any, request: p.Fetch) -> Any:
        """The batch has a tag that can't travel."""
        front.calls.verbs[p.Fetch] = verb
        batch = yield from replied(verb(call, request))
        return msgspec.structs.replace(batch, tags={0: {"n": object()}})

    front.calls.verbs[p.Fetch] = odd
    failed(other.one(other.fetch(1)), "ProtocolError", "the answer can't be sent")
    assert batch_of(other.send(other.fetch(1))[0]) == {0: 7}


class BreakingUnit(StorageUnit):
    """Raises what it was told to where it stores or reads values, once."""

    breaks: tuple[str, BaseException] | None = None

    def _break(self, step: str) -> None:
        if self.breaks is not None and self.breaks[0] == step:
            error, self.breaks = self.breaks[1], None
            raise error

    def write(self, call: Any, request: Any) -> Any:
        self._break("put")
        return super().write(call, request)

    def store_new(self, call: Any, indexes: Any, columns: Any) -> None:
        super().store_new(call, indexes, columns)
        self._break("put in one step")

    def read(self, call: Any, request: Any) -> Any:
        self._break("read")
        return super().read(call, request)


@pytest.mark.parametrize("error", [MemoryError("no"), SystemExit("no")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("step", ["put", "put in one step", "read"])
def test_an_error_of_any_kind_at_any_step_answers_its_caller_alone_and_leaves_nothing(caplog, step, error):
    unit = BreakingUnit("u0")
    front = Front({}, front_of().plane, unit)
    me, other = Client(front, "me"), Client(front, "other")
    unit.breaks = (step, error)
    if step == "read":
        other.stored([7])
        failed(me.one(me.fetch(1)), "RemoteError", "no")
        assert batch_of(me.send(me.fetch(1))[0]) == {0: 7}
    else:
        if step == "put in one step":
            other.stored([9])
            other.send(p.ListPartitions(other.number()), received=[1])
        before = held(front)
        failed(me.put([7])[0], "RemoteError", "no")
        me.gone()
        assert held(front)._replace(held_nbytes=0) == before._replace(held_nbytes=0), "few dead bytes may stay"
        other.stored([8])
    assert type(error).__name__ in caplog.text


class BreakingEndings(StorageUnit):
    """Everything that ends here fails, but for requests."""

    broken = False

    def _break(self, error: str) -> None:
        if self.broken:
            raise OSError(error)

    def trim(self, now: float) -> None:
        self._break("can't trim")
        super().trim(now)

    def delete(self, indexes: Any) -> int:
        self._break("can't delete")
        return super().delete(indexes)

    def end_session(self, client: str, published: Any) -> None:
        self._break("can't end a session")
        super().end_session(client, published)


def test_a_unit_that_can_not_expire_undo_or_end_a_session_loses_no_answer_of_the_plane(caplog):
    unit = BreakingEndings("u0")
    front = Front({}, front_of().plane, unit)
    me, other, third = (Client(front, name) for name in ("me", "other", "third"))
    assert other.send(other.fetch(1, wait_s=5.0)) == []
    unit.broken = True
    (late,) = got(front.expire(6.0))
    assert (late.client, type(late.reply)) == ("other", p.NotReady)
    # A put whose tags fit no row fails after its values are stored. It is undone, and the reserved sample released.
    failed(me.put([7], tags={5: {"v": 1}})[0], "InvalidRequestError", "tags for rows")
    assert third.one(third.reserve(1)).indexes
    assert front.plane is not None
    assert third.gone() == []
    assert front.plane.state.allocator.num_used == 0
    for error in ("can't trim", "can't delete", "can't end a session"):
        assert error in caplog.text
