# SPDX-License-Identifier: Apache-2.0
"""The dashboard of a run: a process of its own, which ends with the process that started it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

from transfer_queue.errors import LaunchError

_END_S = 5.0


def program_name(argv: Sequence[str]) -> str:
    """Such as "grpo" for ``lightning-tq fit --config configs/grpo.yaml``, and "train" for ``python train.py``."""
    configs = [second for first, second in pairwise(argv[1:]) if first in ("-c", "--config")]
    configs += [word.partition("=")[2] for word in argv if word.startswith("--config=")]
    programs = [word for word in argv[:1] if not word.startswith("-")]  # "-c": Python got the program's text
    return PurePath(next(iter([*configs, *programs]), "")).stem


class DashboardProcess:
    """Serves the queue's page from its start until ``close``, or until this process has ended. It prints the URL."""

    def __init__(self, address: str, name: str | None = None) -> None:
        """
        Args:
            address: Address of the queue.
            name: Title of the page. Default: the name of the configuration, or else of the program.
        Raises:
            LaunchError: the program can't be started.
        """
        command = [sys.executable, "-m", "lightning_tq", "dashboard", "--until-input-ends"]
        command += [f"--name={name or program_name(sys.argv)}", address]
        try:
            # In a session of its own, so that Ctrl-C reaches the run alone. Its input ends with this process.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"the dashboard can't be started: {error}.") from error

    def close(self) -> None:
        """End it. Idempotent."""
        try:
            self._process.communicate(timeout=_END_S)  # which closes its input
        except subprocess.TimeoutExpired:  # it may still be importing
            self._process.kill()
            self._process.wait()
