# SPDX-License-Identifier: Apache-2.0
"""The subcommands that join a running queue: ``status``, ``dashboard``, ``clients``, ``evict``, ``forget-task``."""

# Options are parsed before numpy and rich are imported, so that --help and mistakes are fast. Nothing needs torch.

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, TypeAlias

from lightning_tq.checks import counted, did_you_mean, list_names
from lightning_tq.cli import INTERRUPTED
from lightning_tq.cli.dashboard_command import add_options as add_dashboard_options
from lightning_tq.cli.dashboard_command import serve as serve_dashboard
from lightning_tq.cli.parser import Parser
from transfer_queue.errors import ConfigError

if TYPE_CHECKING:
    from transfer_queue import Observer

_UNKNOWN_NAME = 1
"""Exit code: the queue has no client or task of this name."""
_SINGLE_INTERVAL_S = 0.5
"""Seconds between the two snapshots of a single report."""

_HOLDINGS = {
    "reserved": "reserved sample", "leases": "lease", "pins": "pin", "freezes": "freeze", "leaves": "replace permit",
    "parked": "waiting request",
}  # fmt: skip
"""What ``evict`` reports, by its name in the statistics."""


Act: TypeAlias = "Callable[[argparse.Namespace, Observer], int | None]"
"""Looks at a queue, or acts there. Its docstring is the help of its subcommand."""


def _main(name: str, act: Act, args: Sequence[str]) -> int | None:
    """Returns the exit code: 0, 1 for an unknown client or task. Raises where no queue answers."""
    parser = Parser(name, act)
    if act is _evict:
        parser.add_argument("client", metavar="CLIENT", help="Name of the client.")
        parser.add_argument("--unit", action="store_true", help="Also if it is a storage unit. Its values are lost.")
    elif act is _forget_task:
        parser.add_argument("task", metavar="TASK", help="Name of the task.")
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help="Address of the queue. Default: TQ_ADDRESS.")
    if act is _status:
        parser.add_argument("--watch", action="store_true", help="Repeat until Ctrl-C.")
        every = "Interval of --watch. Default: 1."
        parser.add_argument("--every", type=interval, default=1.0, metavar="SECONDS", help=every)
        lines = "Print a JSON object; with --watch, one per line and interval."
        parser.add_argument("--json", action="store_true", help=lines)
    elif act is serve_dashboard:
        add_dashboard_options(parser)
    elif act is _clients:
        parser.add_argument("--json", action="store_true", help="Print a JSON object.")
    return _run(act, parser.parse_args(args))


def seconds(text: str, least: float = 0.0, most: float = TIMEOUT_MAX) -> float:
    """The type of an option. By default any time that a wait takes."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not least <= value <= most:  # nan is not
        latest = "292 years" if most == TIMEOUT_MAX else f"{most:g} seconds"
        raise argparse.ArgumentTypeError(f"must be between {least:g} and {latest}, got {text}")
    return value


def interval(text: str) -> float:
    return seconds(text, 0.05, 3600)


def _run(act: Act, options: argparse.Namespace) -> int | None:
    """Returns the exit code."""
    from transfer_queue import Observer

    options.address = address_of(options)
    try:
        with closing(Observer(options.address)) as observer:  # raises if no queue answers
            return act(options, observer)
    except KeyboardInterrupt:
        return 0 if act in (_status, serve_dashboard) else INTERRUPTED  # Ctrl-C is how --watch ends


def address_of(options: argparse.Namespace) -> str:
    """Of the queue to join. Raises ConfigError if none is named."""
    address: str | None = options.address or os.environ.get("TQ_ADDRESS")
    if not address:
        raise ConfigError(
            "no queue was named: give its address, or set TQ_ADDRESS. A Trainer prints the address, init() returns it."
        )
    if "://" not in address:
        raise ConfigError(f"{address!r} is not an address like ipc:///tmp/tq-.../controller or tcp://host:port.")
    return address


def _unknown(reason: str, name: str, names: Iterable[str]) -> int:
    known = sorted(names)
    there = f"; there is {list_names(known)}." if known else "."
    sys.stderr.write(f"error: {reason}{did_you_mean(name, known, there)}\n")
    return _UNKNOWN_NAME


# ---- status ----


def _status(options: argparse.Namespace, observer: Observer) -> None:
    """Show a running queue: its samples, what waits, who holds something, and its storage units.

    Samples are listed by partition and task: ready, batches in flight, consumed, per second. Waiting requests come with
    what they lack, clients with what they hold. Samplers that held the server are named. It changes nothing in the
    queue. Rates compare two snapshots; a single report takes both, half a second apart.
    """
    asyncio.run(_follow(options, observer))


async def _follow(options: argparse.Namespace, observer: Observer) -> None:
    """Show one report, or one per interval, which a terminal draws over the last one."""
    from rich.live import Live

    from lightning_tq.queue_report import make_report, show, tables, take_snapshot

    before = await take_snapshot(observer)
    redraws = options.watch and not options.json and sys.stdout.isatty()
    with Live(auto_refresh=False, vertical_overflow="ellipsis") if redraws else nullcontext() as live:
        while True:
            await asyncio.sleep(options.every if options.watch else _SINGLE_INTERVAL_S)
            now = await take_snapshot(observer)
            report = make_report(options.address, now, before)
            if live is not None:
                live.update(tables(report), refresh=True)
            elif options.json:
                print(json.dumps(report), flush=True)
            else:
                show(tables(report))
            if not options.watch:
                return
            before = now


# ---- clients and tasks ----


def _clients(options: argparse.Namespace, observer: Observer) -> None:
    """List the clients of a running queue and what each holds. It changes nothing in the queue.

    Listed are connections, samples that it reserved and has not put, leases and pins of memory, freezes of a
    checkpoint, permits to replace values, waiting requests, and answers that it has not received yet.
    """
    from lightning_tq.queue_report import clients_table, others, show

    clients = others(observer.get_stats())
    if options.json:
        print(json.dumps({"address": options.address, "clients": clients}))
    elif clients:
        show(clients_table(clients))
    else:
        print(f"{options.address}: no client.")


def _evict(options: argparse.Namespace, observer: Observer) -> int:
    """End the session of a client that hangs, as if it had died.

    What it reserved, leased, pinned or froze is released; what it fetched and never received goes to others.
    "lightning-tq clients" names the clients. A storage unit is evicted only with --unit, because what it stores is
    lost.
    """
    from lightning_tq.queue_report import others

    clients = others(observer.get_stats())
    if options.client not in clients:
        return _unknown(f"the queue has no client {options.client!r}", options.client, clients)
    observer.evict_client(options.client, unit=options.unit)
    held = clients[options.client]
    had = [counted(held[what], noun) for what, noun in _HOLDINGS.items() if held[what]]
    print(f"Evicted client {options.client!r}, which held {', '.join(had) or 'nothing'}.")
    return 0


def _forget_task(options: argparse.Namespace, observer: Observer) -> int:
    """Let no partition keep samples for this task any more, because its name was misspelt or it will never read again.

    Should it fetch again, it reads from the start.
    """
    task, stats = options.task, observer.get_stats()
    waiting = {each["task"] for each in stats["waiting"] if each["task"] is not None}
    tasks = {name for partition in stats["partitions"].values() for name in partition["tasks"]} | waiting
    if task not in tasks:  # the call would also cancel a mere registration, but the name may be misspelt
        return _unknown(f"no partition knows a task {task!r}", task, tasks)
    count = observer.forget_task(task)
    ended = "; its waiting requests got the end of their stream" if task in waiting else ""
    print(f"Forgot task {task!r}: {counted(count, 'partition')} knew it{ended}.")
    return 0


status = partial(_main, "status", _status)
dashboard = partial(_main, "dashboard", serve_dashboard)
clients = partial(_main, "clients", _clients)
evict = partial(_main, "evict", _evict)
forget_task = partial(_main, "forget-task", _forget_task)
