# SPDX-License-Identifier: Apache-2.0
"""Gates: filters over a group's members, such as ``std(reward) > 0 and count() >= 4``: is the group worth training?

    gate       := all ("or" all)*
    all        := one ("and" one)*
    one        := "not" one | "(" gate ")" | ("any" | "all") "(" tag ")" | value comparison
    comparison := ("==" | "!=" | "<" | "<=" | ">" | ">=") value | ["not"] "in" "[" [literal ("," literal)*] "]"
    value      := aggregate | literal
    aggregate  := "count" "(" ")" | ("sum" | "mean" | "std" | "min" | "max" | "any" | "all") "(" tag ")"

Tags and literals are those of a filter (control/tag_filter.py). ``count()`` is the number of members. The others are
over the members that have the tag, so a gate is judged when all of them have it. ``std`` is that of the population,
and exactly 0 where all values are equal. ``any`` and ``all`` ask whether the tag is true, as Python does. ``mean``,
``std``, ``min`` and ``max`` of no value don't exist, and a comparison with them is False.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from transfer_queue.control.tag_filter import COMPARE, FilterParser, Test
from transfer_queue.errors import InvalidRequestError

_Values = list[Any]
Members = Sequence[Mapping[str, Any]]
"""The tags of each member of a group."""


def _mean(values: _Values) -> float:
    return sum(values) / len(values)


def _std(values: _Values) -> float:
    # Of differences to one value: they are 0 where all are equal. The mean of three 0.1 is not 0.1, so with it
    # `std(reward) > 0` would let a group without signal through.
    moved = [value - values[0] for value in values]
    mean = _mean(moved)
    return math.hypot(*[value - mean for value in moved]) / math.sqrt(len(values))


_NUMERIC: dict[str, Callable[[_Values], float]] = {"sum": sum, "mean": _mean, "std": _std, "min": min, "max": max}
_TRUTH: dict[str, Callable[[_Values], bool]] = {"any": any, "all": all}
_AGGREGATES = {"count": len, **_NUMERIC, **_TRUTH}
_COMPARISONS = {*COMPARE, "in", "not"}


@dataclass(frozen=True, slots=True)
class Gate:
    """A parsed gate. Two of the same text are equal."""

    text: str
    tags: frozenset[str] = field(compare=False)
    """The tags that it names: it can be judged when every member has them."""
    _aggregates: Mapping[str, tuple[str, str]] = field(compare=False, repr=False)
    _passes: Test = field(compare=False, repr=False)

    def judge(self, members: Members) -> bool:
        """Whether the group passes.

        Raises:
            InvalidRequestError: a tag that must be a number is none; the text names both.
        """
        return self._passes(self.seen(members))

    def seen(self, members: Members) -> dict[str, float]:
        """The value of each aggregate of the text, for example ``{"std(reward)": 0.0}``; raises as ``judge`` does."""
        found = {written: _aggregate(name, tag, members) for written, (name, tag) in self._aggregates.items()}
        return {written: value for written, value in found.items() if value is not None}


@lru_cache(maxsize=256)
def parse_gate(text: str) -> Gate:
    """A gate over the members of a group, to try it on tags of your own or to check its text.

    Raises:
        InvalidRequestError: this is no gate; the text says where it goes wrong.
    """
    parser = _GateParser(text)
    passes = parser.filter()
    tags = frozenset(tag for name, tag in parser.aggregates.values() if name != "count")
    return Gate(text, tags, parser.aggregates, passes)


def _aggregate(name: str, tag: str, members: Members) -> float | None:
    if name == "count":
        return float(len(members))
    values = [tags[tag] for tags in members if tag in tags]
    if name in _TRUTH:
        return float(_TRUTH[name](values))
    for value in values:
        if not isinstance(value, (int, float)):
            raise InvalidRequestError(
                f"the gate takes {name}({tag}), but a member's tag {tag!r} is {value!r}, which is no number. "
                f"Let the producer write a number, or ask any({tag}) or all({tag})."
            )
    return float(_NUMERIC[name](values)) if values or name == "sum" else None


class _GateParser(FilterParser):
    """A filter whose tags are aggregates: its tests read the mapping that ``Gate.seen`` gives."""

    noun = "gate"

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.aggregates: dict[str, tuple[str, str]] = {}

    def _tag_name(self) -> str | None:
        kind, _, at = self._next
        name = super()._tag_name()
        if name is None:
            return None
        if kind == "tag" or name not in _AGGREGATES or self._takes("(") is None:
            self._fail(f"mean({name}), any({name}) or another of {', '.join(_AGGREGATES)} over all members", at)
        tag = "" if name == "count" else super()._tag_name()
        if tag is None:
            self._fail("the name of a tag")
        self._need(")", f"after '{name}({tag}'")
        written = f"{name}({tag})"
        self.aggregates[written] = name, tag
        return written

    def _existence(self) -> Test:
        self._fail("an aggregate: a gate waits until every member has its tags, so it has no 'exists'")

    def _comparison(self) -> Test:
        may_stand_alone = self._next.text in _TRUTH
        value = self._value()
        if may_stand_alone and self._next.text not in _COMPARISONS:
            return lambda seen: bool(value(seen))
        return self._compared(value)
