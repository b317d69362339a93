# SPDX-License-Identifier: Apache-2.0
"""An opened checkpoint: its metadata, the saved state of the queue, and its values."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from transfer_queue.checkpoint.directory import find
from transfer_queue.checkpoint.files import (
    METADATA,
    STORAGE,
    VALUES,
    DataFile,
    Metadata,
    plain,
    write_bytes,
)
from transfer_queue.checkpoint.saved_state import SavedState
from transfer_queue.checkpoint.saved_values import SavedValues
from transfer_queue.control.saved import FORMAT, decoded
from transfer_queue.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidRequestError,
    TransferQueueError,
)


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert errors of the file system to CheckpointError."""
    try:
        yield
    except TransferQueueError:
        raise
    except OSError as error:
        raise CheckpointError(f"the checkpoint {os.fspath(path)} can't be read: {error}.") from error


class Opened:
    """An opened checkpoint. Of the values only the manifest is read; ``values`` is None if they were not saved."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        """Check everything except the values.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or a file of it is missing.
            CheckpointError: it is foreign, damaged, or of a newer version.
        """
        self.path = find(target)
        data, place = (self.path / METADATA).read_bytes(), str(self.path / METADATA)
        self.metadata = metadata = decoded(data, Metadata, place, msgspec.json.decode)
        files = self.path / plain(metadata.directory)
        self.state = SavedState(files / plain(metadata.controller.name), metadata.controller)
        self.values = None
        if metadata.storage_saved:
            if metadata.values is None:
                raise CheckpointError(f"{self.path / METADATA} doesn't name the file that lists the values.")
            self.values = SavedValues(files / STORAGE, metadata.values, self.state)


def check_user_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy. Raises InvalidRequestError for values that are not JSON."""
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=False, ensure_ascii=False).encode()
        plain: dict[str, Any] = json.loads(text)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"a checkpoint's metadata must be JSON: {error}.") from error
    return plain


def complete(directory: Path, user: dict[str, Any], controller: DataFile) -> None:
    """Write the metadata, which marks the checkpoint as complete."""
    values = _described(directory / STORAGE / VALUES)
    version = files("transfer_queue").joinpath("version/distribution").read_text().strip()
    metadata = Metadata(FORMAT, values is not None, user, version, controller, values)
    write_bytes(directory / METADATA, msgspec.json.format(msgspec.json.encode(metadata), indent=1))


def _described(path: Path) -> DataFile | None:
    if not path.exists():
        return None
    data = path.read_bytes()
    return DataFile(path.name, len(data), zlib.crc32(data))


def read_values(directory: Path, state: SavedState) -> SavedValues:
    """Read values that were saved without metadata."""
    manifest = _described(directory / STORAGE / VALUES)
    if manifest is None:
        raise CheckpointNotFoundError(f"no saved values in {directory}: there is no {STORAGE}/{VALUES}.")
    return SavedValues(directory / STORAGE, manifest, state)
