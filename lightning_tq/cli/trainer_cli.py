# SPDX-License-Identifier: Apache-2.0
"""TQCLI: a LightningCLI with a TQDataModule, configured by YAML files and options."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf

# Imported so that a configuration can name the callbacks without their module.
from lightning_tq.callbacks import (  # noqa: F401
    partition_switch,
    publish_weights,
    queue_checkpoint,
    queue_monitor,
    write_back,
)
from lightning_tq.checks import did_you_mean
from lightning_tq.datamodule import TQDataModule
from lightning_tq.producers.group import ProducerError
from lightning_tq.progress import Progress
from lightning_tq.queue_config import load_mapping
from lightning_tq.rank_watchdog import RankGoneError
from transfer_queue.errors import (
    BatchTimeoutError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    GateStarvedError,
    InvalidRequestError,
    LaunchError,
    ProducersGoneError,
    QueueUnreachableError,
    SamplerError,
    TransferQueueError,
)

_TERMINATED = 143
_SELF_EXPLANATORY = (
    BatchTimeoutError,
    CheckpointError,
    GateStarvedError,
    LaunchError,
    ProducerError,
    ProducersGoneError,
    QueueUnreachableError,
    RankGoneError,
    SamplerError,
)
"""Errors of a run that need no traceback, because their text is complete."""

_DESCRIPTION = """Train, validate, test or predict with data streamed from a queue, for example "lightning-tq fit
--config run.yaml --trainer.max_epochs 3". "lightning-tq status" shows a running queue, "clients" lists its
clients; "evict" ends a client that hangs, "forget-task" a task that no longer reads. A configuration has three
sections: trainer, model (class_path and init_args of a LightningModule) and data (streams, queue, producers).
"lightning-tq fit --help" explains all options, "lightning-tq fit --data.train.help" those of a stream,
"--data.queue.help" those of the queue, "--data.producers.help" those of a producer."""

_UNKNOWN_HERE = re.compile(r"(?:does not accept option '|unrecognized arguments: --)([\w.]+)", re.IGNORECASE)
_UNKNOWN_IN_CLASS = re.compile(r"^Option '([\w.]+)' is not accepted")
_NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_KEY = re.compile(r'^Parser key "([^"]+)":?')
_CLASS = re.compile(r"^Problem with given class_path '([^']+)':")
_ITEM = re.compile(r"NestedArg\(key='(?:[\w.]+\.)?\d+[.']")
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


class TQArgumentParser(LightningArgumentParser):
    """Reports a mistake in one or two lines instead of a type-checking report."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # the parser only tries one of several types
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        known = {action.dest for action in parser._actions if action.dest not in ("help", argparse.SUPPRESS)}
        text = _explain(message, sorted(known))
        sys.stderr.write(f"error: {text}\ntip: {parser.prog.replace(' [options]', '')} --help explains every option.\n")
        sys.exit(2)


class TQCLI(LightningCLI):
    """LightningCLI with a TQDataModule, or the subclass that data.class_path of the configuration names.

    Examples:
        >>> stream = ["--data.train.partition=train", "--data.train.task=sft", "--data.train.fields=[x]"]
        >>> args = ["fit", *stream, "--data.train.batch_size=4", "--trainer.max_epochs=1"]
        >>> cli = TQCLI(Model, args=args)  # without args: those of the command line
        >>> cli.trainer.global_step
        4
    """

    def __init__(self, model_class: type[LightningModule] | None = None, **options: Any) -> None:
        """Args:
        model_class: Class of the model, whose arguments become options ("--model.width"). Default: class_path of the
            configuration.
        options: Options of LightningCLI.
        """
        os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI's calls, not the user's
        given = sys.argv[1:] if options.get("args") is None else options["args"]
        self._first_arg = str(next(iter(given), ""))
        defaults = {
            "model_class": model_class or LightningModule,
            "datamodule_class": TQDataModule,
            "subclass_mode_model": model_class is None,
            "subclass_mode_data": names_a_data_class(given),
            "seed_everything_default": 0,  # Lightning's own default, which comes with a warning
            # A second run in the same directory must not fail because of the first one's saved configuration.
            "save_config_kwargs": {"overwrite": True},
            # parser_mode resolves ${...} within a file; it works only here.
            "parser_kwargs": {"parser_mode": "omegaconf", "prog": "lightning-tq", "description": _DESCRIPTION},
        }
        super().__init__(**{**defaults, **options})

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the one that the command line begins with, because it takes long to describe all options of each."""
        known: dict[str, set[str]] = LightningCLI.subcommands()
        return {self._first_arg: known[self._first_arg]} if self._first_arg in known else known

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = TQArgumentParser(allow_abbrev=False, **kwargs)
        parser.add_argument("-c", "--config", action="config", help="YAML file. Can be repeated; later files win.")
        return parser

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            is_refusal = isinstance(error, ConfigError | InvalidRequestError)
            if not is_refusal and not str(error).startswith("Does not validate against"):
                raise  # an error of the model
            self._parser(self.subcommand).error(str(error))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        try:
            return super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError, MisconfigurationException) as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if not str(frame.f_globals.get("__name__")).startswith("lightning."):
                raise  # of a user's class
            self._parser(self.subcommand).error(f"trainer: {error}")


def names_a_data_class(args: Sequence[str] | Mapping[str, Any]) -> bool:
    """Whether the command line, its configuration files, or a configuration sets a class for data."""
    if isinstance(args, Mapping):
        return "class_path" in (args.get("data") or {})
    if any(arg.startswith(("--data.class_path", "--data.init_args")) for arg in args):
        return True
    sections = [section for path, key in _config_files(args) for section in _data_sections(path, key)]
    return any(isinstance(section, dict) and "class_path" in section for section in sections)


def _data_sections(path: Path, key: str) -> list[Any]:
    """Those of a whole file may be within those of subcommands."""
    conf: Any = OmegaConf.to_container(load_mapping(path))
    return [conf] if key else [part.get("data") for part in (conf, *conf.values()) if isinstance(part, dict)]


def _config_files(args: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Configuration files that a command line names, each with the key that it is the value of ("" for a whole one)."""
    keys = {"--data": "data", "--config": "", "-c": ""}
    for position, arg in enumerate(args):
        name, _, value = arg.partition("=")
        if name not in keys:
            continue
        path = Path(value or "".join(args[position + 1 : position + 2]))
        if path.is_file():  # otherwise the parser reports it
            yield path, keys[name]


def run(args: Sequence[str] | None, make: Callable[[], TQCLI] = TQCLI) -> int:
    """Run a Trainer's subcommand. Returns the exit code: 0, 1 for a failed run, 2 for a wrong configuration, 143 for
    one that SIGTERM has ended.
    """
    if args is not None:
        sys.argv = [sys.argv[0], *args]  # ranks in new processes get these arguments
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # a configuration may name modules of the current directory
    try:
        sys.path.extend(str(path.parent.resolve()) for path, _ in _config_files(sys.argv[1:]))  # or those next to it
        cli = make()
    except TransferQueueError as error:
        is_refusal = isinstance(error, ConfigError) or _refuses_settings(error)
        if not is_refusal and not isinstance(error, _SELF_EXPLANATORY):
            raise  # of the user's code, whose traceback says where
        sys.stderr.write(f"error: {error}\n")
        return 2 if is_refusal else 1
    except SIGTERMException:
        if os.environ.get("LOCAL_RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" not in os.environ:
            return 0  # Lightning has started this rank, and kills the first one if it fails
        sys.stderr.write("error: SIGTERM has ended this run before its end.\n")
        return _TERMINATED
    if isinstance(cli.datamodule, TQDataModule):
        cli.datamodule.close()
    return 0


def _refuses_settings(error: BaseException) -> bool:
    """Whether the configuration doesn't fit the Trainer, which setup checks, or the checkpoint."""
    checks = {each.__code__ for each in (TQDataModule.setup, Progress.begin, Progress.check_next)}
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, InvalidRequestError | CheckpointNotFoundError) and any(
        frame.f_code in checks for frame, _ in frames
    )


# ---- what the parser says about a wrong configuration, in one sentence ----


class _Reason(NamedTuple):
    path: tuple[str, ...]
    cls: str | None
    """Class that the options belong to."""
    text: str

    def weight(self) -> int:
        """The reason with the lowest weight is shown."""
        if _NO_ATTRIBUTE.search(self.text):
            return -1  # a misspelt class, which was tried as a file, too
        if self.text.startswith(_VAGUE_REASONS):
            return 2
        return 1 if _OF_TYPE.match(self.text) else 0


def _explain(message: str, known: list[str]) -> str:
    """One sentence for a report of the parser, or for another exception's text.

    Args:
        known: All options, as dotted keys of a configuration file.
    """
    reasons = _reasons(message)
    if not reasons:
        return message.strip()
    least = min(reasons, key=_Reason.weight)
    where = f"{'.'.join(least.path)}: " if least.path else ""
    if _ITEM.search(message):
        return f"{where}items of a list can't be set by number. Change them in the file, or give the whole list."
    types = [found[1] for each in reasons if each.path == least.path and (found := _OF_TYPE.match(each.text))]
    if least.weight() == 1:
        return f"{where}expected {' or '.join(name for name in types if name != 'NoneType')}"
    return where + _sentence(least, known)


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
        return f"{reason.cls} has no option {option[1]!r}{did_you_mean(option[1], names)} It has: {', '.join(names)}."
    if key := _UNKNOWN_HERE.search(line):
        wrong, names = _first_unknown(key[1], known)
        return f"unknown key {wrong!r}{did_you_mean(wrong.rpartition('.')[2], names)}"
    if missing := _NO_ATTRIBUTE.search(line):
        return line + did_you_mean(missing[2], dir(import_module(missing[1])))
    return re.sub(r"<class '([\w.]+)'>", r"\1", line).replace("a typing.Literal", "one of ")


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
    parameters = inspect.signature(resolve_name(class_path)).parameters.values()
    skip = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind not in skip]
