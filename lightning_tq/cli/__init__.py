# SPDX-License-Identifier: Apache-2.0
"""The ``lightning-tq`` command: a Trainer's subcommands, and those of a running queue, which need no Trainer."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

_OF_A_QUEUE = ("serve", "status", "dashboard", "clients", "evict", "forget-task", "checkpoint", "doctor")
_COMMANDS = ("fit", "validate", "test", "predict", *_OF_A_QUEUE)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, 1 for what failed, 2 for invalid options.

    Args:
        args: Command line without the program's name. Default: this process's own.
    """
    given = sys.argv[1:] if args is None else list(args)
    first = given[0] if given else ""
    if first in _OF_A_QUEUE:
        from lightning_tq.cli import queue_commands

        return queue_commands.main(first, given[1:])
    if not first.startswith("-") and first not in _COMMANDS:
        return _refuse(first)
    from lightning_tq.cli import trainer_cli

    return trainer_cli.run(args)


def _refuse(command: str) -> int:
    near = difflib.get_close_matches(command, _COMMANDS, 1)
    problem = f"unknown command {command!r}" if command else "no command was given"
    advice = f"; did you mean {near[0]!r}?" if near else f". Use one of {', '.join(_COMMANDS)}."
    sys.stderr.write(f"error: {problem}{advice}\ntip: lightning-tq --help explains them.\n")
    return 2
