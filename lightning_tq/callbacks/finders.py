# SPDX-License-Identifier: Apache-2.0
"""Finders: callbacks of Lightning that try things out on real samples, which a queue gives only once."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from transfer_queue.errors import InvalidRequestError

_INSTEAD = {
    BatchSizeFinder: "Set Stream(micro_batch_size=...): rows of what a step gets, whatever the queue draws at once.",
    LearningRateFinder: "Try rates on samples of your own, with a DataLoader over them and no TQDataModule.",
}


def refuse_finders(trainer: Trainer) -> None:
    """Raises InvalidRequestError where the Trainer has such a callback; a Tuner adds one, too."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        for kind, instead in _INSTEAD.items():
            if isinstance(callback, kind):
                raise InvalidRequestError(
                    f"{kind.__name__} tries out training on batches of its own, and would use up samples of the queue. "
                    f"{instead}"
                )
