# SPDX-License-Identifier: Apache-2.0
"""The verbs of members: storage units of the queue, and processes of a run. A membership ends with its session."""

from __future__ import annotations

from transfer_queue import protocol as p
from transfer_queue.calls import Call, Holding, Until, Wait
from transfer_queue.control import group_work
from transfer_queue.control.state import PlaneState
from transfer_queue.errors import InvalidRequestError

_UNITS = ("units",)
_RUNS = "runs"


class _Unit(Holding):
    """A storage unit is there."""

    until = Until.SESSION

    def __init__(self, state: PlaneState, number: int) -> None:
        self._state, self._number = state, number

    def end(self, died: bool) -> None:
        """The values in it are gone, so their fields aren't produced any more."""
        state = self._state
        state.units.remove(self._number)
        state.waits.wake(_UNITS)
        found = [(partition, partition.lose_unit(self._number)) for partition in state.partitions.values()]
        reason = f"its rows were lost with storage unit {state.units.lost[self._number]!r}"
        for partition, lost in found:
            if len(lost):
                group_work.make_again(state, partition, lost, reason)
                state.changed(partition)


class _RunMember(Holding):
    """A process is a member of a run."""

    until = Until.SESSION

    def __init__(self, state: PlaneState, client: str, run: str) -> None:
        self._state, self._client, self.run = state, client, run

    def end(self, died: bool) -> None:
        """The others can't go on without it. It may have left before."""
        _leave(self._state, self._client, self.run, lost=True)


def join_unit(state: PlaneState, call: Call, request: p.JoinUnit) -> p.Reply:
    """A storage unit is there from now on."""
    number = state.units.join(request)
    state.calls.hold(call, _Unit(state, number))
    state.waits.wake(_UNITS)
    return p.Done(request.id, number)


def check_evict(state: PlaneState, call: Call, request: p.EvictClient) -> None:
    """Raises InvalidRequestError for a client that evicts itself, and for a storage unit that isn't named as one."""
    evicted = request.client
    if evicted == call.client:
        raise InvalidRequestError(f"client {evicted!r} can't evict itself: close it instead.")
    if state.calls.of_session(evicted, _Unit) and not request.unit:
        raise InvalidRequestError(
            f"client {evicted!r} is a storage unit, and what it stores would be lost. If it hangs for good, evict it "
            f"with unit=True (lightning-tq evict --unit)."
        )


def list_units(state: PlaneState, call: Call, request: p.ListUnits) -> p.Reply | Wait:
    """The units, as soon as they differ from those that the client knows."""

    def answer(wait: Wait | None, has_turn: bool) -> p.Reply | None:
        if request.known == state.units.version and not (wait and wait.late):
            return None
        return p.Units(request.id, state.units.version, list(state.units.by_number.values()))

    return answer(None, True) or Wait(_UNITS, state.calls.now + request.wait_s, answer)


def watch_run(state: PlaneState, call: Call, request: p.WatchRun) -> p.Reply | Wait:
    """Join, and wait until the run has lost a member, or this member has left."""
    runs, run = state.runs, request.run

    def answer(wait: Wait | None, has_turn: bool) -> p.Reply | None:
        lost = runs.lost.get(run)
        is_over = lost is not None or not runs.has(call.client, run) or (wait is not None and wait.late)
        return p.Done(request.id, lost) if is_over else None

    if runs.join(call.client, request):
        state.calls.hold(call, _RunMember(state, call.client, run))
    return answer(None, True) or Wait((_RUNS, run), state.calls.now + request.wait_s, answer)


def leave_run(state: PlaneState, call: Call, request: p.LeaveRun) -> p.Reply:
    """The client's own waiting requests for this run are answered, too."""
    for member in state.calls.of_session(call.client, _RunMember):
        if member.run == request.run:
            state.calls.leave(call.client, member)
    _leave(state, call.client, request.run, request.failed)
    return p.Done(request.id)


def _leave(state: PlaneState, client: str, run: str, lost: bool) -> None:
    state.runs.leave(client, run, lost)
    state.waits.wake((_RUNS, run))
