# SPDX-License-Identifier: Apache-2.0
"""A spool is removed at its end; one of a killed process by the next spool of the same user, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from transfer_queue import CheckpointError, spooled_checkpoint

URL = "memory://bucket/queue.tq"
HOLDS = f"""
import os, sys
from transfer_queue import spooled_checkpoint
with spooled_checkpoint({URL!r}) as directory:
    directory.mkdir()
    (directory / "file").write_text("contents")
    if sys.argv[1] == "with a child" and os.fork() == 0:
        print(directory.parent, flush=True)
        sys.stdin.readline()
        os._exit(0)
    elif sys.argv[1] == "alone":
        print(directory.parent, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(temporary: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], Path]]]:
    """``holder("alone")``: a process that is inside its spool, and that spool."""
    started = []

    def start(how: str = "alone") -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        started.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fill_up() -> None:
    with spooled_checkpoint(URL) as directory:
        directory.mkdir()
        raise CheckpointError(f"{directory} is full.")


def test_a_spool_is_removed_however_its_use_ends(temporary: Path) -> None:
    with spooled_checkpoint(URL) as directory:
        directory.mkdir()
        (directory / "file").write_text("contents")
    assert names(temporary) == set()
    with pytest.raises(
        CheckpointError, match=rf"{URL}: .*/checkpoint is full. Its files pass through .*; TMPDIR names"
    ):
        fill_up()
    assert names(temporary) == set()


@pytest.mark.parametrize("how", ["alone", "with a child"])
def test_the_spool_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_stays(
    holder: Callable[..., tuple[subprocess.Popen[str], Path]], temporary: Path, how: str
) -> None:
    killed, left = holder(how)
    _, kept = holder()
    killed.kill()
    killed.wait()
    assert names(temporary) == {left.name, kept.name}
    with spooled_checkpoint(URL) as directory:
        assert names(temporary) == {kept.name, directory.parent.name}
    assert (kept / "checkpoint" / "file").read_text() == "contents"


def test_directories_of_others_stay(holder: Callable[..., tuple[subprocess.Popen[str], Path]], temporary: Path) -> None:
    """Those of another host, whose locks do not hold here, of another user, and what is no spool."""
    killed, left = holder()
    killed.kill()
    killed.wait()
    others = {"spool-tq-another-host-1.d", "spool-tq-mine", "tq-mine.d"}
    for name in others:
        (temporary / name).mkdir()
    if os.geteuid() == 0:
        os.chown(left, 12345, 12345)
        others.add(left.name)
    with spooled_checkpoint(URL) as directory:
        assert names(temporary) == {*others, directory.parent.name}


def test_a_forked_child_that_ends_leaves_its_parents_spool(temporary: Path) -> None:
    with spooled_checkpoint(URL) as directory:
        directory.mkdir()
        code = "import os, sys; from transfer_queue import spooled_checkpoint; c = spooled_checkpoint('memory://x')"
        code += "; d = c.__enter__(); d.mkdir(); p = os.fork(); p or sys.exit(); os.waitpid(p, 0); print(d.exists())"
        told = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TMPDIR": str(temporary)}
        )
        assert told.stdout == "True\n", told.stderr
        assert directory.exists()
