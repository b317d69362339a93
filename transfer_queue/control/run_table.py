# SPDX-License-Identifier: Apache-2.0
"""Runs: processes that depend on each other, on any host. When one ends in the middle, the others get its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError

if TYPE_CHECKING:
    from transfer_queue.control.state import PlaneState

_RUNS = "\0run "


class RunTable:
    """A member is in its run until it leaves, or its session ends. A run without members is gone."""

    def __init__(self) -> None:
        self._members: dict[str, dict[str, str]] = {}
        self._lost: dict[str, str] = {}
        self._changed: set[str] = set()

    def join(self, client: str, request: p.WatchRun) -> None:
        """Raises InvalidRequestError for a run that is unknown, or of which a client without a name is no member."""
        members = self._members.get(request.run, {})
        if request.name is None:
            if client not in members:
                raise InvalidRequestError(f"this client is no member of run {request.run!r}.")
            return
        if not members and not request.opens:
            raise InvalidRequestError(f"this queue has no run {request.run!r}.")
        self._members[request.run] = {**members, client: request.name}

    def leave(self, client: str, run: str, lost: bool) -> None:
        """``lost``: the others can't go on without it."""
        members = self._members.get(run, {})
        name = members.pop(client, None)
        if name is None:
            return
        self._changed.add(run)
        if lost:
            self._lost.setdefault(run, name)
        if not members:
            del self._members[run]
            self._lost.pop(run, None)

    def end_session(self, client: str) -> None:
        """The client leaves its runs, and is lost to them."""
        for run in [run for run, members in self._members.items() if client in members]:
            self.leave(client, run, lost=True)

    def lost(self, run: str) -> str | None:
        """The name of the first member that the run has lost."""
        return self._lost.get(run)

    def has(self, client: str, run: str) -> bool:
        return client in self._members.get(run, {})

    def take_changed(self) -> list[str]:
        """Runs that somebody has left since the last call."""
        changed, self._changed = list(self._changed), set()
        return changed


def watch(state: PlaneState, client: str, request: p.WatchRun, now: float) -> p.Reply | None:
    """Join, and wait until the run has lost a member."""
    state.runs.join(client, request)
    lost = state.runs.lost(request.run)
    if lost is None and request.wait_s > 0:
        state.waiters.park(client, request, now, now + request.wait_s, _RUNS + request.run, 0.0)
        return None
    return p.Done(request.id, lost)


def leave(state: PlaneState, client: str, request: p.LeaveRun) -> p.Reply:
    """The client's own waiting requests for this run are answered, too."""
    state.runs.leave(client, request.run, request.failed)
    return p.Done(request.id)


def take_told(state: PlaneState) -> Iterator[tuple[str, p.Done]]:
    """Remove and answer the requests of runs that have lost a member, and of members that have left."""
    for run in state.runs.take_changed():
        lost = state.runs.lost(run)
        for parked in state.waiters.waiting_in(_RUNS + run):
            if lost is not None or not state.runs.has(parked.client, run):
                state.waiters.remove(parked)
                yield parked.client, p.Done(parked.request.id, lost)
