# SPDX-License-Identifier: Apache-2.0
"""The subcommands that join a running queue: ``status``, ``dashboard``, ``clients``, ``evict``, ``forget-task``."""

# Options are parsed before torch and rich are imported, so that --help and mistakes are fast.

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from lightning_tq.checks import counted, list_names
from lightning_tq.cli.dashboard_command import add_options as add_dashboard_options
from lightning_tq.cli.dashboard_command import serve as serve_dashboard
from transfer_queue.errors import TransferQueueError

_UNKNOWN_NAME = 1
"""Exit code: the queue has no client or task of this name."""
_UNREACHABLE = 2
"""Exit code: no queue answers, or an option is invalid."""
_INTERRUPTED = 130
_SINGLE_INTERVAL_S = 0.5
"""Seconds between the two snapshots of a single report."""

_HOLDINGS = {
    "reserved": "reserved sample", "leases": "lease", "pins": "pin", "freezes": "freeze", "leaves": "replace permit",
    "parked": "waiting request",
}  # fmt: skip
"""What ``evict`` reports, by its name in the statistics."""


def _main(name: str, args: Sequence[str]) -> int:
    """Returns the exit code: 0, 1 for an unknown client or task, 2 if no queue answers or an option is invalid."""
    act = _COMMANDS[name]
    parser = argparse.ArgumentParser(f"lightning-tq {name}", description=act.__doc__, allow_abbrev=False)
    if act is _evict:
        parser.add_argument("client", metavar="CLIENT", help="Name of the client.")
        parser.add_argument("--unit", action="store_true", help="Also if it is a storage unit. Its values are lost.")
    elif act is _forget_task:
        parser.add_argument("task", metavar="TASK", help="Name of the task.")
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help="Address of the queue. Default: TQ_ADDRESS.")
    if act is _status:
        parser.add_argument("--watch", action="store_true", help="Repeat until Ctrl-C.")
        every = "Interval of --watch. Default: 1."
        parser.add_argument("--every", type=_seconds, default=1.0, metavar="SECONDS", help=every)
        lines = "Print a JSON object; with --watch, one per line and interval."
        parser.add_argument("--json", action="store_true", help=lines)
    elif act is _dashboard:
        add_dashboard_options(parser)
    elif act is _clients:
        parser.add_argument("--json", action="store_true", help="Print a JSON object.")
    return run_joined(act, parser.parse_args(args))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be between 0.05 and 3600 seconds, got {text}")
    return value


def run_joined(act: Callable[[argparse.Namespace, str], int], options: argparse.Namespace) -> int:
    """Join the queue as a client, and act there. Returns the exit code."""
    address = options.address or os.environ.get("TQ_ADDRESS")
    if not address:
        return _refuse(
            "no queue was named: give its address, or set TQ_ADDRESS. A Trainer prints the address, init() returns it."
        )
    if "://" not in address:
        return _refuse(f"{address!r} is not an address like ipc:///tmp/tq-.../controller or tcp://host:port.")
    import transfer_queue as tq

    try:
        tq.init(address)  # raises if no queue answers
        try:
            return act(options, address)
        finally:
            tq.close()
    except KeyboardInterrupt:
        return 0 if act in (_status, _dashboard) else _INTERRUPTED  # Ctrl-C is how --watch ends
    except TransferQueueError as error:
        return _refuse(str(error))
    except BrokenPipeError:  # e.g. "| head"; the redirect also silences Python's final flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _refuse(reason: str, code: int = _UNREACHABLE) -> int:
    sys.stderr.write(f"error: {reason}\n")
    return code


def _unknown(reason: str, name: str, names: Iterable[str]) -> int:
    known = sorted(names)
    near = difflib.get_close_matches(name, known, 1)
    there = f"; did you mean {near[0]!r}?" if near else f"; there is {list_names(known)}." if known else "."
    return _refuse(reason + there, _UNKNOWN_NAME)


# ---- status ----


def _status(options: argparse.Namespace, address: str) -> int:
    """Show a running queue: its samples, what waits, who holds something, and its storage units.

    Samples are listed by partition and task: ready, batches in flight, consumed, per second. Waiting requests come with
    what they lack, clients with what they hold. Samplers that held the server are named. It changes nothing in the
    queue. Rates compare two snapshots; a single report takes both, half a second apart.
    """
    asyncio.run(_live(options, address) if _is_live(options) else _print(options, address))
    return 0


def _is_live(options: argparse.Namespace) -> bool:
    return bool(options.watch and not options.json and sys.stdout.isatty())


async def _reports(options: argparse.Namespace, address: str) -> AsyncIterator[dict[str, Any]]:
    """One report, or one per interval."""
    import transfer_queue as tq
    from lightning_tq.queue_report import make_report, take_snapshot

    client = tq.get_client()
    before = await take_snapshot(client)
    while True:
        await asyncio.sleep(options.every if options.watch else _SINGLE_INTERVAL_S)
        now = await take_snapshot(client)
        yield make_report(address, now, before)
        if not options.watch:
            return
        before = now


async def _print(options: argparse.Namespace, address: str) -> None:
    from lightning_tq.queue_report import show, tables

    async for report in _reports(options, address):
        if options.json:
            print(json.dumps(report), flush=True)
        else:
            show(tables(report))


async def _live(options: argparse.Namespace, address: str) -> None:
    from rich.live import Live

    from lightning_tq.queue_report import tables

    with Live(auto_refresh=False, vertical_overflow="ellipsis") as live:
        async for report in _reports(options, address):
            live.update(tables(report), refresh=True)


def _dashboard(options: argparse.Namespace, address: str) -> int:
    """Show a running queue as a web page that follows it.

    It has partitions and tasks as they fill and drain, waiting fetches and what they lack, throughput and waits over
    time, memory, clients, alarms. It changes nothing in the queue. The printed address has a token, without which the
    page shows nothing, also to other users of this host.
    """
    return serve_dashboard(options, address)


# ---- clients and tasks ----


def _clients(options: argparse.Namespace, address: str) -> int:
    """List the clients of a running queue and what each holds. It changes nothing in the queue.

    Listed are connections, samples that it reserved and has not put, leases and pins of memory, freezes of a
    checkpoint, permits to replace values, waiting requests, and answers that it has not received yet.
    """
    import transfer_queue as tq
    from lightning_tq.queue_report import clients_table, others, show

    clients = others(tq.get_client().get_stats())
    if options.json:
        print(json.dumps({"address": address, "clients": clients}))
    elif clients:
        show(clients_table(clients))
    else:
        print(f"{address}: no client.")
    return 0


def _evict(options: argparse.Namespace, address: str) -> int:
    """End the session of a client that hangs, as if it had died.

    What it reserved, leased, pinned or froze is released; what it fetched and never received goes to others.
    "lightning-tq clients" names the clients. A storage unit is evicted only with --unit, because what it stores is
    lost.
    """
    import transfer_queue as tq
    from lightning_tq.queue_report import others

    client = tq.get_client()
    clients = others(client.get_stats())
    if options.client not in clients:
        return _unknown(f"the queue has no client {options.client!r}", options.client, clients)
    client.evict_client(options.client, unit=options.unit)
    held = clients[options.client]
    had = [counted(held[what], noun) for what, noun in _HOLDINGS.items() if held[what]]
    print(f"Evicted client {options.client!r}, which held {', '.join(had) or 'nothing'}.")
    return 0


def _forget_task(options: argparse.Namespace, address: str) -> int:
    """Let no partition keep samples for this task any more, because its name was misspelt or it will never read again.

    Should it fetch again, it reads from the start.
    """
    import transfer_queue as tq

    client, task = tq.get_client(), options.task
    stats = client.get_stats()
    waiting = {each["task"] for each in stats["waiting"] if each["task"] is not None}
    tasks = {name for partition in stats["partitions"].values() for name in partition["tasks"]} | waiting
    if task not in tasks:  # the call would also cancel a mere registration, but the name may be misspelt
        return _unknown(f"no partition knows a task {task!r}", task, tasks)
    count = client.forget_task(task)
    ended = "; its waiting requests got the end of their stream" if task in waiting else ""
    print(f"Forgot task {task!r}: {counted(count, 'partition')} knew it{ended}.")
    return 0


# The doc string of each is its help.
_COMMANDS: dict[str, Callable[[argparse.Namespace, str], int]] = {
    "status": _status,
    "dashboard": _dashboard,
    "clients": _clients,
    "evict": _evict,
    "forget-task": _forget_task,
}
status, dashboard, clients, evict, forget_task = (partial(_main, name) for name in _COMMANDS)


def doctor(args: Sequence[str]) -> int:
    """Look for problems of the queue that TQ_ADDRESS names, unless another one is given."""
    from lightning_tq.cli.doctor_command import main

    return main(args, os.environ.get("TQ_ADDRESS"))
