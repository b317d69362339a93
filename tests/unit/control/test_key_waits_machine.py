# SPDX-License-Identifier: Apache-2.0
"""Watches and waits under random changes: whoever replays what a watch tells has the list, told nothing twice.

The client's own code runs here, on a plane in this thread: a parked call is a coroutine that hasn't ended.
"""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any

from control_model import FILTERS
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.local_plane import LocalPlane, To
from transfer_queue import protocol as p
from transfer_queue.calls import Turn
from transfer_queue.client.key_watch import KeyChanges, KeyWaits, KeyWatch
from transfer_queue.control import key_waits, listed_keys
from transfer_queue.errors import EndOfPartitionError, KeysTimeoutError, TransferQueueError, from_wire

WATCHER, PRODUCER = "watcher", "producer"
Keys = dict[str, dict[str, Any]]
keys = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=5, unique=True)
all_tags = st.dictionaries(st.sampled_from(["v", "total_lengths"]), st.integers(0, 4))
filters = st.sampled_from(list(FILTERS))


@types.coroutine
def parked() -> Generator[None, None, None]:
    yield


class PlaneSession:
    """A client's session with a plane of this thread."""

    def __init__(self, handle: Callable[[p.Request], None]) -> None:
        self._ids = itertools.count(1)
        self._handle = handle
        self.replies: dict[int, p.Reply] = {}

    async def ask(self, verb: Any, expected: Any, *args: Any, wait_s: float = 0.0) -> Any:
        request = verb(next(self._ids), *args)
        self._handle(request)
        while request.id not in self.replies:
            await parked()
        reply = self.replies.pop(request.id)
        if isinstance(reply, p.Failed):
            raise from_wire(reply.code, reply.text)
        assert isinstance(reply, expected)
        return reply


@dataclass(eq=False)
class Watcher:
    """Replays a watch into ``known``; busy ones ask for no answer for a while."""

    watch: KeyWatch
    where: str | None
    known: Keys = field(default_factory=dict)
    call: Coroutine[Any, Any, KeyChanges | None] | None = None
    busy: bool = False
    ended: bool = False

    def go_on(self) -> None:
        """Take every answer there is."""
        while not self.busy and not self.ended:
            self.call = self.call or self.watch._next()
            try:
                self.call.send(None)
            except StopIteration as stop:
                self.call = None
                self.take(stop.value)
            else:
                return

    def take(self, changes: KeyChanges | None) -> None:
        if changes is None:
            self.ended = True
            return
        assert changes.changed or changes.removed, "an answer tells something"
        assert self.known.keys() >= set(changes.removed), "only what was told before is removed"
        for key in changes.removed:
            del self.known[key]
        if changes.fresh:
            assert self.known.keys() <= changes.changed.keys(), "a fresh list is whole"
        else:
            assert not any(self.known.get(key) == tags for key, tags in changes.changed.items()), "told twice"
        self.known.update(changes.changed)


@dataclass(eq=False)
class Waiter:
    """A call of ``wait_keys`` that hasn't ended."""

    call: Coroutine[Any, Any, Keys]
    where: str | None
    count: int


def outcome_of(call: Coroutine[Any, Any, Keys]) -> Keys | TransferQueueError | None:
    """What the call returned or raised; None: it is still parked."""
    try:
        call.send(None)
    except StopIteration as stop:
        keys: Keys = stop.value
        return keys
    except TransferQueueError as error:
        return error
    return None


class KeyMachine(RuleBasedStateMachine):
    SMALL = ((listed_keys, "_FEWEST", 4), (key_waits, "PAGE", 3))

    @initialize(small=st.booleans())
    def begin(self, small: bool) -> None:
        self.kept = [(module, name, getattr(module, name)) for module, name, _ in self.SMALL]
        for module, name, value in self.SMALL if small else ():
            setattr(module, name, value)
        self.plane = LocalPlane()
        self.plane.calls.turn = Turn(itertools.count(step=2e-3 if small else 1e-4).__next__)
        self.ids = itertools.count(1)
        self.session = PlaneSession(lambda request: self.absorb(self.plane.handle(WATCHER, request, 0.0)))
        self.listed: dict[str, tuple[int, Keys]] = {}
        self.model: dict[str, dict[str, Any]] = {}
        self.watchers: list[Watcher] = []
        self.waiters: list[Waiter] = []

    def teardown(self) -> None:
        for each in [*self.waiters, *(each for each in self.watchers if each.call)] if hasattr(self, "kept") else ():
            assert each.call is not None
            each.call.close()
        for module, name, value in getattr(self, "kept", ()):
            setattr(module, name, value)

    def absorb(self, replies: list[To]) -> None:
        self.session.replies.update({to.reply.id: to.reply for to in replies if to.client == WATCHER})

    def send(self, verb: Any, *args: Any) -> Any:
        request = verb(next(self.ids), *args)
        replies = self.plane.handle(PRODUCER, request, 0.0)
        self.absorb(replies)
        return next(to.reply for to in replies if to.client == PRODUCER)

    def matching(self, where: str | None) -> Keys:
        return {key: tags for key, tags in self.model.items() if FILTERS[where](tags)}

    # ---- producers ----

    @rule(names=keys, tags=all_tags)
    def put(self, names: list[str], tags: dict[str, int]) -> None:
        begun = self.send(p.ResolveKeys, "p", names, True, True)
        indexes = p.unpack_indexes(begun.indexes).tolist()
        self.send(p.Publish, "p", begun.indexes, {}, dict.fromkeys(indexes, tags), False, begun.id)
        for name in names:
            self.model[name] = {**self.model.get(name, {}), **tags}

    @rule(names=keys)
    def insert(self, names: list[str]) -> None:
        self.send(p.ResolveKeys, "p", names, True)
        for name in names:
            self.model.setdefault(name, {})

    @rule(names=keys, tags=all_tags)
    def replace_tags(self, names: list[str], tags: dict[str, int]) -> None:
        found = self.send(p.ResolveKeys, "p", names)
        self.send(p.SetTags, {"p": dict.fromkeys(p.unpack_indexes(found.indexes).tolist(), tags)})
        self.model.update({name: tags for name in names if name in self.model})

    @rule(names=keys)
    def put_and_cancel(self, names: list[str]) -> None:
        begun = self.send(p.ResolveKeys, "p", names, True, True)
        assert self.send(p.Cancel, begun.id).value in ("undone", "kept")

    @rule(count=st.integers(1, 90))
    def put_and_clear_without_keys(self, count: int) -> None:
        """Enough to compact the table now and then."""
        reserved = self.send(p.Reserve, "p", count)
        self.send(p.Publish, "p", reserved.indexes, {}, {}, False, reserved.id)
        self.send(p.ClearSamples, "p", reserved.indexes)

    @rule(names=keys)
    def clear(self, names: list[str]) -> None:
        found = self.send(p.ResolveKeys, "p", names)
        self.send(p.ClearSamples, "p", found.indexes)
        for name in names:
            self.model.pop(name, None)

    @rule()
    @precondition(lambda self: len(self.model) > 6)
    def clear_partition(self) -> None:
        self.send(p.ClearPartition, "p")
        while self.plane.next_deadline() == -math.inf:
            self.absorb(self.plane.expire(0.0))
        self.model.clear()
        for each in self.watchers:
            each.busy = False
            each.go_on()
            assert each.ended or each.watch._position is None
        self.watchers = [each for each in self.watchers if not each.ended]
        assert all(isinstance(outcome_of(each.call), EndOfPartitionError) for each in self.waiters)
        self.waiters.clear()

    # ---- who waits ----

    @rule(where=filters)
    def watch(self, where: str | None) -> None:
        session: Any = self.session
        self.watchers.append(Watcher(KeyWatch(session, "p", where, None), where))

    @rule(data=st.data())
    @precondition(lambda self: self.watchers)
    def be_busy_or_go_on(self, data: st.DataObject) -> None:
        watcher = data.draw(st.sampled_from(self.watchers), "watcher")
        watcher.busy = not watcher.busy

    @rule(data=st.data())
    @precondition(lambda self: any(each.call for each in self.watchers))
    def cancel_a_parked_watch(self, data: st.DataObject) -> None:
        """The next call goes on where the last answer ended."""
        watcher = data.draw(st.sampled_from([each for each in self.watchers if each.call]), "watcher")
        assert watcher.call is not None
        watcher.call.close()
        watcher.call = None

    @rule(where=filters, count=st.integers(1, 8), wait_s=st.sampled_from([0.0, 100.0]))
    def wait(self, where: str | None, count: int, wait_s: float) -> None:
        client: Any = types.SimpleNamespace(session=self.session)
        self.waiters.append(Waiter(KeyWaits.async_wait_keys(client, "p", where, count, wait_s), where, count))

    # ---- what always holds ----

    @invariant()
    def who_is_not_busy_knows_the_list(self) -> None:
        self.settle()
        for each in self.watchers:
            assert each.busy or each.known == self.matching(each.where), each.where

    @invariant()
    def a_wait_ends_as_soon_as_enough_keys_match(self) -> None:
        self.settle()
        for each in list(self.waiters):
            expected = self.matching(each.where)
            outcome = outcome_of(each.call)
            if outcome is None:
                assert len(expected) < each.count
                continue
            self.waiters.remove(each)
            if isinstance(outcome, KeysTimeoutError):
                assert len(expected) < each.count
                told = f": {len(expected)} of its {len(self.model)} keys match"
                assert told in str(outcome) or not self.plane.state.partitions
            else:
                assert len(expected) >= each.count
                assert outcome == expected

    def settle(self) -> None:
        """All work that was left for later turns is done, and every answer is taken."""
        for each in self.watchers:
            each.go_on()
        while (self.plane.next_deadline() or 1.0) <= 0.0:
            self.absorb(self.plane.expire(0.0))
            for each in self.watchers:
                each.go_on()

    @invariant()
    def records_agree(self) -> None:
        self.plane.check_invariants()


class TestKeyMachine(KeyMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
