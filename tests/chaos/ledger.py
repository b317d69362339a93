# SPDX-License-Identifier: Apache-2.0
"""What each process says that it did, in a file of its own that outlives a SIGKILL. The checkers know nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Record(NamedTuple):
    """``at``: the machine's monotonic seconds. ``life``: how many queues there were before. ``actor``: its name."""

    at: float
    life: int
    actor: str
    event: str
    what: dict[str, Any]


class Ledger:
    """The file of one process."""

    def __init__(self, directory: Path, actor: str, serial: int, life: int) -> None:
        path = directory / f"{serial:05d}-{actor}.jsonl"
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._actor, self._life = actor, life

    def note(self, event: str, **what: Any) -> None:
        """One write, so that a process that is killed leaves whole lines."""
        line = json.dumps([time.monotonic(), self._life, self._actor, event, what])
        os.write(self._file, f"{line}\n".encode())


class Reader:
    """All ledgers of a directory, as they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new(self) -> Iterator[Record]:
        """What was written since the last call, by file."""
        for path in sorted(self._directory.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                yield Record(*json.loads(line))


def all_records(directory: Path) -> list[Record]:
    """In the order of their times."""
    return sorted(Reader(directory).new(), key=lambda record: record.at)
