# SPDX-License-Identifier: Apache-2.0
"""Clients that add fields: what they leave undone goes to others, and nobody hears the end while another goes on.

A failure prints the steps and a ``@reproduce_failure`` line: put that line over ``TestAddingMachine`` to replay it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.local_plane import LocalPlane
from tests.unit.control.control_kit import (
    ask,
    batches,
    cancel,
    clear,
    clear_consumed,
    fetch,
    indexes,
    load,
    new_plane,
    not_ready,
    publish,
    put,
    received,
    refused,
    register,
    save,
    seal,
)
from transfer_queue import protocol as p

HELPERS = ("anna", "bert", "carl")


def take(plane: LocalPlane, client: str, count: int = 2, adds: str = "y", **kwargs: Any) -> Any:
    return fetch(plane, count, task="add", client=client, adds=[adds], **kwargs)


def test_what_a_client_left_undone_goes_to_others(plane):
    put(plane, 4)
    first, *rest = received(plane, "anna", take(plane, "anna", 4))
    publish(plane, [first], "y", client="anna")
    assert take(plane, "bert", 3, wait_s=100.0) is None
    assert batches(plane.client_gone("anna", 1.0)) == [("bert", rest)]


def test_the_end_waits_for_what_others_have_in_hand_and_not_for_ones_own(plane):
    samples = put(plane, 2)
    seal(plane)
    received(plane, "anna", take(plane, "anna"))
    assert take(plane, "bert", wait_s=100.0) is None
    assert take(plane, "carl", wait_s=100.0) is None
    assert isinstance(take(plane, "anna"), p.Ended), "it would wait for itself"
    own, *others = publish(plane, samples, "y", client="anna")
    assert isinstance(own.reply, p.Published)
    assert sorted(to.client for to in others if isinstance(to.reply, p.Ended)) == ["bert", "carl"]


def test_samples_that_are_cleared_are_in_nobodys_hand(plane):
    samples = put(plane, 2)
    seal(plane)
    received(plane, "anna", take(plane, "anna"))
    assert take(plane, "bert", wait_s=0.0).in_hand == {"anna": 2}
    clear(plane, samples)
    assert isinstance(take(plane, "bert"), p.Ended)


def test_whoever_waits_for_the_field_hears_who_has_the_samples(plane):
    put(plane, 2)
    received(plane, "anna", take(plane, "anna", 1))
    reply = fetch(plane, 2, names=("x", "y"))
    assert not_ready(reply) == (2, 0, 2, {"y": 2})
    assert reply.in_hand == {"anna": 1}


def test_who_has_samples_in_hand_is_a_living_producer_of_what_it_adds(plane):
    samples = put(plane, 4)
    received(plane, "anna", take(plane, "anna"))
    publish(plane, samples[:2], "y", client="anna")
    received(plane, "bert", take(plane, "bert"))
    assert fetch(plane, 4, names=("x", "y"), wait_s=1e4) is None
    plane.client_gone("anna", 1.0)
    assert plane.expire(1000.0) == []
    plane.client_gone("bert", 1000.0)
    (late,) = plane.expire(2000.0)
    refused(late.reply, "ProducersGoneError", "all producers of 'y' have died")


def test_clients_of_one_task_add_the_same_fields(plane):
    put(plane, 4)
    received(plane, "anna", take(plane, "anna"))
    refused(take(plane, "bert", adds="z"), "InvalidRequestError", "add ['y']", "adds=['z']", "another task name")


@pytest.mark.parametrize("which", ["rank", "batch", "size", "groups"])
def test_a_reader_of_numbered_batches_or_of_groups_adds_nothing(plane, which):
    if which == "groups":
        register(plane, "add", sampler={"class": "GroupSampler", "kwargs": {"groups": 2}})
    if which == "size":
        register(plane, "add", dp_size=1)
    numbered = {"rank": (0, None), "batch": (None, 0)}.get(which, (None, None))
    reply = fetch(plane, 2, *numbered, task="add", client="anna", adds=["y"])
    refused(reply, "InvalidRequestError", "adds=['y']", "no dp_rank and no batch_index")


def test_what_a_fetch_waits_for_is_not_what_it_adds(plane):
    refused(take(plane, "anna", adds="x"), "InvalidRequestError", "'x', which this fetch waits for")


def test_who_waits_for_the_end_needs_no_producer(plane):
    samples = put(plane, 2, client="carl")
    seal(plane)
    received(plane, "anna", take(plane, "anna"))
    assert take(plane, "bert", wait_s=1e4) is None
    plane.client_gone("carl", 1.0)
    assert plane.expire(1000.0) == []
    (_, to) = publish(plane, samples, "y", client="anna", now=1000.0)
    assert isinstance(to.reply, p.Ended)


def test_a_batch_that_others_label_is_kept_until_its_client_has_read_it(plane):
    samples = put(plane, 2)
    reply = take(plane, "anna")
    plane.received("anna", [reply.id])
    publish(plane, samples, "y", client="carl")
    assert clear_consumed(plane, "add") == []
    plane.read("anna", [reply.id])
    assert clear_consumed(plane, "add") == samples


def test_a_batch_that_never_arrived_comes_again_although_it_has_the_field(plane):
    samples = put(plane, 2, "x", "y")
    assert cancel(plane, "anna", take(plane, "anna"))[0] == "undone"
    assert indexes(take(plane, "bert")) == samples


class AddingMachine(RuleBasedStateMachine):
    """``hands``: by client, what it was given and has not labelled. ``live``: by sample, whether it has the field."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = new_plane()
        self.live: dict[int, bool] = {}
        self.hands: dict[str, set[int]] = {name: set() for name in HELPERS}
        self.sealed = False

    def lacking(self) -> set[int]:
        return {index for index, has in self.live.items() if not has}

    def held(self) -> set[int]:
        return set[int]().union(*self.hands.values())

    @rule(count=st.integers(1, 5))
    def produce(self, count: int) -> None:
        if not self.sealed:
            self.live |= dict.fromkeys(put(self.plane, count), False)

    @rule(client=st.sampled_from(HELPERS), count=st.integers(1, 4), arrives=st.booleans())
    def ask_for_some(self, client: str, count: int, arrives: bool) -> None:
        reply = take(self.plane, client, count)
        if isinstance(reply, p.Batch):
            given = set(indexes(reply))
            assert given <= self.live.keys() - self.held(), "what one has in hand is given to nobody else"
            if arrives:
                self.hands[client] |= set(received(self.plane, client, reply)) & self.lacking()
            else:
                cancel(self.plane, client, reply)
        elif isinstance(reply, p.Ended):
            assert self.sealed
            assert self.lacking() <= self.hands[client], "all but its own is done"
        else:
            assert isinstance(reply, p.NotReady)
            assert not self.sealed or self.held() - self.hands[client], "the end comes once nobody else goes on"

    @rule(data=st.data(), client=st.sampled_from(HELPERS))
    def label(self, data: st.DataObject, client: str) -> None:
        own = sorted(self.hands[client] & self.live.keys())
        if own:
            done = data.draw(st.lists(st.sampled_from(own), min_size=1, unique=True), "labelled")
            publish(self.plane, done + done[:1], "y", client=client)
            self.live |= dict.fromkeys(done, True)
            self.hands[client] -= set(done)

    @rule(client=st.sampled_from(HELPERS), died=st.booleans())
    def end(self, client: str, died: bool) -> None:
        self.plane.client_gone(client, 0.0, died)
        self.hands[client] = set()

    @rule(data=st.data())
    def clear_some(self, data: st.DataObject) -> None:
        if self.live:
            gone = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, unique=True), "cleared")
            clear(self.plane, gone)
            self.live = {index: has for index, has in self.live.items() if index not in gone}
            self.hands = {client: own - set(gone) for client, own in self.hands.items()}

    @rule()
    def clear_done(self) -> None:
        for index in clear_consumed(self.plane, "add"):
            assert self.live.pop(index), "what lacks the field is not done"

    @rule()
    def restart(self) -> None:
        """All processes end, and the queue is loaded into a new one."""
        state, self.plane = save(self.plane), new_plane()
        load(self.plane, state)
        self.hands = {name: set() for name in HELPERS}

    @rule()
    def begin_anew(self) -> None:
        ask(self.plane, "anna", p.ResetConsumption, "p", "add")
        self.hands = {name: set() for name in HELPERS}

    @rule()
    def no_more(self) -> None:
        if self.live:
            seal(self.plane)
            self.sealed = True

    @invariant()
    def books_agree(self) -> None:
        self.plane.check_invariants()
        partition = self.plane.state.partitions.get("p")
        consumer = None if partition is None else partition.consumers.get("add")
        counts = {} if consumer is None else consumer.hands.counts
        assert counts == {client: len(own) for client, own in self.hands.items() if own}

    def teardown(self) -> None:
        """Whatever happened: one client that goes on to the end finds all that lacks the field, each once."""
        if not self.live:
            return
        seal(self.plane)
        for client in HELPERS[1:]:
            self.plane.client_gone(client, 0.0)
        left, found = self.lacking() - self.hands["anna"], list[int]()
        while isinstance(reply := take(self.plane, "anna", 3), p.Batch):
            given = received(self.plane, "anna", reply)
            found += [index for index in given if not self.live[index]]
            publish(self.plane, given, "y", client="anna")
        assert isinstance(reply, p.Ended)
        assert sorted(found) == sorted(left)


class TestAddingMachine(AddingMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=200, stateful_step_count=40, deadline=None, print_blob=True)
