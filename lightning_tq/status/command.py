# SPDX-License-Identifier: Apache-2.0
"""The ``status`` subcommand: its options, how often it looks, and its exit codes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from transfer_queue.errors import TransferQueueError

_APART_S = 0.5
"""Between the two looks of a single answer: rates are differences."""

_FILE_WIDTH = 160

_DESCRIPTION = """Show a running queue: samples by partition and task (ready, batches in flight, consumed, per second),
who waits for how long and what is lacking, and what each storage unit holds. Only asks; nothing in the queue changes.
Rates are differences between two looks; a single answer takes two, half a second apart."""

Report = dict[str, Any]


def main(args: Sequence[str]) -> int:
    """Returns the exit code: 0; 2 when no queue answers, or for options that can't be right."""
    options = _parser().parse_args(args)
    address = options.address or os.environ.get("TQ_ADDRESS")
    if not address:
        return _refuse("no queue was named: give its address, or set TQ_ADDRESS. Trainers and init() tell the address.")
    if "://" not in address:
        return _refuse(f"{address!r} is no address; one looks like ipc:///tmp/tq-.../controller or tcp://host:port.")
    with contextlib.suppress(KeyboardInterrupt):  # how --watch ends
        try:
            _show(address, options)
        except TransferQueueError as error:
            return _refuse(str(error))
        except BrokenPipeError:  # "| head" has seen enough; nor may Python's own flush at the end complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lightning-tq status", description=_DESCRIPTION)
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help="Of the queue. Default: TQ_ADDRESS.")
    parser.add_argument("--watch", action="store_true", help="Look again and again until Ctrl-C.")
    parser.add_argument("--every", type=_seconds, default=1.0, metavar="SECONDS", help="With --watch. Default: 1.")
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object; with --watch, one a line for each look."
    )
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be between 0.05 and 3600 seconds, got {text}")
    return value


def _refuse(reason: str) -> int:
    sys.stderr.write(f"error: {reason}\n")
    return 2


def _show(address: str, options: argparse.Namespace) -> None:
    import transfer_queue as tq

    tq.init(address)  # as a client; raises when nobody answers
    try:
        if options.json:
            asyncio.run(_print(address, options, _json_line))
        elif options.watch and sys.stdout.isatty():
            asyncio.run(_live(address, options))
        else:
            asyncio.run(_print(address, options, _print_tables))
    finally:
        tq.close()


async def _reports(address: str, options: argparse.Namespace) -> AsyncIterator[Report]:
    """One, or one after the other."""
    import transfer_queue as tq
    from lightning_tq.status.look import report, take_look

    client = tq.get_client()
    before = await take_look(client)
    while True:
        await asyncio.sleep(options.every if options.watch else _APART_S)
        now = await take_look(client)
        yield report(address, now, before)
        if not options.watch:
            return
        before = now


async def _print(address: str, options: argparse.Namespace, show: Callable[[Report], None]) -> None:
    async for each in _reports(address, options):
        show(each)


def _json_line(report: Report) -> None:
    print(json.dumps(report), flush=True)


def _print_tables(report: Report) -> None:
    from rich.console import Console

    from lightning_tq.status.tables import tables

    console = Console()
    if not console.is_terminal:  # rich would take a file for 80 columns wide
        console.width = _FILE_WIDTH
    console.print(tables(report))


async def _live(address: str, options: argparse.Namespace) -> None:
    from rich.live import Live

    from lightning_tq.status.tables import tables

    with Live(auto_refresh=False, vertical_overflow="ellipsis") as live:
        async for each in _reports(address, options):
            live.update(tables(each), refresh=True)
