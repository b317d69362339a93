# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``checkpoint``: what a saved queue holds, and whether its files are as they were written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_tq.cli.parser import Parser
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError, TransferQueueError

_DAMAGED = 1
_NOT_FOUND = 2


def main(args: Sequence[str]) -> int:
    """Look into a saved queue, such as last.ckpt.tq next to last.ckpt, without starting a queue.

    "show" prints its partitions, fields and tasks. "verify" also reads every value and compares it with its checksum.
    Exit codes: 0, 1 if the checkpoint is damaged, foreign or unreadable, 2 if there is none. "verify" also exits with 1
    if samples had lost values with a storage unit when it was saved.
    """
    parser = Parser("checkpoint", main)
    parser.add_argument("action", choices=["show", "verify"])
    parser.add_argument("path", metavar="PATH", help="The saved queue: a directory, or a URL that fsspec knows.")
    parser.add_argument("--json", action="store_true", help="Print a JSON object.")
    options = parser.parse_args(args)
    import transfer_queue as tq

    try:
        found = tq.describe_checkpoint(options.path, verify=options.action == "verify")
    except TransferQueueError as error:
        sys.stderr.write(f"error: {error}{_hint(options.path)}\n")
        is_damaged = isinstance(error, CheckpointError) and not isinstance(error, CheckpointNotFoundError)
        return _DAMAGED if is_damaged else _NOT_FOUND
    if options.json:
        print(json.dumps(found))
    else:
        _show(found, "verified" if options.action == "verify" else "not verified")
    lost = list(_losses(found))
    sys.stderr.writelines(f"{text}\n" for text in lost)
    return _DAMAGED if lost and options.action == "verify" else 0


def _losses(found: dict[str, Any]) -> Iterator[str]:
    for name, each in found["partitions"].items():
        for field, count in each["lost"].items():
            yield f"{count:,} of {each['samples']:,} samples of {name!r} had lost {field!r} with a storage unit."


def _hint(path: str) -> str:
    beside = f"{path.rstrip('/')}.tq"
    return f" The queue is saved beside it: {beside}." if os.path.isdir(beside) else ""


def _show(found: dict[str, Any], state: str) -> None:
    from rich.console import Group
    from rich.text import Text

    from lightning_tq.checks import byte_text
    from lightning_tq.queue_report import show, table_of

    head = f"saved by lightning-tq {found['version']}, {byte_text(found['nbytes'])} of values, {state}"
    if found["metadata"]:
        head += f"; {', '.join(f'{name}={value}' for name, value in found['metadata'].items())}"
    partitions, fields, tasks = [], [], []
    for name, each in found["partitions"].items():
        partitions.append([name, f"{each['samples']:,}", f"{each['keys']:,}", "yes" if each["sealed"] else "no"])
        for field, own in each["fields"].items():
            kind = [own["dtype"] or "objects", _shape(own["shape"])]
            fields.append([name, field, *kind, f"{own['samples']:,}", byte_text(own["nbytes"])])
        for task, own in each["tasks"].items():
            tasks.append([name, task, f"{own['given']:,}", f"{own['consumed']:,}"])
    tables = [
        table_of(["partition", "samples", "keys", "sealed"], partitions),
        table_of(["partition", "field", "dtype", "shape", "samples", "bytes"], fields),
        table_of(["partition", "task", "given", "consumed"], tasks),
    ]
    show(Group(Text(head), *(part for table in tables if table.row_count for part in (Text(""), table))))


def _shape(shape: Sequence[int | None] | None) -> str:
    return "" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
