# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``keys``: makes the keys of a queue that serves several hosts, before any server runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from lightning_tq.cli.parser import Parser


def main(args: Sequence[str]) -> None:
    """Make a new file of keys, readable by you alone, for the servers and programs of one queue.

    It is never replaced, because a queue may use it. Exit codes: 0, 2 if it can't be made.
    """
    parser = Parser("keys", main)
    parser.add_argument("file", metavar="FILE", help="Where to write the keys.")
    path = parser.parse_args(args).file
    import transfer_queue as tq

    tq.make_key_file(path)
    print(
        f"{path} holds new keys. Copy it to the other hosts (scp -p), then start a server:\n"
        f"  lightning-tq serve --listen tcp://0.0.0.0:5555 --key-file {shlex.quote(path)}\n"
        f"Programs of other hosts find it by TQ_KEY_FILE."
    )
