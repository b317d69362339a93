# SPDX-License-Identifier: Apache-2.0
"""The room of calls against a model: clients begin, repeat, go on, receive, finish, cancel and end in any order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from transfer_queue.calls import Answer, Call, Calls, Holding, Steps, Turn, Until, Wait
from transfer_queue.calls.turn import TURN_S
from transfer_queue.errors import InvalidRequestError
from transfer_queue.protocol import Done, Failed, Reply, Request

SIZED = ("sized",)
ROOM = 8
MOST_TURNS = 300
Key = tuple[str, int]


class Do(Request, frozen=True):
    """``plan``: what it does, one after the other."""

    plan: tuple[Any, ...] = ()


class Other(Do, frozen=True):
    pass


class GoOn(Do, frozen=True):
    """A further step of an answered call, or a call of its own."""


class Token(Holding):
    """Something taken. ``fate``: what became of it, once."""

    def __init__(self, until: Until, stays: bool, size: int = 0) -> None:
        self.until, self.outlives_session, self.size = until, stays, size  # type: ignore[misc]
        self.fate = "held"
        self.over: Callable[[int], None] = lambda size: None

    def keep(self) -> None:
        self._ends("kept")

    def undo(self) -> bool:
        self._ends("undone")
        return True

    def _ends(self, fate: str) -> None:
        assert self.fate == "held", "one end"
        self.fate = fate
        self.over(self.size)


class Sent:
    """What the model knows of a call. ``wait``: of itself or of a further step; ``runs``: of its own plan."""

    def __init__(self, kind: type[Request]) -> None:
        self.kind = self.busy_with = kind
        self.tokens: list[Token] = []
        self.fates: list[str] = []
        self.reply: Reply | None = None
        self.is_under_way = True
        self.goes_on = False
        """A further step of it came, which has an answer of its own."""
        self.has_answer = False
        """The client said that it has the answer."""

    @property
    def is_known(self) -> bool:
        return self.is_under_way or "held" in self.fates

    def take(self, token: Token) -> None:
        self.tokens.append(token)
        self.fates.append("held")

    def end(self, fate: Callable[[Token], str | None]) -> bool:
        """Returns whether anything was held."""
        held = [n for n, now in enumerate(self.fates) if now == "held"]
        for n in held:
            self.fates[n] = fate(self.tokens[n]) or "held"
        return bool(held)


UNTIL = st.sampled_from(list(Until))
QUEUES = st.sampled_from([("q", "a"), ("q", "b"), ("r",), ("q",)])
KEYS = st.lists(st.sampled_from(["k", "l"]), max_size=2, unique=True)
OPS = st.one_of(
    st.tuples(st.just("hold"), UNTIL, st.booleans()),
    st.tuples(st.just("wait"), QUEUES, st.sampled_from([1.0, 3.0]), st.sampled_from([0.0, 1.0]), KEYS, st.booleans()),
    st.tuples(st.just("room"), st.integers(0, ROOM), st.sampled_from([1.0, 30.0])),
    st.just(("pause",)),
    st.just(("fail",)),
)
PLANS = st.lists(OPS, max_size=4).map(tuple)
CLIENTS = st.sampled_from(["a", "b"])
KINDS = st.sampled_from([Do, Do, Other, GoOn])


class CallsMachine(RuleBasedStateMachine):
    """``supply``: how many waits of a queue may be answered in their turn; ``opened``: keys whose waits may be."""

    @initialize(looks=st.sampled_from([1, 3, 50]))
    def begin(self, looks: int) -> None:
        self.room = Calls(Turn(itertools.count(step=TURN_S / looks).__next__))
        self.room.verbs = {Do: self.carry_out, Other: self.carry_out, GoOn: self.carry_out}
        self.room.steps.add(GoOn)
        self.room.waits.with_sizes(SIZED, lambda: self.free)
        self.now, self.free = 0.0, ROOM
        self.sent: dict[Key, Sent] = {}
        self.of_sessions: dict[str, list[Token]] = {"a": [], "b": []}
        self.lines: dict[tuple[Any, ...], list[Wait]] = {}
        self.overtaken: Counter[Wait] = Counter()
        self.reasons: Counter[Wait] = Counter()
        self.examined: Counter[Wait] = Counter()
        self.supply: Counter[tuple[Any, ...]] = Counter()
        self.opened: set[str] = set()
        self.numbers = itertools.count(1)
        self.arrivals = itertools.count(1)

    # ---- what verbs do ----

    def carry_out(self, call: Call, request: Do) -> Reply | Wait | Steps:
        *before, last = [*request.plan, ("end",)]
        if any(op[0] in ("wait", "room", "pause") for op in before):
            if last == ("end",) and len(before) == 1 and before[0][0] != "pause":
                return self.waits_for(call, before[0])
            if request.plan and type(request) is not GoOn:
                return self.steps(call, request)
        for op in before:
            self.act(call, op)
        return Done(call.number, "done")

    def steps(self, call: Call, request: Do) -> Steps:
        for op in request.plan:
            if op[0] == "pause":
                yield None
            elif op[0] in ("wait", "room"):
                reply = yield self.waits_for(call, op)
                assert isinstance(reply, Done)
            else:
                self.act(call, op)
        return Done(call.number, "done")

    def act(self, call: Call, op: Any) -> None:
        if op[0] == "hold":
            self.hold(call, Token(op[1], op[2]))
        elif op[0] == "fail":
            raise InvalidRequestError("as planned")

    def hold(self, call: Call, token: Token) -> None:
        token.over = self.give_back
        if token.until is Until.SESSION:
            self.of_sessions[call.client].append(token)
        else:
            self.sent[call.client, call.number].take(token)
        self.room.hold(call, token)

    def give_back(self, size: int) -> None:
        self.free += size
        self.room.waits.wake_first(SIZED)

    def waits_for(self, call: Call, op: Any) -> Wait:
        if op[0] == "room":
            wait = Wait(SIZED, self.now + op[2], self.admits, size=op[1])
        else:
            wait = Wait(op[1], self.now + op[2], self.answers, order=op[3], keys=tuple(op[4]), due=op[5])
            self.reasons[wait] += op[5]
        line = self.lines.setdefault(wait.queue, [])
        line.append(wait)
        wait.rank = (wait.order, next(self.arrivals))  # as the room will number it
        line.sort(key=lambda each: each.rank)
        wait.owner = call
        return wait

    def answers(self, wait: Wait, has_turn: bool) -> Reply | None:
        self.examined[wait] += 1
        assert self.examined[wait] <= self.reasons[wait] + (wait.deadline <= self.now), "something woke it"
        assert wait.late == (wait.deadline <= self.now) or not wait.late
        assert not has_turn or self.lines[wait.queue][0] is wait, "only the first has its turn"
        if not (wait.late or self.opened.intersection(wait.keys)):
            if not has_turn or not self.supply[wait.queue]:
                return None
            self.supply[wait.queue] -= 1
        self.leaves(wait)
        return Done(wait.owner.number, "waited")

    def admits(self, wait: Wait, has_turn: bool) -> Reply:
        line = self.lines[SIZED]
        if has_turn:
            assert wait.size <= self.free, "it fits"
            for other in line[: line.index(wait)]:
                self.overtaken[other] += wait.size
                assert self.overtaken[other] <= other.size, "nobody is overtaken by more than its own size"
        else:
            assert wait.late, "something woke it"
        self.leaves(wait)
        if has_turn:
            self.free -= wait.size
            self.hold(wait.owner, Token(Until.DONE, False, wait.size))
        return Done(wait.owner.number, "room")

    def leaves(self, wait: Wait) -> None:
        line = self.lines[wait.queue]
        was_first = line[0] is wait
        line.remove(wait)
        if was_first and line:
            self.reasons[line[0]] += 1

    def stop(self, key: Key) -> None:
        """The model's call waits no more."""
        for line in list(self.lines.values()):
            for wait in [each for each in line if (each.owner.client, each.owner.number) == key]:
                self.leaves(wait)

    # ---- what comes back ----

    def note(self, answers: list[Answer]) -> None:
        for answer in answers:
            sent = self.sent[answer.call.client, answer.call.number]
            assert sent.is_under_way, "it is answered once"
            assert answer.call.kind is sent.busy_with
            sent.is_under_way = False
            if sent.goes_on:
                continue
            sent.reply = answer.reply
            if isinstance(answer.reply, Failed):
                sent.end(lambda token: "undone")

    def settle(self) -> None:
        for _ in range(MOST_TURNS):
            due = self.room.next_deadline()
            if due is None or due > self.now:
                break
            self.note(self.room.expire(self.now))
        else:
            raise AssertionError("it does not come to rest")
        self.check()
        line = self.lines.get(SIZED, [])
        for at, wait in enumerate(line):
            allowed = all(self.overtaken[other] + wait.size <= other.size for other in line[:at])
            assert wait.size > self.free or not allowed, "it may go, and waits"

    def check(self) -> None:
        self.room.check_invariants()
        assert self.room.faults == []
        assert self.room.waits.count == sum(map(len, self.lines.values()))
        for (client, number), sent in self.sent.items():
            assert [token.fate for token in sent.tokens] == sent.fates, (client, number)
            assert (self.room.find(client, number) is not None) == sent.is_known, (client, number)

    # ---- what clients do ----

    @rule(client=CLIENTS, kind=KINDS, plan=PLANS)
    def sends(self, client: str, kind: Any, plan: Any) -> None:
        number = next(self.numbers)
        self.sent[client, number] = Sent(kind)
        self.note(self.room.handle(Call(client, kind(number, plan), self.now), self.now))

    @rule(client=CLIENTS, back=st.integers(1, 5), kind=KINDS, plan=PLANS)
    def sends_again(self, client: str, back: int, kind: Any, plan: Any) -> None:
        """A call that is known has one effect and one answer."""
        known = self.known(client)
        if back > len(known):
            return
        number = known[-back]
        sent = self.sent[client, number]
        call = Call(client, kind(number, plan), self.now)
        if sent.is_under_way and kind is sent.busy_with:
            self.settled_then(call, [])
        elif not sent.is_under_way and kind is sent.kind and not sent.has_answer:
            self.settled_then(call, [sent.reply])
        elif kind is GoOn and not sent.is_under_way:
            sent.busy_with, sent.is_under_way, sent.goes_on = GoOn, True, True
            self.note(self.room.handle(call, self.now))
        else:
            self.settled_then(call, ["ProtocolError"])

    def settled_then(self, call: Call, expected: list[Any]) -> None:
        """The call's own answers are these, and others are noted as always."""
        answers = self.room.handle(call, self.now)
        own = [answer for answer in answers if answer.call is call]
        replies = [each.reply.code if isinstance(each.reply, Failed) else each.reply for each in own]
        assert replies == expected
        self.note([answer for answer in answers if answer.call is not call])

    def known(self, client: str) -> list[int]:
        return [number for owner, number in self.sent if owner == client and self.sent[owner, number].is_known]

    @rule(client=CLIENTS, back=st.integers(1, 5), until=st.sampled_from([Until.RECEIVED, Until.DONE]))
    def says(self, client: str, back: int, until: Until) -> None:
        number = (self.known(client) or [0])[-back:][0]
        (self.room.received if until is Until.RECEIVED else self.room.done)(client, [number])
        sent = self.sent.get((client, number))
        if sent is not None and not sent.is_under_way:
            sent.has_answer |= until is Until.RECEIVED
            sent.end(lambda token: "kept" if token.until is until else None)

    @rule(client=CLIENTS, back=st.integers(1, 5))
    def cancels(self, client: str, back: int) -> None:
        number = (self.known(client) or [0])[-back:][0]
        sent = self.sent.get((client, number))
        was_under_way = sent is not None and sent.is_under_way
        self.stop((client, number))
        became = self.room.cancel(client, number)
        held = sent is not None and sent.end(lambda token: "undone")
        assert became == ("undone" if held else "removed" if was_under_way else "kept")
        if sent is not None:
            sent.is_under_way = False

    @rule(client=CLIENTS, died=st.booleans())
    def ends(self, client: str, died: bool) -> None:
        for number in self.known(client):
            self.stop((client, number))
        for number in self.known(client):
            sent = self.sent[client, number]
            sent.is_under_way = False
            sent.end(lambda token: "kept" if token.outlives_session else "undone")
        own, self.of_sessions[client] = self.of_sessions[client], []
        self.note(self.room.client_gone(client, self.now, died))
        assert [token.fate for token in own] == ["kept" if token.outlives_session else "undone" for token in own]
        assert client not in self.room.clients()

    # ---- what changes ----

    @rule(queue=st.sampled_from([("q", "a"), ("q", "b"), ("q",), ("r",)]), first=st.booleans())
    def wakes(self, queue: Any, first: bool) -> None:
        for name, line in self.lines.items():
            if name[: len(queue)] == queue:
                self.supply[name] += first
                self.reasons.update(line[:1] if first else line)
        (self.room.waits.wake_first if first else self.room.waits.wake)(queue)

    @rule(key=st.sampled_from(["k", "l"]))
    def opens(self, key: str) -> None:
        self.opened.add(key)
        self.reasons.update(wait for line in self.lines.values() for wait in line if key in wait.keys)
        self.room.waits.wake_key(key)

    @rule(key=st.sampled_from(["k", "l"]))
    def shuts(self, key: str) -> None:
        self.opened.discard(key)

    @rule(by=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def time_passes(self, by: float) -> None:
        self.now += by
        self.note(self.room.expire(self.now))

    @rule()
    def rests(self) -> None:
        self.settle()

    def teardown(self) -> None:
        if not hasattr(self, "room"):
            return
        self.settle()
        for client in ("a", "b"):
            self.ends(client, True)
        self.settle()
        tokens = [token for sent in self.sent.values() for token in sent.tokens]
        assert all(token.fate != "held" for token in tokens)
        assert (self.room.clients(), self.room.waits.count, self.free) == ([], 0, ROOM)
        assert self.room.next_deadline() is None, "nothing is left"


CallsMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, print_blob=True)
test_calls = CallsMachine.TestCase
