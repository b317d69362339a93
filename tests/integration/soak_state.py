# SPDX-License-Identifier: Apache-2.0
"""What actors of one soaking process share, know of samples from their tags, and keep to look at again."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration import soak_values as values

OPERATIONS = ("put", "stream", "insert", "replace", "write_back", "fetch", "fetch_shared", "take", "read_any",
              "read_own", "recheck", "clear", "clear_any", "clear_partition", "kv_put", "kv_get", "kv_clear", "look",
              "cancel")  # fmt: skip
OUTCOMES = ("ok", "SampleClearedError", "StorageKeyNotFoundError", "UnknownPartitionError", "EndOfPartitionError",
            "BatchTimeoutError", "StorageFullError", "ProducersGoneError", "KeyGone")  # fmt: skip
OTHERS = ("nbytes_put", "nbytes_checked", "most_held_nbytes")
COUNTS = (*OPERATIONS, *OUTCOMES, *OTHERS)
KEYED_FIELDS = ("num", "u8", "ids", "text")
"""Fields of samples with keys. Of shared keys (tag "w") many actors write these, so no version is the least."""

NEWEST = (1 << 24) - 1
_LOG_NBYTES = 1 << 20


def tags_for(sids: NDArray[np.int64], **more: int) -> list[dict[str, int]]:
    return [{"s": sid, **more} for sid in sids.tolist()]


def known(data: TensorDict) -> list[str]:
    return [str(name) for name in data.keys()]  # noqa: SIM118 (iterating a TensorDict gives rows)


def sids_of(meta: tq.BatchMeta) -> NDArray[np.int64]:
    bare = [index for index, tags in zip(meta.global_indexes, meta.custom_meta, strict=True) if "s" not in tags]
    if bare:
        raise values.WrongValueError(f"samples {bare[:5]} have fields and not the tags that were put with them")
    return np.array([tags["s"] for tags in meta.custom_meta], np.int64)


def versions_of(meta: tq.BatchMeta, name: str, default: int = 1) -> NDArray[np.int64]:
    """Versions that reads must give at least, by the tags that were published after the values."""
    shared = name in KEYED_FIELDS
    rows = [0 if shared and "w" in tags else tags.get(f"v.{name}", default) for tags in meta.custom_meta]
    return np.array(rows, np.int64)


@dataclass
class Kept:
    """A batch that was read, and which versions were found in it."""

    data: TensorDict
    indexes: Sequence[int]
    sids: NDArray[np.int64]
    found: dict[str, NDArray[np.int64]]
    nbytes: int

    @classmethod
    def checked(cls, data: TensorDict, meta: tq.BatchMeta, exact: bool) -> Kept:
        """Raise WrongValueError unless these are the values of the samples."""
        if known(data) != meta.field_names or list(data.batch_size) != [meta.size]:
            raise values.WrongValueError(f"asked for {meta}, got {known(data)} of batch size {list(data.batch_size)}")
        kept = cls(data, list(meta.global_indexes), sids_of(meta), {}, 0)
        for name in meta.field_names:
            low = versions_of(meta, name)
            high = low if exact else np.full(meta.size, NEWEST)
            kept._check(name, low, high)
        return kept

    def check_again(self) -> None:
        for name, versions in list(self.found.items()):
            self._check(name, versions, versions)

    def _check(self, name: str, low: NDArray[np.int64], high: NDArray[np.int64]) -> None:
        found, nbytes = values.check(name, self.data[name], self.indexes, self.sids, low, high)
        self.nbytes += nbytes if name not in self.found else 0
        self.found[name] = found


class Share:
    """One per soaking process. Its counts and its log lie in files, so that they outlive a SIGKILL."""

    def __init__(self, directory: Path, serial: int, slot: int, limits: dict[str, Any]) -> None:
        self.serial = serial
        self.task = f"task-{slot}"
        self.capacity_bytes: int | None = limits["capacity_bytes"]
        self.largest_put: int = limits["largest_put"]
        self.largest_kept: int = limits["largest_kept"]
        self.most_nbytes: int = limits["most_nbytes"]
        self.most_samples: int = limits["most_samples"]
        self.stop = threading.Event()
        self.doomed = threading.Event()
        self.busy: dict[int, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._counts = _mapped(directory / f"counts-{serial}.bin")
        self._given = os.open(directory / f"given-{serial}.bin", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._log_path = directory / f"log-{serial}.txt"
        self._log = self._opened_log()

    # ---- counts ----

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[COUNTS.index(name)] += by

    def saw(self, held_nbytes: int) -> None:
        at = COUNTS.index("most_held_nbytes")
        self._counts[at] = max(self._counts[at], held_nbytes)

    def given(self, indexes: Sequence[int]) -> None:
        """The shared task gave these to this process: nobody else may ever get one of them."""
        os.write(self._given, np.array(indexes, np.int64).tobytes())

    # ---- the log of the last operations ----

    def log(self, actor: int, text: str) -> None:
        line = f"{time.monotonic():.4f} {actor}   {text}\n".encode()
        with self._lock:
            os.write(self._log, line)
            if os.fstat(self._log).st_size > _LOG_NBYTES:
                os.close(self._log)
                self._log_path.replace(self._log_path.with_suffix(".old.txt"))
                self._log = self._opened_log()

    def _opened_log(self) -> int:
        return os.open(self._log_path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND, 0o600)

    # ---- operations ----

    def begin(self, actor: int, operation: str) -> None:
        self.busy[actor] = (operation, time.monotonic())
        if self.doomed.is_set():
            threading.Timer(random.uniform(0.0, 0.01), die).start()

    def end(self, actor: int, operation: str, outcome: str) -> None:
        del self.busy[actor]
        self.count(operation)
        self.count(outcome)
        self.log(actor, f"{operation}: {outcome}")

    def fatal_parser(self, rng: random.Random) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """Now and then a doomed process dies between reserving and storing."""
        return (lambda columns: die() or columns) if self.doomed.is_set() and rng.random() < 0.5 else None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def read_counts(directory: Path) -> dict[str, int]:
    """The counts of all processes of a run, those that were killed included."""
    total = np.zeros(len(COUNTS), np.int64)
    at = COUNTS.index("most_held_nbytes")
    for path in directory.glob("counts-*.bin"):
        counts = np.fromfile(path, np.int64)
        most = max(total[at], counts[at])
        total += counts
        total[at] = most
    return dict(zip(COUNTS, total.tolist(), strict=True))


def _mapped(path: Path) -> NDArray[np.int64]:
    nbytes = 8 * len(COUNTS)
    with path.open("w+b") as file:
        file.truncate(nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.int64)
