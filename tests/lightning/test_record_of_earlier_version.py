# SPDX-License-Identifier: Apache-2.0
"""Records that earlier versions wrote are still replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import transfer_queue as tq
from transfer_queue.checkpoint.saved_state import SavedState
from transfer_queue.errors import InvalidRequestError


def test_a_record_of_an_earlier_version_has_no_batch_size_so_only_larger_batches_are_refused(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = SavedState.batches
    earlier = lambda self: [(name, replace(batch, batch_size=None)) for name, batch in saved(self)]  # noqa: E731
    monkeypatch.setattr(SavedState, "batches", earlier)
    record = tq.RecordedBatches(recorded)
    record.check(["x"], 1, 8)
    with pytest.raises(InvalidRequestError, match="has batches of 4 rows, and this stream has batch_size=2"):
        record.check(["x"], 1, 2)
