# SPDX-License-Identifier: Apache-2.0
"""The dashboard of a run: a process of its own, which ends with the process that started it."""

from __future__ import annotations

import subprocess
import sys

from transfer_queue.errors import LaunchError

_END_S = 5.0


class DashboardProcess:
    """Serves the queue's page from its start until ``close``, or until this process has ended. It prints the URL."""

    def __init__(self, address: str) -> None:
        """
        Args:
            address: Address of the queue.
        Raises:
            LaunchError: the program can't be started.
        """
        command = [sys.executable, "-m", "lightning_tq", "dashboard", "--until-input-ends", address]
        try:
            # In a session of its own, so that Ctrl-C reaches the run alone. Its input ends with this process.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"the dashboard can't be started: {error}.") from error

    def close(self) -> None:
        """End it. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it may still be importing
            self._process.kill()
            self._process.wait()
