# SPDX-License-Identifier: Apache-2.0
"""Runs: processes that depend on each other, on any host. When one ends in the middle, the others get its name."""

from __future__ import annotations

from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError


class RunTable:
    """A member is in its run until it leaves, or its session ends. A run without members is gone."""

    def __init__(self) -> None:
        self._members: dict[str, dict[str, str]] = {}
        self.lost: dict[str, str] = {}
        """By run, the name of the first member that it has lost."""

    def join(self, client: str, request: p.WatchRun) -> bool:
        """Returns whether the client is a new member.

        Raises InvalidRequestError for a run that is unknown, or of which a client without a name is no member.
        """
        members = self._members.get(request.run, {})
        if request.name is None:
            if client not in members:
                raise InvalidRequestError(f"this client is no member of run {request.run!r}.")
            return False
        if not members and not request.opens:
            raise InvalidRequestError(f"this queue has no run {request.run!r}.")
        self._members[request.run] = {**members, client: request.name}
        return client not in members

    def leave(self, client: str, run: str, lost: bool) -> None:
        """``lost``: the others can't go on without it."""
        members = self._members.get(run, {})
        name = members.pop(client, None)
        if name is None:
            return
        if lost:
            self.lost.setdefault(run, name)
        if not members:
            del self._members[run]
            self.lost.pop(run, None)

    def has(self, client: str, run: str) -> bool:
        return client in self._members.get(run, {})
