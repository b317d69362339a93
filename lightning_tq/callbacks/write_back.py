# SPDX-License-Identifier: Apache-2.0
"""WriteBack: stores values that a step computed as new fields of its samples."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import NonTensorStack

from lightning_tq.batch import meta_of
from lightning_tq.checks import are_names, check_choice, check_int
from lightning_tq.run import Run, run_of
from transfer_queue import BatchMeta, StorageFullError, TransferQueueClient
from transfer_queue.errors import InvalidRequestError, TransferQueueError

Stage = Literal["train", "val", "test", "predict"]
_CLEAR_EVERY_S = 0.2
_STORAGE_ADVICE = (
    "The queue is full of samples, so a fit can't write new fields back, and only training frees space. Limit the "
    "samples (queue.total_storage_size) so that all of their fields fit into queue.memory. Or let "
    "producers lease groups, as many as a GroupSampler admits, or raise queue.memory."
)
_STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}


class WriteBack(Callback):
    """Stores values that a step returns as new fields of the batch's samples, for other tasks to read.

    The step returns a mapping with one row per sample, ``{"loss": loss, "log_probs": log_probs}``. Other tasks can read
    the fields after the step's hooks. Each data-parallel group writes its own samples once. Padding rows and the sanity
    check are not written.

    A queue with a memory limit needs space for the new fields, because training must write them before it can free
    anything. ``total_storage_size`` samples with all of their fields should fit into ``memory``.

    Examples:
        >>> dm = TQDataModule(predict=Stream(partition="train", task="scoring", fields=["x"], batch_size=4))
        >>> predictions = L.Trainer(callbacks=[WriteBack(["score"])]).predict(Model(), dm)
        >>> client.get_meta(["x", "score"], 16, "train", task_name="ranking").size
        16
    """

    # Not in a thread: a put takes milliseconds (benchmarks/callbacks.py), and a failed put must fail this step.

    def __init__(self, fields: dict[str, str] | list[str], stage: Stage = "predict", loader: int | None = None) -> None:
        """Args:
            fields: {new field: key in the mapping that the step returns}. A list where both are equal.
            stage: Stage of the step: train, val, test or predict.
            loader: Number of the stream, where the stage has several. Default: all of them.
        Raises:
            InvalidRequestError: no fields, an unknown stage, or a loader that is no number; it is a ValueError.
        """
        if not are_names([*fields, *fields.values()] if isinstance(fields, Mapping) else fields):
            raise InvalidRequestError(f"fields must name at least one field, as a mapping or a list, got {fields!r}.")
        check_choice("stage", stage, tuple(_STEPS))
        check_int("loader", loader, 0, optional=True)
        self.fields = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
        self.stage = stage
        self.loader = loader

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        run_of(trainer, "WriteBack")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        stage = trainer.state.stage
        assert stage is not None, "a batch belongs to a stage"
        is_own = stage.dataloader_prefix == self.stage and self.loader in (None, dataloader_idx)
        if is_own and not trainer.sanity_checking:
            self._write(trainer, outputs, batch, dataloader_idx)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def _write(self, trainer: Trainer, outputs: Any, batch: Any, loader: int) -> None:
        values = {field: self._value(outputs, key) for field, key in self.fields.items()}
        run = run_of(trainer)
        if not run.topology.is_reader:
            return  # another rank of the group writes the same values
        if run.of_stage(self.stage)[loader].stream.replay_from is not None:
            return  # the samples are in no queue
        if trainer.state.fn != TrainerFn.FITTING:
            put_back(run.client, meta_of(batch), values)
            return
        try:
            with _freeing_space(run):
                put_back(run.client, meta_of(batch), values)
        except StorageFullError as error:
            raise StorageFullError(f"{error} {_STORAGE_ADVICE}") from error

    def _value(self, outputs: Any, key: str) -> Any:
        if isinstance(outputs, Mapping) and key in outputs:
            return outputs[key]
        found = type(outputs).__name__
        if isinstance(outputs, Mapping):
            found = f"a mapping with {', '.join(map(repr, outputs)) or 'nothing'}"
        raise InvalidRequestError(
            f"WriteBack needs {key!r} from {_STEPS[self.stage]}, which returned {found}. Return a mapping with this "
            f"key and one row per sample, in training together with the loss."
        )


@contextmanager
def _freeing_space(run: Run) -> Iterator[None]:
    """Clear what every task is done with while the main thread, which usually clears at each batch, is blocked."""
    reader = run.train_reader()
    tasks = reader.stream.clearing_tasks
    if not tasks or reader.progress.partition is None:
        yield
        return
    partition, over = reader.progress.partition, threading.Event()

    def clear() -> None:
        with suppress(TransferQueueError):  # the put gets the same error
            while not over.wait(_CLEAR_EVERY_S):
                run.client.clear_consumed(partition, tasks)

    thread = threading.Thread(target=clear, name="lightning-tq-clearing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def put_back(client: TransferQueueClient, meta: BatchMeta, values: Mapping[str, Any]) -> None:
    """Store values as fields of these samples. They are readable when this returns.

    Args:
        values: {field: [N, ...]}, one row per sample. Rows are a tensor on any device, a nested tensor, an array, or a
            list of objects or tensors of any sizes. Gradient graphs are detached. Padding rows are skipped.
    Raises:
        InvalidRequestError: a field has a different number of rows than there are samples. Nothing is written.
        SampleClearedError: the samples were cleared in the meantime.
    Examples:
        >>> meta = client.get_meta(["x"], 4, "train", task_name="evaluation")
        >>> put_back(client, meta, {"score": torch.rand(4)})
        >>> client.get_meta(["x", "score"], 4, "train", task_name="ranking").size
        4
    """
    rows = {name: _rows(name, value, meta.size) for name, value in values.items()}
    if not all(meta.padding_mask):
        client.put(rows, metadata=meta.select_samples(list(range(meta.size))))  # a copy: a put updates its metadata


def _rows(name: str, value: Any, samples: int) -> Any:
    """The value as a column, checked to have one row per sample. A tensor comes to this host in one copy."""
    count = None
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim:
        count = value.size(0) if isinstance(value, torch.Tensor) else len(value)  # len() fails for some nested tensors
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        count = len(value)
        if not all(isinstance(row, torch.Tensor) for row in value):
            value = NonTensorStack(*value)  # numbers stay what they are, too
    if count != samples:
        what = f"a single {type(value).__name__}" if count is None else f"{count} rows"
        raise InvalidRequestError(
            f"field {name!r} has {what} for the {samples} samples of the batch. Write one row per sample: a "
            f"tensor of shape [{samples}, ...], a nested tensor, or a list."
        )
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value if value.device.type == "cpu" else value.cpu()  # which torch 2.6 refuses for nested ones in predict
