# SPDX-License-Identifier: Apache-2.0
"""PublishWeights: sends each new version of the weights to the producers, through the queue, during training."""

from __future__ import annotations

import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor

import transfer_queue as tq
from lightning_tq.callbacks.background_worker import BackgroundWorker
from lightning_tq.checks import check_choice, check_int
from lightning_tq.device_copies import SideStream
from lightning_tq.producers.model_weights import WEIGHTS_PARTITION, WeightsSnapshot, check_dense
from lightning_tq.run import run_of
from lightning_tq.trainer_compat import restores_after_setup
from transfer_queue import TransferQueueClient
from transfer_queue.errors import InvalidRequestError, QueueUnreachableError

_STOP_TIMEOUT_S = 5.0
_COMPILED = re.compile(r"(^|\.)(?:_orig_mod\.)+")
"""What torch.compile puts before the names in a module's state dict."""


@dataclass(frozen=True, slots=True)
class _Version:
    """A copy of the weights."""

    snapshot: WeightsSnapshot
    number: int
    info: dict[str, Any]
    copied: Any
    """Event that completes with the copy."""


class PublishWeights(Callback):
    """Publishes the weights before the first optimizer step and after every ``every_n_steps``, for WeightsReader.

    A step waits only for a copy in host memory. From an accelerator, that copy overlaps the next forward and backward
    pass. Until then only an optimizer step may change the weights, or a callback from the start of validation on. A
    thread of the first rank puts the copy into the queue, and its errors end the training. The version is
    ``trainer.global_step``. At the end of training the partition is sealed, which ends the readers' waits. Where
    training replays a record, nothing is published: it has no producers, and those of a live run need its weights.
    The copy of the newest version is kept, and put again if its values are lost with a storage unit.

    It also tells the queue which version trains now (``client.advance``), for all partitions that the train stream may
    read. So a lease has the version whose weights are right for it: ``latest(least=lease.version)``.

    Examples:
        >>> trainer = L.Trainer(max_epochs=1, callbacks=[PublishWeights(module="layer")])
        >>> trainer.fit(Model(), dm)
        >>> weights = WeightsReader().latest(timeout_s=5.0)
        >>> weights.version, list(weights.state_dict)
        (4, ['weight', 'bias'])
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        module: str | None = None,
        include: list[str] | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        partition: str = WEIGHTS_PARTITION,
        keep: int = 2,
        when_busy: Literal["skip", "wait"] = "skip",
    ) -> None:
        """Args:
            every_n_steps: Optimizer steps between two versions. The last version is always published.
            module: Submodule to publish ("policy"). Names of weights are then relative to it. Default: the whole model.
            include: Publish only weights with names that match one of these patterns ("*.lora_*"). Default: all.
            dtype: Floating-point weights are cast to it. Default: no cast.
            partition: Partition for the versions, one sample each. It must hold nothing else.
            keep: Number of versions that stay readable. Older ones are cleared.
            when_busy: What happens to a version while one is being put and another waits: it replaces the waiting one
                (skip), or the step waits (wait).
        Raises:
            InvalidRequestError: a number below 1, or an unknown choice; it is a ValueError.
        """
        check_int("every_n_steps", every_n_steps, 1)
        check_int("keep", keep, 1)
        check_choice("when_busy", when_busy, ("skip", "wait"))
        check_choice("dtype", dtype, ("float32", "bfloat16", "float16", None))
        self.every_n_steps = every_n_steps
        self.module = module
        self.include = include
        self.dtype = dtype
        self.partition = partition
        self.keep = keep
        self.when_busy = when_busy
        self.skipped = 0
        """Versions of this fit that a newer one replaced before they were put."""
        self.version: int | None = None
        """Version that this fit published last, on every rank. None before the first."""
        self._worker: BackgroundWorker[_Version] | None = None
        self._free: list[WeightsSnapshot] = []
        self._keys: deque[str] = deque()
        self._newest: _Version | None = None
        """The last one that was put, kept in case that a storage unit is lost."""
        self._copied: Any = None
        self._side: SideStream | None = None

    def info(self, trainer: Trainer, pl_module: LightningModule, version: int) -> dict[str, Any]:
        """Small plain data that readers get as ``Weights.info``. Override it; the first rank calls it."""
        return {}

    # ---- when to publish ----

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        run = run_of(trainer, "PublishWeights")
        if stage != "fit":
            return
        if getattr(trainer.strategy, "zero_stage_3", False):
            raise InvalidRequestError(
                "PublishWeights can't gather the weights of DeepSpeed stage 3. Use FSDP, ModelParallelStrategy or "
                "DeepSpeed stage 2."
            )
        self.skipped, self.version, self._newest = 0, None, None
        if trainer.is_global_zero and run.train_reader().reads_queue:
            self._worker = BackgroundWorker("lightning-tq-weights", self._put, self._put_again)
            self._keys.clear()
            _clear_earlier_versions(run.client, self.partition)

    # A producer may need weights for the first sample, which Lightning may fetch before on_train_start. With a
    # checkpoint, the right weights are loaded when on_load_checkpoint is called.

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            self._publish(trainer, pl_module, int(checkpoint["global_step"]))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.version is None and not restores_after_setup(trainer):
            self._publish(trainer, pl_module, trainer.global_step)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.version != trainer.global_step:
            self._publish(trainer, pl_module, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._worker is not None:
            self._worker.check()
        if self.version is None or trainer.global_step - self.version >= self.every_n_steps:
            self._publish(trainer, pl_module, trainer.global_step)

    # After these hooks, something may change the tensors that are being copied: the step, or a callback that averages
    # weights.

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any = None) -> None:
        """Wait for the copy. The device waits, not the host."""
        copied, self._copied = self._copied, None
        if copied is not None and self._side is not None:
            self._side.lead(copied)

    on_before_optimizer_step = on_train_epoch_end = on_validation_start

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.version != trainer.global_step:
            self._publish(trainer, pl_module, trainer.global_step)
        self._seal(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seal(trainer, pl_module)  # Lightning skips on_train_end when there is nothing to train

    def _seal(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._worker is not None:
            self._worker.flush()
            run_of(trainer).client.seal_partition(self.partition)
            self.teardown(trainer, pl_module, "fit")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # not sealed: a trainer that resumes from a checkpoint publishes again

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop(_STOP_TIMEOUT_S)
        self._free, self._newest, self._copied, self._side = [], None, None, None

    # ---- copy and put ----

    def _publish(self, trainer: Trainer, pl_module: LightningModule, version: int) -> None:
        """All ranks must call it, because the weights may be sharded over them."""
        self.version = version
        run_of(trainer).announce(version)  # before the weights are copied, so that no group is leased with the last one
        state = _full_state(trainer, pl_module)
        if self._worker is None:
            return
        snapshot = self._free.pop() if self._free else WeightsSnapshot()
        copied = self._copy(self._selected(state), snapshot, pl_module)
        newest = _Version(snapshot, version, self.info(trainer, pl_module, version), copied)
        replaced = self._worker.submit(newest, replace=self.when_busy == "skip")
        if replaced is not None:
            self.skipped += 1
            self._free.append(replaced.snapshot)

    def _selected(self, state: dict[str, Any]) -> dict[str, Tensor]:
        prefix = f"{self.module}." if self.module else ""
        own = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
        if self.include is not None:
            own = {name: value for name, value in own.items() if any(fnmatchcase(name, p) for p in self.include)}
        if not own:
            raise InvalidRequestError(
                f"PublishWeights(module={self.module!r}, include={self.include!r}) selects none of the "
                f"{len(state)} weights: {', '.join(list(state)[:5])}{', ...' * (len(state) > 5)}"
            )
        return check_dense(own)

    def _copy(self, tensors: dict[str, Tensor], snapshot: WeightsSnapshot, pl_module: LightningModule) -> Any:
        """Start the copy. Returns ``_Version.copied``."""
        device = next((tensor.device for tensor in tensors.values() if not tensor.is_cpu), torch.device("cpu"))
        if self._side is None or self._side.device != device:
            self._side = SideStream(device)
        side = self._side
        views = snapshot.prepare(tensors, getattr(torch, self.dtype) if self.dtype else None, pinned=side.is_real)
        # Only an optimizer step changes parameters, but a forward pass changes buffers. Copy those at once.
        parameters = {parameter.data_ptr() for parameter in pl_module.parameters()}
        own = {name for name, tensor in tensors.items() if tensor.device == device and side.is_real}
        overlapped = {name for name in own if tensors[name].data_ptr() in parameters}
        for name in views.keys() - overlapped:
            views[name].copy_(tensors[name], non_blocking=name in own)
        side.follow(tensors[name] for name in overlapped)
        with side.copies() as copied:
            for name in overlapped:
                views[name].copy_(tensors[name], non_blocking=True)
        self._copied = copied
        return copied

    def _put(self, version: _Version) -> None:
        """Runs in the thread."""
        version.copied.synchronize()
        self._keys.append(version.snapshot.put(self.partition, version.number, version.info))
        if self._newest is not None:
            self._free.append(self._newest.snapshot)
        self._newest = version
        self._clear(self.keep)

    def _clear(self, keep: int) -> None:
        while len(self._keys) > keep:
            tq.kv_clear([self._keys.popleft()], self.partition)

    def _put_again(self) -> None:
        """Runs in the thread: the newest version, which readers may wait for, if it was lost with a storage unit."""
        if (newest := self._newest) is None:
            return
        with suppress(QueueUnreachableError):  # it may be busy; the next put reports an end
            if tq.get_client().get_lost_samples(self.partition):
                self._clear(1)
                if tq.get_client().get_lost_samples(self.partition):
                    newest.snapshot.put(self.partition, newest.number, newest.info)


def _full_state(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """The whole state dict, in host memory of the first rank, with names as if nothing were compiled."""
    if isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy)):
        # Like lightning_module_state_dict, but always the full state, whatever the strategy saves.
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        assert trainer.strategy.model is not None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(trainer.strategy.model, options=options)
    else:
        state = pl_module.state_dict() if trainer.is_global_zero else {}
    return {_COMPILED.sub(r"\1", name): value for name, value in state.items()}


def _clear_earlier_versions(client: TransferQueueClient, partition: str) -> None:
    """Clear an earlier trainer's versions. Its readers continue with ours, unless it had sealed the partition."""
    known = client.get_stats()["partitions"].get(partition)
    if known is not None and known["sealed"]:
        client.clear_partition(partition)
    elif keys := list(tq.kv_list(partition).get(partition, {})):
        tq.kv_clear(keys, partition)
