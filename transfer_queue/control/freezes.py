# SPDX-License-Identifier: Apache-2.0
"""Freezes: samples that a checkpoint is reading keep their values."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from transfer_queue.protocol import NO_INDEXES, Indexes


@dataclass(slots=True, eq=False)
class FrozenSamples:
    """All samples with an index below ``before``. ``kept``: those of them that were cleared since."""

    before: int
    kept: list[Indexes] = field(default_factory=list)


class Freezes(list[FrozenSamples]):
    """All freezes. Who has them is known by the calls that hold them."""

    def end(self, samples: FrozenSamples) -> Indexes:
        """Returns what was cleared since, and may be deleted now."""
        self.remove(samples)
        # Many times faster than np.unique, which hashes.
        kept = np.sort(np.concatenate([NO_INDEXES, *samples.kept]), kind="stable")
        return self.keep(kept[np.diff(kept, prepend=-1) > 0])

    def keep(self, cleared: Indexes) -> Indexes:
        """Return the cleared samples that may lose their values now; ``end`` returns the others."""
        for freeze in self:
            held = cleared < freeze.before
            if held.any():
                freeze.kept.append(cleared[held])
                cleared = cleared[~held]
        return cleared

    def holds(self, indexes: Indexes) -> npt.NDArray[np.bool_]:
        """Which of the indexes must keep their values."""
        return indexes < max((freeze.before for freeze in self), default=0)
