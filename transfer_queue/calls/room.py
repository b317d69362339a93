# SPDX-License-Identifier: Apache-2.0
"""Calls: the one room of a server process for its clients' calls, shared by control plane and storage unit.

A call has one effect and one answer, however often it is sent, timed out, cancelled or interrupted. A deadline, a
cancel, a lost connection and a death differ only in which waits and holdings they end.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from transfer_queue.calls.call import Answer, Call, Holding, Steps, Until
from transfer_queue.calls.turn import Turn
from transfer_queue.calls.wait import MORE, Wait, Waits
from transfer_queue.errors import ProtocolError, TransferQueueError, to_wire
from transfer_queue.protocol import Failed, Reply, Request

H = TypeVar("H", bound=Holding)
Verb = Callable[[Call, Any], "Reply | Wait | Steps | None"]
"""Carries out a request. Returns the reply, what it waits for, or its steps; None: nobody waits for a reply."""
Job = Iterator[None]
"""Work that belongs to no call, and yields often."""
_REMEMBERED = 1024
"""Sessions that have ended and are still refused; likewise the cancelled calls of a session."""


@dataclass(slots=True, eq=False)
class _Session:
    calls: dict[int, Call] = field(default_factory=dict)
    holdings: list[Holding] = field(default_factory=list)
    cancelled: dict[int, None] = field(default_factory=dict)
    """Calls that nobody waits for. They may come all the same, over a connection that has ended."""


_NOBODY = _Session()
"""Stands for sessions that hold nothing."""


class Calls:
    """Requests in, answers out. ``now`` is the caller's monotonic seconds, passed in."""

    def __init__(self, turn: Turn | None = None) -> None:
        self.waits = Waits()
        self.turn = turn or Turn()
        self.now = 0.0
        self.verbs: dict[type[Request], Verb] = {}
        self.steps: set[type[Request]] = set()
        """Requests that may be further steps of a call that was answered. They reply or wait, and have no steps."""
        self.faults: list[BaseException] = []
        """What should not have failed: bugs, and foreign code. Its owner logs them and empties the list."""
        self._sessions: defaultdict[str, _Session] = defaultdict(_Session)
        self._ended: dict[str, None] = {}
        self._jobs: deque[Job | Call] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._answers: list[Answer] = []

    # ---- requests ----

    def handle(self, call: Call, now: float) -> list[Answer]:
        """Carry out a request. Returns its answer, unless it waits, and the answers to others that it decides.

        The same call again gets the same answer, or none while it is under way.
        """
        self.now = now
        self.turn.begin()
        session = self._sessions.get(call.client, _NOBODY)
        known = session.calls.get(call.number)
        if call.number in session.cancelled:
            refused = ProtocolError(f"call {call.number} was cancelled. Make another call.")
            self._answers.append(Answer(call, call.request, call.envelope, self.failed(call, refused)))
        elif known is None or not self._is_known(known, call):
            self._begin(call)
        return self.work()

    def _is_known(self, known: Call, call: Call) -> bool:
        """Whether this call came before. If it was answered, it gets the same answer."""
        under_way = known if known.wait is None else known.wait.owner
        same = under_way.kind is call.kind
        if same and known.is_under_way:
            under_way.envelope = call.envelope
        elif same and known.reply is not None:
            self._answers.append(Answer(call, call.request, call.envelope, known.reply, known.values))
        elif call.kind in self.steps and not known.is_under_way:
            return False
        else:
            refused = ProtocolError(
                f"call {call.number} was {known.kind.__name__} before, now it is "
                f"{call.kind.__name__}. Numbers of calls are never used again."
            )
            self._answers.append(Answer(call, call.request, call.envelope, self.failed(call, refused)))
        return True

    def _begin(self, call: Call) -> None:
        """The one guard of requests: whatever is wrong with one, its caller gets the error, and others are served."""
        result: Reply | Wait | Steps | None
        try:
            verb = self.verbs.get(call.kind)
            if verb is None:
                raise ProtocolError(f"this server does not serve {call.kind.__name__}: it is of another kind.")
            result = verb(call, call.request)
        except BaseException as error:  # foreign code may raise anything, and no Ctrl-C reaches a server
            result = self.failed(call, error)
        if isinstance(result, Reply):
            self._answer(call, result)
        elif isinstance(result, Wait):
            self._park(call, result)
        elif result is not None:
            call.steps = result
            self._go_on(call, None)

    def failed(self, call: Call, error: BaseException) -> Failed:
        """The error as the call's answer. One that no client caused is a fault."""
        if not isinstance(error, TransferQueueError):
            self.faults.append(error)
        return Failed(call.number, *to_wire(error))

    def _park(self, call: Call, wait: Wait) -> None:
        self._register(call).wait = wait
        self.waits.park(call, wait, self.now)

    def _go_on(self, call: Call, reply: Reply | None) -> None:
        """Take the next steps of a call, until it waits, has worked for a turn, or is answered."""
        steps = call.steps
        assert steps is not None
        try:
            wanted = steps.send(reply)
            while wanted is None and self.turn.has_time():
                wanted = next(steps)
        except StopIteration as done:
            call.steps = None
            self._answer(call, done.value)
        except BaseException as error:  # as above
            self._answer(call, self.failed(call, error))
        else:
            if wanted is not None:
                self._park(call, wanted)
            else:
                self._register(call)
                self._jobs.append(call)

    def _answer(self, call: Call, reply: Reply) -> None:
        """The call is answered. An error has no effect, so what the call has taken is undone."""
        self._answers.append(Answer(call, call.request, call.envelope, reply, call.values))
        if not call.is_registered:
            return
        if isinstance(reply, Failed):
            self._forget(call)
            self._undo(call.holdings)
        elif call.holdings:
            call.reply = reply  # only this is kept, and what the call holds
            call.request, call.frames, call.envelope = None, (), None
        else:
            self._forget(call)

    # ---- what calls hold ----

    def _register(self, call: Call) -> Call:
        """The call as others find it. A further step belongs to the call that it goes on with."""
        if call.is_registered:
            return call
        known = self._sessions[call.client].calls.setdefault(call.number, call)
        call.is_registered = known is call
        return known

    def _forget(self, call: Call) -> None:
        if call.is_registered:
            call.is_registered = False
            session = self._sessions[call.client]
            del session.calls[call.number]
            if not (session.calls or session.holdings or session.cancelled):
                del self._sessions[call.client]

    def hold(self, call: Call, holding: Holding) -> None:
        """The call has taken this. A further step of a call adds to what the call holds."""
        if holding.until is Until.SESSION:
            self._sessions[call.client].holdings.append(holding)
        else:
            (call if call.is_registered else self._register(call)).holdings.append(holding)

    def find(self, client: str, number: int) -> Call | None:
        """A call that is under way, or whose answer or holdings are kept."""
        return self._sessions.get(client, _NOBODY).calls.get(number)

    def held(self, client: str, number: int, kind: type[H]) -> list[H]:
        """What a call holds of this kind."""
        call = self.find(client, number)
        return [] if call is None else [each for each in call.holdings if isinstance(each, kind)]

    def take(self, client: str, number: int, kind: type[H]) -> list[H]:
        """Remove and return what a call holds of this kind. Nothing else happens to it."""
        call = self.find(client, number)
        if call is None:
            return []
        found = [each for each in call.holdings if isinstance(each, kind)]
        call.holdings = [each for each in call.holdings if not isinstance(each, kind)]
        self.forget_if_over(call)
        return found

    def forget_if_over(self, call: Call) -> None:
        """Drop the call if it holds nothing any more, and is not under way."""
        if not call.holdings and not call.is_under_way:
            self._forget(call)

    def of_session(self, client: str, kind: type[H]) -> list[H]:
        """What the session itself holds of this kind."""
        return [each for each in self._sessions.get(client, _NOBODY).holdings if isinstance(each, kind)]

    def leave(self, client: str, holding: Holding) -> None:
        """The session no longer holds this."""
        session = self._sessions[client]
        session.holdings.remove(holding)
        if not (session.calls or session.holdings or session.cancelled):
            del self._sessions[client]

    def holdings(self, kind: type[H]) -> Iterator[tuple[Call, H]]:
        """Who holds this up: all that is held of this kind, with the calls that hold it."""
        for session in self._sessions.values():
            for call in session.calls.values():
                for each in call.holdings:
                    if isinstance(each, kind):
                        yield call, each

    def of(self, client: str) -> list[Call]:
        """The calls of one session."""
        return list(self._sessions.get(client, _NOBODY).calls.values())

    def clients(self) -> list[str]:
        """Sessions that hold or wait for something."""
        return [client for client, session in self._sessions.items() if session.calls or session.holdings]

    # ---- what ends ----

    def received(self, client: str, numbers: Iterable[int]) -> None:
        """The client has these answers, or no longer needs them."""
        self._release(client, numbers, Until.RECEIVED)

    def done(self, client: str, numbers: Iterable[int]) -> None:
        """The client is done with what these calls hold."""
        self._release(client, numbers, Until.DONE)

    def _release(self, client: str, numbers: Iterable[int], until: Until) -> None:
        calls = self._sessions.get(client, _NOBODY).calls
        for number in numbers:
            call = calls.get(number)
            if call is None or call.wait is not None or call.steps is not None:
                continue
            if until is Until.RECEIVED:
                call.reply, call.values = None, ()
            for each in list(call.holdings):
                if each.until is until:
                    call.holdings.remove(each)
                    each.keep()
            if not call.holdings:
                self._forget(call)

    def cancel(self, client: str, number: int) -> str:
        """Nobody waits for this call, whether it came already or not. Later it is refused.

        Says what became of it: "removed", "undone" or "kept".
        """
        call = self.find(client, number)
        self._remember(client, number)
        if call is None:
            return "kept"
        was_waiting = call.is_under_way
        self._stop(call)
        self._forget(call)
        if was_waiting and not call.holdings:
            return "removed"
        return "undone" if self._undo(call.holdings) else "kept"

    def _remember(self, client: str, number: int) -> None:
        cancelled = self._sessions[client].cancelled
        cancelled[number] = None
        if len(cancelled) > _REMEMBERED:
            del cancelled[next(iter(cancelled))]

    def _stop(self, call: Call) -> None:
        if call.wait is not None:
            self.waits.remove(call.wait)
            call.wait = None
        if call.steps is not None:
            steps, call.steps = call.steps, None
            self._guard(steps.close)
            if call in self._jobs:
                self._jobs.remove(call)

    def stop_waiting(self, client: str, number: int) -> None:
        """A further step of this call is not waited for any more."""
        call = self.find(client, number)
        if call is not None and call.wait is not None:
            self._stop(call)
            self.forget_if_over(call)

    def _undo(self, holdings: list[Holding]) -> bool:
        """Undo the last one first. Returns whether any was undone."""
        undone = [self._guard(each.undo) for each in reversed(holdings)]
        return any(undone)

    def _guard(self, act: Callable[[], Any]) -> Any:
        """An undo that fails keeps nothing else from being undone."""
        try:
            return act()
        except Exception as error:
            self.faults.append(error)
            return False

    def end(self, client: str, died: bool = True) -> None:
        """The session has ended: its waits are removed, and its holdings end. Those that stay even so are kept here."""
        session = self._sessions.pop(client, None)
        if session is None:
            return
        stay = _Session()
        for call in reversed(session.calls.values()):
            call.is_registered = False
            self._stop(call)
            call.holdings = [each for each in reversed(call.holdings) if self._guard(partial(each.end, died))]
            if call.holdings:
                stay.calls[call.number], call.is_registered = call, True
        for each in reversed(session.holdings):
            self._guard(partial(each.end, died))
        if stay.calls:
            self._sessions[client] = stay

    def refuse(self, client: str) -> None:
        """This session has ended: what may still arrive of it is refused. The last thousand are remembered."""
        self._ended.pop(client, None)
        self._ended[client] = None
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, client: str) -> bool:
        """Whether this session is refused."""
        return client in self._ended

    # ---- turns ----

    def later(self, job: Job) -> None:
        """Do this bit by bit, between the requests."""
        self._jobs.append(job)

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do this at that time."""
        heapq.heappush(self._timers, (when, next(self._timer_numbers), act))

    def client_gone(self, client: str, now: float, died: bool) -> list[Answer]:
        """The session has ended. Returns the answers to others that this decides."""
        self.now = now
        self.turn.begin()
        self.end(client, died)
        return self.work()

    def expire(self, now: float) -> list[Answer]:
        """Answer waits past their deadline, and do a little of what is left."""
        self.now = now
        self.turn.begin()
        answers = self.work()
        if self._jobs:
            self._work_on(self._jobs.popleft())
        while self._jobs and self.turn.has_time():
            self._work_on(self._jobs.popleft())
        return answers + self.work()

    def next_deadline(self) -> float | None:
        """When ``expire`` has work: minus infinity for at once, None for never."""
        if self._jobs or self.waits.active:
            return -float("inf")
        deadline = self.waits.next_deadline()
        if not self._timers:
            return deadline
        return self._timers[0][0] if deadline is None else min(deadline, self._timers[0][0])

    def work(self) -> list[Answer]:
        """Examine the waits that are due, while this turn has time. Returns all answers that came of this turn."""
        while self._timers and self._timers[0][0] <= self.now and self.turn.has_time():
            self._guard(heapq.heappop(self._timers)[2])
        if self.waits.count and self.waits.may_be_due(self.now):
            self._examine_due()
        answers, self._answers = self._answers, []
        return answers

    def _examine_due(self) -> None:
        has_time = True
        while has_time:
            self.waits.wake_late(self.now)  # each time, because a call may wait once more though its time is over
            found = self.waits.next()
            if found is None:
                break
            self._examine(*found)
            has_time = self.turn.has_time()

    def _examine(self, wait: Wait, has_turn: bool) -> None:
        try:
            reply = wait.answer(wait, has_turn)
        except BaseException as error:  # as in _begin
            reply = self.failed(wait.owner, error)
        if isinstance(reply, Reply):
            self.waits.remove(wait)
            self._woken(wait.owner, reply)
        elif reply is MORE or wait.late:
            self.waits.examine(wait)

    def _woken(self, call: Call, reply: Reply) -> None:
        self._register(call).wait = None
        if call.steps is not None:
            self._go_on(call, reply)
        else:
            self._answer(call, reply)

    def _work_on(self, job: Job | Call) -> None:
        if isinstance(job, Call):
            self._go_on(job, None)
            return
        try:
            next(job)
        except StopIteration:
            pass
        except Exception as error:
            self.faults.append(error)
        else:
            self._jobs.append(job)

    def check_invariants(self) -> None:
        """Raise AssertionError if the tables disagree; for tests."""
        for client, session in self._sessions.items():
            assert session.calls or session.holdings or session.cancelled, f"session {client!r} is kept for something"
            assert session.calls.keys().isdisjoint(session.cancelled), f"cancelled calls of {client!r} are over"
            for number, call in session.calls.items():
                assert call.holdings or call.is_under_way, f"call {number} is kept for something"
                assert call.is_registered, f"call {number} knows that it is kept"
                assert call.wait is None or not call.wait.done, f"call {number} waits"
        for wait in self.waits:
            assert self.find(wait.owner.client, wait.owner.number) is not None, "a waiting call is known"


def replied(result: Reply | Wait | Steps) -> Steps:
    """The reply of a verb that another verb uses as one of its steps."""
    if isinstance(result, Reply):
        return result
    if isinstance(result, Wait):
        reply: Reply = yield result
        return reply
    return (yield from result)
