# SPDX-License-Identifier: Apache-2.0
"""Every public name is in the reference, says what it is for, and has an example that runs."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

import lightning_tq
import transfer_queue as tq
from tests.docs.test_code_blocks import ROOT, blocks
from transfer_queue.errors import NotInitializedError

REFERENCE = ROOT / "docs" / "reference"
PAGES = [*sorted(REFERENCE.glob("*/*.md")), REFERENCE / "errors.md"]
_HEADING = re.compile(r"^#{2,} ", re.M)
_PROGRAM = re.compile(r"^```python\n.*?^```$", re.M | re.S)
_SHOWN = re.compile(r"^::: (?P<name>[\w.]+)\n(?P<options>(?: .*\n|\n(?= ))*)", re.M)
_ANSWERS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Name(NamedTuple):
    """A name that the reference shows."""

    path: str
    value: Any
    page: Path
    program: str
    """The program of its section of the page; "" if there is none."""

    def docstring(self) -> str:
        """With that of ``__init__``, as the page shows it."""
        own = [self.value.__doc__]
        if inspect.isclass(self.value):
            own = [vars(self.value).get("__doc__"), getattr(vars(self.value).get("__init__"), "__doc__", None)]
        return "\n\n".join(inspect.cleandoc(text) for text in own if text)

    def is_in_the_program(self) -> bool:
        """Errors of a group share a program that raises some of them."""
        is_error = inspect.isclass(self.value) and issubclass(self.value, Exception)
        return bool(self.program) and (is_error or bool(re.search(rf"\b{self.path.rsplit('.', 1)[1]}\b", self.program)))

    def examples(self) -> list[doctest.Example]:
        return doctest.DocTestParser().get_examples(self.docstring(), self.path)


def names() -> Iterator[Name]:
    """Every name that mkdocstrings shows on these pages."""
    for page in PAGES:
        for section in _HEADING.split(page.read_text() + "\n"):
            program = "".join(_PROGRAM.findall(section))
            for shown in _SHOWN.finditer(section):
                for path in paths(shown["name"], yaml.safe_load(textwrap.dedent(shown["options"])) or {}):
                    yield Name(path, found(path), page, program)


def paths(name: str, settings: dict[str, Any]) -> list[str]:
    options = settings.get("options", {})
    if options.get("members"):
        return [f"{name}.{member}" for member in options["members"]]
    value = found(name)
    if not inspect.ismodule(value):
        return [name]
    return [f"{name}.{own}" for own in sorted(vars(value)) if not own.startswith("_") and is_of(value, own)]


def is_of(module: Any, name: str) -> bool:
    value = getattr(module, name)
    return inspect.isclass(value) and value.__module__ == module.__name__


def found(path: str) -> Any:
    parts = path.split(".")
    for at in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:at]))
        except ModuleNotFoundError:
            continue
        for part in parts[at:]:
            value = getattr(value, part)
        return value
    raise AssertionError(f"the reference shows {path}, which does not exist")


NAMES = list(names())


def test_every_public_name_is_in_the_reference() -> None:
    public = {name for name in tq.__all__ if not name.startswith("async_")} | set(lightning_tq.__all__)
    twins = {name for name in dir(tq.TransferQueueClient) if name.startswith("async_")}
    verbs = {name.removeprefix("async_") for name in twins}
    assert (public | verbs) - {each.path.rsplit(".", 1)[1] for each in NAMES} == set()


@pytest.mark.parametrize("name", NAMES, ids=lambda each: each.path)
def test_a_public_name_says_what_it_is_for(name: Name) -> None:
    first = name.docstring().split("\n")[0]
    assert first.strip('" '), "the first line of its docstring is empty"


@pytest.mark.parametrize("name", NAMES, ids=lambda each: each.path)
def test_a_public_name_has_an_example(name: Name) -> None:
    assert name.examples() or name.is_in_the_program(), (
        "add an 'Examples:' section to its docstring, or use it in the program of its section of the page"
    )


class Answers(doctest.OutputChecker):
    """Compares what an example says that it prints. What a Trainer prints besides is not part of it."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    """One queue for all examples of this file: starting one for each would take longer than the examples."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    tq.close()


@pytest.fixture
def namespace(name: Name, queue: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the page's first program makes, and an empty queue with the samples that it promises."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    made: dict[str, Any] = {"__name__": "reference_page"}
    first = name.page if name.page.parent == REFERENCE else name.page.parent / "index.md"
    for block in [block for block in blocks(first) if block.language == "python"][:1]:
        exec(block.code, made)
    if "dm" in made:
        tags = [{"policy_version": 0}] * 16
        made["client"].put({"x": torch.randn(16, 1)}, partition_id="train", tags=tags)
        made["client"].seal_partition("train")
    yield made
    with contextlib.suppress(NotInitializedError):  # an example may have closed it
        for partition in tq.get_client().get_partition_list():
            tq.get_client().clear_partition(partition)


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`:UserWarning")
@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter:UserWarning")
@pytest.mark.parametrize("name", [each for each in NAMES if each.examples()], ids=lambda each: each.path)
def test_the_example_of_a_public_name_runs(name: Name, namespace: dict[str, Any]) -> None:
    test = doctest.DocTest(name.examples(), namespace, name.path, None, None, None)
    report: list[str] = []
    doctest.DocTestRunner(Answers(), optionflags=_ANSWERS).run(test, out=report.append)
    assert not report, "".join(report)
