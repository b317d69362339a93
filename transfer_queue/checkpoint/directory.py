# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's directory: filled beside its place, swapped in whole, and put right after a swap that broke off."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from transfer_queue.checkpoint.manifest import CONTROLLER, METADATA, STORAGE
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError, TransferQueueError

_OURS = {METADATA, CONTROLLER, STORAGE}


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


class Staging:
    """``path`` is where the files go, from ``begin`` on. Left by an error it leaves nothing; what was there stays."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.target = Path(target).absolute()
        self.path = _beside(self.target, ".tmp")
        self._lock = -1

    def begin(self) -> None:
        """
        Raises:
            CheckpointError: something else is there, or somebody else saves to the same place now.
        """
        try:
            self._check_target()
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._take_over()
            self.path.mkdir()
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> Staging:
        return self

    def _check_target(self) -> None:
        there = self.target
        if there.exists() and not is_checkpoint(there) and any(there.iterdir()):
            raise CheckpointError(f"{there} is there and no checkpoint, so it is not replaced. Name another place.")

    def _take_over(self) -> None:
        """Remove what a killed save left behind."""
        if not self.path.exists():
            return
        lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may be the only whole checkpoint: of a save that was killed in the middle of its swap.
            repair(self.target)
            _remove(self.path)
        except BlockingIOError as error:
            raise CheckpointError(f"somebody else is saving to {self.target} now: {self.path} is in use.") from error
        finally:
            os.close(lock)

    def commit(self) -> None:
        """The files are complete: put them in their place."""
        try:
            old = _beside(self.target, ".old")
            _remove(old)
            _sync(self.path)
            if self.target.exists():
                os.rename(self.target, old)
            os.rename(self.path, self.target)
            _sync(self.target.parent)
            _remove(old)
        except OSError as error:
            raise self._failed(error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        if error is None:
            return
        if not self.target.exists():
            repair(self.target)
        shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, TransferQueueError):
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        there = "the earlier checkpoint there is as it was" if self.target.exists() else "nothing was left there"
        return CheckpointError(f"the checkpoint {self.target} could not be written: {error}; {there}.")


def is_checkpoint(path: Path) -> bool:
    """A whole one: its metadata is written last."""
    return (path / METADATA).is_file()


def repair(target: Path) -> None:
    """Finish a swap that broke off between its two renames: the new checkpoint takes its place, or else the old one."""
    new, old = _beside(target, ".tmp"), _beside(target, ".old")
    if not target.exists() and old.exists():
        os.rename(new if is_checkpoint(new) else old, target)
    if is_checkpoint(target):
        _remove(old)


def find(target: str | os.PathLike[str]) -> Path:
    """The directory of a whole checkpoint.

    Raises:
        CheckpointNotFoundError: there is none; the text names what is missing.
    """
    path = Path(target).absolute()
    try:
        repair(path)
    except OSError:
        if not path.exists():  # else it can be read all the same
            raise
    if not path.is_dir():
        raise CheckpointNotFoundError(f"no checkpoint at {path}: there is no such directory.")
    if not is_checkpoint(path):
        raise CheckpointNotFoundError(f"{path} is no checkpoint, or not a whole one: it has no {METADATA}.")
    return path


def _remove(path: Path) -> None:
    """A directory of ours; anything else that has its name is left alone."""
    if not path.exists():
        return
    foreign = {entry.name for entry in path.iterdir()} - _OURS
    if foreign:
        raise CheckpointError(f"{path} is in the way and not ours: it holds {sorted(foreign)[:3]}. Move it elsewhere.")
    shutil.rmtree(path)


def _sync(directory: Path) -> None:
    """Make the names in it last."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
