# SPDX-License-Identifier: Apache-2.0
"""The grammar of gates: which groups pass, which texts are refused and where, and that the numbers are right."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.control.gate import parse_gate
from transfer_queue.control.tag_filter import MAX_LENGTH
from transfer_queue.errors import InvalidRequestError

GROUP = [
    {"reward": 0.0, "tokens": 10, "done": True, "odd name": 1, "env": "math"},
    {"reward": 1.0, "tokens": 30, "done": True, "odd name": 2, "env": "math"},
    {"reward": 1.0, "tokens": 20, "done": False, "odd name": 3, "env": "code"},
]
NUMBERS = st.one_of(st.integers(-(2**40), 2**40), st.floats(-1e6, 1e6, allow_subnormal=False), st.booleans())


@pytest.mark.parametrize(
    "text",
    [
        "std(reward) > 0 and count() >= 3", "count() == 3", "3 <= count()", "count() in [3, 4]", "count() not in []",
        "sum(tokens) == 60", "mean(tokens) == 20", "min(tokens) == 10", "max(tokens) < 31", "sum(done) == 2",
        "mean(tokens) < sum(tokens)", "any(done)", "not all(done)", "any(done) == true", "all(done) == False",
        "any(reward) and all(tokens)", "all(done) or (any(done) and count() > 1)", "any(done) not in [false]",
        "max(`odd name`) == 3", "any(env)", "std ( reward )>0.47 and std(reward)<0.48", "1 == 1",
    ],
)  # fmt: skip
def test_a_group_that_passes(text):
    assert parse_gate(text).judge(GROUP)


@pytest.mark.parametrize("text", ["std(tokens) < 0", "count() > 3", "all(done)", "mean(reward) == 'math'", "any(gone)"])
def test_a_group_that_does_not(text):
    assert not parse_gate(text).judge(GROUP)


@pytest.mark.parametrize("aggregate", ["mean", "std", "min", "max"])
def test_an_aggregate_of_no_value_does_not_exist_and_compares_as_false(aggregate):
    for members in ([], [{}]):
        for sign in ("<", "==", "!=", ">"):
            assert not parse_gate(f"{aggregate}(reward) {sign} 0").judge(members)
        assert parse_gate(f"{aggregate}(reward) < 1").seen(members) == {}
    assert parse_gate("count() == 0 and sum(reward) == 0 and all(done) and not any(done)").judge([])


def test_equal_rewards_have_no_deviation_whatever_their_mean_rounds_to():
    for value in (0.1, 1 / 3, 1e-200, 1e300):
        for count in range(1, 40):
            assert not parse_gate("std(reward) > 0").judge([{"reward": value}] * count)


def test_rewards_that_are_no_finite_numbers_are_compared_as_python_does():
    nan, infinite = [{"reward": math.nan}, {"reward": 1.0}], [{"reward": math.inf}, {"reward": -math.inf}]
    for members in (nan, infinite):
        assert not parse_gate("std(reward) > 0 or mean(reward) >= 0 or sum(reward) <= 0").judge(members)
    assert parse_gate("max(reward) > 1e308").judge(infinite)


def test_a_gate_knows_its_tags_and_what_it_saw():
    gate = parse_gate("std(reward) > 0 and count() >= 4 or not any(done) or std(reward) == 1")
    assert gate.text == "std(reward) > 0 and count() >= 4 or not any(done) or std(reward) == 1"
    assert gate.tags == {"reward", "done"}
    assert gate.seen([{"reward": 1, "done": False}, {"reward": 3}]) == {"std(reward)": 1, "count()": 2, "any(done)": 0}
    assert parse_gate("count() > 1").tags == frozenset()
    assert parse_gate(gate.text) == gate


@pytest.mark.parametrize("aggregate", ["sum", "mean", "std", "min", "max"])
@pytest.mark.parametrize("value", ["1", None, [1]], ids=repr)
def test_a_tag_that_is_no_number_is_named_with_its_value(aggregate, value):
    gate = parse_gate(f"count() > 9 and {aggregate}(score) > 0")
    for ask in (gate.judge, gate.seen):
        with pytest.raises(InvalidRequestError, match=rf"{aggregate}\(score\).*'score' is .*no number") as caught:
            ask([{"score": 1}, {"score": value}])
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "at", "expected"),
    [
        ("reward > 0", 1, "mean(reward), any(reward) or another of count, sum, mean, std, min, max, any, all"),
        ("count() > reward", 11, "mean(reward), any(reward)"),
        ("median(reward) > 0", 1, "mean(median), any(median)"),
        ("mean > 0", 1, "mean(mean)"),
        ("`mean`(reward) > 0", 1, "mean(mean)"),
        ("count(reward) > 0", 7, "')' after 'count('"),
        ("std(reward", 11, "')' after 'std(reward'"),
        ("std() > 0", 5, "the name of a tag"),
        ("std('reward') > 0", 5, "the name of a tag"),
        ("exists(reward)", 7, "an aggregate"),
        ("std(reward)", 12, "a comparison"),
        ("any(done) 1", 11, "'and', 'or' or the end"),
        ("any(done) not 1", 15, "'in' after 'not'"),
        ("0 < std(reward) < 1", 17, "'and', 'or' or the end"),
        ("std(reward) = 1", 13, "== to compare"),
        ("", 1, "a tag or a value"),
    ],
)  # fmt: skip
def test_a_mistake_is_shown_with_its_place(text, at, expected):
    with pytest.raises(InvalidRequestError) as caught:
        parse_gate(text)
    assert f"the gate {text!r} goes wrong at character {at}: expected {expected}" in str(caught.value)


def test_a_gate_is_bounded():
    with pytest.raises(InvalidRequestError, match=f"a gate has at most {MAX_LENGTH} characters"):
        parse_gate("1 == 1".ljust(MAX_LENGTH + 1))
    with pytest.raises(InvalidRequestError, match="inside each other"):
        parse_gate("not " * 40 + "1 == 1")


@given(st.lists(NUMBERS, min_size=1, max_size=30))
def test_the_numbers_are_those_of_the_statistics_module(values):
    texts = ["count()", "sum(x)", "mean(x)", "std(x)", "min(x)", "max(x)"]
    seen = parse_gate(" and ".join(f"{text} == 0" for text in texts)).seen([{"x": value} for value in values])
    mean, std = statistics.fmean(values), statistics.pstdev(values)
    exact = [len(values), math.fsum(values), mean, std, float(min(values)), float(max(values))]
    scale = float(max(map(abs, values)))
    assert list(seen) == texts
    assert list(seen.values()) == pytest.approx(exact, rel=1e-9, abs=1e-12 * scale)
    assert (seen["std(x)"] == 0) is (len(set(values)) == 1)


@given(st.text(alphabet="stdcount any(`x`)0.5'<=>andornotin[],", max_size=40))
def test_any_text_is_a_gate_or_is_refused(text):
    try:
        gate = parse_gate(text)
    except InvalidRequestError:
        return
    assert gate.judge([{"x": 1}, {"x": 0.5}]) in (True, False)
