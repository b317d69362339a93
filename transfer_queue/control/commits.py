# SPDX-License-Identifier: Apache-2.0
"""Commits: the published writes whose values storage units may still keep aside, in the order of their publishes."""

from __future__ import annotations

import numpy as np

from transfer_queue.protocol import Indexes, WriteName


class Commits(dict[WriteName, Indexes]):
    """Of one partition: the samples of each write.

    Units must commit writes to the same samples in this order. The writer, a later writer, a reader, a save, or the
    janitor for a client that has ended may send them there. So each of them names the writes that come first.
    """

    def first_for(self, samples: Indexes) -> list[WriteName]:
        """What is committed before these samples are read or written. Where one has some of them, it is all of them,
        because that one may come after any other.
        """
        if not len(samples):
            return []
        first, last = samples.min(), samples.max()
        near = (own for own in self.values() if own.min() <= last and first <= own.max())
        return list(self) if any(np.isin(own, samples).any() for own in near) else []
