# SPDX-License-Identifier: Apache-2.0
"""The subcommands ``record``, ``records`` and ``simulate``: what a task is given in files; a fit that only sleeps."""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lightning_tq.checks import counted
from lightning_tq.cli import INTERRUPTED, discard_output
from lightning_tq.cli.parser import Parser
from lightning_tq.cli.queue_commands import address_of, seconds
from transfer_queue.errors import CheckpointError, ConfigError, QueueUnreachableError, TransferQueueError

if TYPE_CHECKING:
    from transfer_queue import RecordedBatches, TransferQueueClient

_POLL_S = 0.25
_EVERY_S = 2.0
"""Seconds between two directories. Until a batch is written, the queue keeps its samples."""
_SHARE = 10
"""Writing takes at most one second in so many, unless a put waits for room."""
_TELL_EVERY_S = 10.0
_FEW = 8
"""Tensors of up to so many numbers are shown."""


# ---- record ----


def record(args: Sequence[str]) -> int | None:
    """Write the batches that a task of a running queue is given to a directory: values, tags, and who got which when.

    It takes nothing from the task, but the queue keeps its samples until they are written, for some seconds. It ends
    with the task's last partition, the queue or the terminal, or with Ctrl-C. However it ends, what was written stays
    readable.
    Exit codes: 0, 1 if samples or batches may be missing, because they were cleared before or the queue
    ended, 2 for an error.
    If it is killed, the queue keeps later batches for it: start it again with the same directory, or end that with
    "lightning-tq forget-task". Batches that the task had finished before it started are not there.
    """
    parser = Parser("record", record)
    parser.add_argument("address", metavar="ADDRESS", help="Address of the queue, which a run prints.")
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="Where to write. An earlier record of this run is continued."
    )
    parser.add_argument("--task", required=True, metavar="TASK", help="Name of the task, as in Stream(task=...).")
    options = parser.parse_args(args)
    address = address_of(options)
    import transfer_queue as tq

    try:
        tq.init(address)  # raises if no queue answers
        return _record(tq.get_client(), options, address)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        tq.close()


def _record(client: TransferQueueClient, options: argparse.Namespace, address: str) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves the end of its terminal
            signal.signal(number, _end)
    try:
        options.directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.directory).close()
    except OSError as error:
        raise ConfigError(f"can't write to {options.directory}: {error.strerror or error}.") from error
    return _Recorder(client, address, options.task, options.directory.resolve()).run()


def _end(*_: Any) -> None:
    """A second signal must not break off the last save."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        discard_output()  # its terminal is closed


class _Recorder:
    def __init__(self, client: TransferQueueClient, address: str, task: str, directory: Path) -> None:
        self._client, self._address, self._task, self._directory = client, address, task, directory
        self._own = f"record:{task}:{directory}"
        self._number = 1 + max((int(path.name) for path in directory.glob("[0-9]*") if path.name.isdigit()), default=-1)
        self._continues = self._number > 0
        """Whether it is still to be seen that an earlier record there is of this run."""
        self._written = self._behind = self._cleared = 0
        self._gap = self._misses = False
        """Whether batches may lack before the next ones, or before any that this process wrote."""
        self._note_of_gap = directory / "gap"
        """Is there while batches may lack before the next ones. If this process is killed, the next one must say so."""
        self._due = self._tell_at = 0.0

    def run(self) -> int:
        missing = 0
        try:
            with contextlib.suppress(KeyboardInterrupt):
                self._follow()
            self._look()
            self._save()
            self._look()  # what was cleared meanwhile
        except QueueUnreachableError:
            missing = self._behind
            lost = f" {counted(missing, 'batch', 'batches')} may be missing." if missing else ""
            _say(f"The queue has ended, or has not answered twice.{lost}")
        finally:  # the queue must not keep what nobody will write
            with contextlib.suppress(TransferQueueError):
                self._client.forget_task(self._own)
        _say(f"{counted(self._written, 'batch', 'batches')} written to {self._directory}")
        return 1 if missing or self._misses else 0

    def _look_at_earlier(self) -> None:
        """A killed one has left its task in the queue, which has kept all batches for it. Otherwise some may lack."""
        from transfer_queue import describe_checkpoint

        self._gap = self._continues
        with contextlib.suppress(CheckpointError):  # there is none
            earlier = describe_checkpoint(self._directory / f"{self._number - 1:06}")["metadata"]
            tasks = [each["tasks"] for each in self._client.get_stats()["partitions"].values()]
            was_killed = earlier.get("address") == self._address and any(self._own in each for each in tasks)
            if was_killed and not self._note_of_gap.exists():
                self._gap, self._cleared = False, earlier["cleared"]
        if self._gap:
            self._note_of_gap.touch()

    def _follow(self) -> None:
        """Until the task ends."""
        self._look_at_earlier()
        known = {task for each in self._look()["partitions"].values() for task in each["tasks"]} - {self._own}
        nothing = "" if self._task in known else f"; it has read nothing yet, others have: {sorted(known)}"
        _say(f"Recording task {self._task!r} to {self._directory}{nothing}")
        while not self._has_ended(stats := self._look()):
            if time.monotonic() >= self._due or any(wait["writer"] for wait in stats["waiting"]):
                self._save()
            if time.monotonic() >= self._tell_at:
                self._tell_at = time.monotonic() + _TELL_EVERY_S
                _say(f"{counted(self._written, 'batch', 'batches')} written, {self._behind} to write")
            threading.Event().wait(_POLL_S)

    def _look(self) -> dict[str, Any]:
        try:
            stats = self._stats()
        except QueueUnreachableError:  # it may only have been busy, or stopped for a while
            stats = self._stats()
        tasks = [each["tasks"] for each in stats["partitions"].values()]
        self._behind = sum(each[self._own]["in_flight"] for each in tasks if self._own in each)
        cleared = stats["dropped"].get(self._own, {}).get("cleared", 0)
        if cleared > self._cleared:
            why = "clear_samples and clear_partition wait for no recorder, clear_consumed does"
            _say(f"{counted(cleared, 'sample')} cleared before written, and may be missing: {why}.")
            self._cleared, self._gap, self._misses = cleared, True, True
        return stats

    def _stats(self) -> dict[str, Any]:
        # Each time, because the queue may have been replaced by the one of a checkpoint.
        self._client.register_task(self._own, follows=self._task)
        return self._client.get_stats()

    def _has_ended(self, stats: dict[str, Any]) -> bool:
        read = [each["tasks"][self._task] for each in stats["partitions"].values() if self._task in each["tasks"]]
        readers = f"StreamingDataset_{self._task}_"
        is_read = bool(read) and all(each["ended"] for each in read)
        return is_read and not any(name.startswith(readers) for name in stats["clients"])

    def _save(self) -> None:
        """What is to be written, if there is anything."""
        started = time.monotonic()
        if self._behind:
            directory = self._directory / f"{self._number:06}"
            about = {"address": self._address, "cleared": self._cleared, "gap": self._gap}
            self._written += self._client.save_batches(directory, self._own, about)
            self._gap = False
            self._note_of_gap.unlink(missing_ok=True)
            if self._continues:
                self._leave_another_run(directory)
            self._number, self._behind = self._number + 1, 0
            self._due = time.monotonic() + max(_EVERY_S, (_SHARE - 1) * (time.monotonic() - started))

    def _leave_another_run(self, written: Path) -> None:
        """A run that begins at the first batch of an earlier record is another one: it gets a directory of its own."""
        from transfer_queue import RecordedBatches

        self._continues = False
        if written not in RecordedBatches(self._directory).begun_again:
            return
        earlier = self._directory
        number = next(number for number in itertools.count(2) if not Path(f"{earlier}-{number}").exists())
        self._directory = Path(f"{earlier}-{number}")
        self._directory.mkdir()
        written.rename(self._directory / written.name)
        _say(f"{earlier} holds another run, which began with the same batch. This one is written to {self._directory}.")


# ---- records ----


def records(args: Sequence[str]) -> None:
    """Show what a record holds, or the samples that one step trained: their tags, versions, texts and small fields.

    A step is one batch of every data-parallel rank. They are counted from 0, as trainer.global_step is where each batch
    is one optimizer step. The last one may have been fetched ahead, and not trained.
    """
    parser = Parser("records", records)
    parser.add_argument("directory", metavar="DIR", help="What lightning-tq record wrote.")
    parser.add_argument("--step", type=int, metavar="N", help="Show the samples of this step.")
    parser.add_argument("--partition", metavar="NAME", help="Count the batches of this partition only.")
    parser.add_argument("--json", action="store_true", help="Print a JSON object per sample, or one for the record.")
    options = parser.parse_args(args)
    import transfer_queue as tq

    found = tq.RecordedBatches(options.directory)
    if options.partition not in (None, *found.partitions):
        raise tq.CheckpointNotFoundError(
            f"{found.directory} has no partition {options.partition!r}. It has {', '.join(found.partitions)}."
        )
    rounds = [each for each in found.rounds if options.partition in (None, each[0])]
    first = next((index for _, index in rounds), 0)  # the record may have begun later than the task
    if options.step is not None and not first <= options.step < first + len(rounds):
        raise tq.CheckpointNotFoundError(
            f"{found.directory} has no step {options.step}. It has {len(rounds)} from {first} on, of the "
            f"partitions {found.partitions}."
        )
    if options.step is not None and options.partition is None and found.may_lack:
        name, last = next(iter(found.may_lack.items()))
        if options.step > first + rounds.index((name, last)):
            print(f"Steps after batch {last} of {name!r} may have been later ones: recording stopped.", file=sys.stderr)
    whole = options.step is None
    shown = _summary(found, rounds, first) if whole else _samples(found, *rounds[options.step - first])
    _show(list(shown), options.json)


def _summary(found: RecordedBatches, rounds: list[tuple[str, int]], first: int) -> Iterator[dict[str, Any]]:
    """A row per partition."""
    for name in dict.fromkeys(partition for partition, _ in rounds):
        at = [number for number, (partition, _) in enumerate(rounds, first) if partition == name]
        own = [index for partition, index in rounds if partition == name]
        gaps = max(own) - min(own) + 1 - len(own)
        _, meta = found.read(name, next(iter(found.rounds[name, own[0]])), own[0])
        yield {
            "partition": name, "steps": f"{at[0]} to {at[-1]}", "batches": f"{min(own)} to {max(own)}",
            "lacking": gaps or None, "may lack": f"from {found.may_lack[name] + 1}" if name in found.may_lack else None,
            "ranks": len(found.rounds[name, own[0]]), "rows": meta.size,
            "fields": ", ".join(meta.field_names),
        }  # fmt: skip


def _samples(found: RecordedBatches, partition: str, index: int) -> Iterator[dict[str, Any]]:
    """A row per sample."""
    for rank in found.rounds[partition, index]:
        data, meta = found.read(partition, rank, index)
        for row in range(meta.size):
            own = meta.custom_meta[row]
            shown = {name: tag for name, tag in own.items() if not name.startswith("group.")}
            shown |= {name: _plain(data[name][row]) for name in meta.field_names}
            named = {"partition": partition, "batch": index, "rank": rank, "sample": meta.global_indexes[row]}
            if meta.heads is not None:
                head = meta.heads[row]
                named |= {"group": head, "version": meta.group_versions.get(head)}
            yield named | {f"{name} (own)" if name in named else name: value for name, value in shown.items()}


def _plain(value: Any) -> Any:
    """A small value itself; of a large tensor its dtype and shape."""
    if not hasattr(value, "numel"):
        return value if isinstance(value, (str, int, float, bool)) else str(value)
    return value.tolist() if value.numel() <= _FEW else f"{str(value.dtype)[6:]} {list(value.shape)}"


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    from rich.table import Column, Table

    from lightning_tq.queue_report import literal, show

    if as_json:
        print("\n".join(msgspec.json.encode(row).decode() for row in rows))  # NaN as null: JSON has none
        return
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    headers = [Column(literal(name)) for name in names]
    table = Table(*headers, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for row in rows:
        table.add_row(*(literal(_cell(row.get(name))) for name in names))
    show(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_cell, value))}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).expandtabs().replace("\n", r"\n")


# ---- simulate ----


def simulate(args: Sequence[str]) -> int:
    """Run the producers of a configuration, and sleep instead of training.

    Options are those of "lightning-tq fit". The model is made and its first weights are published, but each optimizer
    step only sleeps. Everything is on this host's CPU, with as many ranks as trainer.devices says. There are no
    validation results, checkpoints and loggers, and of the callbacks only those that pace producers. It ends with the
    same paragraph as a fit: whether training or generation was the bottleneck.
    """
    parser = Parser("simulate", simulate)
    length = "Length of an optimizer step."
    parser.add_argument("--step-s", type=seconds, required=True, metavar="SECONDS", help=length)
    config = "YAML file of a run. Can be repeated; later files win."
    parser.add_argument("--config", "-c", action="append", default=[], metavar="FILE", help=config)
    options, others = parser.parse_known_args(args)
    if not options.config and not others:
        parser.error("the run to simulate is missing: --config FILE, as for lightning-tq fit")
    files = [word for path in options.config for word in ("--config", path)]
    sys.argv = [sys.argv[0], "simulate", *args]  # ranks in new processes get these arguments
    from lightning_tq.cli.simulate_command import run_sleeping

    return run_sleeping(options.step_s, [*files, *others])
