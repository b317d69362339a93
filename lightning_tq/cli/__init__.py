# SPDX-License-Identifier: Apache-2.0
"""The ``lightning-tq`` command: a table of subcommands, each imported only when it runs, so that help takes no time."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from lightning_tq.checks import did_you_mean
from transfer_queue.errors import TransferQueueError

COMMANDS = {
    # name: (its line in --help, its module in lightning_tq.cli, the function that gets the words after its name; those
    # of a Trainer get the name, too). The function returns the exit code, or None where that is always 0.
    "demo": ("Learn for a minute on two cores, with a live page; ends with a picture.", "demo_command", "main"),
    "new": ("Write a run of your own to start from: grpo, sft or stream.", "new_command", "main"),
    "fit": ("Train with data streamed from a queue, as a YAML file says.", "trainer_cli", "run"),
    "validate": ("Validate a model, as a YAML file says.", "trainer_cli", "run"),
    "test": ("Test a model, as a YAML file says.", "trainer_cli", "run"),
    "predict": ("Predict with a model, as a YAML file says.", "trainer_cli", "run"),
    "serve": ("Serve a queue that outlives programs, or join it with this host.", "serve_command", "main"),
    "keys": ("Make the keys of a queue that serves several hosts.", "keys_command", "main"),
    "status": ("Show what a running queue holds, and what waits for what.", "queue_commands", "status"),
    "dashboard": ("Show a running queue as a live web page.", "queue_commands", "dashboard"),
    "clients": ("List a queue's clients, and what each holds.", "queue_commands", "clients"),
    "evict": ("End the session of a client that hangs.", "queue_commands", "evict"),
    "forget-task": ("Keep no samples any more for a task that never reads again.", "queue_commands", "forget_task"),
    "record": ("Write what a task is given to files, while it trains.", "record_commands", "record"),
    "records": ("Show what a record holds, or which samples one step trained.", "record_commands", "records"),
    "simulate": ("Run the producers of a YAML file against steps that only sleep.", "record_commands", "simulate"),
    "doctor": ("Say what is wrong with this environment and a queue, and what mends it.", "doctor_command", "main"),
    "checkpoint": ("Look into a saved queue, or verify it.", "checkpoint_command", "main"),
}
_OF_A_TRAINER = {name for name, (_, module, _) in COMMANDS.items() if module == "trainer_cli"}
_WITH_TRACEBACKS = {*_OF_A_TRAINER, "simulate"}
"""They run the user's own code, and report themselves the errors that need no traceback."""
INTERRUPTED = 130
OPTIONS_OF_A_TRAINER = (
    "help", "config", "print_config", "seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler",
    "ckpt_path", "weights_only", "verbose", "return_predictions",
)  # fmt: skip
"""First parts of a Trainer's options. Only its own parser, which takes seconds to build, knows the rest."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, 1 for what failed, 2 for invalid options.

    Args:
        args: Command line without the program's name. Default: this process's own.
    """
    given = list(sys.argv[1:] if args is None else args)
    first = given[0] if given else ""
    if first in ("-h", "--help"):
        print(_help())
        return 0
    if first == "--version":
        print(f"lightning-tq {version('lightning-tq')}")
        return 0
    if first in COMMANDS:
        return _run(first, given if first in _OF_A_TRAINER else given[1:])
    if first.split("=")[0] in ("-c", "--config", "--print_config"):  # of a Trainer; the subcommand follows
        return _run("fit", given)
    if first.startswith("-"):
        return _refuse(
            f"unknown option {first!r}{did_you_mean(first, ('--help', '--version', '--config', '--print_config'))}"
        )
    problem = f"unknown command {first!r}" if first else "no command was given"
    return _refuse(problem + did_you_mean(first, COMMANDS, f". Use one of {', '.join(COMMANDS)}."))


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {text}" for name, (text, _, _) in COMMANDS.items())
    return (
        f"usage: lightning-tq COMMAND ...\n\nA streaming data queue between the producers and trainers of "
        f"post-training.\n\n{rows}\n\nlightning-tq COMMAND --help explains its options. "
        f"--version: which this is."
    )


def _run(name: str, args: Sequence[str]) -> int:
    _, module, function = COMMANDS[name]
    problem = _problem_of_a_trainer(args) if name in _OF_A_TRAINER else ""
    if problem:
        return _refuse(problem, f"lightning-tq {name}")
    try:
        with _ended_by_ctrl_c():
            run: Callable[[Sequence[str]], int | None] = getattr(import_module(f"lightning_tq.cli.{module}"), function)
        status = run(args) or 0
        print(end="", flush=True)  # also where there is no output (">&-")
        return status
    except KeyboardInterrupt:  # often while torch is imported
        return INTERRUPTED
    except TransferQueueError as error:
        if name in _WITH_TRACEBACKS:
            raise
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        if name in _WITH_TRACEBACKS or error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        return _without_output(error)


def _problem_of_a_trainer(args: Sequence[str]) -> str:
    """What is wrong with these words, as far as that shows before its parser is built. ``args``: with the command."""
    if len(args) == 1:
        return f"the run to {args[0]} is missing: --config FILE"
    for option, path in pairwise([*args, ""]):
        name, _, own = option.partition("=")
        file = own or path
        is_named = name in ("-c", "--config") and file.endswith((".yaml", ".yml")) and "://" not in file
        if is_named and not Path(file).exists():
            return f"config: there is no file {file!r}"
    for word in args:
        option = word.split("=")[0].split(".")[0]
        if option.startswith("--") and option[2:] not in OPTIONS_OF_A_TRAINER:
            near = did_you_mean(option, [f"--{known}" for known in OPTIONS_OF_A_TRAINER], "", 0.75)
            if near:  # otherwise it may be one of another version of Lightning: its parser knows
                return f"unknown option {option!r}{near}"
    given = {word.split("=")[0].split(".")[1].rstrip("+") for word in args if word.startswith("--trainer.")}
    known = _options_of_trainer() if given else []
    for name in sorted(given.difference(known)):
        near = did_you_mean(f"--trainer.{name}", [f"--trainer.{each}" for each in known], "", 0.85)
        if near:
            return f"unknown option '--trainer.{name}'{near}"
    return ""


def _options_of_trainer() -> list[str]:
    """The arguments of Lightning's Trainer, from its source: an import takes seconds. Empty if that can't be read."""
    with contextlib.suppress(ImportError, OSError, SyntaxError, StopIteration, AttributeError, TypeError):
        found = find_spec("lightning")
        source = Path(found.submodule_search_locations[0], "pytorch/trainer/trainer.py").read_text()  # type: ignore[union-attr, index]
        classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Trainer")
        own = next(each for each in next(classes).body if getattr(each, "name", "") == "__init__")
        return [each.arg for each in own.args.kwonlyargs]  # type: ignore[attr-defined]
    return []


def _without_output(error: OSError) -> int:
    discard_output()
    if error.errno == errno.EPIPE:  # who read it has gone, as with "| head"
        return 0
    sys.stderr.write(f"error: the output can't be written: {error}\n")
    return 2


def discard_output() -> None:
    """Who read the output has gone. Python would fail when it flushes once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once: torch imports NumPy in a way that swallows a KeyboardInterrupt."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _refuse(problem: str, command: str = "lightning-tq") -> int:
    sys.stderr.write(f"error: {problem}\ntip: {command} --help explains them.\n")
    return 2
