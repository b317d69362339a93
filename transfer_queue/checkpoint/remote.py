# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at a URL such as ``s3://bucket/run/queue``, which fsspec opens: copied there and back as a whole.

An object store can't rename. So the files of each save get a directory of their own, and ``metadata.json`` next to
it names that directory. It is one object, written last: until then the earlier checkpoint is the one that is found.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from transfer_queue.checkpoint.directory import SAVE, copy_to, discard, find, foreign, is_url, refuse_foreign
from transfer_queue.checkpoint.files import METADATA, Metadata, plain
from transfer_queue.control.saved import decoded
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError, ConfigError, TransferQueueError
from transfer_queue.utils.logging_utils import get_logger

P = ParamSpec("P")
R = TypeVar("R")

RETRY_AFTER_S = (0.5, 2.0, 8.0)
"""Pauses between the attempts to copy one file."""
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError, ImportError)
_log = get_logger(__name__)


class RemoteCheckpoint:
    """The place of one checkpoint at a URL. Credentials and endpoints are fsspec's own settings."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL without a path, or for which fsspec has no file system."""
        import fsspec  # it takes 30 ms, and only URLs need it

        self.url = url.rstrip("/")
        if "://" not in self.url:
            raise ConfigError(f"{url!r} names no place for a checkpoint: add a bucket and a path.")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"the checkpoint {url} can't be reached: {error}.") from error

    def check(self) -> None:
        """Raise CheckpointError if something else lies there, which must not be replaced."""
        with self._explained("written"):
            refuse_foreign(self.url, self._names())

    def write(self, directory: Path) -> None:
        """Copy a complete checkpoint there from a local directory. A file that fails is tried again, four times in all.

        Raises:
            CheckpointError: it could not be copied. An earlier checkpoint stays.
        """
        metadata = self._decoded((directory / METADATA).read_bytes())
        name = f"{SAVE}{uuid.uuid4().hex}"
        with self._explained("written"):
            try:
                for path in sorted(directory.rglob("*")):
                    if path.is_file() and path.name != METADATA:
                        target = posixpath.join(self._root, name, path.relative_to(directory).as_posix())
                        self._make_directory(posixpath.dirname(target))
                        self._retried(self._fs.put_file, str(path), target)
                data = msgspec.json.encode(msgspec.structs.replace(metadata, directory=name))
                self._retried(self._fs.pipe_file, posixpath.join(self._root, METADATA), msgspec.json.format(data))
            except BaseException:
                if not self._may_name(name):
                    self._remove_files([name])
                    self._remove_empty()
                raise
            self._remove_files(self._replaced(by=name))

    def _make_directory(self, path: str) -> None:
        """Where files need one. Object stores don't, and would make a bucket; their paths begin with its name."""
        if path.startswith("/"):
            self._retried(self._fs.makedirs, path, exist_ok=True)

    def _may_name(self, directory: str) -> bool:
        """Whether ``metadata.json`` may name this directory: its write may have worked although the answer was lost."""
        try:
            self._fs.invalidate_cache()
            data = self._fs.cat_file(posixpath.join(self._root, METADATA))
            return self._decoded(data).directory == directory
        except FileNotFoundError:
            return False
        except Exception:  # each file system has errors of its own
            return True

    def read(self, directory: Path) -> None:
        """Copy the checkpoint to a new local directory.

        Raises:
            CheckpointNotFoundError: there is none, or a file of it is missing.
            CheckpointError: it could not be copied, or it is none of ours.
        """
        with self._explained("read"):
            if METADATA not in self._names():
                raise CheckpointNotFoundError(f"no checkpoint at {self.url}: it has no {METADATA}.")
            data = self._retried(self._fs.cat_file, posixpath.join(self._root, METADATA))
            source = posixpath.join(self._root, plain(self._decoded(data).directory))
            for name in self._fs.find(source):
                target = directory / posixpath.relpath(name, self._root)
                target.parent.mkdir(parents=True, exist_ok=True)
                self._retried(self._fs.get_file, name, str(target))
            directory.mkdir(parents=True, exist_ok=True)
            (directory / METADATA).write_bytes(data)

    def remove(self) -> None:
        """Remove the checkpoint, if there is one. Where anything else lies, nothing is removed, as from a directory."""
        with self._explained("removed"):
            if foreign(names := self._names()):
                return
            if METADATA in names:
                self._retried(self._fs.rm_file, posixpath.join(self._root, METADATA))
            self._remove_files(self._replaced())
            self._remove_empty()

    def _remove_empty(self) -> None:
        with contextlib.suppress(Exception):  # each file system has errors of its own; an empty directory may stay
            if not self._names():
                self._fs.rmdir(self._root)  # object stores have no directories

    def _names(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return [posixpath.basename(each.rstrip("/")) for each in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def _replaced(self, by: str = "") -> list[str]:
        """Names of what earlier checkpoints left, copies made by hand included; without the save of this name."""
        names = self._names()
        return sorted({*names} - {*foreign(names), METADATA, by})

    def _remove_files(self, names: list[str]) -> None:
        for name in names:
            try:
                self._fs.rm(posixpath.join(self._root, name), recursive=True)
            except FileNotFoundError:
                continue
            except Exception as error:  # a leftover costs room, but no checkpoint depends on it
                _log.warning(f"{posixpath.join(self.url, name)} could not be removed ({error}); nothing needs it.")

    def _retried(self, attempt: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        for pause_s in RETRY_AFTER_S:
            try:
                return attempt(*args, **kwargs)
            except _FINAL:
                raise
            except Exception as error:  # each file system has errors of its own
                _log.warning(f"{self.url}: {type(error).__name__}: {error}; the next attempt follows in {pause_s} s.")
            threading.Event().wait(pause_s)
        return attempt(*args, **kwargs)

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except TransferQueueError:
            raise
        except Exception as error:  # each file system has errors of its own
            is_missing = done == "read" and isinstance(error, FileNotFoundError)
            raise (CheckpointNotFoundError if is_missing else CheckpointError)(
                f"the checkpoint {self.url} could not be {done}: {type(error).__name__}: {error}."
            ) from error

    def _decoded(self, metadata: bytes) -> Metadata:
        return decoded(metadata, Metadata, f"{self.url}/{METADATA}", msgspec.json.decode)


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove the checkpoint in a directory or at a URL, with what a killed save left of one. Nothing else is removed.

    Raises:
        CheckpointError: it could not be removed.
    Examples:
        >>> client.save_checkpoint("runs/queue")
        >>> tq.remove_checkpoint("runs/queue")
    """
    if is_url(path):
        RemoteCheckpoint(os.fspath(path)).remove()
    else:
        discard(path)


def upload_checkpoint(directory: str | os.PathLike[str], url: str) -> None:
    """Copy a checkpoint from a local directory to a URL, where it replaces an earlier one once it is whole.

    A file that can't be copied is tried again, four times in all.

    Raises:
        CheckpointNotFoundError: there is no whole checkpoint in the directory.
        CheckpointError: it could not be copied, or something else lies at the URL. An earlier checkpoint stays.
        ConfigError: fsspec has no file system for this URL, or a package for it is missing.
    Examples:
        >>> client.save_checkpoint("runs/queue")
        >>> tq.upload_checkpoint("runs/queue", "memory://bucket/queue")  # s3://..., gs://... likewise
        >>> tq.describe_checkpoint("memory://bucket/queue")["partitions"]
        {}
    """
    if not is_url(url):
        copy_to(find(directory), url)
        return
    remote = RemoteCheckpoint(url)
    remote.check()
    remote.write(find(directory))
