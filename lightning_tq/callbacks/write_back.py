# SPDX-License-Identifier: Apache-2.0
"""WriteBack: what a step computed becomes new fields of the samples it was computed for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import NonTensorStack, TensorDict

from lightning_tq.callbacks.partition_switch import datamodule_of
from transfer_queue import BatchMeta, StorageFullError, TransferQueueClient
from transfer_queue.errors import InvalidRequestError, TransferQueueError

if TYPE_CHECKING:
    from lightning_tq.datamodule import TQDataModule

Stage = Literal["train", "val", "test", "predict"]
_CLEAR_EVERY_S = 0.2
_ROOM = (
    "What a step of a fit writes back finds no room in a queue that is full of samples, since training makes room only "
    "by going on. Bound the queue by samples (queue.total_storage_size), so that as many with all of their fields fit "
    "into queue.memory; or pace producers (StalenessGuard); or raise queue.memory."
)
_STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}


class WriteBack(Callback):
    """Puts values that a step returns back onto the samples of its batch, where other tasks can wait for them.

    The step returns a mapping with one row per sample, ``{"loss": loss, "log_probs": log_probs}``. The fields are there
    for every task as soon as the step's hooks are over. Each data-parallel group writes its own samples once; rows that
    only pad a batch, and the sanity check, are left out.

    A queue that is bounded in bytes must keep room for the new fields: in a fit, training is what makes room, and it
    goes on once they are written. ``total_storage_size`` samples with all of their fields should fit into ``memory``.
    """

    # In place, not in a thread: a put takes milliseconds (benchmarks/callbacks.py), and what failed fails this step.

    def __init__(self, fields: dict[str, str] | list[str], stage: Stage = "predict", loader: int | None = None) -> None:
        """Args:
            fields: New field of the samples: key in what the step returns. A list where both are the same.
            stage: Whose step: train, val, test or predict.
            loader: Number of the stream, where the stage has several. Default: all of them.
        Raises:
            InvalidRequestError: no fields, or an unknown stage; is a ValueError.
        """
        self.fields = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
        if not self.fields or isinstance(fields, str):
            raise InvalidRequestError(f"fields must name at least one field, as a mapping or a list, got {fields!r}.")
        if stage not in _STEPS:
            raise InvalidRequestError(f"stage must be one of {', '.join(_STEPS)}, got {stage!r}.")
        self.stage = stage
        self.loader = loader

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        datamodule_of(trainer, "WriteBack")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._write("train", trainer, outputs, batch, 0)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        if not trainer.sanity_checking:
            self._write("val", trainer, outputs, batch, dataloader_idx)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._write("test", trainer, outputs, batch, dataloader_idx)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._write("predict", trainer, outputs, batch, dataloader_idx)

    def _write(self, stage: Stage, trainer: Trainer, outputs: Any, batch: Any, loader: int) -> None:
        if stage != self.stage or self.loader not in (None, loader):
            return
        values = {field: self._value(outputs, key) for field, key in self.fields.items()}
        datamodule = datamodule_of(trainer, "WriteBack")
        if not datamodule.topology.is_reader:
            return  # peers of the group computed the same
        if trainer.state.fn != TrainerFn.FITTING:
            put_back(datamodule.client, meta_of(batch), values)
            return
        try:
            with _making_room(datamodule):
                put_back(datamodule.client, meta_of(batch), values)
        except StorageFullError as error:
            raise StorageFullError(f"{error} {_ROOM}") from error

    def _value(self, outputs: Any, key: str) -> Any:
        if isinstance(outputs, Mapping) and key in outputs:
            return outputs[key]
        found = type(outputs).__name__
        if isinstance(outputs, Mapping):
            found = f"a mapping with {', '.join(map(repr, outputs)) or 'nothing'}"
        raise InvalidRequestError(
            f"WriteBack looks for {key!r} in what {_STEPS[self.stage]} returns, which is {found}. Return a mapping "
            f"with it, one row per sample; in training beside the loss."
        )


@contextmanager
def _making_room(datamodule: TQDataModule) -> Iterator[None]:
    """Clears what every task is done with while this thread waits: it is the one that does so from batch to batch."""
    feed = datamodule.train_feed()
    others = feed.stream.clear_consumed
    if others is False or feed.partition is None:
        yield
        return
    tasks = [feed.stream.task, *(others if isinstance(others, list) else ())]
    clear = partial(datamodule.client.clear_consumed, feed.partition, tasks)
    over = threading.Event()
    thread = threading.Thread(target=_repeat, args=(clear, over), name="lightning-tq-room", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _repeat(clear: Callable[[], object], over: threading.Event) -> None:
    while not over.wait(_CLEAR_EVERY_S):
        try:
            clear()
        except TransferQueueError:
            return  # the put hears of it, too


def meta_of(batch: Any) -> BatchMeta:
    """The metadata of a loader's pair, also of one that a transfer hook made a tuple of."""
    meta = batch[1] if isinstance(batch, Sequence) or hasattr(batch, "meta") else None
    if not isinstance(meta, BatchMeta):
        raise InvalidRequestError(
            f"the batch is a {type(batch).__name__} without BatchMeta, so its samples aren't known. Let hooks that "
            f"change a batch return the pair (data, meta)."
        )
    return meta


def put_back(client: TransferQueueClient, meta: BatchMeta, values: Mapping[str, Any]) -> None:
    """Store values as fields of these samples. They are readable when this returns.

    Args:
        values: Per field one row per sample: a tensor (on any device, with or without a graph), a nested tensor, an
            array, or a list; of tensors, which may differ in their sizes, or of objects. Rows that only pad the batch
            are skipped.
    Raises:
        InvalidRequestError: a field has another number of rows than there are samples; nothing is written then.
        SampleClearedError: the samples were cleared meanwhile.
    """
    rows = {name: _rows(name, value, meta.size) for name, value in values.items()}
    real = [position for position, filler in enumerate(meta.padding_mask) if not filler]
    if not real:
        return
    columns = {name: _column(value, None if len(real) == meta.size else real) for name, value in rows.items()}
    client.put(TensorDict(columns, batch_size=[len(real)]), metadata=meta.select_samples(real))


def _rows(name: str, value: Any, samples: int) -> Any:
    """The value as a tensor on the host without a graph, or as a list; checked to have a row per sample."""
    if isinstance(value, np.ndarray) and value.ndim:
        value = torch.tensor(value) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        count = value.size(0) if value.ndim else None
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        value = [_host(row) for row in value]
        count = len(value)
    else:
        count = None
    if count != samples:
        what = f"a single {type(value).__name__}" if count is None else f"{count} rows"
        raise InvalidRequestError(
            f"field {name!r} has {what} for the {samples} samples of the batch. Write back one row per sample: a "
            f"tensor of shape [{samples}, ...], a nested tensor, or a list."
        )
    return value


def _host(row: Any) -> Any:
    return row.detach().cpu() if isinstance(row, torch.Tensor) else row


def _column(rows: Any, positions: list[int] | None) -> Any:
    if isinstance(rows, torch.Tensor) and not rows.is_nested:
        return rows if positions is None else rows[positions]
    if isinstance(rows, torch.Tensor) and positions is None:
        return rows
    listed = list(rows.unbind()) if isinstance(rows, torch.Tensor) else rows
    listed = listed if positions is None else [listed[position] for position in positions]
    return _joined(listed)


def _joined(rows: list[Any]) -> Any:
    if not all(isinstance(row, torch.Tensor) and not row.is_nested for row in rows):
        return NonTensorStack(*rows)
    if len({(row.dtype, row.ndim) for row in rows}) > 1:
        return NonTensorStack(*rows)  # nothing that one tensor could hold
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows)
    only_lengths = len({row.shape[1:] for row in rows}) == 1
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged if only_lengths else torch.strided)
