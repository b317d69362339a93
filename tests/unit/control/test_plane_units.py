# SPDX-License-Identifier: Apache-2.0
"""Storage units that join and end: where values lie travels with the metadata, and lost values are not produced."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from control_kit import (
    ACTOR,
    ROLLOUT,
    ask,
    batch,
    clear,
    fetch,
    fields,
    indexes,
    load,
    new_plane,
    refused,
    reserve,
    save,
    send,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transfer_queue import protocol as p


def join(plane: Any, name: str) -> int:
    return int(ask(plane, name, p.JoinUnit, name, f"host of {name}", [f"tcp://{name}:1"]).value)


def publish_in(plane: Any, samples: list[int], units: Any, *names: str) -> Any:
    specs = {name: msgspec.structs.replace(spec, units=units) for name, spec in fields(*names).items()}
    return ask(plane, ROLLOUT, p.Publish, "p", p.pack_indexes(samples), specs)


def places(plane: Any, name: str = "x") -> Any:
    return ask(plane, ACTOR, p.Describe, "p", [name]).fields[name].units


def test_units_have_numbers_that_are_never_reused(plane):
    assert (join(plane, "left"), join(plane, "right")) == (1, 2)
    plane.client_gone("left", 0.0)
    assert join(plane, "left") == 3
    assert [unit.name for unit in ask(plane, ACTOR, p.ListUnits).units] == ["right", "left"]
    assert ask(plane, ACTOR, p.GetStats).value["lost_units"] == ["left"]


def test_a_client_that_knows_the_units_waits_for_a_change(plane):
    known = ask(plane, ACTOR, p.ListUnits).version
    assert ask(plane, ACTOR, p.ListUnits, known, 10.0) is None
    told = send(plane, "left", p.JoinUnit, "left", "h", ["tcp://left:1"])
    assert [(to.client, type(to.reply)) for to in told] == [("left", p.Done), (ACTOR, p.Units)]
    version = told[1].reply.version
    assert ask(plane, ACTOR, p.ListUnits, version, 5.0, now=1.0) is None
    assert [to.reply.version for to in plane.expire(6.0)] == [version]


def test_metadata_say_where_the_values_lie(plane):
    join(plane, "left"), join(plane, "right")
    samples = reserve(plane, 5)
    publish_in(plane, samples, [(1, 2), (2, 3)], "x")
    publish_in(plane, samples, None, "y")
    reply = fetch(plane, 5, names=("x", "y"))
    assert (reply.fields["x"].units, reply.fields["y"].units) == ([(1, 2), (2, 3)], None)


def test_a_field_put_again_lies_where_it_was_put_last(plane):
    join(plane, "left")
    samples = reserve(plane, 3)
    publish_in(plane, samples, [(1, 3)], "x")
    publish_in(plane, samples[1:2], None, "x")
    assert places(plane) == [(1, 1), (0, 1), (1, 1)]


@pytest.mark.parametrize("units", [[(1, 2)], [(1, 4)], []])
def test_places_of_another_number_of_rows_are_refused(plane, units):
    join(plane, "left")
    refused(publish_in(plane, reserve(plane, 3), units, "x"), "InvalidRequestError", "'x'", "3 rows")


def test_a_publish_of_values_in_a_lost_unit_is_refused_by_name(plane):
    join(plane, "left")
    samples = reserve(plane, 2)
    plane.client_gone("left", 0.0)
    refused(publish_in(plane, samples, [(1, 2)], "x"), "UnitLostError", "left", "put these values again")
    refused(publish_in(plane, samples, [(7, 2)], "x"), "UnitLostError", "unknown")


def test_lost_values_are_not_produced_and_named_until_they_are_put_again(plane):
    join(plane, "left")
    samples = reserve(plane, 4)
    publish_in(plane, samples, [(1, 2), (0, 2)], "x")
    publish_in(plane, samples, None, "y")
    plane.client_gone("left", 0.0)
    assert batch(plane, 2, names=("x", "y")) == samples[2:]
    assert fetch(plane, 2, names=("x",)).lacking == {"x": 2}
    assert ask(plane, ACTOR, p.GetStats).value["partitions"]["p"]["lost"] == {"x": 2}
    publish_in(plane, samples[:1], None, "x")
    assert ask(plane, ACTOR, p.GetStats).value["partitions"]["p"]["lost"] == {"x": 1}
    clear(plane, samples[1:2])
    assert ask(plane, ACTOR, p.GetStats).value["partitions"]["p"]["lost"] == {}
    assert batch(plane, 1, names=("x", "y")) == samples[:1]


def test_lost_values_of_a_partition_that_is_empty_by_now_are_not_asked_for(plane):
    number = join(plane, "left")
    samples = reserve(plane, 200)  # more than it keeps rows of once they are cleared
    publish_in(plane, samples, [(number, 200)], "x")
    plane.client_gone("left", 0.0)
    clear(plane, samples)
    assert ask(plane, ACTOR, p.ListLost, "p").value == {}
    assert ask(plane, ACTOR, p.GetStats).value["partitions"]["p"]["lost"] == {}


def test_who_waits_for_lost_values_without_producers_hears_what_to_do_about_them(plane):
    join(plane, "left")
    samples = reserve(plane, 4)
    publish_in(plane, samples, [(1, 4)], "x")
    plane.client_gone("left", 0.0)
    assert fetch(plane, 4, wait_s=1e4) is None
    plane.client_gone(ROLLOUT, 0.0)
    (late,) = plane.expire(1000.0)
    said = ["4 samples lost 'x' with a storage unit", "client.get_lost_samples('p') names them"]
    refused(late.reply, "ProducersGoneError", *said)


def test_a_drawn_batch_that_lost_values_waits_for_them(plane):
    join(plane, "left")
    samples = reserve(plane, 2)
    publish_in(plane, samples, [(1, 2)], "x")
    first = fetch(plane, 2, 0, 0)
    plane.client_gone("left", 0.0)
    assert isinstance(fetch(plane, 2, 0, 0), p.NotReady)
    publish_in(plane, samples, None, "x")
    again = fetch(plane, 2, 0, 0)
    assert (indexes(again), again.token) == (indexes(first), first.token)


def test_a_saved_state_says_where_values_lay(plane, make_plane):
    join(plane, "left")
    publish_in(plane, reserve(plane, 3), [(0, 1), (1, 2)], "x")
    other = make_plane()
    join(other, "left")
    load(other, save(plane))
    assert places(other) == [(0, 1), (1, 2)]


class UnitMachine(RuleBasedStateMachine):
    """What is ready is what lies in units that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = new_plane()
        self.numbers = [0, join(self.plane, "left"), join(self.plane, "right")]
        self.stored: dict[int, dict[str, int]] = {}
        self.drawn: set[int] = set()

    @rule(units=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def put(self, units: list[int]) -> None:
        samples = reserve(self.plane, len(units))
        self.publish(samples, "x", units)
        self.publish(samples, "y", units[::-1])

    def publish(self, samples: list[int], name: str, units: list[int]) -> None:
        numbers = [self.numbers[unit] for unit in units]
        publish_in(self.plane, samples, [(number, 1) for number in numbers], name)
        for index, number in zip(samples, numbers, strict=True):
            self.stored.setdefault(index, {})[name] = number

    @rule(unit=st.integers(1, 2))
    def lose(self, unit: int) -> None:
        session = ("", "left", "right")[unit]
        self.plane.client_gone(session, 0.0)
        for own in self.stored.values():
            for name in [name for name, number in own.items() if number == self.numbers[unit]]:
                del own[name]
        self.numbers[unit] = join(self.plane, session)

    @rule(name=st.sampled_from(["x", "y"]), unit=st.integers(0, 2))
    def put_again(self, name: str, unit: int) -> None:
        lacking = [index for index, own in self.stored.items() if name not in own]
        if lacking:
            self.publish(lacking, name, [unit] * len(lacking))

    @rule(count=st.integers(1, 3))
    def fetch(self, count: int) -> None:
        ready = [index for index, own in self.stored.items() if len(own) == 2 and index not in self.drawn]
        reply = fetch(self.plane, count, names=("x", "y"))
        assert isinstance(reply, p.Batch) == (len(ready) >= count)
        if isinstance(reply, p.Batch):
            assert indexes(reply) == ready[:count]
            self.drawn |= set(indexes(reply))

    @invariant()
    def books_agree(self) -> None:
        self.plane.check_invariants()
        stats = ask(self.plane, ACTOR, p.GetStats).value["partitions"].get("p", {"lost": {}})
        lacking = {name: sum(name not in own for own in self.stored.values()) for name in ("x", "y")}
        assert stats["lost"] == {name: count for name, count in lacking.items() if count}


class TestUnitMachine(UnitMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=60, stateful_step_count=30, deadline=None, print_blob=True)
