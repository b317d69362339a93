# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint: what its JSON files list, and .npy arrays and plain files with checksums."""

from __future__ import annotations

import errno
import io
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import CheckpointError, CheckpointNotFoundError
from transfer_queue.storage.wire import Layout

METADATA = "metadata.json"
CONTROLLER = "controller_state.msgpack"
STORAGE = "simple_storage"
VALUES = "values.json"


class DataFile(msgspec.Struct, frozen=True):
    """One file. ``crc32`` covers what follows the header; only .npy files have a header."""

    name: str
    nbytes: int
    crc32: int


class BlockFiles(msgspec.Struct, frozen=True):
    """Rows of one field with the same layout. ``samples``: the index of each row; None: the partition's, in order.

    dense: ``values`` [rows, *shape]. ragged: ``values`` flat, row i is values[offsets[i] : offsets[i + 1]], of shape
    ``shapes[i]`` if it has more than one dim. objects: ``values`` is msgpack, cut at ``offsets`` in bytes.
    Elements of a dtype that NumPy lacks (bfloat16, float8) are unsigned integers of the same size.
    """

    layout: Layout
    rows: int
    values: DataFile
    offsets: DataFile | None = None
    shapes: DataFile | None = None
    samples: DataFile | None = None


class FieldFiles(msgspec.Struct, frozen=True):
    name: str
    blocks: list[BlockFiles]


class PartitionFiles(msgspec.Struct, frozen=True):
    """One partition. ``directory`` has its files. ``samples``: the indexes of all its samples."""

    name: str
    directory: str
    samples: DataFile
    fields: list[FieldFiles]


class ValueFiles(msgspec.Struct, frozen=True):
    """``values.json``."""

    format: int
    partitions: list[PartitionFiles]


class Metadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """``metadata.json``, written last: a directory that has it is complete.

    ``directory``: the one next to it that has the other files; "": its own.
    """

    format: int
    storage_saved: bool
    user_metadata: dict[str, Any]
    version: str
    controller: DataFile
    values: DataFile | None = None
    directory: str = ""


for _kind in (ValueFiles, Metadata):
    msgspec.json.Decoder(_kind)  # prepared at import: see config.py


_PIECE = 1 << 22


class GrowingFile:
    """A file that grows. ``close`` returns what was written; ``sync`` makes it durable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "xb")  # noqa: SIM115 (closed by its own ``close`` or ``discard``)
        self._header_nbytes = self._file.write(self._header(0))
        self._nbytes = self._crc = 0

    def _header(self, rows: int) -> bytes:
        """What stands in front, of one length whatever the number of rows."""
        return b""

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B") if len(data) else b""
        self._file.write(view)
        self._nbytes += len(view)
        self._crc = zlib.crc32(view, self._crc)

    def close(self, rows: int = 0) -> DataFile:
        """``rows``: how many an array has."""
        with self._file as file:
            file.seek(0)
            file.write(self._header(rows))
        return DataFile(self._path.name, self._header_nbytes + self._nbytes, self._crc)

    def discard(self) -> None:
        """Close the file, of an aborted checkpoint too: what is not on the disk by now may have no room there."""
        self._file.raw.close()


class GrowingArray(GrowingFile):
    """A .npy file of [rows, *row_shape]. ``write`` appends whole rows."""

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: Sequence[int] = ()) -> None:
        self._dtype, self._row_shape = dtype.newbyteorder("<"), tuple(row_shape)
        super().__init__(path)

    def _header(self, rows: int) -> bytes:
        """NumPy leaves room for more digits of ``rows``."""
        header, described = io.BytesIO(), {"descr": self._dtype.str, "fortran_order": False}
        np.lib.format.write_array_header_1_0(header, {**described, "shape": (rows, *self._row_shape)})
        return header.getvalue()


def write_array(path: Path, array: NDArray[Any]) -> DataFile:
    """Write a whole array."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return _whole(GrowingArray(path, array.dtype, array.shape[1:]), data, len(array))


def write_bytes(path: Path, data: bytes) -> DataFile:
    """Write a whole file."""
    return _whole(GrowingFile(path), data)


def _whole(file: GrowingFile, data: Any, rows: int = 0) -> DataFile:
    try:
        file.write(data)
        return file.close(rows)
    finally:
        file.discard()


def plain(name: str) -> str:
    """Return a file name from a manifest. Raises CheckpointError if it leads out of the directory."""
    if Path(name).name != name or name == "..":
        raise CheckpointError(f"a file of the checkpoint is said to be {name!r}, outside of its directory.")
    return name


def replace(path: Path, new: Path) -> None:
    """Put a new file in the place of another one, atomically."""
    sync(new)
    new.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems can't sync directories
            raise
    finally:
        os.close(descriptor)


class SavedFile:
    """A file that the manifest names, read from its beginning."""

    def __init__(self, directory: Path, expected: DataFile) -> None:
        """Check that the file exists with its expected size.

        Raises:
            CheckpointNotFoundError: it is missing.
            CheckpointError: it is longer or shorter than it was written.
        """
        self.path = directory / plain(expected.name)
        self._expected = expected
        try:
            have = self.path.stat().st_size
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"the checkpoint lacks {self.path}: was it copied whole?") from error
        if have != expected.nbytes:
            raise CheckpointError(f"{self.path} has {have} bytes, {expected.nbytes} were written: was it copied whole?")

    def chunks(self, sizes: Iterator[int] | Sequence[int], skip: int = 0) -> Iterator[NDArray[np.uint8]]:
        """Yield its bytes after the header, in chunks of these sizes, which must add up to the whole; then check them.

        Raises:
            CheckpointError: the contents differ from what was written.
        """
        crc = 0
        with open(self.path, "rb") as file:
            file.seek(skip)
            for size in sizes:
                chunk = np.empty(size if 0 <= size <= self._expected.nbytes else 0, np.uint8)
                if file.readinto(chunk.data) != size:
                    raise CheckpointError(f"{self.path} ends too early: its rows take more bytes than it has.")
                crc = zlib.crc32(chunk.data, crc)
                yield chunk
            if file.read(1):
                raise CheckpointError(f"{self.path} goes on after its last row.")
        if crc != self._expected.crc32:
            raise CheckpointError(f"{self.path} was changed since it was written: its checksum differs.")

    def whole(self) -> bytes:
        """Read a whole file without a header."""
        (data,) = self.chunks([self._expected.nbytes])
        return data.tobytes()

    def check(self) -> None:
        """Read a whole file without a header, and keep nothing of it. Raises what ``chunks`` raises."""
        nbytes = self._expected.nbytes
        for _ in self.chunks(min(_PIECE, nbytes - start) for start in range(0, nbytes, _PIECE)):
            pass

    def header(self, dtype: np.dtype[Any], shape: Sequence[int]) -> int:
        """Return the length of a .npy file's header. Raises CheckpointError unless it has this dtype and shape."""
        try:
            with open(self.path, "rb") as file:
                if np.lib.format.read_magic(file) != (1, 0):
                    raise ValueError("not version 1.0")
                found, fortran, have = np.lib.format.read_array_header_1_0(file)[::-1]
                nbytes = file.tell()
        except OSError:
            raise
        except Exception as error:  # numpy parses a header as Python, and many parts of that fail in their own way
            raise CheckpointError(f"{self.path} is no .npy file: {error}.") from error
        if (found, fortran, have) != (dtype.newbyteorder("<"), False, tuple(shape)):
            raise CheckpointError(f"{self.path} holds {found} {have}, expected {dtype} {tuple(shape)}.")
        return nbytes

    def array(self, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
        """Read a whole .npy file."""
        nbytes = math.prod(shape) * dtype.itemsize
        (data,) = self.chunks([nbytes], self.header(dtype, shape))
        return data.view(dtype).reshape(tuple(shape))
