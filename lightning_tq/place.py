# SPDX-License-Identifier: Apache-2.0
"""Place: a position in a stream, as a checkpoint holds it, and whether a stream can go on there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transfer_queue.errors import InvalidRequestError

Place = dict[str, Any]
"""As ``StreamingDataset.state_dict`` says it; the epoch in which its iterator began; sizes that batches were cut by."""

_NEEDED = {"partition_id", "batch_index", "micro_batch"}
_INSTEAD = "Resume from the last checkpoint, or start another queue from what TQCheckpoint saved beside this one"


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
            f"batches before {settled} were acknowledged since, when a later checkpoint was saved or at the end of "
            f"their steps, and are gone. {_INSTEAD}; TQDataModule(ack='never') keeps every batch."
        )


def check_is_held(place: Place, held: Collection[str]) -> None:
    """Raises InvalidRequestError where the queue has let go of the whole partition, which nobody would fill again.

    Args:
        held: Partitions that were there before this run could make any. None: a new queue, with nothing to go back to.
    """
    begun = place["batch_index"] or place["micro_batch"]
    if held and begun and place["partition_id"] not in held:
        raise InvalidRequestError(
            f"the checkpoint stands at batch {place['batch_index']} of partition {place['partition_id']!r}, which was "
            f"cleared: the queue holds {listed(held)}. {_INSTEAD}."
        )


def listed(names: Collection[str], most: int = 6) -> str:
    """Partitions as a message names them, in order: the first ones where there are many."""
    shown = ", ".join(map(repr, sorted(names)[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
