# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``dashboard``: a web page that shows a running queue."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING

from transfer_queue.errors import ConfigError

if TYPE_CHECKING:
    from transfer_queue import Observer


def add_options(parser: argparse.ArgumentParser) -> None:
    host = "Where to listen; 0.0.0.0: on all networks. Default: 127.0.0.1, for programs of this host."
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help=host)
    port = "Default: 8766, or a free one if that is in use. 0: a free one."
    parser.add_argument("--port", type=int, metavar="PORT", help=port)
    no_token = "Let every user of this host read the page. Only without --host."
    parser.add_argument("--no-token", action="store_true", help=no_token)
    parser.add_argument("--name", default="", metavar="NAME", help="Title of the page, such as the run's name.")
    # For the dashboard of a run: it ends with the process that holds the other end of its input.
    parser.add_argument("--until-input-ends", action="store_true", help=argparse.SUPPRESS)


def serve(options: argparse.Namespace, observer: Observer) -> None:
    """Show a running queue as a web page that follows it.

    It has partitions and tasks as they fill and drain, waiting fetches and what they lack, throughput and waits over
    time, memory, clients, alarms. It changes nothing in the queue. The printed address has a token, without which the
    page shows nothing, also to other users of this host.
    """
    from lightning_tq.dashboard.web_page import Dashboard

    page = Dashboard(observer, options.address, options.host, not options.no_token, options.name)

    async def run() -> None:
        serving = asyncio.ensure_future(page.run(options.port, lambda url: print(f"Dashboard: {url}", flush=True)))
        if options.until_input_ends:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    try:
        asyncio.run(run())
    except (OSError, OverflowError) as error:
        port = "" if options.port is None else f", port {options.port}"
        raise ConfigError(f"the dashboard can't listen at {options.host}{port}: {error}") from error
