# SPDX-License-Identifier: Apache-2.0
"""Blocks on disk, in the server: an unlinked file that is mapped like the arena, and the steps in which bytes move."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from transfer_queue.calls import PIECE, PIECE_NBYTES
from transfer_queue.errors import ConfigError
from transfer_queue.storage.messages import PAGE_NBYTES
from transfer_queue.storage.unit.arena import Arena
from transfer_queue.storage.wire import ByteArray, WireColumn

SPILL_STEP_NBYTES, _ROWS_PER_STEP = PIECE_NBYTES // 4, PIECE // 16
"""Written or read per step. A slow disk takes some milliseconds for them, during which no request is served."""
_SHARE_OF_DISK = 2
"""By default the file may take this fraction (one half) of the free disk."""
FOLDER = "transfer_queue_ssd_offload"


class SpillFile(Arena):
    """An arena in a file without a name, so that nothing is left when its processes have ended, however they end.

    It is read where it is mapped, and written by ``write`` alone. A write to the mapping of a full disk would end
    the process. It also takes up to 100 ms per page while the kernel writes that page back.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None, nbytes: int | None, least_nbytes: int = 1, sharers: int = 1
    ) -> None:
        """
        Args:
            directory: The file is in its folder ``transfer_queue_ssd_offload``. None: the system's temporary directory.
            nbytes: The bound on the file's size; None: its share of half of what is free on the disk.
            least_nbytes: Smaller blocks stay in memory.
            sharers: How many units make such a file.
        Raises:
            ConfigError: no file can be made there.
        """
        folder = Path(directory or tempfile.gettempdir()) / FOLDER
        self.least_nbytes = max(least_nbytes, PAGE_NBYTES)
        self._folder = folder
        self.failure = ""
        """Why the last write failed; "" if it didn't."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            super().__init__(nbytes or free_nbytes(folder) // _SHARE_OF_DISK // sharers, _unlinked_file(folder))
        except OSError as error:
            raise ConfigError(
                f"backend.SimpleStorage.ssd_offload: no file of {nbytes or 'half of the free'} bytes can be made in "
                f"{str(folder)!r}: {error}. Set ssd_offload.path to a directory that is writable, or enabled to false."
            ) from error

    def write(self, extent: ByteArray, start: int, data: ByteArray) -> bool:
        """Write to an extent from ``start`` on. False: the disk is full, or fails."""
        offset, view = self.offset_of(extent) + start, memoryview(data.data)
        try:
            os.posix_fallocate(self.descriptor, offset, max(len(view), 1))  # the writes are four times as fast then
            while len(view):
                written = os.pwrite(self.descriptor, view, offset)
                offset, view = offset + written, view[written:]
        except OSError as error:
            self.failure = f"{error.strerror or error}, at {str(self._folder)!r}"
            return False
        self.failure = ""
        return True

    def stored(self, data: ByteArray) -> ByteArray | None:
        """Store a copy of these bytes. None: the file or the disk is full."""
        extent = self.allocate(data.nbytes)
        return extent if extent is not None and self.write(extent, 0, data) else None

    def holds(self, memory: ByteArray) -> bool:
        return memory.nbytes > 0 and self.offset_of(memory) >= 0

    def _return(self, start: int, size: int) -> None:
        with contextlib.suppress(OSError):  # a file system without holes: the space is used again later
            super()._return(start, size)


def free_nbytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return max(found.f_bavail * found.f_frsize, PAGE_NBYTES * _SHARE_OF_DISK)


def _unlinked_file(folder: Path) -> int:
    with contextlib.suppress(OSError):  # not every file system has it
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    descriptor, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return descriptor


def warm(parts: Iterable[WireColumn]) -> Iterator[None]:
    """Read these rows of the file, so that they are in memory when an answer is made of them. Yields between steps."""
    left, rows = SPILL_STEP_NBYTES, 0
    for part in parts:
        data, starts = part.data, part.starts
        for start, end in zip(starts.tolist(), (starts + part.sizes).tolist(), strict=True):
            while start < end:
                if not left or rows == _ROWS_PER_STEP:
                    yield
                    left, rows = SPILL_STEP_NBYTES, 0
                stop = min(end, start + left)
                data[start:stop:PAGE_NBYTES].max()
                data[stop - 1].item()
                left, rows, start = left - (stop - start), rows + 1, stop
