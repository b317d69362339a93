# SPDX-License-Identifier: Apache-2.0
"""The room of calls: repeats, further steps, what clients say of calls, and how holdings end, as examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from transfer_queue.calls import Answer, Call, Calls, Holding, Steps, Turn, Until, Wait
from transfer_queue.protocol import Done, Failed, ListPartitions, Publish, Request


class Noted(Holding):
    """Notes how it ends. ``stays``: in the room, when its session ends."""

    def __init__(self, name: str, notes: list[str], until: Until = Until.DONE, stays: bool = False) -> None:
        self.name, self.notes, self.until, self.stays = name, notes, until, stays  # type: ignore[misc]

    def keep(self) -> None:
        self.notes.append(f"{self.name} kept")

    def undo(self) -> bool:
        self.notes.append(f"{self.name} undone")
        return True

    def end(self, died: bool) -> bool:
        self.notes.append(f"{self.name} ended, {died=}")
        return self.stays


class Fails(Noted):
    def undo(self) -> bool:
        raise KeyError("a bug")

    def end(self, died: bool) -> bool:
        raise KeyError("a bug")


class Room(Calls):
    """``does``: what the next call does. A Publish may be a further step of another call."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.does: Any = None
        self.steps.add(Publish)
        self.verbs = dict.fromkeys((ListPartitions, Publish), self.do)

    def do(self, call: Call, request: Request) -> Any:
        return self.does(call) if callable(self.does) else self.does

    def asks(self, number: int, does: Any = None, kind: Any = ListPartitions, envelope: Any = None) -> list[Answer]:
        self.does = Done(number) if does is None else does
        request = Publish(number, "p", b"", {}) if kind is Publish else ListPartitions(number)
        return self.handle(Call("c", request, 0.0, [memoryview(b"frame")], envelope), 0.0)

    def holds(self, number: int, *names: str, until: Until = Until.DONE) -> list[Answer]:
        """A call that is answered, and holds these."""

        def verb(call: Call) -> Done:
            for name in names:
                self.hold(call, Noted(name, self.notes, until))
            call.values = [b"values"]
            return Done(number)

        return self.asks(number, verb)


@pytest.fixture
def room() -> Iterator[Room]:
    made = Room()
    yield made
    made.check_invariants()


def waits(wait_s: float = 9.0) -> Wait:
    return Wait(("q",), wait_s, lambda wait, has_turn: Done(wait.owner.number, "late") if wait.late else None)


def refused(answers: list[Answer], code: str) -> None:
    (answer,) = answers
    assert isinstance(answer.reply, Failed)
    assert answer.reply.code == code


# ---- a call that comes again ----


@pytest.mark.parametrize("kind", [ListPartitions, Publish], ids=["a call", "a further step"])
def test_one_that_waits_is_answered_where_it_was_asked_last(room, kind):
    if kind is Publish:
        room.holds(1, "a")
    assert room.asks(1, waits(), kind, "here") == []
    assert room.asks(1, waits(), kind, "there") == []
    assert [(answer.envelope, answer.reply.value) for answer in room.expire(9.0)] == [("there", "late")]


def test_an_answer_that_was_received_is_not_given_again(room):
    room.holds(1, "a")
    room.received("c", [1])
    refused(room.asks(1), "ProtocolError")
    call = room.find("c", 1)
    assert (call.values, call.reply) == ((), None), "nor kept"


def test_an_answered_call_keeps_its_answer_and_nothing_of_its_request(room):
    (first,) = room.holds(1, "a")
    call = room.find("c", 1)
    assert (call.request, call.frames, call.envelope) == (None, (), None)
    (again,) = room.asks(1)
    assert (again.reply, again.values) == (first.reply, first.values)


# ---- what a client says ----


def steps(room: Room) -> Steps:
    yield waits()
    return Done(1)


def works(room: Room) -> Steps:
    while True:
        yield None


@pytest.mark.parametrize("under_way", [steps, works], ids=["waits", "works"])
def test_what_a_client_says_of_a_call_under_way_changes_nothing(room, under_way):
    def verb(call: Call) -> Steps:
        room.hold(call, Noted("a", room.notes))
        return under_way(room)

    assert room.asks(1, verb) == []
    room.received("c", [1])
    room.done("c", [1])
    assert room.notes == []
    assert (room.cancel("c", 1), room.notes, room.clients(), room.find("c", 1)) == ("undone", ["a undone"], [], None)


def test_a_further_step_that_waits_is_cancelled_though_nothing_is_held_any_more(room):
    room.holds(1, "a")
    room.asks(1, waits(), Publish)
    assert [each.name for each in room.take("c", 1, Noted)] == ["a"]
    assert (room.cancel("c", 1), room.waits.count, room.clients()) == ("removed", 0, [])


@pytest.mark.parametrize("held", [True, False])
def test_a_further_step_that_is_not_waited_for_any_more_ends_no_more_than_itself(room, held):
    if held:
        room.holds(1, "a")
    room.asks(1, waits(), Publish)
    room.stop_waiting("c", 1)
    assert (room.waits.count, room.notes, room.clients()) == (0, [], ["c"] if held else [])


def test_a_session_that_leaves_what_it_held_is_not_known_any_more(room):
    room.holds(1, "a", until=Until.SESSION)
    (own,) = room.of_session("c", Noted)
    room.leave("c", own)
    assert (room.clients(), room.notes) == ([], [])


# ---- the end ----


def test_what_was_taken_last_is_undone_first(room):
    room.holds(1, "a", "b")
    call = room.find("c", 1)
    assert room.cancel("c", 1) == "undone"
    assert (room.notes, call.is_registered) == (["b undone", "a undone"], False)


@pytest.mark.parametrize("died", [True, False])
def test_a_session_ends_what_was_taken_last_first_and_says_whether_it_died(room, died):
    room.holds(1, "a", "b")
    room.holds(2, "c")
    room.holds(3, "d", "e", until=Until.SESSION)
    calls = room.of("c")
    assert room.client_gone("c", 0.0, died) == []
    assert room.notes == [f"{name} ended, {died=}" for name in "cbaed"]
    assert not any(call.is_registered for call in calls)


def test_what_outlives_its_session_can_still_be_taken_and_is_known_until_then(room):
    def verb(call: Call) -> Done:
        room.hold(call, Noted("a", room.notes, stays=True))
        return Done(1)

    room.asks(1, verb)
    room.client_gone("c", 0.0, True)
    room.check_invariants()
    assert [each.name for each in room.take("c", 1, Noted)] == ["a"]
    assert room.clients() == []


def test_an_undo_that_fails_undoes_nothing_and_keeps_nothing(room):
    def verb(call: Call) -> Done:
        room.hold(call, Fails("a", room.notes))
        return Done(call.number)

    room.asks(1, verb)
    assert (room.cancel("c", 1), room.clients()) == ("kept", [])
    room.asks(2, verb)
    room.client_gone("c", 0.0, True)
    assert (room.clients(), [type(fault) for fault in room.faults]) == ([], [KeyError] * 2)


def test_steps_that_fail_when_they_are_cancelled_are_a_fault_and_harm_nobody(room):
    def fails() -> Steps:
        try:
            yield waits()
        finally:
            raise KeyError("a bug")

    room.asks(1, lambda call: fails())
    assert room.cancel("c", 1) == "removed"
    assert [type(fault) for fault in room.faults] == [KeyError]


@pytest.mark.parametrize("how", ["at once", "in a later step", "when it is examined"])
def test_whatever_foreign_code_raises_is_the_answer_to_its_caller(room, how):
    def leaves(*_: Any) -> Any:
        raise SystemExit(3)

    def later() -> Steps:
        yield Wait(("q",), 0.0, lambda wait, has_turn: Done(1))
        leaves()

    verbs = {
        "at once": leaves,
        "in a later step": lambda call: later(),
        "when it is examined": lambda call: Wait(("q",), 0.0, leaves),
    }
    refused(room.asks(1, verbs[how]), "RemoteError")
    assert ([type(fault) for fault in room.faults], room.clients()) == ([SystemExit], [])


def test_the_last_thousand_sessions_that_ended_are_refused(room):
    for number in range(1024):
        room.refuse(str(number))
    room.refuse("0")
    assert all(room.has_ended(str(number)) for number in range(1024))
    room.refuse("another")
    assert [name for name in ("0", "1", "2", "another") if not room.has_ended(name)] == ["1"]


# ---- time ----


def test_what_is_to_be_done_at_a_time_is_done_then_in_order_and_what_fails_is_a_fault(room):
    def fails() -> None:
        raise KeyError("a bug")

    for when, name in [(2.0, "c"), (1.0, "a"), (1.0, "b")]:
        room.at(when, lambda name=name: room.notes.append(name))
    room.at(1.0, fails)
    room.asks(1, waits(5.0))
    assert room.next_deadline() == 1.0
    room.expire(1.0)
    assert (room.notes, [type(fault) for fault in room.faults]) == (["a", "b"], [KeyError])
    room.expire(2.0)
    assert (room.notes, room.next_deadline()) == (["a", "b", "c"], 5.0)


def test_a_turn_does_as_much_of_the_jobs_as_it_has_time_for_a_piece_of_each_in_turn(room):
    for name in "ab":
        room.later(job(room, name))
    room.expire(0.0)
    assert (room.notes, room.next_deadline()) == (["a1", "b1", "a2", "b2"], None)


def test_jobs_take_turns_and_each_turn_does_a_piece_of_one_at_least(room):
    room.turn = Turn(iter(range(1000)).__next__)  # no turn has time left
    for name in "ab":
        room.later(job(room, name))
    assert (room.next_deadline(), room.notes) == (-float("inf"), [])
    for _ in range(4):
        room.expire(0.0)
    assert room.notes == ["a1", "b1", "a2", "b2"]
    room.expire(0.0)
    room.expire(0.0)
    assert room.next_deadline() is None


def test_waits_past_their_deadline_come_before_jobs(room):
    def answer(wait: Wait, has_turn: bool) -> Done:
        room.notes.append("late")
        return Done(1)

    room.asks(1, Wait(("q",), 5.0, answer))
    room.later(job(room, "a"))
    room.expire(5.0)
    assert room.notes == ["late", "a1", "a2"]


def job(room: Room, name: str) -> Iterator[None]:
    for number in (1, 2):
        room.notes.append(f"{name}{number}")
        yield


def test_a_job_that_fails_is_a_fault_and_is_not_gone_on_with(room):
    def fails() -> Iterator[None]:
        yield
        raise KeyError("a bug")

    room.later(fails())
    room.expire(0.0)
    assert ([type(fault) for fault in room.faults], room.next_deadline()) == ([KeyError], None)


# ---- a call that comes after its cancel ----


def test_a_cancel_that_overtakes_its_call_keeps_it_from_any_effect(room):
    assert room.cancel("c", 1) == "kept"
    refused(room.holds(1, "a"), "ProtocolError")
    assert (room.find("c", 1), room.notes, room.clients()) == (None, [], [])
    assert [answer.reply for answer in room.holds(2, "b")] == [Done(2)], "another call of the session"


@pytest.mark.parametrize("kind", [ListPartitions, Publish], ids=["the same", "a further step"])
def test_a_call_that_was_undone_does_not_begin_again(room, kind):
    room.holds(1, "a")
    assert room.cancel("c", 1) == "undone"
    refused(room.asks(1, kind=kind), "ProtocolError")
    assert room.notes == ["a undone"]


def test_cancels_are_remembered_for_as_long_as_the_session_lasts_and_the_last_thousand_at_most(room):
    for number in range(1, 1026):
        room.cancel("c", number)
    assert [answer.reply for answer in room.asks(1)] == [Done(1)]
    refused(room.asks(2), "ProtocolError")
    room.end("c")
    assert [answer.reply for answer in room.asks(2)] == [Done(2)]
