# SPDX-License-Identifier: Apache-2.0
"""What ranks of a run do together: one acts, all hear how it went."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from transfer_queue.errors import from_wire, to_wire

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer

_QUIET = (
    # Fetching ahead is a thread's work here, whatever num_workers says.
    r"The '.*_dataloader' does not have many workers",
    # Workers share one stream, so the length holds for any number of them.
    r"Your `IterableDataset` has `__len__` defined",
    # A list of no loaders is how a data module says that it has none of a kind.
    r"Total length of `list` across ranks is zero",
    # overfit_batches replays the same batches, in their order.
    r"You requested to overfit but enabled \w+ dataloader shuffling",
)


def on_first_rank(owner: Trainer | Fabric, action: Callable[[], str]) -> str:
    """Run on global rank 0; its result, or its error, on every rank. A collective: all ranks must call it."""
    failure: BaseException | None = None
    answer: tuple[str, tuple[str, str] | None] = ("", None)
    if owner.is_global_zero:
        try:
            answer = (action(), None)
        except Exception as error:  # the other ranks wait for the broadcast; unheard, they would for ever
            failure = error
            answer = ("", to_wire(error))
    result, refused = owner.strategy.broadcast(answer, src=0)
    if failure is not None:
        raise failure
    if refused is not None:
        raise from_wire(*refused)
    return result


def resumed_from(trainer: Trainer) -> str | Path | None:
    """The checkpoint that the run which is being set up goes on from."""
    from lightning.pytorch import Trainer

    # Trainer.ckpt_path says it once the checkpoint is loaded, which is after setup.
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is Trainer._run.__code__:
            path: str | Path | None = frame.f_locals.get("ckpt_path")
            return path
        frame = frame.f_back
    return trainer.ckpt_path


def quiet_known_warnings() -> None:
    """Lightning warns of things that don't hold for streams of a queue."""
    for message in _QUIET:
        warnings.filterwarnings("ignore", message=message)
