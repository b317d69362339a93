# SPDX-License-Identifier: Apache-2.0
"""WaitHints: for a stream that waits long, a warning that says why it may never end and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lightning_tq.checks import lacking_text
from lightning_tq.stream_reader import StreamReader
from lightning_tq.trainer_compat import callbacks_of, fetches_ahead
from transfer_queue import TransferQueueClient
from transfer_queue.errors import TransferQueueError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_LOOK_EVERY_S = 10.0
_TOO_LATE = ("on_train_start", "on_train_epoch_start")
"""Hooks of a fit that come after the request for the first batch, where the length is unknown."""


class WaitHints:
    """Looks at each wait every 10 s. It asks the queue then, in the watchdog's thread."""

    def __init__(
        self,
        trainer: Trainer,
        client: TransferQueueClient,
        producers_done: Callable[[], bool],
        warn_once: Callable[[str, str], None],
    ) -> None:
        """Args:
        producers_done: Whether the run had producers and all have ended.
        warn_once: Takes a key and a text, and logs one text per key.
        """
        self._trainer = trainer
        self._client = client
        self._producers_done = producers_done
        self._warn_once = warn_once
        self._looks: dict[str, int] = {}  # during the current wait, by label of the reader

    def look(self, readers: Iterable[StreamReader]) -> None:
        """Warn of readers that wait for too long."""
        for reader in readers:
            due = int(reader.waiting_s() / _LOOK_EVERY_S)
            if due > self._looks.get(reader.label, 0):
                self._explain(reader)
            self._looks[reader.label] = due

    def _explain(self, reader: StreamReader) -> None:
        try:
            stats = self._client.get_stats()
        except TransferQueueError:  # the stream itself reports that
            return
        waits = f"stream {reader.label!r} waits for more of partition {reader.partition!r}, but"
        partition = stats["partitions"].get(reader.partition, {})
        lacks, is_sealed, fields = _lacking(stats, reader), partition.get("sealed", False), partition.get("fields", [])
        unknown = [name for name in reader.stream.fields if name not in fields]
        if is_sealed and lacks:
            self._warn_once(
                f"lacks {reader.partition}",
                f"{waits} it is sealed and {lacks}. Put what is missing, or clear those samples.",
            )
        elif not is_sealed and self._producers_done():
            also = f" So far {lacks}." if lacks else ""
            self._warn_once(
                f"done {reader.partition}",
                f"{waits} all producers of this run have ended and none has sealed it.{also} If nothing else fills it, "
                f"seal it when it is complete: client.seal_partition({reader.partition!r}).",
            )
        elif fields and unknown:
            self._warn_once(
                f"unknown {reader.partition}",
                f"{waits} none of its samples has {' or '.join(map(repr, unknown))} so far; they have "
                f"{', '.join(map(repr, fields))}. Check the name in Stream(fields=...), and who puts it.",
            )
        elif self._trainer.sanity_checking:
            self._warn_once(
                "sanity check",
                f"{waits} this is the sanity check, which runs before training. If producers make validation samples "
                f"later, this is a deadlock: set Trainer(num_sanity_val_steps=0).",
            )
        elif reader.stage == "train" and fetches_ahead(self._trainer, reader.stream):
            self._explain_look_ahead(reader)

    def _explain_look_ahead(self, reader: StreamReader) -> None:
        hooks = _own_hooks(self._trainer)
        if reader.taken > reader.trained:
            self._warn_once(
                "ahead",
                f"stream {reader.label!r} waits for batch {reader.taken} while batch {reader.trained} is untrained, "
                f"because Lightning fetches one batch ahead when the length is unknown. If producers wait for that "
                f"step (for new weights), this is a deadlock: set Stream(num_batches=...) or "
                f"Trainer(limit_train_batches=...). If no more samples come, seal the partition: "
                f"client.seal_partition({reader.partition!r}).",
            )
        elif not reader.waited_s and hooks:  # it has got no batch in this run
            self._warn_once(
                "first",
                f"stream {reader.label!r} waits for its first batch, which Lightning fetches before on_train_start and "
                f"on_train_epoch_start when the length is unknown. If {' or '.join(hooks)} makes its samples, this is "
                f"a deadlock: make them in on_fit_start, or set Stream(num_batches=...).",
            )


def _lacking(stats: dict[str, Any], reader: StreamReader) -> str:
    """What the samples for this reader's fetch lack; "" for nothing."""
    for waiting in stats["waiting"]:
        if (waiting.get("task"), waiting["partition"]) == (reader.stream.task, reader.partition):
            return lacking_text(waiting)
    return ""


def _own_hooks(trainer: Trainer) -> list[str]:
    """The user's own hooks that come too late to make the first batch, such as "Rollout.on_train_start"."""
    return [
        f"{type(owner).__name__}.{name}"
        for owner in (trainer.lightning_module, *callbacks_of(trainer))
        for name in _TOO_LATE
        if getattr(owner, name).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning", "lightning_tq")
    ]
