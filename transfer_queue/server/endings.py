# SPDX-License-Identifier: Apache-2.0
"""What ends: cancelled calls and sessions are undone in both parts of a server, and unused values are deleted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from transfer_queue import protocol as p
from transfer_queue.control.plane import ControlPlane
from transfer_queue.server.janitor import Janitor, StepwiseWrites
from transfer_queue.storage.messages import Delete, EndSession, EndWrite
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.transport.base import Buffer
from transfer_queue.transport.loop import guarded
from transfer_queue.utils.logging_utils import get_logger

PER_TURN = 5_000
"""Samples whose values are deleted in one turn: some milliseconds."""

_log = get_logger(__name__)
Act = Callable[[], Iterable[Any]]


class Answer(NamedTuple):
    """A reply, the client it goes to, and the values that travel with it."""

    client: str
    reply: p.Reply
    frames: Sequence[Buffer] = ()


def answers_of(replies: Iterable[Any]) -> list[Answer]:
    """What the control plane or the storage unit replies, as answers."""
    return [Answer(*reply) for reply in replies]


def all_answers(acts: Iterable[Act]) -> list[Answer]:
    """The answers of these acts. An act that fails is logged, and loses no answer of the others."""
    answers: list[Answer] = []
    for act in acts:
        guarded(lambda act=act: answers.extend(answers_of(act())))
    return answers


def in_turns(indexes: p.Indexes) -> Iterator[p.Indexes]:
    """The samples, cut into as many as are deleted in one turn."""
    return (indexes[start : start + PER_TURN] for start in range(0, len(indexes), PER_TURN))


class Endings:
    """Undoes calls and ends sessions in the control plane and the storage unit of one process."""

    def __init__(self, plane: ControlPlane | None, unit: StorageUnit | None) -> None:
        self._plane, self._unit = plane, unit
        self.janitor: Janitor | None = None
        """Does the same in storage units of other processes, if there are any."""
        self.writes = StepwiseWrites()
        self.unused: deque[p.Indexes] = deque()
        """Values to be deleted by ``delete_some``, in parts of a turn."""

    def undo(self, client: str, call: int, now: float) -> list[Answer]:
        """Both parts undo what they did for this call."""
        acts: list[Act] = []
        if self._unit is not None:
            acts.append(partial(self._unit.cancel, client, call, now))
        if self._plane is not None:
            acts.append(partial(self._plane.handle, client, p.Cancel(0, call), now))
        return all_answers(acts)

    def cancel(self, client: str, cancel: p.Cancel, now: float) -> list[Answer]:
        """The client has cancelled a call."""
        published = self.writes.cancelled(client, cancel.call)
        answers = []
        if self._unit is not None and published:
            answers += answers_of(self._unit.handle(client, EndWrite(0, client, cancel.call, True), [], now))
        elif self._unit is not None:
            answers += answers_of(self._unit.cancel(client, cancel.call, now))
        if self._plane is None:
            return [Answer(client, p.Done(cancel.id)), *answers]
        answers += answers_of(self._plane.handle(client, cancel, now))
        if self.janitor is not None and published is not None:
            self.janitor.end_write(client, cancel.call, published)
        return answers

    def end_session(self, client: str, died: bool, now: float) -> list[Answer]:
        """The client has left or died."""
        acts: list[Act] = []
        published = self.writes.end(client)
        if self._unit is not None:
            acts.append(partial(self._unit.client_gone, client, now))
        if self._plane is not None:
            acts.append(partial(self._plane.client_gone, client, now, died))
            if self._unit is not None:
                acts.append(partial(self._unit.handle, client, EndSession(0, client, published), [], now))
            if self.janitor is not None:
                self.janitor.end_session(client, published)
        answers = all_answers(acts)
        for fault in [] if self._plane is None else self._plane.take_faults():
            _log.error("a call of ended client %s could not be undone: %s", client, fault)
        return answers

    def take_unused(self, now: float) -> list[Answer]:
        """Delete what has become unused in the control plane, or at least the first part of it."""
        answers: list[Answer] = []
        for unused in [] if self._plane is None else self._plane.take_unused():
            if self._unit is not None:
                self.unused.extend(in_turns(unused))
                answers += self.delete_some(now)
            if self.janitor is not None:
                self.janitor.delete(unused)
        return answers

    def delete_some(self, now: float) -> list[Answer]:
        """Delete the next part of the unused values."""
        assert self._unit is not None
        packed = p.pack_indexes(self.unused.popleft())
        return all_answers([partial(self._unit.handle, "", Delete(0, packed), [], now)])
