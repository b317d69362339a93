# SPDX-License-Identifier: Apache-2.0
"""Turns the parser's long report of a wrong configuration into one sentence, with the nearest known key."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

_UNKNOWN_HERE = re.compile(r"(?:does not accept option '|unrecognized arguments: --)([\w.]+)", re.IGNORECASE)
_UNKNOWN_IN_CLASS = re.compile(r"^Option '([\w.]+)' is not accepted")
_NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_KEY = re.compile(r'^Parser key "([^"]+)":?')
_CLASS = re.compile(r"^Problem with given class_path '([^']+)':")
_OF_TYPE = re.compile(r"^Expected a <class '([\w.]+)'>$")
_REPORT_LINES = ("Does not validate against", "Subtypes:", "Errors:", "Given value")
"""Beginnings of lines that describe how the parser tried types, not why one failed."""
_VAGUE_REASONS = (
    "Not a valid subclass of",
    "Subclass types expect",
    "a class path ",
    "a dict with",
    "Expected a <class 'None",
)
"""Beginnings of reasons for one of several types, which is seldom the intended one."""


class _Reason(NamedTuple):
    path: tuple[str, ...]
    cls: str | None
    """Class that the options belong to."""
    text: str

    def weight(self) -> int:
        """The reason with the lowest weight is shown."""
        if self.text.startswith(_VAGUE_REASONS):
            return 2
        return 1 if _OF_TYPE.match(self.text) else 0


def known_keys(parser: argparse.ArgumentParser) -> list[str]:
    """All options of a parser, as dotted keys of a configuration file."""
    return sorted({action.dest for action in parser._actions if action.dest not in ("help", argparse.SUPPRESS)})


def explain(message: str, known: Iterable[str]) -> str:
    """One sentence for a report of the parser, or for another exception's text."""
    reasons = _reasons(message)
    if not reasons:
        return message.strip()
    least = min(reasons, key=_Reason.weight)
    where = f"{'.'.join(least.path)}: " if least.path else ""
    types = [found[1] for each in reasons if each.path == least.path and (found := _OF_TYPE.match(each.text))]
    if least.weight() == 1:
        return f"{where}expected {' or '.join(name for name in types if name != 'NoneType')}"
    return where + _sentence(least, list(known))


def _reasons(message: str) -> list[_Reason]:
    """All reasons of a report, in order. Indentation shows the key and class of each."""
    within: list[tuple[int, str, bool]] = []
    reasons = []
    for raw in filter(str.strip, message.splitlines()):
        line, indent = raw.strip().removeprefix("- "), len(raw) - len(raw.lstrip())
        within = [each for each in within if each[0] < indent]
        if key := _KEY.match(line):
            within.append((indent, key[1], True))
            line = line[key.end() :].strip()
        if cls := _CLASS.match(line):
            within.append((indent, cls[1], False))
        elif line and not line.startswith(_REPORT_LINES):
            classes = [name for _, name, is_key in within if not is_key]
            path = tuple(name for _, name, is_key in within if is_key)
            reasons.append(_Reason(path, classes[-1] if classes else None, line))
    return reasons


def _sentence(reason: _Reason, known: list[str]) -> str:
    line = reason.text
    if (option := _UNKNOWN_IN_CLASS.match(line)) and reason.cls:
        names = _parameters(reason.cls)
        return f"{reason.cls} has no option {option[1]!r}{_did_you_mean(option[1], names)} It has: {', '.join(names)}."
    if key := _UNKNOWN_HERE.search(line):
        wrong, names = _first_unknown(key[1], known)
        return f"unknown key {wrong!r}{_did_you_mean(wrong.rpartition('.')[2], names)}"
    if missing := _NO_ATTRIBUTE.search(line):
        return line + _did_you_mean(missing[2], dir(import_module(missing[1])))
    return re.sub(r"<class '([\w.]+)'>", r"\1", line).replace("a typing.Literal", "one of ")


def _did_you_mean(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1, 0.0)
    return f"; did you mean {near[0]!r}?" if near else "."


def _first_unknown(key: str, known: list[str]) -> tuple[str, list[str]]:
    """The shortest unknown prefix of a dotted key, and the names that are known in its place."""
    parts = key.split(".")
    for length in range(1, len(parts) + 1):
        level = {tuple(name.split(".")[:length]) for name in known}
        if tuple(parts[:length]) not in level:
            there = {name[-1] for name in level if len(name) == length and name[:-1] == tuple(parts[: length - 1])}
            return ".".join(parts[:length]), sorted(there)
    return key, known


def _parameters(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    cls: Any = getattr(import_module(module), name)
    skip = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.kind not in skip]
