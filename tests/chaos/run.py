# SPDX-License-Identifier: Apache-2.0
"""One run of a seed: its plan on a stage, then the judgement of the ledgers, and what is left on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.hosts import missing_privilege, two_hosts
from tests.chaos.ledger import Record, all_records
from tests.chaos.plan import Plan, make_plan
from tests.chaos.stage import ChaosError, Stage, small_disk
from tests.integration.soak_left import traces


def may_mount() -> bool:
    """Whether a small disk can be made here."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "chaos", folder]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            return False
        subprocess.run(["umount", folder], check=True)
    return True


def run_seed(world: str, seed: int, directory: Path, length: float = 1.0, hosts: bool = False) -> dict[str, Any]:
    """Returns a summary. Raises ChaosError, whose text has the plan and the command that replays it.

    ``directory``: of the ledgers; empty.
    """
    plan = make_plan(world, seed, length, hosts, may_mount())
    try:
        return _run(plan, directory)
    except Exception as error:
        found = str(error) if isinstance(error, ChaosError) else f"{type(error).__name__}: {error}"
        text = f"{found}\n\n{plan.text()}\nledgers: {directory}\nreplay: {plan.command()}"
        raise ChaosError(text) from error


def _run(plan: Plan, directory: Path) -> dict[str, Any]:
    began, before = time.monotonic(), traces()
    with ExitStack() as stack:
        stack.enter_context(small_disk(directory, plan.disk_nbytes))
        pair = stack.enter_context(two_hosts(directory)) if plan.hosts else None
        stage = Stage(plan, directory, pair)
        stage.run()
    records = all_records(directory)
    wrong = import_module(f"tests.chaos.{plan.world}_check").check(plan, records)
    after = traces()
    left = {kind: sorted(after[kind] - before[kind]) for kind in after if after[kind] - before[kind]}
    if left:
        wrong.append(f"left behind: {left}")
    if wrong:
        raise ChaosError("\n".join(wrong))
    return _summary(plan, records, time.monotonic() - began)


def _summary(plan: Plan, records: Sequence[Record], seconds: float) -> dict[str, Any]:
    faults = Counter(record.what["fault"] for record in records if record.event == "fault")
    errors = Counter(record.what["kind"] for record in records if record.event == "error")
    events = Counter(record.event for record in records)
    lives = 1 + max(record.life for record in records)
    return {
        "world": plan.world, "hosts": plan.hosts, "seed": plan.seed, "seconds": round(seconds, 1), "queues": lives,
        "processes": events["began"], "faults": dict(faults), "errors": dict(errors),
        "samples": sum(len(record.what["numbers"]) for record in records if record.event == "trained"),
    }  # fmt: skip


def privilege() -> str | None:
    """Why there can be no hosts here; None if there can."""
    return missing_privilege() if os.getuid() == 0 else "network namespaces need root"
