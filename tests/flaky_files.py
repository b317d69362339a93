# SPDX-License-Identifier: Apache-2.0
"""A file system at ``flaky://``, in this process' memory like ``memory://``, which fails or waits when told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem


class FlakyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """``failures``: so many copies of files to it fail. ``open``: cleared, these copies wait.

    ``forbidden``: files whose names end so can't be written from now on. ``tells_times``: cleared, all files look as if
    they were written in the same second.
    """

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012 (shared by all instances, as in its base class)
    pseudo_dirs = [""]  # noqa: RUF012
    failures = 0
    forbidden: str | None = None
    tells_times = True
    copied = 0
    open_gate = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.replace("flaky://", "memory://"))
        return stripped

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().info(path, **kwargs)
        if not type(self).tells_times:
            found.pop("created", None)
            found["mtime"] = 0
        return found

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        forbidden = type(self).forbidden
        if forbidden is not None and "w" in mode and path.endswith(forbidden):
            raise PermissionError("Forbidden")
        return super()._open(path, mode, *args, **kwargs)

    def put_file(self, *args: Any, **kwargs: Any) -> None:
        cls = type(self)
        assert cls.open_gate.wait(100.0)
        if cls.failures:
            cls.failures -= 1
            raise ConnectionResetError("the network is gone")
        cls.copied += 1
        super().put_file(*args, **kwargs)


@contextmanager
def flaky_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakyFileSystem]]:
    """The file system, empty. A checkpoint tries again at once where it would wait for a little while."""
    monkeypatch.setattr("transfer_queue.checkpoint.remote.RETRY_AFTER_S", (0.0, 0.0, 0.0))
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    FlakyFileSystem.store.clear()
    FlakyFileSystem.pseudo_dirs[:] = [""]
    FlakyFileSystem.failures = FlakyFileSystem.copied = 0
    FlakyFileSystem.forbidden, FlakyFileSystem.tells_times = None, True
    FlakyFileSystem.open_gate.set()
    yield FlakyFileSystem
    FlakyFileSystem.open_gate.set()
