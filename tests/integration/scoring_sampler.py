# SPDX-License-Identifier: Apache-2.0
"""Samplers of a user's own that look at NumPy arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from transfer_queue import BaseSampler


class BestScores(BaseSampler):
    """Those with the highest scores first; ``scores[i]`` is of sample ``first + i``."""

    def sample(self, ready_indexes: Any, batch_size: int, *, scores: Any, first: Any, **_: Any) -> Any:
        own = scores[np.asarray(ready_indexes) - first]
        best = [ready_indexes[at] for at in np.argsort(-own)[:batch_size].tolist()]
        return best, list(best)


class Described(BaseSampler):
    """Says in an error what it was given."""

    def sample(self, ready_indexes: Any, batch_size: int, *, seen: Any, **_: Any) -> Any:
        (value,) = seen["deep"]
        raise ValueError(f"{type(value).__name__} {value.dtype.str} {value.shape} {value.tolist()!r}")
