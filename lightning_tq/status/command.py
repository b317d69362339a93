# SPDX-License-Identifier: Apache-2.0
"""The ``status`` subcommand: its options, its output and its exit codes."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from lightning_tq.status.joined import run_joined

_SINGLE_INTERVAL_S = 0.5
"""Seconds between the two snapshots of a single report."""

_DESCRIPTION = """Show a running queue: samples by partition and task (ready, batches in flight, consumed, per second),
waiting requests and what they lack, clients that hold something, samplers that held the server, and what each storage
unit holds. It changes nothing in the queue. Rates compare two snapshots; a single report takes both, half a second
apart."""

Report = dict[str, Any]


def main(args: Sequence[str]) -> int:
    """Returns the exit code: 0, or 2 if no queue answers or an option is invalid."""
    options = _parser().parse_args(args)
    return run_joined(options.address, lambda address: _show(address, options), interrupted=0)  # how --watch ends


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lightning-tq status", description=_DESCRIPTION)
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help="Address of the queue. Default: TQ_ADDRESS.")
    parser.add_argument("--watch", action="store_true", help="Repeat until Ctrl-C.")
    parser.add_argument(
        "--every", type=_seconds, default=1.0, metavar="SECONDS", help="Interval of --watch. Default: 1."
    )
    parser.add_argument(
        "--json", action="store_true", help="Print a JSON object; with --watch, one per line and interval."
    )
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be between 0.05 and 3600 seconds, got {text}")
    return value


def _show(address: str, options: argparse.Namespace) -> int:
    if options.json:
        asyncio.run(_print(address, options, _json_line))
    elif options.watch and sys.stdout.isatty():
        asyncio.run(_live(address, options))
    else:
        asyncio.run(_print(address, options, _print_tables))
    return 0


async def _reports(address: str, options: argparse.Namespace) -> AsyncIterator[Report]:
    """One report, or one per interval."""
    import transfer_queue as tq
    from lightning_tq.status.report import make_report, take_snapshot

    client = tq.get_client()
    before = await take_snapshot(client)
    while True:
        await asyncio.sleep(options.every if options.watch else _SINGLE_INTERVAL_S)
        now = await take_snapshot(client)
        yield make_report(address, now, before)
        if not options.watch:
            return
        before = now


async def _print(address: str, options: argparse.Namespace, show: Callable[[Report], None]) -> None:
    async for each in _reports(address, options):
        show(each)


def _json_line(report: Report) -> None:
    print(json.dumps(report), flush=True)


def _print_tables(report: Report) -> None:
    from lightning_tq.status.tables import show, tables

    show(tables(report))


async def _live(address: str, options: argparse.Namespace) -> None:
    from rich.live import Live

    from lightning_tq.status.tables import tables

    with Live(auto_refresh=False, vertical_overflow="ellipsis") as live:
        async for each in _reports(address, options):
            live.update(tables(each), refresh=True)
