# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the internals of Lightning's Trainer, in one place."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from types import FrameType
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import _load
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_tq.progress import Progress
from lightning_tq.stream import StageStream, Stream
from transfer_queue import CheckpointError, CheckpointNotFoundError, GroupSampler
from transfer_queue.errors import ConfigError, InvalidRequestError

_HARMLESS_WARNINGS = (
    # Batches are requested ahead, whatever num_workers is.
    r"The '.*_dataloader' does not have many workers",
    # Workers share one stream, so the length is right for any number of them.
    r"Your `IterableDataset` has `__len__` defined",
    # A data module reports "no loader of this kind" as an empty list.
    r"Total length of `list` across ranks is zero",
    # overfit_batches replays the same batches in the same order.
    r"You requested to overfit but enabled \w+ dataloader shuffling",
    # Lightning's own use of torch, once per process.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)
_HOOKS_BEFORE_THE_DEVICE = ("on_before_batch_transfer", "transfer_batch_to_device")
_ALTERNATIVES = {
    BatchSizeFinder: "Set Stream(micro_batch_size=...), the rows that a step gets, whatever the queue draws at once.",
    LearningRateFinder: "Try learning rates on your own samples, with a DataLoader instead of a TQDataModule.",
}


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The Trainer's own list, so that changes to it take effect."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks


def resume_path(trainer: Trainer) -> str | Path | None:
    """The checkpoint that the run being set up resumes from."""
    # Trainer.ckpt_path is set when the checkpoint is loaded, which is after setup.
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is Trainer._run.__code__:
            path: str | Path | None = frame.f_locals.get("ckpt_path")
            return path
        frame = frame.f_back
    return trainer.ckpt_path


def check_checkpoint_exists(path: str | Path) -> None:
    """Raise CheckpointNotFoundError before the queue is restored; Lightning would say so after it."""
    if _described(path) is None:
        raise CheckpointNotFoundError(f"there is no checkpoint {os.fspath(path)!r} (ckpt_path). Nothing was restored.")


def only_note_sigterm(trainer: Trainer) -> None:
    """Let a SIGTERM on several ranks take effect between batches. Call it in the data module's setup.

    Lightning's handler broadcasts at once. If ranks are in another collective then, both stand still.
    """
    connector = trainer._signal_connector

    def note(signum: int, frame: FrameType | None) -> None:
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        connector.received_sigterm = True

    if trainer.world_size > 1:
        connector._sigterm_notifier_fn = note  # type: ignore[assignment, method-assign]


def restores_after_setup(trainer: Trainer) -> bool:
    """True where a checkpoint is loaded only after ``on_fit_start``, as with FSDP."""
    return trainer.ckpt_path is not None and trainer.strategy.restore_checkpoint_after_setup


def keeps_checkpoints(trainer: Trainer) -> bool:
    """True where the run resumed from a checkpoint, or a callback saves some that it could resume from."""
    saves = any(not isinstance(each, ModelCheckpoint) or _saves(each) for each in _savers(trainer))
    return saves or resume_path(trainer) is not None


def _savers(trainer: Trainer) -> list[Checkpoint]:
    """Callbacks that save checkpoints while a run goes on; the others do so only when it fails."""
    return [each for each in trainer.checkpoint_callbacks if not isinstance(each, OnExceptionCheckpoint)]


def _saves(callback: ModelCheckpoint) -> bool:
    """Whether it saves checkpoints from which a run can resume."""
    return bool(callback.save_top_k != 0 or callback.save_last) and not callback.save_weights_only


def early_checkpoint_path(trainer: Trainer) -> str | None:
    """Where a checkpoint that is due early belongs: next to those of a ModelCheckpoint. ``ckpt_path="last"`` finds it.

    None: no callback says where.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and _saves(callback) and callback.dirpath is not None:
            return f"{os.fspath(callback.dirpath)}/last-early{callback.FILE_EXTENSION}"
    return None


def refuse_async_checkpoints(trainer: Trainer, needs_them: bool) -> None:
    """Raise ConfigError where Lightning writes checkpoints in the background, so that nobody knows when one is there.

    It also removes the one before at once.

    Args:
        needs_them: Whether samples are acknowledged or cleared once a checkpoint is written.
    """
    plugin: CheckpointIO | None = trainer.strategy.checkpoint_io
    while isinstance(plugin, _WrappingCheckpointIO) and not isinstance(plugin, AsyncCheckpointIO):
        plugin = plugin.checkpoint_io
    if needs_them and isinstance(plugin, AsyncCheckpointIO):
        raise ConfigError(
            "with Lightning's AsyncCheckpointIO, a run that is killed may find no checkpoint that holds its samples. "
            "Use TQCheckpoint(asynchronous=True) instead, which also writes checkpoints in the background. Or keep all "
            "samples: TQDataModule(ack='never'), and PartitionSwitch(clear_finished=False) if there is one."
        )


def check_written_checkpoints(trainer: Trainer) -> None:
    """From now on, a checkpoint that this process may not write is an error. Lightning ignores that."""
    plugin: CheckpointIO = trainer.strategy.checkpoint_io
    while isinstance(plugin, _WrappingCheckpointIO) and plugin.checkpoint_io is not None:
        plugin = plugin.checkpoint_io
    if type(plugin).save_checkpoint is TorchCheckpointIO.save_checkpoint and "save_checkpoint" not in vars(plugin):
        plugin.save_checkpoint = partial(_save_and_look, plugin.save_checkpoint)  # type: ignore[method-assign]


def _save_and_look(save: Callable[..., None], checkpoint: dict[str, Any], path: str | Path, **options: Any) -> None:
    before = _described(path)
    save(checkpoint, path, **options)
    now = _described(path)
    if now is None or (now == before and not _is_of_step(path, checkpoint)):
        kept = "it is the one from before" if before else "there is none"
        raise CheckpointError(
            f"the checkpoint {path} was not written: {kept}. Lightning's writer ignores that it lacks the permission. "
            f"Check who may write there, and resume from an earlier checkpoint if one is needed."
        )


def _is_of_step(path: str | Path, checkpoint: dict[str, Any]) -> bool:
    """Whether the file holds this step, or can't be read. Some file systems tell whole seconds, or no time at all."""
    try:
        found = _load(path, map_location="cpu", weights_only=True)  # it may be another user's file
    except (OSError, UnpicklingError):
        return True
    return all(found.get(name) == checkpoint.get(name) for name in ("epoch", "global_step"))


def _described(path: str | Path) -> dict[str, Any] | None:
    """What the file system says of a file, such as its time; None: there is none."""
    import fsspec

    files, name = fsspec.core.url_to_fs(os.fspath(path))
    files.invalidate_cache()
    try:
        return dict(files.info(name))
    except FileNotFoundError:
        return None
    except OSError:  # this process may write, but not look
        return {}


def is_between_batches(trainer: Trainer) -> bool:
    """Whether all batches so far are counted as trained, so that a checkpoint saved now resumes with the next one."""
    counts = trainer.fit_loop.epoch_loop.batch_progress.total
    return counts.ready == counts.completed


def batches_between_checkpoints(trainer: Trainer, stream: Stream) -> int | None:
    """Most batches that are trained from one checkpoint to the next. None: that isn't known."""
    distances = [_distance(trainer, each, stream.num_batches) for each in _savers(trainer)]
    known = [each for each in distances if each is not None]
    return min(known) if known and len(known) == len(distances) else None


def _distance(trainer: Trainer, callback: Callback, num_batches: int | None) -> int | None:
    if type(callback) is not ModelCheckpoint or not _saves(callback):
        return None
    if callback._every_n_train_steps:
        return callback._every_n_train_steps * trainer.accumulate_grad_batches
    if num_batches is None or not callback._every_n_epochs or callback.save_last or trainer.val_check_interval != 1.0:
        return None
    return callback._every_n_epochs * num_batches


def check_checkpoints(trainer: Trainer, train: Stream, dp_size: int, samples: int | None) -> None:
    """Raise InvalidRequestError where samples that wait for a checkpoint would fill the queue before it is saved.

    Args:
        train: The stream that is trained.
        samples: How many the queue holds at most; None: any number.
    """
    rows = (train.micro_batch_size or train.batch_size or 0) * dp_size
    if train.groups is not None:
        rows = 0 if train.cuts_draws else 2 * train.groups  # each a head and a row
    least = "" if train.groups is None else "at least "
    distance = batches_between_checkpoints(trainer, train)
    if not train.acks_free_room or samples is None or distance is None or not rows:
        return
    ahead = int(fetches_ahead(trainer, train))
    if (distance + ahead) * rows <= samples:
        return
    fits = (samples // rows - ahead) // trainer.accumulate_grad_batches
    sooner = f"save a checkpoint at least every {fits} steps (ModelCheckpoint(every_n_train_steps={fits})), "
    raise InvalidRequestError(
        f"stream 'train' keeps its samples until a checkpoint holds their step, so that a resumed run can train them "
        f"again. The next checkpoint comes after {distance:,} batches of {least}{rows:,} samples, but the queue holds "
        f"{samples:,} samples (total_storage_size): training would stand still before it. To go on, "
        f"{sooner if fits > 0 else ''}acknowledge without a checkpoint (TQDataModule(ack='step')), or raise "
        f"total_storage_size."
    )


def fetches_ahead(trainer: Trainer, stream: Stream) -> bool:
    """Whether Lightning fetches each training batch before it trains the previous one, as it does at unknown length.

    Before the fit has its loaders, nobody knows of one beside the stream whose length counts.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None:
        return fetcher.length is None
    return stream.num_batches is None and not isinstance(trainer.limit_train_batches, int)


def changes_batches(trainer: Trainer) -> bool:
    """Whether a hook of the user may change a batch before it is on the device. A copy made ahead would be outdated."""
    owners = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    return any(is_overridden(hook, owner) for hook in _HOOKS_BEFORE_THE_DEVICE for owner in owners)


def step_when_trained(trainer: Trainer, progress: Progress) -> int:
    """Optimizer steps done when the batch that is fetched now is trained. One fetched ahead follows one more batch."""
    if progress.taken == progress.trained:
        return trainer.global_step
    started = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return trainer.global_step + ((started + 1) % trainer.accumulate_grad_batches == 0)


def check_shares(trainer: Trainer, streams: Sequence[StageStream]) -> None:
    """Raise ConfigError for a share of an epoch of unknown length. Lightning's own text speaks of IterableDatasets."""
    for each in streams:
        limit = f"limit_{each.stage}_batches"
        of_epoch = isinstance(getattr(trainer, limit), float) and each.stage == "train"
        for name in [limit, *(["val_check_interval"] if of_epoch else [])]:
            share = getattr(trainer, name, None)  # Lightning sets no val_check_interval where it is a time
            if each.stream.num_batches is None and isinstance(share, float) and share not in (0.0, 1.0):
                raise ConfigError(
                    f"Trainer({name}={share}) is a share of an epoch, but the length of stream {each.label!r} is "
                    f"unknown. Set Stream(num_batches=...), the batches per epoch, or a number of batches: {name}=100."
                )


def check_slots(trainer: Trainer, train: Stream, every_n_steps: int) -> None:
    """Raise InvalidRequestError where a step would wait for ever for groups, or could not bound their staleness.

    ``every_n_steps``: between two versions of the weights.
    """
    sampler, ahead = train.sampler, fetches_ahead(trainer, train)
    if not isinstance(sampler, GroupSampler):
        return
    accumulated, is_cut = trainer.accumulate_grad_batches, train.cuts_draws
    batches = ahead + (1 if is_cut else accumulated)
    remedy = "set Stream(num_batches=...), the batches per epoch, or " if ahead else ""
    if sampler.budget < batches * sampler.groups:
        why = "Lightning fetches one batch ahead where the length is unknown" if ahead else "gradients accumulate"
        raise InvalidRequestError(
            f"stream 'train' needs {batches} batches of {sampler.groups} groups at once, because {why}, but its "
            f"GroupSampler admits {sampler.budget} groups: training would wait for ever. To go on, {remedy}raise ahead."
        )
    bound = sampler.bound
    if bound is None:
        return
    if is_cut == (accumulated == 1) and trainer.lightning_module.automatic_optimization:
        why = "each micro-batch of a draw is a step" if is_cut else f"{accumulated} draws are one step"
        whole = "by manual optimization, once per draw" if train.cuts_by_tokens else (
            "with Stream(micro_batch_size=...) and as many accumulate_grad_batches")  # fmt: skip
        raise InvalidRequestError(
            f"the GroupSampler of stream 'train' bounds staleness (stale={sampler.stale!r}) where each draw is one "
            f"optimizer step, but here {why}. Accumulate the micro-batches of one draw, {whole}, or set stale='train'."
        )
    if sampler.stale == "drop" and bound < ahead:
        raise InvalidRequestError(
            f"the GroupSampler of stream 'train' drops groups that are more than {bound} versions old, "
            f"and what Lightning fetches ahead is one version old at least: it would drop every group. To go on, "
            f"{remedy}raise max_staleness."
        )
    if bound < every_n_steps > 1:
        raise InvalidRequestError(
            f"the GroupSampler of stream 'train' bounds staleness to {bound} versions, but with "
            f"PublishWeights(every_n_steps={every_n_steps}) workers get weights that are up to {every_n_steps} "
            f"steps old. Lower every_n_steps, or raise max_staleness."
        )


def check_step_of_draw(train: Stream, steps: int, progress: Progress) -> None:
    """Raise InvalidRequestError where the last step was not with one draw, so that a bound on staleness has no meaning.

    ``steps``: that the last batch was in.
    """
    sampler, position = train.sampler, progress.position
    if not isinstance(sampler, GroupSampler) or sampler.bound is None or position is None:
        return
    why = ""
    if steps > 1:
        why = f"manual optimization made {steps} with this one"
    elif position.micro_batch:
        why = f"the last step was made {position.micro_batch} micro-batches into a draw that has more"
    elif progress.draws_of_step > 1:
        why = f"the last step was made with {progress.draws_of_step} draws"
    if why:
        raise InvalidRequestError(
            f"the GroupSampler of stream 'train' bounds staleness (stale={sampler.stale!r}) where each draw is one "
            f"optimizer step, but {why}. Accumulate as many micro-batches as each draw has, step at the end of each "
            f"draw with manual optimization, or set stale='train'."
        )


def ignore_harmless_warnings() -> None:
    """Silence what Lightning says to users of other data, or of other products."""
    for message in _HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_tip)


def _is_no_tip(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("💡 Tip:")


def refuse_finders(trainer: Trainer) -> None:
    """Raise InvalidRequestError for callbacks (a Tuner's too) that would use up samples, which exist only once."""
    for callback in callbacks_of(trainer):
        for kind, alternative in _ALTERNATIVES.items():
            if isinstance(callback, kind):
                if getattr(callback, "_early_exit", False):  # a Tuner has added it, and removes it only after a success
                    callbacks_of(trainer).remove(callback)
                raise InvalidRequestError(
                    f"{kind.__name__} tries settings on batches, which would use up samples of the queue. {alternative}"
                )


def correct_progress(checkpoint: dict[str, Any], unstepped: int) -> None:
    """Correct the Trainer's counts in a checkpoint to what a run that resumes from it still has to do.

    Args:
        unstepped: Batches of an accumulation without an optimizer step. The checkpoint lacks their gradients.
    """
    loop = checkpoint["loops"]["fit_loop"]
    progress, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    total, current = progress["total"], progress["current"]
    if _stopped_within_an_epoch(progress, epochs["current"]):  # which Lightning has ended all the same
        for counts in epochs.values():
            counts["processed"] = counts["completed"] = counts["started"] - 1
    between_epochs = epochs["current"]["started"] == epochs["current"]["processed"]
    at_batch_end = total["completed"] == total["processed"] - 1
    if between_epochs or (at_batch_end and progress["is_last_batch"]):
        # With max_steps, Lightning would end an epoch twice and skip the next one. Saved by on_train_epoch_start, it
        # would skip that epoch, because the batches of the one before are over. From its last batch (which always
        # steps), it would resume in the ended epoch, or train the next one without counting that this one began.
        if not between_epochs:  # as Lightning counts it when it resumes at the end of another batch
            loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
        for counts in (total, *epochs.values()):
            counts |= dict.fromkeys(counts, counts["started"])  # Lightning leaves "ready" behind when it restarts
        progress |= {"current": dict.fromkeys(current, 0), "is_last_batch": False}
        return
    for counts in (total, current) if unstepped else ():
        for name in counts:
            counts[name] -= unstepped


def _stopped_within_an_epoch(progress: dict[str, Any], epoch: dict[str, int]) -> bool:
    """Did max_steps or should_stop end training after some batches of an epoch, and were they not its last?"""
    return epoch["processed"] == epoch["started"] and progress["current"]["ready"] and not progress["is_last_batch"]


def begin_next_epoch(trainer: Trainer, stream: Stream) -> None:
    """Count the epoch that the Trainer resumed in as done, and the next one as begun, before its first batch.

    Lightning asks for a batch only once before it ends an epoch. So the next epoch's batches are trained right away.
    """
    loop: Any = trainer.fit_loop
    batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress
    for counts in (epochs.total, epochs.current):
        counts.processed = counts.completed = counts.started  # Lightning leaves "ready" behind when it restarts
        counts.ready = counts.started + 1
        if not fetches_ahead(trainer, stream):  # else Lightning is still to start the epoch, and calls its hooks
            counts.started = counts.ready
    batches.current.reset()
    batches.is_last_batch = False
    batches.current.completed = batches.total.completed - batches.total.processed  # it is increased by one if negative
    loop._data_fetcher.fetched = 0
