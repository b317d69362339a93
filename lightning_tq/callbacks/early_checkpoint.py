# SPDX-License-Identifier: Apache-2.0
"""EarlyCheckpoint: saves a checkpoint before samples that wait for one fill a bounded queue."""

from __future__ import annotations

from functools import partial
from typing import Literal

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_tq.callbacks.queue_checkpoint import finish_writing
from lightning_tq.checks import counted, list_names
from lightning_tq.loader import StreamReader
from lightning_tq.queue_room import Room
from lightning_tq.run import Run
from lightning_tq.topology import run_on_rank_zero
from lightning_tq.trainer_compat import early_checkpoint_path, is_between_batches

Action = Literal["", "written", "save"]


class EarlyCheckpoint:
    """Looks before a training stream waits for a batch. All ranks look at the same batches, and do the same.

    An ack frees room, as does a finished partition that is cleared. Both need a checkpoint: without it, a run that
    resumes could not train these samples again. So where the next checkpoint is further away than the queue is large,
    producers and the trainer would wait for each other for ever.
    """

    def __init__(self, run: Run, reader: StreamReader) -> None:
        self._run, self._reader = run, reader
        self._clears = reader.stream.acks_free_room
        """Whether an ack frees room. Otherwise, a partition does that a PartitionSwitch clears."""
        self._look_in = 2 if self._clears else 1  # batches
        self._saved_for: set[str] = set()
        """Partitions that the stream had left when a checkpoint was saved here."""
        self._has_said = False
        storage = run.connection.conf.get("backend", {}).get("SimpleStorage", {})
        self._spills = bool(storage.get("ssd_offload", {}).get("enabled"))
        """Then a full memory stops nobody."""

    def before_batch(self) -> None:
        """Acknowledge what may be by now, and save a checkpoint if too much waits for it."""
        progress, trainer = self._reader.progress, self._run.trainer
        if not is_between_batches(trainer):
            return
        if self._clears and progress.trained:  # every rank has started its iterator, and has trained a batch of it
            self._reader.ack_due()  # this batch may need the room
        if not self._waits() and not self._left():
            return
        self._look_in -= 1
        path = early_checkpoint_path(trainer)
        if path is None or self._look_in > 0:
            return
        action, self._look_in = run_on_rank_zero(trainer, self._look)
        if action == "save":
            self._save(path)
        if action:
            run_on_rank_zero(trainer, partial(finish_writing, trainer))
            progress.note_written()
            self._reader.ack_due()
            if self._reader.after_move is not None:
                self._reader.after_move()

    def _waits(self) -> bool:
        """Whether acks that free room wait for a checkpoint."""
        return self._clears and self._reader.progress.waits_for_checkpoints

    def _left(self) -> set[str]:
        """Partitions that streams have moved on from, and that are cleared once there is another checkpoint."""
        waits = self._run.switch.clear_finished and self._run.ack_rule.keeps_checkpoints
        return set(self._run.left_partitions()) - self._saved_for if waits else set()

    def _look(self) -> tuple[Action, int]:
        """What to do, and how many batches later to look again. On the first rank."""
        progress, run = self._reader.progress, self._run
        units = [] if self._spills else run.client.get_storage_stats()
        stats, stream, names = run.client.get_stats(), self._reader.stream, run.left_partitions()
        left = [each for name, each in stats["partitions"].items() if name in names]
        room = Room.of(stats, units, stream.task, run.topology.dp_size, stream.batch_size)
        room = room.without_undrawn(left, stream.task)
        if not self._waits():
            return ("", room.batches_until_full // 2) if room.batches_until_full > 1 else ("save", 1)
        if room.batches_left(progress.kept):
            return "", room.batches_until_look(progress.kept)
        action: Action = "written" if progress.unwritten else "save" if progress.unsaved or self._left() else ""
        return action, 1

    def _save(self, path: str) -> None:
        if not self._has_said:
            self._has_said = True
            kept, others = counted(self._reader.progress.kept, "trained batch", "trained batches"), ""
            what = f"{kept} of stream {self._reader.label!r}"
            if self._waits() and self._reader.progress.unsaved:
                others = ", or acknowledge without a checkpoint: TQDataModule(ack='step')"
            else:
                what = f"finished partitions ({list_names(self._run.left_partitions())})"
            rank_zero_info(
                f"{what} waiting for a checkpoint would fill the queue before one is due, so one is saved early, here "
                f"and whenever that is so: {path}. Save more often (ModelCheckpoint(every_n_train_steps=...)), give "
                f"the queue more room{others}."
            )
        self._saved_for.update(self._run.left_partitions())
        self._run.trainer.save_checkpoint(path, weights_only=False)
