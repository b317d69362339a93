# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``serve``: a queue, or a further host's part of one, that outlives the programs that use it."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from lightning_tq.cli.parser import Parser


def main(args: Sequence[str]) -> None:
    """Serve a queue until SIGTERM, Ctrl-C or the end of the terminal (SIGHUP, which nohup ignores).

    With --join, add this host's memory to a running queue: values then stay on the host that produced them. Programs
    find the queue by TQ_ADDRESS, and on other hosts also need TQ_KEY_FILE. Once the server answers, it prints its
    addresses in one line that begins with "ready", and then lines to copy. Exit codes: 0 after a signal, 2 if it can't
    serve, or has lost the queue that it joined.
    """
    parser = Parser("serve", main)
    listen = "Also serve other hosts at this address, as tcp://HOST:PORT. HOST 0.0.0.0: on all networks; PORT 0: any."
    parser.add_argument("--listen", metavar="ADDRESS", help=listen)
    parser.add_argument("--join", metavar="ADDRESS", help="Join the queue that listens there.")
    keys = (
        "The queue's keys, readable by you alone, the same on all hosts. The first server makes the file if necessary."
    )
    parser.add_argument("--key-file", metavar="FILE", help=keys)
    plain = "Serve other hosts without keys: any program that reaches the address can read and change everything."
    parser.add_argument("--no-encryption", action="store_true", help=plain)
    memory = "Most bytes of values on this host, e.g. 4GiB. Default: half of the machine's memory."
    parser.add_argument("--memory", metavar="SIZE", help=memory)
    config = "A YAML file with the queue's settings, like 'queue' of a TQDataModule."
    parser.add_argument("--config", metavar="FILE", help=config)
    directory = "Directory of the socket for programs of this host. Default: a new one."
    parser.add_argument("--directory", metavar="DIR", help=directory)
    options = parser.parse_args(args)
    # Before NumPy is imported: one of its threads would take them, and the process would die unheard.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    import transfer_queue as tq

    conf = _conf(options)
    tq.serve(conf, options.join, options.directory, partial(_tell, conf, options.join is not None))


def _conf(options: argparse.Namespace) -> dict[str, Any]:
    from lightning_tq.queue_config import as_queue_config

    conf = as_queue_config(options.config).conf()
    for name in ("listen", "key_file"):
        if getattr(options, name) is not None:
            conf[name] = getattr(options, name)
    if options.no_encryption:
        conf["encryption"] = "none"
    if options.memory is not None:
        conf["backend"]["SimpleStorage"]["memory"] = options.memory
    return conf


def _tell(conf: dict[str, Any], joined: bool, local: str, remote: str | None, metrics: str | None) -> None:
    # In one piece, unlike print(): who reads the first line, and closes the pipe, must not end the server.
    sys.stdout.write("\n".join([*_lines(conf, joined, local, remote, metrics), ""]))
    sys.stdout.flush()


def _lines(conf: dict[str, Any], joined: bool, local: str, remote: str | None, metrics: str | None) -> Iterator[str]:
    """The line that scripts read, and then what a person copies."""
    from lightning_tq.checks import with_host

    yield f"ready {local}{'' if remote is None else ' ' + remote}"
    yield f"programs of this host:  export TQ_ADDRESS={local}"
    if remote is not None:
        keys = conf.get("key_file") or os.path.join(os.path.dirname(local.removeprefix("ipc://")), "keys")
        copied = "" if conf.get("encryption") == "none" else f" TQ_KEY_FILE={keys}  (a copy of this host's)"
        yield f"of other hosts:         export TQ_ADDRESS={with_host(remote, socket.gethostname())}{copied}"
    yield f"watch it:               lightning-tq status --watch {local}"
    yield f"as a web page:          lightning-tq dashboard {local}"
    if metrics is not None and not joined:
        yield f"metrics:                http://{metrics}/metrics"
