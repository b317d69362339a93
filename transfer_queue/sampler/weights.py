# SPDX-License-Identifier: Apache-2.0
"""The weight of a sample is its training cost, read from its tags."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from transfer_queue.errors import SamplerError

Weight = str | Callable[[dict[str, Any]], float]
"""The name of a tag that holds the weight, or a function of a sample's tags."""


def sample_weights(indexes: list[int], weight: Weight, view: Any) -> list[float]:
    """One weight per index.

    Raises:
        SamplerError: A tag is missing, or a weight is no finite number >= 0; the text names the sample.
    """
    tags = view.get_custom_meta(indexes)
    return [_weigh(index, tags.get(index) or {}, weight) for index in indexes]


def _weigh(index: int, tags: dict[str, Any], weight: Weight) -> float:
    if isinstance(weight, str):
        if weight not in tags:
            raise SamplerError(
                f"sample {index} has no tag {weight!r}, which the sampler balances by; its tags: {sorted(tags)}. "
                f"Write the tag when the sample is put, or build the sampler with another weight=."
            )
        value = tags[weight]
        source = f"tag {weight!r}"
    else:
        value = weight(tags)
        source = f"weight function {getattr(weight, '__name__', weight)!r}"
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise SamplerError(f"{source} of sample {index} is {value!r}; a weight must be a finite number >= 0.")
    # .item(): numpy scalars would overflow silently and slow the partitioning down.
    return value.item() if hasattr(value, "item") else value  # type: ignore[return-value]
