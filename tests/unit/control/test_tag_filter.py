# SPDX-License-Identifier: Apache-2.0
"""The grammar of filters: what matches, what is refused and where, and that nothing else can happen."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue import parse_filter
from transfer_queue.errors import InvalidRequestError

MAX_DEPTH, MAX_LENGTH = 32, 4096

SIGNS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
TAGS = {
    "version": 7, "env": "math", "done": True, "note": None, "score": 0.5, "odd name": 1, "and": 2, "größe": 3,
    "labels": ["a", "b"],
}  # fmt: skip


def matches(where: str, tags: dict[str, Any] = TAGS) -> bool:
    return parse_filter(where).matches(tags)


@pytest.mark.parametrize(
    "where",
    [
        "version == 7", "version != 8", "version >= 7", "7 <= version", "version < 7.5", "version > -1",
        "score < version",
        "env == 'math'", 'env == "math"', "env < 'n'", "env in ['code', 'math']", "env not in ['code']",
        "env not in []",
        "version in [1, 7, 'x', null]", "done == true", "done == True", "note == null", "note == None", "done != false",
        "exists(env)", "not exists(reward)", "exists(`odd name`)", "`odd name` == 1", "`and` == 2", "größe == 3",
        "version>=7 and(env=='math')", "(version == 1 or env == 'math') and not done == false", "1 == 1",
        "version == 1 or version == 7 and env == 'math'", "not version == 1 and done == true", "score == 5e-1",
        "labels not in ['a']", "labels == labels", " version \n == \t 7 ", r"env == 'm\x61th'", r"'\'\n' != env",
    ],
)  # fmt: skip
def test_what_matches(where):
    assert matches(where)


@pytest.mark.parametrize(
    "where",
    [
        "reward == 1", "reward != 1", "reward < 1", "reward in [1]", "reward not in [1]", "version > reward",
        "version < 'x'", "env >= 1", "note < 1", "labels > 1", "labels in ['a']", "version in []", "not exists(env)",
        "not (version == 7)", "not not version == 8",
    ],
)  # fmt: skip
def test_a_missing_tag_or_an_impossible_comparison_is_false(where):
    assert not matches(where)


@pytest.mark.parametrize(
    ("where", "at", "expected"),
    [
        ("", 1, "a tag or a value"),
        ("version", 8, "a comparison"),
        ("version == 7 env == 'x'", 14, "'and', 'or' or the end"),
        ("1 < version < 9", 13, "'and', 'or' or the end"),
        ("(version == 7", 14, "')'"),
        ("version in 7", 12, "'[' after 'in'"),
        ("version in [7 8]", 15, "','"),
        ("version in [env]", 13, "a number, a string"),
        ("version not == 7", 13, "'in' after 'not'"),
        ("exists env", 8, "'(' after 'exists'"),
        ("exists('env')", 8, "the name of a tag"),
        ("env == 'math", 8, 'found "\'math"'),
        ("env == __import__('os')", 18, "'and', 'or' or the end"),
        ("env.upper() == 'X'", 10, "a comparison"),
        ("env # 'math'", 5, "an operator"),
        ("env = 'math'", 5, "expected == to compare, found \"= 'math'\""),
        ("version == 7 && env == 'math'", 14, "expected 'and', found"),
        ("version == 7 || env == 'math'", 14, "expected 'or', found"),
        ("!done", 1, "expected 'not' or !=, found '!done'"),
        ("version == 7x", 12, "found '7x'"),
        (r"env == '\U00ffffff'", 8, "Unicode"),
        ("not " * (MAX_DEPTH + 1) + "version == 7", 4 * MAX_DEPTH + 1, "at most"),
        ("(" * 2000, MAX_DEPTH + 1, "at most"),
    ],
)
def test_a_mistake_is_refused_with_its_place(where, at, expected):
    with pytest.raises(InvalidRequestError) as error:
        parse_filter(where)
    assert f"at character {at}: " in str(error.value)
    assert expected in str(error.value)


def test_a_filter_has_a_bounded_length():
    longest = "version == 7" + " " * (MAX_LENGTH - len("version == 7"))
    assert matches(longest)
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_LENGTH} characters, got {MAX_LENGTH + 1}"):
        parse_filter(longest + " ")


def test_a_long_chain_needs_no_depth():
    assert matches(" or ".join(["version == 1"] * 200 + ["version == 7"]))
    assert not matches(" and ".join(["version == 7"] * 200 + ["version == 1"]))


# ---- random filters, compared with a plain evaluation ----

plain = st.one_of(
    st.integers(-3, 3),
    st.floats(-2, 2),
    st.booleans(),
    st.none(),
    st.sampled_from(["", "a", "b c", "it's", 'a"\\\n', "é"]),
)
names = st.sampled_from(["a", "b", "c_1", "odd name", "in"])
tag_values = st.one_of(plain, st.lists(plain, max_size=2), st.dictionaries(st.sampled_from("xy"), plain, max_size=1))
all_tags = st.dictionaries(names, tag_values)
operands = st.one_of(st.tuples(st.just("tag"), names), st.tuples(st.just("literal"), plain))
tests = st.one_of(
    st.tuples(st.sampled_from(sorted(SIGNS)), operands, operands),
    st.tuples(st.sampled_from(["in", "not in"]), operands, st.lists(plain, max_size=3)),
    st.tuples(st.just("exists"), names),
)
trees = st.recursive(
    tests,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3)),
    ),
    max_leaves=8,
)


def name_text(name: str) -> str:
    return name if name.isidentifier() and name != "in" else f"`{name}`"


def operand_text(operand: Any) -> str:
    return name_text(operand[1]) if operand[0] == "tag" else repr(operand[1])


def text_of(tree: Any) -> str:
    kind, *parts = tree
    if kind in ("and", "or"):
        return "(" + f" {kind} ".join(map(text_of, parts[0])) + ")"
    if kind == "not":
        return f"not {text_of(parts[0])}"
    if kind == "exists":
        return f"exists({name_text(parts[0])})"
    if kind in SIGNS:
        return f"{operand_text(parts[0])} {kind} {operand_text(parts[1])}"
    return f"{operand_text(parts[0])} {kind} {parts[1]!r}"


def plain_evaluation(tree: Any, tags: dict[str, Any]) -> bool:
    kind, *parts = tree
    if kind in ("and", "or"):
        return (all if kind == "and" else any)(plain_evaluation(each, tags) for each in parts[0])
    if kind == "not":
        return not plain_evaluation(parts[0], tags)
    if kind == "exists":
        return parts[0] in tags
    operands = parts if kind in SIGNS else parts[:1]
    if any(each[0] == "tag" and each[1] not in tags for each in operands):
        return False
    values = [tags[each[1]] if each[0] == "tag" else each[1] for each in operands]
    if kind in SIGNS:
        try:
            return bool(SIGNS[kind](*values))
        except TypeError:
            return False
    return (values[0] in parts[1]) == (kind == "in")


@settings(deadline=None)
@given(tree=trees, tags=all_tags)
def test_a_random_filter_says_what_a_plain_evaluation_says(tree, tags):
    assert matches(text_of(tree), tags) == plain_evaluation(tree, tags)


numbers = st.integers(-3, 3)
of_numbers = st.recursive(
    st.tuples(st.sampled_from(sorted(SIGNS)), *[st.one_of(st.sampled_from("abc"), numbers.map(str))] * 2).map(
        lambda each: f"{each[1]} {each[0]} {each[2]}"
    ),
    lambda inner: st.one_of(
        inner.map(lambda each: f"not {each}"),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(" ".join),
        inner.map(lambda each: f"({each})"),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(where=of_numbers, tags=st.fixed_dictionaries(dict.fromkeys("abc", numbers)))
def test_precedence_is_that_of_python(where, tags):
    assert matches(where, tags) == bool(eval(where, {}, dict(tags)))


def broken(text: str) -> st.SearchStrategy[str]:
    """The text with one character, or none, replaced by others."""
    return st.builds(lambda at, new: text[:at] + new + text[at + 1 :], st.integers(0, len(text)), st.text(max_size=3))


@settings(deadline=None)
@given(where=st.one_of(st.text(), trees.map(text_of).flatmap(broken)), tags=all_tags)
def test_any_text_is_a_filter_or_a_mistake(where, tags):
    try:
        found = parse_filter(where)
    except InvalidRequestError:
        return
    assert found.matches(tags) in (True, False)
