# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's directory: written under a temporary name, swapped in whole, repaired after an interruption."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from transfer_queue.checkpoint.files import CONTROLLER, METADATA, STORAGE, sync
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError, TransferQueueError

_OF_THIS_HOST = ("file", "local")
_OURS = {METADATA, CONTROLLER, STORAGE}
SAVE = "save-"
"""How the directory begins that has the files of a checkpoint which was at a URL."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether fsspec opens it. ``file://`` and ``local://`` name a directory of this host."""
    scheme, separator, _ = os.fspath(path).partition("://")
    return bool(separator) and scheme not in _OF_THIS_HOST


def _resolved(target: str | os.PathLike[str]) -> Path:
    """Resolve links and "..", because the temporary directory must be a sibling of the real one."""
    given = os.fspath(target)
    scheme, _, path_of_url = given.partition("://")
    try:
        path = Path(path_of_url if scheme in _OF_THIS_HOST and path_of_url else given).resolve()
    except ValueError as error:  # a NUL
        raise CheckpointError(f"{given!r} is no path: {error}.") from error
    if not path.name:
        raise CheckpointError(f"{given!r} is the root of a file system. Name a directory below it.")
    return path


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


class Staging:
    """A context in which a checkpoint is made: its files go to ``path``. On errors, the earlier checkpoint stays.

    Raises:
        CheckpointError: the target holds something else, or another process is saving there.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.target = _resolved(target)
        self.path = _sibling(self.target, ".tmp")
        self._lock = ExitStack()

    def __enter__(self) -> Staging:
        try:
            repair(self.target)
            if self.target.exists():
                refuse_foreign(self.target, os.listdir(self.target))
            self.target.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():  # left by a killed save
                with _locked(self.path):
                    _remove(self.path)
            self.path.mkdir()
            self._lock.enter_context(_locked(self.path))
        except OSError as error:
            raise self._failed(error) from error
        return self

    def commit(self) -> None:
        """Sync the complete files and swap them in. The context that it is called in explains an OSError."""
        old = _sibling(self.target, ".old")
        _remove(old)
        for directory, _, files in os.walk(self.path):
            for name in (*files, "."):
                sync(Path(directory) / name)
        if self.target.exists():
            os.rename(self.target, old)
        os.rename(self.path, self.target)
        sync(self.target.parent)
        _remove(old)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # the first error is the one to report
                repair(self.target)
        self._lock.close()
        if isinstance(error, OSError) and not isinstance(error, TransferQueueError):
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> CheckpointError:
        there = "the earlier checkpoint there is as it was" if is_checkpoint(self.target) else "nothing was left there"
        return CheckpointError(f"the checkpoint {self.target} could not be written: {error}; {there}.")


def copy_to(source: Path, target: str | os.PathLike[str]) -> None:
    """Copy a complete checkpoint into another directory. Raises CheckpointError; an earlier checkpoint stays."""
    with Staging(target) as staging:
        shutil.copytree(source, staging.path, dirs_exist_ok=True)
        staging.commit()


def is_checkpoint(path: Path) -> bool:
    """Return whether the checkpoint is complete: its metadata is written last."""
    return (path / METADATA).is_file()


def repair(target: Path) -> None:
    """Finish a swap that was interrupted between its two renames: use the new checkpoint, or else the old one."""
    new, old = _sibling(target, ".tmp"), _sibling(target, ".old")
    if target.exists() or not old.exists():
        return
    if not is_checkpoint(new):
        os.rename(old, target)
        return
    with _locked(new):
        os.rename(new, target)
    _remove(old)


def find(target: str | os.PathLike[str]) -> Path:
    """Return the directory of a complete checkpoint.

    Raises:
        CheckpointNotFoundError: there is none; the text names what is missing.
    """
    path = _resolved(target)
    try:
        repair(path)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} can't be read: {error}.") from error
    if not path.is_dir():
        raise CheckpointNotFoundError(f"no checkpoint at {path}: there is no such directory.")
    if not is_checkpoint(path):
        raise CheckpointNotFoundError(f"{path} is no checkpoint, or not a whole one: it has no {METADATA}.")
    return path


def refuse_foreign(place: Path | str, names: Iterable[str]) -> None:
    """Raise CheckpointError if there is a name that no checkpoint has, at the place of a new checkpoint."""
    if found := foreign(names):
        raise CheckpointError(
            f"{place} is there and holds something else ({found[0]}), so it is not replaced. Name another place."
        )


def discard(target: str | os.PathLike[str]) -> None:
    """Remove a checkpoint and what a killed save left of one. Directories with anything else in them stay."""
    path = _resolved(target)
    for each in (path, _sibling(path, ".old"), _sibling(path, ".tmp")):
        try:
            if each.is_dir() and not foreign(os.listdir(each)):
                shutil.rmtree(each)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {each} could not be removed: {error}.") from error


@contextmanager
def _locked(staged: Path) -> Iterator[None]:
    """The directory of a save that runs; the lock ends with its process."""
    lock = os.open(staged, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"another process is saving a checkpoint there now: {staged} is in use.") from error
        except OSError:
            pass  # the file system has no locks: users must not save twice to one place at the same time
        if not (staged.exists() and os.path.samestat(os.fstat(lock), os.stat(staged))):
            raise CheckpointError(f"another process is saving a checkpoint there now: it has removed {staged}.")
        yield
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    """Remove one of our directories, but never anything else with its name."""
    if not path.exists():
        return
    if found := foreign(os.listdir(path)):
        raise CheckpointError(f"{path} is in the way and holds something else ({found[0]}). Move it elsewhere.")
    shutil.rmtree(path)


def foreign(names: Iterable[str]) -> list[str]:
    """Those of the names in a directory, or at a URL, that no checkpoint has."""
    return sorted(name for name in names if name not in _OURS and not name.startswith(SAVE))
