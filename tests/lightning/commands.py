# SPDX-License-Identifier: Apache-2.0
"""Commands of ``lightning-tq`` in a fork of the test's process, which needs no time to import."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

import transfer_queue as tq
from tests.console import lightning_tq
from tests.own_processes import SLOW

Said = tuple[int, str, str]
"""Exit code, output and errors."""


def run(*commands: list[str], **env: str) -> list[Said]:
    """What each command said; they run one after the other in another process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(commands, env, there))
    process.start()
    there.close()
    try:
        assert here.poll(60.0 * SLOW)
        said: list[Said] = here.recv()
        return said
    finally:
        process.join(60.0 * SLOW)
        process.kill()


def _run(commands: Sequence[list[str]], env: dict[str, str], told: Any) -> None:
    tq.close()  # the parent's client
    os.environ.update(env)
    said = []
    for command in commands:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = lightning_tq(command)
        said.append((code, out.getvalue(), err.getvalue()))
    told.send(said)
