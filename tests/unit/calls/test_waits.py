# SPDX-License-Identifier: Apache-2.0
"""Waits: who is examined, who has its turn, and who may overtake whom."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.calls import MORE, Call, Calls, Effect, Turn, Wait
from transfer_queue.calls.turn import TURN_S
from transfer_queue.protocol import Done, Failed, ListPartitions

ROOM = ("room",)


class Room:
    """Calls that wait, each with a letter for its name. ``examined``: those that were, capitals had their turn."""

    def __init__(self, looks: int = 10**6) -> None:
        self.calls = Calls(Turn(itertools.count(step=TURN_S / looks).__next__))
        self.calls.verbs[ListPartitions] = lambda call, request: self.wait
        self.calls.waits.with_sizes(ROOM, lambda: self.free)
        self.free = 0
        self.examined = ""
        self.answers: set[str] = set()
        """Names of those that are answered when they are examined."""

    def park(self, name: str, queue: Any = ("q",), deadline: float = 10.0, **more: Any) -> Wait:
        def answer(wait: Wait, has_turn: bool) -> Any:
            self.examined += name.upper() if has_turn else name
            if wait.late or name in self.answers or (has_turn and queue == ROOM):
                return Done(wait.owner.number, name)
            return None

        self.wait = Wait(queue, deadline, more.pop("answer", answer), **more)
        self.calls.handle(Call("c", ListPartitions(ord(name))), self.calls.now)
        return self.wait

    def go_on(self, now: float = 0.0) -> str:
        """Names of the calls that are answered in this turn."""
        return "".join(answer.reply.value for answer in self.calls.expire(now))

    def admit(self, free: int) -> str:
        self.free = free
        self.calls.waits.wake_first(ROOM)
        return self.go_on()


def parked(*sizes: int) -> Room:
    room = Room()
    for name, size in zip("abcdefgh", sizes, strict=False):
        room.free = -1
        room.park(name, ROOM, size=size)
    return room


# ---- queues with sizes ----


@pytest.mark.parametrize(
    ("sizes", "admitted"),
    [
        ((2, 3, 4), [(5, "ab"), (5, "c")]),
        ((8, 3, 3, 3), [(7, "bc"), (7, ""), (8, "a"), (3, "d")]),
        ((8, 2, 0), [(0, "c")]),
        ((8, 4, 3, 3), [(3, "c"), (3, "")]),
        ((4, 9, 3, 3), [(3, "c"), (3, "")]),
        ((4, 9, 5), [(3, "")]),
    ],
    ids=[
        "in order of arrival",
        "as much as the size of the first one",
        "without room",
        "each one counts for itself",
        "a large one allows no more than the one before it",
        "no more than is free",
    ],
)
def test_what_fits_goes_and_overtakes_no_more_than_the_size_of_a_wait(sizes, admitted):
    room = taking(parked(*sizes), sizes)
    assert [(free, room.admit(free)) for free, _ in admitted] == admitted


def taking(room: Room, sizes: tuple[int, ...]) -> Room:
    """Each that is admitted takes its room."""
    by_name = dict(zip("abcdefgh", sizes, strict=False))
    for wait in room.calls.waits:
        wait.answer = takes(room, wait.answer, by_name[chr(wait.owner.number)])
    return room


def takes(room: Room, answer: Callable[[Wait, bool], Any], size: int) -> Callable[[Wait, bool], Any]:
    def taken(wait: Wait, has_turn: bool) -> Any:
        room.free -= size if has_turn else 0
        return answer(wait, has_turn)

    return taken


def test_a_size_may_change_while_its_call_waits():
    room = parked(8, 1)
    (first, _) = room.calls.waits
    room.free = 2
    room.calls.waits.resize(first, 2)
    assert room.go_on()[0] == "a"


def test_one_that_leaves_makes_way_for_those_that_must_not_overtake_it():
    room = taking(parked(20, 6, 5, 5), (20, 6, 5, 5))
    assert (room.admit(5), room.admit(5)) == ("c", "")
    room.calls.cancel("c", ord("b"))
    assert room.go_on() == "d"


@settings(max_examples=100, deadline=None, print_blob=True)
@given(st.integers(1, 12), st.lists(st.integers(1, 4), min_size=60, max_size=60))
def test_a_large_one_goes_though_small_ones_never_stop_coming(size, others):
    room, gone, busy = Room(), [], [1] * 12  # one of 12 comes free at a time
    names = itertools.count(ord("b"))

    def goes(name: str, size: int) -> Callable[[Wait, bool], Any]:
        def answer(wait: Wait, has_turn: bool) -> Any:
            room.free -= size
            busy.extend([1] * size)
            gone.append(name)
            return Done(wait.owner.number, name)

        return answer

    room.park("a", ROOM, size=size, answer=goes("a", size))
    for other in others:
        name = chr(next(names))
        room.park(name, ROOM, size=other, answer=goes(name, other))
        del busy[:1]
        room.admit(12 - len(busy))
        if "a" in gone:
            return
    raise AssertionError("starved")


def test_room_may_be_made_for_a_wait_that_does_not_fit_and_it_is_asked_once_if_none_can_be():
    room, gained = Room(), [3, 0]

    def make_room() -> bool:
        room.free += gained[0]
        return gained.pop(0) > 0

    room.calls.waits.with_sizes(ROOM, lambda: room.free, make_room)
    room.free = -1
    room.park("a", ROOM, size=2)
    assert (room.examined, gained) == ("A", [0])
    room.free = -1
    room.park("b", ROOM, size=2)
    assert (room.go_on(), room.examined, gained) == ("", "A", [])


# ---- who is examined ----


def test_in_a_queue_without_sizes_the_first_one_alone_has_its_turn():
    room = Room()
    for name in "abc":
        room.park(name)
    room.calls.waits.wake_first(("q",))
    assert (room.go_on(), room.examined) == ("", "A")
    room.calls.waits.wake(("q",))
    assert (room.go_on(), room.examined) == ("", "AAbc")


def test_the_next_one_has_its_turn_when_the_first_is_answered_or_cancelled():
    room = Room()
    for name in "abc":
        room.park(name)
    room.answers = {"a"}
    room.calls.waits.wake_first(("q",))
    assert (room.go_on(), room.examined) == ("a", "AB")
    room.calls.cancel("c", ord("b"))
    assert (room.go_on(), room.examined) == ("", "ABC")


def test_one_that_is_due_when_it_comes_is_examined_at_once():
    room = Room()
    room.park("a")
    room.park("b", due=True)
    assert room.examined == "b"


def test_one_that_is_cancelled_when_it_was_woken_is_not_examined():
    room = Room()
    for name in "abc":
        room.park(name)
    room.calls.waits.wake(("q",))
    room.calls.cancel("c", ord("b"))
    assert (room.go_on(), room.examined) == ("", "Ac")


def test_a_lower_order_is_in_front_of_those_that_came_before_it():
    room = Room()
    for name, order in [("a", 2.0), ("b", 1.0), ("c", 1.0)]:
        room.park(name, order=order)
    room.calls.waits.wake(("q",))
    assert (room.go_on(), room.examined) == ("", "Bca")
    assert room.calls.waits.would_be_first(("q",), 0.0)
    assert not room.calls.waits.would_be_first(("q",), 1.0)


def test_a_group_is_all_queues_whose_names_begin_so_and_a_key_wakes_in_any_queue():
    room = Room()
    room.park("a", ("q", "x", 1))
    room.park("b", ("q", "x", 2), keys=("k",))
    room.park("c", ("q", "y"))
    room.park("d", ("other", "x"), keys=("k",))
    room.calls.waits.wake(("q", "x"))
    assert (room.go_on(), sorted(room.examined)) == ("", ["A", "B"])
    room.calls.waits.wake_key("k")
    assert (room.go_on(), sorted(room.examined[2:])) == ("", ["B", "D"])
    assert [chr(wait.owner.number) for wait in room.calls.waits.of(("q",))] == ["a", "b", "c"]


def test_nothing_is_examined_because_turns_end_and_a_deadline_examines_its_own_wait_alone():
    room = Room()
    room.park("a", deadline=5.0)
    room.park("b", deadline=3.0)
    assert [room.go_on(now) for now in (0.0, 1.0, 2.9)] == ["", "", ""]
    assert (room.examined, room.calls.next_deadline()) == ("", 3.0)
    assert (room.go_on(3.0), room.examined, room.calls.next_deadline()) == ("b", "b", 5.0)
    assert (room.go_on(5.0), room.calls.next_deadline()) == ("a", None)
    assert ("q",) not in room.calls.waits.occupied, "nothing is left of them"


def test_each_has_its_own_deadline_however_many_were_cancelled_and_these_take_no_room():
    room, deadlines = Room(), {number: float(number * 37 % 400) for number in range(1, 400)}
    for number, deadline in deadlines.items():
        room.park(chr(number), deadline=deadline)
    for number in [number for number in deadlines if number % 5]:
        room.calls.cancel("c", number)
        del deadlines[number]
    for number in range(400, 500):
        room.park(chr(number), deadline=1000.0)
        room.calls.cancel("c", number)
    assert len(room.calls.waits._deadlines) <= 64 + 2 * len(deadlines)
    for number, deadline in sorted(deadlines.items(), key=lambda each: each[1]):
        assert room.calls.next_deadline() == deadline
        assert room.go_on(deadline) == chr(number)


@pytest.mark.parametrize("count", [1, 33, 700])
def test_all_get_their_turn_though_each_turn_is_short_and_all_are_woken_again_in_each(count):
    room, seen = Room(looks=4), set()

    def answer(wait: Wait, has_turn: bool) -> None:
        seen.add(wait.owner.number)

    for number in range(count):
        room.park(chr(number + 1), answer=answer)
    turns = 0
    while len(seen) < count:
        room.calls.waits.wake(("q",))
        room.go_on()
        turns += 1
        assert turns <= count, "the last ones starve"


def test_a_turn_examines_no_more_than_it_has_time_for():
    room = Room(looks=4)
    for number in range(50):
        room.park(chr(ord("a") + number))
    room.calls.waits.wake(("q",))
    room.go_on()
    assert 1 <= len(room.examined) <= 8


def test_work_that_takes_more_turns_holds_up_no_other_wait():
    room, left = Room(looks=2), [9]

    def works(wait: Wait, has_turn: bool) -> Any:
        left[0] -= 1
        return Done(wait.owner.number, "a") if left[0] == 0 else MORE

    room.park("a", answer=works)
    room.park("b")
    room.answers = {"b"}
    room.calls.waits.wake(("q",))
    answered = "".join(room.go_on() for _ in range(10))
    assert (answered, left[0], room.calls.next_deadline()) == ("ba", 0, None)


# ---- errors ----


def test_an_answer_that_fails_harms_its_own_call_alone():
    room = Room()

    def fails(wait: Wait, has_turn: bool) -> Any:
        raise KeyError("a bug")

    room.park("a", answer=fails)
    room.park("b")
    room.answers = {"b"}
    room.calls.waits.wake(("q",))
    replies = [answer.reply for answer in room.calls.expire(0.0)]
    assert [type(reply) for reply in replies] == [Failed, Done]
    assert [type(fault) for fault in room.calls.faults] == [KeyError]


def test_an_undo_that_fails_keeps_nothing_else_from_being_undone():
    undone: list[str] = []

    class Fails(Effect):
        def undo(self) -> bool:
            raise KeyError("a bug")

    class Undone(Effect):
        def undo(self) -> bool:
            undone.append("undone")
            return True

    calls = Calls()
    call = Call("c", ListPartitions(1))
    for holding in (Undone(), Fails(), Undone()):
        calls.hold(call, holding)
    assert calls.cancel("c", 1) == "undone"
    assert (undone, [type(fault) for fault in calls.faults], calls.clients()) == (["undone"] * 2, [KeyError], [])
