# SPDX-License-Identifier: Apache-2.0
"""A rank that names no batch gets every batch of its own once, in order: whatever answers are lost, saved or loaded."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
from control_kit import (
    ACTOR,
    CRITIC,
    SAVER,
    ack,
    ask,
    batch,
    cancel,
    clear,
    corrupted,
    fetch,
    indexes,
    load,
    new_plane,
    put,
    refused,
    register,
    save,
    stage,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue import protocol as p

CLIENTS = (ACTOR, CRITIC)
SIZE = 2


def test_a_batch_that_its_rank_never_received_comes_again_after_a_load(plane, make_plane):
    register(plane, dp_size=2)
    put(plane, 8)
    assert batch(plane, SIZE, 0) == [0, 1]
    lost = fetch(plane, SIZE, 1, client=CRITIC)
    assert cancel(plane, CRITIC, lost)[0] == "undone"
    restored = make_plane()
    load(restored, save(plane))
    again = fetch(restored, SIZE, 1, client=CRITIC)
    assert (again.batch_index, indexes(again), again.token) == (0, [2, 3], lost.token)
    assert [batch(restored, SIZE, rank) for rank in (0, 1)] == [[4, 5], [6, 7]]


@pytest.mark.parametrize("how", ["cancel", "end"])
def test_an_answer_that_is_lost_after_a_load_comes_again_too(plane, how):
    register(plane, dp_size=2)
    put(plane, 8)
    lost = fetch(plane, SIZE, 1, client=CRITIC)
    load(plane, save(plane))
    if how == "cancel":
        assert cancel(plane, CRITIC, lost)[0] == "undone"
    else:
        plane.client_gone(CRITIC, 0.0)
    assert [batch(plane, SIZE, 1) for _ in range(2)] == [[10, 11], [14, 15]], "their indexes were in use"


@pytest.mark.parametrize("missed", [[1], [0]])
def test_a_saved_state_whose_rank_missed_what_it_was_not_given_is_refused(plane, make_plane, missed):
    register(plane, dp_size=2)
    put(plane, 8)
    fetch(plane, SIZE, 0)
    if missed == [0]:
        ack(plane, fetch(plane, SIZE, 1).token)
    bad = corrupted(save(plane), lambda plain: one_rank(plain, 1).update(missed=missed))
    refused(load(make_plane(), bad), "CheckpointError", "others than its samples say")


def one_rank(plain: Any, rank: int) -> Any:
    ranks = plain["partitions"][0]["consumers"][0]["ledger"]["ranks"]
    return next(each for each in ranks if each["rank"] == rank)


@dataclass
class RankModel:
    """``next``: of a rank that lost nothing. ``on_its_way``: calls whose answer may still be lost."""

    next: int = 0
    missed: set[int] = field(default_factory=set)
    settled: set[int] = field(default_factory=set)
    tokens: dict[int, str] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)
    on_its_way: dict[int, int] = field(default_factory=dict)

    def expected(self) -> int:
        while self.next in self.settled:
            self.next += 1
        return min(self.missed, default=self.next)

    def given(self, reply: p.Batch) -> None:
        index = reply.batch_index
        assert index == self.expected(), "no batch is skipped or given twice"
        assert reply.token == self.tokens.setdefault(index, reply.token)
        assert indexes(reply) == self.samples.setdefault(index, indexes(reply))
        self.next = max(self.next, index + 1)
        self.missed.discard(index)
        self.on_its_way[reply.id] = index

    def lost(self, calls: list[int]) -> None:
        lost = {self.on_its_way.pop(call) for call in calls}
        self.missed |= {index for index in lost - self.settled if index < self.next}

    def settle(self, index: int) -> None:
        self.settled.add(index)
        self.missed.discard(index)


class Readers:
    """Two ranks, each with a client of its own, beside a model of each."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.plane = new_plane()
        self.ranks = [RankModel(), RankModel()]
        self.saved: tuple[bytes, list[RankModel]] | None = None
        register(self.plane, dp_size=2)
        put(self.plane, 12)

    def act(self) -> None:
        rank = self.draw(st.integers(0, 1))
        verbs = [
            self.fetch,
            self.fetch,
            self.receive,
            self.cancel,
            self.end,
            self.ack,
            self.clear,
            self.save,
            self.load,
        ]
        self.draw(st.sampled_from(verbs))(rank)
        self.plane.check_invariants()

    def fetch(self, rank: int) -> None:
        reply = fetch(self.plane, SIZE, rank, client=CLIENTS[rank])
        if isinstance(reply, p.Batch):
            self.ranks[rank].given(reply)
            others = [set(each) for model in self.ranks for each in model.samples.values()]
            assert sum(map(len, others)) == len(set().union(*others)), "no sample is in two batches"
        else:
            assert self.ranks[rank].expected() not in self.ranks[rank].tokens, "what was drawn is there"
            put(self.plane, 4)

    def some_call(self, rank: int) -> list[int]:
        calls = list(self.ranks[rank].on_its_way)
        return [self.draw(st.sampled_from(calls))] if calls else []

    def receive(self, rank: int) -> None:
        for call in self.some_call(rank):
            del self.ranks[rank].on_its_way[call]
            self.plane.received(CLIENTS[rank], [call])

    def cancel(self, rank: int) -> None:
        for call in self.some_call(rank):
            ask(self.plane, CLIENTS[rank], p.Cancel, call)
            self.ranks[rank].lost([call])

    def end(self, rank: int) -> None:
        self.plane.client_gone(CLIENTS[rank], 0.0)
        self.ranks[rank].lost(list(self.ranks[rank].on_its_way))

    def ack(self, rank: int) -> None:
        model = self.ranks[rank]
        if given := sorted(model.tokens.keys() - model.settled - model.missed - set(model.on_its_way.values())):
            index = self.draw(st.sampled_from(given))
            earlier = self.draw(st.booleans())
            for each in [each for each in given if each == index or (earlier and each < index)]:
                assert ack(self.plane, model.tokens[each]) == 1
                model.settle(each)

    def clear(self, rank: int) -> None:
        """A batch whose samples are gone is settled, whether its rank was given it or not."""
        model = self.ranks[rank]
        if open_ones := sorted(model.samples.keys() - model.settled):
            index = self.draw(st.sampled_from(open_ones))
            clear(self.plane, model.samples[index])
            model.settle(index)

    def save(self, rank: int) -> None:
        self.saved = save(self.plane), copy.deepcopy(self.ranks)

    def load(self, rank: int) -> None:
        """Into this queue, whose clients live on, or into a new one. What was on its way then counts as received."""
        if self.saved is None:
            return
        state, ranks = self.saved
        now, self.ranks = self.ranks, copy.deepcopy(ranks)
        is_new = self.draw(st.booleans())
        if is_new:
            self.plane = new_plane()
        shift = stage(self.plane, state)
        assert isinstance(ask(self.plane, SAVER, p.Restore, state, shift), p.Cleared)
        for model, before in zip(self.ranks, now, strict=True):
            model.samples = {at: [index + shift for index in own] for at, own in model.samples.items()}
            model.on_its_way = {} if is_new else {
                call: index for call, index in before.on_its_way.items()
                if index in model.tokens and model.tokens[index] == before.tokens[index]
            }  # fmt: skip


@settings(max_examples=120, deadline=None, print_blob=True)
@given(data=st.data())
def test_no_rank_skips_or_repeats_a_batch(data):
    readers = Readers(data)
    for _ in range(data.draw(st.integers(5, 40))):
        readers.act()
