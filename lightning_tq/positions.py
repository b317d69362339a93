# SPDX-License-Identifier: Apache-2.0
"""Position: where a stream continues, as a checkpoint stores it, and the checks before a run resumes there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from transfer_queue.errors import InvalidRequestError

_NEEDED = {"partition_id", "batch_index", "micro_batch"}
_SIZES = ("batch_size", "micro_batch_size", "dp_size")
_REMEDY = "Resume from the last checkpoint, or start a new queue from what TQCheckpoint saved next to this one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The next micro-batch of a stream. Optional fields are None in checkpoints that don't hold them."""

    partition_id: str
    batch_index: int = 0
    """Index of the next batch in the partition."""
    micro_batch: int = 0
    """Index of the next micro-batch in that batch."""
    epoch: int | None = None
    """Epoch in which the iterator started."""
    batch_size: int | None = None
    """Rows per batch; the three sizes decide how batches are numbered."""
    micro_batch_size: int | None = None
    """Rows per micro-batch."""
    dp_size: int | None = None
    """Data-parallel ranks."""

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], label: str) -> Position:
        """Read a checkpoint's dict. Raises InvalidRequestError for a dict that is no position of a stream."""
        if not set(state) >= _NEEDED:
            raise InvalidRequestError(
                f"can't resume stream {label!r} from {dict(state)!r}: this is not a position in a stream. "
                f"It needs {', '.join(sorted(_NEEDED))}."
            )
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in state.items() if name in known})

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def check_sizes(self, now: Position, label: str) -> None:
        """Raise InvalidRequestError where batches are numbered differently now than when this was saved."""
        saved = {name: getattr(self, name) for name in _SIZES if getattr(self, name) is not None}
        changed = {name: value for name, value in saved.items() if getattr(now, name) != value}
        if changed:
            was = ", ".join(f"{name}={value}" for name, value in changed.items())
            current = ", ".join(f"{name}={getattr(now, name)}" for name in changed)
            raise InvalidRequestError(
                f"the checkpoint is at batch {self.batch_index} of partition {self.partition_id!r} in stream "
                f"{label!r}, which was read with {was}. It is now read with {current}, which numbers batches "
                f"differently. Keep the sizes until the partition ends, or resume from the end of an epoch."
            )

    def check_not_acked(self, acked: int) -> None:
        """Raise InvalidRequestError where the next batch was acknowledged. ``acked``: first batches that were."""
        if acked > self.batch_index:
            raise InvalidRequestError(
                f"the checkpoint is at batch {self.batch_index} of partition {self.partition_id!r}, but the batches "
                f"before {acked} were acknowledged since then and are gone. {_REMEDY}. "
                f"TQDataModule(ack='never') keeps every batch."
            )

    def check_partition_exists(self, existing: Collection[str]) -> None:
        """Raise InvalidRequestError where the partition was cleared, so that nothing would fill it again.

        Args:
            existing: Partitions in the queue before this run's producers started. Empty for a new queue.
        """
        started = self.batch_index or self.micro_batch
        if existing and started and self.partition_id not in existing:
            raise InvalidRequestError(
                f"the checkpoint is at batch {self.batch_index} of partition {self.partition_id!r}, which was cleared. "
                f"The queue holds {list_names(existing)}. {_REMEDY}."
            )


def list_names(names: Collection[str], most: int = 6) -> str:
    """Names in order, for a message: the first ``most`` of them and the number of the others."""
    shown = ", ".join(map(repr, sorted(names)[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
