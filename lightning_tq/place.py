# SPDX-License-Identifier: Apache-2.0
"""Place: a position in a stream, as a checkpoint holds it, and whether a stream can go on there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import InvalidRequestError

Place = dict[str, Any]
"""As ``StreamingDataset.state_dict`` says it; the epoch in which its iterator began; sizes that batches were cut by."""

_NEEDED = {"partition_id", "batch_index", "micro_batch"}


def check_is_place(place: Mapping[str, Any], label: str) -> None:
    """Raises InvalidRequestError for anything else."""
    if not set(place) >= _NEEDED:
        raise InvalidRequestError(f"can't resume stream {label!r} from {dict(place)!r}: not a position in a stream.")


def check_sizes(place: Place, sizes: Mapping[str, int], label: str) -> None:
    """Raises InvalidRequestError where batches are numbered otherwise than when the checkpoint was saved."""
    changed = {name: place[name] for name, now in sizes.items() if place.get(name, now) != now}
    if changed:
        was = ", ".join(f"{name}={value}" for name, value in changed.items())
        now = ", ".join(f"{name}={sizes[name]}" for name in changed)
        raise InvalidRequestError(
            f"the checkpoint stands in partition {place['partition_id']!r} at batch {place['batch_index']} of stream "
            f"{label!r}, which was read with {was}; now it is {now}, so batches are numbered anew. Go on with the same "
            f"sizes until the partition ends, or resume from the end of an epoch."
        )


def check_is_there(place: Place, settled: int) -> None:
    """Raises InvalidRequestError where the queue has let go of the batch that comes next."""
    if settled > place["batch_index"]:
        raise InvalidRequestError(
            f"the checkpoint stands at batch {place['batch_index']} of partition {place['partition_id']!r}, but "
            f"batches before {settled} were acknowledged when a later checkpoint was saved, and are gone. Resume from "
            f"the last checkpoint, or start another queue from what TQCheckpoint saved beside this one; "
            f"TQDataModule(ack='never') keeps every batch."
        )
