# SPDX-License-Identifier: Apache-2.0
"""Filters over a sample's tags, such as ``policy_version >= 7 and env == 'math'``: text in, a test of tags out.

    filter     := all ("or" all)*
    all        := one ("and" one)*
    one        := "not" one | "(" filter ")" | "exists" "(" tag ")" | value comparison
    comparison := ("==" | "!=" | "<" | "<=" | ">" | ">=") value | ["not"] "in" "[" [literal ("," literal)*] "]"
    value      := tag | literal
    literal    := number | string | "true" | "false" | "null"      (also as Python writes them)

A tag is a name, maybe with dots, or any text in backticks. Values compare as Python's do. A comparison that Python
refuses, or that has a missing tag, is False.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from transfer_queue.errors import InvalidRequestError

MAX_LENGTH = 4096
"""Characters of a filter."""
MAX_DEPTH = 32
"""Parentheses and ``not`` inside each other."""

_MOST_SHOWN = 200

Test = Callable[[Mapping[str, Any]], bool]
_Value = Callable[[Mapping[str, Any]], Any]

_MISSING = object()
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_KEYWORDS = {"and", "or", "not", "in", "exists"}
_TOKEN = re.compile(
    r"""(?P<number>-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?!\w))
    |(?P<string>'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")
    |`(?P<tag>[^`]+)`
    |(?P<word>[^\W\d]\w*(?:\.[^\W\d]\w*)*)
    |(?P<symbol>[=!<>]=|[<>()\[\],])""",
    re.VERBOSE | re.DOTALL,
)
_WRITE = {"=": "== to compare", "&": "'and'", "|": "'or'", "!": "'not' or !="}
"""What to write instead of another language's operator, by its first character."""
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}


@dataclass(frozen=True, slots=True)
class TagFilter:
    """``matches(tags)`` never raises for plain data."""

    text: str
    matches: Test


@lru_cache(maxsize=256)
def parse_filter(text: str) -> TagFilter:
    """A filter over tags, to try it on tags of your own or to check its text. docs/semantics.md has the grammar.

    Raises:
        InvalidRequestError: this is no filter; the text says where it goes wrong.
    Examples:
        >>> tq.parse_filter("env == 'math' and policy_version >= 7").matches({"env": "math", "policy_version": 8})
        True
    """
    return TagFilter(text, FilterParser(text).filter())


class _Token(NamedTuple):
    """``kind``: a group of ``_TOKEN``, or "end"."""

    kind: str
    text: str
    at: int


class FilterParser:
    """Recursive descent: one method per rule of the grammar, one token ahead. gate.py changes two rules."""

    noun = "filter"

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise InvalidRequestError(f"a {self.noun} has at most {MAX_LENGTH} characters, got {len(text)}.")
        self._text = text
        self._depth = 0
        self._after = 0
        self._next = self._read(0)

    # ---- tokens ----

    def _read(self, start: int) -> _Token:
        at = _SPACE.match(self._text, start).end()  # type: ignore[union-attr]  # it matches nothing, too
        if at == len(self._text):
            return _Token("end", "", at)
        found = _TOKEN.match(self._text, at)
        if found is None or found.lastgroup is None:
            self._fail(_WRITE.get(self._text[at], "a name, a value, an operator or a parenthesis"), at)
        self._after = found.end()
        return _Token(found.lastgroup, found[found.lastgroup], at)

    def _take(self) -> _Token:
        token = self._next
        self._next = self._read(self._after)
        return token

    def _takes(self, *texts: str) -> str | None:
        """The next token, if it is one of these symbols or words."""
        is_it = self._next.kind in ("symbol", "word") and self._next.text in texts
        return self._take().text if is_it else None

    def _need(self, text: str, after: str) -> None:
        if self._takes(text) is None:
            self._fail(f"{text!r} {after}")

    def _fail(self, expected: str, at: int | None = None) -> NoReturn:
        at = self._next.at if at is None else at
        found = repr(self._text[at : at + 12]) if at < len(self._text) else "its end"
        text = self._text if len(self._text) <= _MOST_SHOWN else f"{self._text[:_MOST_SHOWN]}..."
        raise InvalidRequestError(
            f"the {self.noun} {text!r} goes wrong at character {at + 1}: expected {expected}, found {found}."
        )

    # ---- rules ----

    def filter(self) -> Test:
        test = self._any()
        if self._next.kind != "end":
            self._fail("'and', 'or' or the end")
        return test

    def _any(self) -> Test:
        return self._series("or", self._all, True)

    def _all(self) -> Test:
        return self._series("and", self._one, False)

    def _series(self, word: str, rule: Callable[[], Test], decides: bool) -> Test:
        """``decides``: the result of one test that is the result of all."""
        tests = [rule()]
        while self._takes(word):
            tests.append(rule())
        return tests[0] if len(tests) == 1 else _series(tests, decides)

    def _one(self) -> Test:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"at most {MAX_DEPTH} parentheses and 'not' inside each other")
        try:
            if self._takes("not"):
                inner = self._one()
                return lambda tags: not inner(tags)
            if self._takes("("):
                test = self._any()
                self._need(")", "after what '(' began")
                return test
            return self._existence() if self._takes("exists") else self._comparison()
        finally:
            self._depth -= 1

    def _existence(self) -> Test:
        self._need("(", "after 'exists'")
        name = self._tag_name()
        if name is None:
            self._fail("the name of a tag")
        self._need(")", "after the name of a tag")
        return lambda tags: name in tags

    def _comparison(self) -> Test:
        return self._compared(self._value())

    def _compared(self, left: _Value) -> Test:
        if self._takes("in"):
            return _membership(left, self._list())
        if self._takes("not"):
            if self._takes("in") is None:
                self._fail("'in' after 'not'")
            return _membership(left, self._list(), negated=True)
        sign = self._takes(*COMPARE)
        if sign is None:
            self._fail("a comparison: ==, !=, <, <=, >, >= or in [...]")
        return _comparison(left, COMPARE[sign], self._value())

    def _value(self) -> _Value:
        name = self._tag_name()
        if name is not None:
            return lambda tags: tags.get(name, _MISSING)
        value = self._literal("a tag or a value")
        return lambda _: value

    def _tag_name(self) -> str | None:
        kind, text, _ = self._next
        if kind == "tag" or (kind == "word" and text not in _CONSTANTS and text not in _KEYWORDS):
            return self._take().text
        return None

    def _list(self) -> frozenset[Any]:
        self._need("[", "after 'in'")
        values: list[Any] = []
        while self._takes("]") is None:
            if values:
                self._need(",", "or ']' in a list")
            values.append(self._literal("a number, a string, true, false or null"))
        return frozenset(values)

    def _literal(self, expected: str) -> Any:
        kind, text, at = self._next
        if kind == "number":
            value: Any = float(text) if set(text) & set(".eE") else int(text)
        elif kind == "string":
            value = _unescaped(text[1:-1])
            if value is None:
                self._fail("a string of Unicode characters", at)
        elif kind == "word" and text in _CONSTANTS:
            value = _CONSTANTS[text]
        else:
            self._fail(expected)
        self._take()
        return value


def _unescaped(text: str) -> str | None:
    """The string that was written; None if an escape names no character."""

    def character(escape: re.Match[str]) -> str:
        code = escape[1]
        return _CONTROLS.get(code, code) if len(code) == 1 else chr(int(code[1:], 16))

    try:
        return _ESCAPE.sub(character, text)
    except (ValueError, OverflowError):
        return None


# ---- tests of tags ----


def _series(tests: list[Test], decides: bool) -> Test:
    def test(tags: Mapping[str, Any]) -> bool:
        for each in tests:  # a generator inside any() takes twice as long
            if each(tags) is decides:
                return decides
        return not decides

    return test


def _comparison(left: _Value, compare: Callable[[Any, Any], Any], right: _Value) -> Test:
    def test(tags: Mapping[str, Any]) -> bool:
        one, other = left(tags), right(tags)
        if one is _MISSING or other is _MISSING:
            return False
        try:
            return bool(compare(one, other))
        except TypeError:
            return False

    return test


def _membership(value: _Value, choices: frozenset[Any], negated: bool = False) -> Test:
    def test(tags: Mapping[str, Any]) -> bool:
        own = value(tags)
        if own is _MISSING:
            return False
        try:
            return (own in choices) is not negated
        except TypeError:  # a list or a dict equals no literal
            return negated

    return test
