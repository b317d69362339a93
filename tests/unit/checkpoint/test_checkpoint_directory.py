# SPDX-License-Identifier: Apache-2.0
"""Whenever a save is killed, what lies at its place is a whole checkpoint: the earlier one, or the new one."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from transfer_queue.checkpoint.directory import Staging, find
from transfer_queue.checkpoint.files import CONTROLLER, METADATA
from transfer_queue.checkpoint.saved_state import SavedState
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


@contextmanager
def save(target: Path, what: str) -> Iterator[Staging]:
    """All of a save but its end."""
    with Staging(target) as staging:
        write(staging, what)
        yield staging


def write(staging: Staging, what: str) -> None:
    (staging.path / CONTROLLER).write_text(what)
    (staging.path / METADATA).write_text("{}")


def what_is_at(target: Path) -> str:
    return (find(target) / CONTROLLER).read_text()


STEPS = [(os, "rename"), (shutil, "rmtree"), (os, "fsync"), (os, "mkdir"), (os, "unlink"), (os, "rmdir")]


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """The process ends instead of its ``number``-th step that changes what lies on the disk; what it did is kept."""
    done: list[str] = []

    def dying(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if len(done) == number:
                raise Killed
            done.append(name)
            return step(*args, **kwargs)

        return run

    for module, name in STEPS:
        monkeypatch.setattr(module, name, dying(name, getattr(module, name)))
    return done


def interrupted_save(target: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> bool:
    """Was it killed?"""
    with monkeypatch.context() as patched:
        kill_at(patched, number)
        staging = Staging(target)
        try:
            write(staging.__enter__(), "new")
            staging.commit()
        except Killed:
            return True
        finally:
            staging._lock.close()  # as the kernel does for a process that ended
    return False


def test_a_save_that_is_killed_at_any_step_leaves_the_earlier_checkpoint_or_the_new_one(tmp_path, monkeypatch):
    found, number, killed = set(), 0, True
    while killed:
        target = tmp_path / str(number) / "c"
        with save(target, "earlier") as staging:
            staging.commit()
        killed = interrupted_save(target, monkeypatch, number)
        found.add(what_is_at(target))
        with save(target, "next") as staging:
            staging.commit()
        assert what_is_at(target) == "next"
        assert os.listdir(target.parent) == ["c"]
        number += 1
    assert found == {"earlier", "new"}
    assert number > 8


def test_a_first_save_that_is_killed_at_any_step_leaves_nothing_or_all(tmp_path, monkeypatch):
    number, killed, found = 0, True, set()
    while killed:
        target = tmp_path / str(number) / "c"
        killed = interrupted_save(target, monkeypatch, number)
        try:
            found.add(what_is_at(target))
        except CheckpointNotFoundError:
            found.add("nothing")
        number += 1
    assert found == {"nothing", "new"}


@pytest.mark.parametrize("step", ["rename", "fsync"])
def test_a_save_whose_disk_refuses_any_step_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, step):
    target, real, failures = tmp_path / "c", getattr(os, step), 0
    with save(target, "earlier") as staging:
        staging.commit()
    for number in range(2):
        calls = iter(range(100))

        def refusing(*args: Any, fail_at: int = number, calls: Any = calls) -> Any:
            if next(calls) == fail_at:
                raise OSError(5, "Input/output error")
            return real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(os, step, refusing)
            with (
                pytest.raises(CheckpointError, match=r"could not be written: .*Input/output error"),
                save(target, "new") as staging,
            ):
                staging.commit()
        failures += 1
        assert what_is_at(target) == "earlier"
        assert os.listdir(tmp_path) == ["c"]
    assert failures == 2


def test_an_error_inside_leaves_nothing_and_comes_out_as_it_is(tmp_path):
    with pytest.raises(KeyError), save(tmp_path / "c", "new"):
        raise KeyError("mine")
    assert os.listdir(tmp_path) == []


def test_two_saves_to_one_place_are_told_apart(tmp_path):
    with save(tmp_path / "c", "first") as first:
        with pytest.raises(CheckpointError, match="another process is saving"), Staging(tmp_path / "c"):
            pass
        first.commit()
    assert what_is_at(tmp_path / "c") == "first"


def test_a_directory_that_another_save_removed_before_it_was_locked_is_not_used(tmp_path, monkeypatch):
    lock = fcntl.flock

    def late(descriptor, how):
        shutil.rmtree(tmp_path / "c.tmp")
        (tmp_path / "c.tmp").mkdir()  # the other save's own
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(CheckpointError, match="another process is saving"), Staging(tmp_path / "c"):
        pass
    assert os.listdir(tmp_path) == ["c.tmp"]


def test_a_state_that_was_replaced_since_it_was_checked_is_not_read(tmp_path):
    state, other = tmp_path / "state", tmp_path / "other"
    state.write_bytes(b"earlier")
    saved = SavedState(state)
    other.write_bytes(b"new")
    other.replace(state)
    with pytest.raises(CheckpointError, match="another checkpoint was saved to"):
        next(saved.slices())


def test_a_link_to_a_checkpoint_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "disk" / "c")
    for what in ("earlier", "new"):
        with save(tmp_path / "c", what) as staging:
            staging.commit()
        assert what_is_at(tmp_path / "c") == what
    assert (tmp_path / "c").is_symlink()
    assert os.listdir(tmp_path / "disk") == ["c"]


def test_a_path_that_leads_through_the_checkpoint_itself_is_saved_there(tmp_path):
    for what in ("earlier", "new"):
        with save(tmp_path / "c" / ".." / "c", what) as staging:
            staging.commit()
        assert (what_is_at(tmp_path / "c"), os.listdir(tmp_path)) == (what, ["c"])


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    def refusing(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refusing)
    with save(tmp_path / "c", "new") as staging:
        staging.commit()
    assert what_is_at(tmp_path / "c") == "new"
