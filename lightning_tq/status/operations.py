# SPDX-License-Identifier: Apache-2.0
"""The subcommands ``clients``, ``evict`` and ``forget-task``: find what holds a queue up, and end it."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from lightning_tq.status.joined import refuse, run_joined

_NO_SUCH = 1
"""Exit code: the queue has no client or task of this name."""

_CLIENTS = """List the clients of a running queue and what each holds: connections, samples that it reserved and has not
put, leases and pins of memory, freezes of a checkpoint, leaves to replace values, parked requests, and answers that it
has not received yet. It changes nothing in the queue."""
_EVICT = """End the session of a client that hangs, as if it had died. What it reserved, leased, pinned or froze is
given back; what it fetched and never received goes to others. "lightning-tq clients" names the clients."""
_FORGET = """Let no partition keep samples for this task any more, because its name was misspelt or it will never read
again. Should it fetch again, it reads from the start."""


def main(name: str, args: Sequence[str]) -> int:
    """Returns the exit code: 0, 1 for an unknown client or task, 2 if no queue answers or an option is invalid."""
    act, options = _options(name, args)
    return run_joined(options.address, partial(act, options))


def _options(name: str, args: Sequence[str]) -> tuple[Callable[[argparse.Namespace, str], int], argparse.Namespace]:
    act, description = {"clients": (_list, _CLIENTS), "evict": (_evict, _EVICT), "forget-task": (_forget, _FORGET)}[
        name
    ]
    parser = argparse.ArgumentParser(f"lightning-tq {name}", description=description, allow_abbrev=False)
    if act is _evict:
        parser.add_argument("client", metavar="CLIENT", help="Name of the client.")
    elif act is _forget:
        parser.add_argument("task", metavar="TASK", help="Name of the task.")
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help="Address of the queue. Default: TQ_ADDRESS.")
    if act is _list:
        parser.add_argument("--json", action="store_true", help="Print a JSON object.")
    return act, parser.parse_args(args)


def _list(options: argparse.Namespace, address: str) -> int:
    import transfer_queue as tq
    from lightning_tq.status.report import others

    clients = others(tq.get_client().get_stats())
    if options.json:
        print(json.dumps({"address": address, "clients": clients}))
    elif clients:
        from lightning_tq.status.tables import clients_table, show

        show(clients_table(clients))
    else:
        print(f"{address}: no client.")
    return 0


def _evict(options: argparse.Namespace, address: str) -> int:
    import transfer_queue as tq
    from lightning_tq.status.report import Holdings, others

    client = tq.get_client()
    clients = others(client.get_stats())
    if options.client not in clients:
        return _no_such(f"the queue has no client {options.client!r}", options.client, clients)
    client.evict_client(options.client)
    held: Holdings = clients[options.client]
    had = [_counted(held[what], noun) for what, noun in _HELD.items() if held[what]]
    print(f"Evicted client {options.client!r}, which held {', '.join(had) or 'nothing'}.")
    return 0


def _forget(options: argparse.Namespace, address: str) -> int:
    import transfer_queue as tq

    client, task = tq.get_client(), options.task
    stats = client.get_stats()
    waiting = {each["task"] for each in stats["waiting"] if each["task"] is not None}
    tasks = {name for partition in stats["partitions"].values() for name in partition["tasks"]} | waiting
    if task not in tasks:  # not even its registration is forgotten: the name may be a slip
        return _no_such(f"no partition knows a task {task!r}", task, tasks)
    count = client.forget_task(task)
    told = "; its waiting requests were told that their stream has ended" if task in waiting else ""
    print(f"Forgot task {task!r}: {_counted(count, 'partition')} knew it{told}.")
    return 0


_HELD = {
    "reserved": "reserved sample", "leases": "lease", "pins": "pin", "freezes": "freeze", "leaves": "leave",
    "parked": "waiting request",
}  # fmt: skip


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _no_such(reason: str, name: str, names: Iterable[str]) -> int:
    near = difflib.get_close_matches(name, sorted(names), 1, 0.0)
    return refuse(f"{reason}{f'; did you mean {near[0]!r}?' if near else '.'}", _NO_SUCH)
