# SPDX-License-Identifier: Apache-2.0
"""A producer whose function is missing or doesn't take its arguments is refused when it is made, not when it runs."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import producing
import pytest
from lightning.fabric import Fabric

from lightning_tq import FabricLoader, Producer, ProducerGroup, TQDataModule
from tests.lightning.conftest import stream
from transfer_queue.errors import InvalidRequestError


def plain(partition: str, *, worker: int, num_workers: int) -> None: ...


def with_any(**options: Any) -> None: ...


def filling(function: Callable[..., None]) -> Callable[..., None]:
    """A decorator whose function needs one argument less than the one that it shows."""

    @functools.wraps(function)
    def filled(*args: Any, **kwargs: Any) -> None:
        function("train", *args, **kwargs)

    return filled


@filling
def decorated(partition: str, count: int = 1) -> None: ...


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in sys.path, which the import system has already looked into."""
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("not_written_yet")
    return tmp_path


@pytest.mark.parametrize("target", [plain, "test_producer_checks:plain"], ids=["function", "name"])
@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"partition": "a", "rows": 2}, r"\['partition', 'rows'\]: got an unexpected keyword argument 'rows'"),
        ({}, r"missing a required argument: 'partition'. Its parameters are \['partition', 'worker', 'num_workers'\]"),
        ({"partition": "a", "worker": 3}, "gets 'worker' from its group, so args can't set it too"),
        (["a"], r"args are a mapping of keyword arguments, got args=\['a'\]"),
    ],
)
def test_arguments_that_a_function_does_not_take_are_refused(target: Any, args: Any, says: str) -> None:
    sys.modules.setdefault("test_producer_checks", sys.modules[__name__])
    with pytest.raises(InvalidRequestError, match=says):
        Producer(target=target, args=args)


@pytest.mark.parametrize(
    ("target", "args"),
    [(plain, {"partition": "a"}), (with_any, {"x": 1}), (decorated, {}), (decorated, {"count": 2}), (dict, {"a": 1})],
)
def test_arguments_that_a_function_takes_are_accepted(target: Any, args: dict[str, Any]) -> None:
    assert Producer(target=target, args=args).args == args


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("producing:prodce", r"module 'producing' \(.*producing.py\) has no 'prodce'; did you mean 'produce'\?"),
        ("producing:zzz", "has no 'zzz'. Compare with the functions of that module"),
        ("producing:FIELDS", "which is not a function"),
        ("no_such_module:f", "there is no module 'no_such_module' in the directories of sys.path"),
        ("no_such_package.part:f", "there is no module 'no_such_package'"),
        (":f", "must be 'module:function'"),
        ("producing:", "must be 'module:function'"),
    ],
)
def test_a_name_that_is_known_to_be_wrong_is_refused(target: str, says: str) -> None:
    assert producing.produce
    with pytest.raises(InvalidRequestError, match=says):
        Producer(target=target)


def test_a_module_is_found_and_not_imported(folder: Path) -> None:
    (folder / "heavy_rollout.py").write_text("raise AssertionError('this is imported in the producer only')")
    assert Producer(target="heavy_rollout:anything", args={"x": 1}).label() == "heavy_rollout:anything"
    assert "heavy_rollout" not in sys.modules


def test_a_program_may_name_its_functions_before_they_are_defined(folder: Path) -> None:
    (folder / "early.py").write_text(
        "from lightning_tq import Producer\nproducer = Producer(target='early:late')\ndef late(): ..."
    )
    assert importlib.import_module("early").producer.label() == "early:late"
    assert Producer(target="__main__:defined_below").label() == "__main__:defined_below"


@pytest.mark.parametrize("producers", [producing.produce, [producing.produce], Producer(target=["true"]), "a:b"])
def test_only_a_list_of_producers_is_accepted(producers: Any) -> None:
    says = r"producers must be a list of Producer\(target=...\), got "
    with pytest.raises(InvalidRequestError, match=says):
        TQDataModule(train=stream(), producers=producers)
    with pytest.raises(InvalidRequestError, match=says):
        ProducerGroup(producers)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    with pytest.raises(InvalidRequestError, match=says):
        FabricLoader(fabric, stream(), producers=producers)


@pytest.mark.parametrize("restarts", [-1, True, 1.5, None])
def test_restarts_are_a_number(restarts: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"producer restarts must be an int of at least 0, got "):
        Producer(target=["true"], restarts=restarts)
