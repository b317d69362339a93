# SPDX-License-Identifier: Apache-2.0
"""How a subcommand finds its queue and joins it, and how it says that there is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from transfer_queue.errors import TransferQueueError

UNREACHABLE = 2
"""Exit code: no queue answers, or an option is invalid."""
_INTERRUPTED = 130


def run_joined(address: str | None, act: Callable[[str], int], interrupted: int = _INTERRUPTED) -> int:
    """Join the queue as a client, and act there.

    Args:
        address: From the command line. Default: TQ_ADDRESS.
        act: Gets the queue's address and returns the exit code.
        interrupted: Exit code after Ctrl-C.
    """
    address = address or os.environ.get("TQ_ADDRESS")
    if not address:
        return refuse(
            "no queue was named: give its address, or set TQ_ADDRESS. A Trainer prints the address, init() returns it."
        )
    if "://" not in address:
        return refuse(f"{address!r} is not an address like ipc:///tmp/tq-.../controller or tcp://host:port.")
    try:
        return _act(address, act)
    except KeyboardInterrupt:
        return interrupted
    except TransferQueueError as error:
        return refuse(str(error))
    except BrokenPipeError:  # e.g. "| head"; the redirect also silences Python's final flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def refuse(reason: str, code: int = UNREACHABLE) -> int:
    """Say why in one line. Returns the exit code."""
    sys.stderr.write(f"error: {reason}\n")
    return code


def _act(address: str, act: Callable[[str], int]) -> int:
    import transfer_queue as tq

    tq.init(address)  # joins as a client; raises if no queue answers
    try:
        return act(address)
    finally:
        tq.close()
