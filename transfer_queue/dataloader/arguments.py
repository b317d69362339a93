# SPDX-License-Identifier: Apache-2.0
"""Checks a stream's arguments and brings them to one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.errors import InvalidRequestError


def check_sizes(batch_size: int, micro_batch_size: int) -> None:
    """Raises ValueError with the value seen, like the checks below."""
    if batch_size < 1:
        raise InvalidRequestError(f"batch_size must be at least 1, got {batch_size}.")
    if micro_batch_size < 1:
        raise InvalidRequestError(f"micro_batch_size must be at least 1, got {micro_batch_size}.")
    if micro_batch_size > batch_size:
        raise InvalidRequestError(f"micro_batch_size {micro_batch_size} is larger than batch_size {batch_size}.")


def check_ranks(dp_rank: int, dp_size: int | None) -> None:
    if dp_rank < 0:
        raise InvalidRequestError(f"dp_rank must be at least 0, got {dp_rank}.")
    if dp_size is not None and dp_rank >= dp_size:
        raise InvalidRequestError(f"dp_rank {dp_rank} with dp_size {dp_size}: ranks go from 0 to {dp_size - 1}.")


def check_values(data_fields: Sequence[str] | str, layout: str | None) -> None:
    if not data_fields:
        raise InvalidRequestError("data_fields must name at least one field.")
    if layout not in (None, "jagged", "dense"):
        raise InvalidRequestError(f"layout must be 'jagged', 'dense' or None, got {layout!r}.")


def numbered(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the older form of the sampling config, which named a rank of a replica group, to a ``dp_rank``."""
    rest = dict(config)
    replica = [rest.pop(f"data_replica_{name}", None) for name in ("group", "rank", "world_size")]
    group, rank, size = replica
    if replica == [None, None, None]:
        return rest
    if None in replica or size < 1 or not 0 <= rank < size:
        raise InvalidRequestError(
            f"data_replica_group, data_replica_rank and data_replica_world_size are {group}, {rank} and {size}: give "
            f"all three, with a rank from 0 to world size - 1."
        )
    return {"dp_rank": group, **rest}
