# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``doctor``: what is wrong with the environment and with a running queue, and what mends it."""

# Checks are pure, over readings. Files of these packages that are replaced or missing were refused at import.

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_tq.checks import byte_text, counted
from lightning_tq.cli.parser import Parser
from lightning_tq.cli.queue_commands import seconds
from transfer_queue.errors import ConfigError, TransferQueueError

if TYPE_CHECKING:
    from transfer_queue import Finding
    from transfer_queue.environment import Environment

_PROBLEMS = 1
_LEAST_OPEN_FILES = 4096
_LEAST_SHM = 256 << 20
_WAITS = ("fetch", "put", "keys", "lease")
"""Kinds of findings that are normal while they are young."""


class Line(NamedTuple):
    """What a check says."""

    is_problem: bool
    text: str


fine, problem = partial(Line, False), partial(Line, True)


def main(args: Sequence[str]) -> int:
    """Look for problems of the environment and of a running queue, and say what mends them.

    Without an address and TQ_ADDRESS, only the environment is looked at. It changes nothing in the queue. Exit codes:
    0, 1 if there is a problem, 2 for an invalid option.
    """
    parser = Parser("doctor", main)
    given = os.environ.get("TQ_ADDRESS")
    parser.add_argument("address", nargs="?", default=given, metavar="ADDRESS", help="Address of the queue.")
    config = "A YAML file with the queue's settings, which the environment must fit. Default: the queue's own."
    parser.add_argument("--config", metavar="FILE", help=config)
    wait = "A request that waits for longer is a problem. Default: 60."
    parser.add_argument("--wait", type=seconds, default=60.0, metavar="SECONDS", help=wait)
    options = parser.parse_args(args)
    if options.address and "://" not in options.address:
        parser.error(f"{options.address!r} is not an address like ipc:///tmp/tq-.../controller or tcp://host:port.")
    try:
        return _report(_lines(options))
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed in this environment, {sys.prefix}: install lightning-tq here, with "
        return _report([problem(f"{missing}its dependencies.")])
    except ConfigError as error:
        parser.error(str(error))


def _lines(options: argparse.Namespace) -> list[Line]:
    from transfer_queue.environment import read_environment  # whose dependencies may be missing

    conf = None
    if options.config is not None:
        from lightning_tq.queue_config import as_queue_config

        conf = as_queue_config(options.config).conf()
    queue, running = _look_at(options.address, options.wait)
    if conf is None and str(options.address).startswith("ipc://"):
        conf = running
    return [*check_environment(read_environment(conf)), *queue]


def _report(lines: Sequence[Line]) -> int:
    for line in lines:
        print(f"{'PROBLEM' if line.is_problem else 'fine':9}{line.text}")
    count = sum(line.is_problem for line in lines)
    print(f"{counted(count, 'problem')} found." if count else "Everything is fine.")
    return _PROBLEMS if count else 0


# ---- the environment ----


def check_environment(found: Environment) -> list[Line]:
    lines = [check_files(found), check_torch(found), check_shm(found), check_limits(found), check_memory(found)]
    return lines if found.key_file is None else [*lines, check_keys(found)]


def check_files(found: Environment) -> Line:
    again, own = " && ".join(found.remedy), f"lightning-tq {found.version} in {found.folder}"
    if found.other_version is not None:
        return problem(
            f"TransferQueue {found.other_version} is installed, too, and at its next upgrade or uninstall it "
            f"replaces or deletes files of {own}: {again}"
        )
    if found.changed_files:
        count, first = counted(len(found.changed_files), "file"), found.changed_files[0]
        return problem(f"{count} of {own} changed since the installation, such as {first}: {found.remedy[-1]}")
    return fine(f"{own}{' (a clone)' if found.changed_files is None else ', files as installed'}")


def check_torch(found: Environment) -> Line:
    if found.torch is None:
        return problem("torch is not installed in this environment: install lightning-tq here, with its dependencies.")
    if found.gpus and found.torch_device is None:
        return problem(
            f"torch {found.torch} is built for CPUs only, but this host has {counted(found.gpus, 'GPU')}: install the "
            "build for CUDA, with the command of pytorch.org/get-started."
        )
    built = "CPUs only" if found.torch_device is None else found.torch_device
    return fine(f"torch {found.torch}, built for {built}; {counted(found.gpus, 'GPU')}")


def check_shm(found: Environment) -> Line:
    remedy = (
        "start the container with --shm-size=2g (Kubernetes: an emptyDir with medium: Memory), or use num_workers=0."
    )
    if found.shm_free is None:
        return problem(f"/dev/shm can't be written, so a loader's workers can't pass tensors: {remedy}")
    if found.shm_free < _LEAST_SHM:
        free = byte_text(found.shm_free)
        return problem(f"/dev/shm has {free} left; a loader's workers pass batches through it: {remedy}")
    return fine(f"/dev/shm: {byte_text(found.shm_free)} free")


def check_limits(found: Environment) -> Line:
    if 0 <= found.open_files < _LEAST_OPEN_FILES:
        return problem(
            f"a process may open only {found.open_files:,} files (ulimit -Hn), and a server needs one for each thread "
            "of its clients: raise nofile in limits.conf, LimitNOFILE of systemd, or --ulimit nofile of Docker."
        )
    return fine(f"open files: {'no limit' if found.open_files < 0 else f'up to {found.open_files:,}'}")


def check_memory(found: Environment) -> Line:
    has = byte_text(found.machine_memory)
    if found.memory is None:
        return fine(f"memory: {has}; the queue's own has no limit, so a queue that nobody clears ends the server")
    if found.memory > found.machine_memory:
        return problem(
            f"the queue's memory is {byte_text(found.memory)}, but this machine or container has {has}, so the system "
            "kills the server before a put waits: lower memory, or raise the container's limit."
        )
    return fine(f"memory: {byte_text(found.memory)} of {has} for values")


def check_keys(found: Environment) -> Line:
    if found.key_mode is None:
        return problem(
            f"the key file {found.key_file} is missing, or not yours to read: copy it from the first server's host."
        )
    if found.key_mode & 0o077:
        return problem(
            f"other users can read the keys in {found.key_file} (mode {found.key_mode:o}): run chmod 600, and make new "
            "keys if others use this host."
        )
    return fine(f"keys: {found.key_file}")


# ---- the queue ----


def check_queue(address: str, stats: Mapping[str, Any], findings: Sequence[Finding], wait_s: float) -> Iterator[Line]:
    """What waits, and what went wrong in it. Young waits are no problem."""
    from transfer_queue import is_internal

    partitions = [each for name, each in stats["partitions"].items() if not is_internal(name)]
    samples = counted(sum(each["samples"] for each in partitions), "sample")
    yield fine(f"queue {address}: {samples} in {counted(len(partitions), 'partition')}")
    for finding in findings:
        is_long = finding.kind != "lease" and (finding.age_s or 0.0) > wait_s
        yield Line(is_long or finding.kind not in _WAITS, str(finding))


def _look_at(address: str | None, wait_s: float) -> tuple[list[Line], Any | None]:
    """The lines of a queue, and its configuration if it answers."""
    if not address:
        return [fine("no queue was named: give its address, or set TQ_ADDRESS, to look at one")], None
    from lightning_tq.queue_report import take_snapshot
    from transfer_queue import Observer

    try:
        with closing(Observer(address)) as observer:
            found = asyncio.run(take_snapshot(observer))
            return list(check_queue(address, found.stats, found.findings(), wait_s)), observer.conf
    except TransferQueueError as error:
        return [problem(str(error))], None
