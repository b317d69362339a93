# SPDX-License-Identifier: Apache-2.0
"""PublishWeights: hands each new version of the weights to the producers, through the queue, beside the training."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor

import transfer_queue as tq
from lightning_tq.background import Background
from lightning_tq.callbacks.partition_switch import datamodule_of
from lightning_tq.checks import check_int
from lightning_tq.weights import PARTITION, Snapshot, check_state
from transfer_queue import TransferQueueClient
from transfer_queue.errors import InvalidRequestError

_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Version:
    """A copy of the weights on its way."""

    snapshot: Snapshot
    number: int
    info: dict[str, Any]
    copied: torch.cuda.Event | None
    """What tells that the copy is there; None: it is already."""


class PublishWeights(Callback):
    """Publishes the weights before the first optimizer step and after every so many; WeightsReader gets them.

    The step waits for a copy on the host only; on CUDA that runs beside the next forward and backward pass. A thread of
    the first rank puts it into the queue; what it raises ends the training. The version is ``trainer.global_step``.
    When training has ended the partition is sealed: that is how readers learn of it.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        module: str | None = None,
        include: list[str] | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        partition: str = PARTITION,
        keep: int = 2,
        when_busy: Literal["skip", "wait"] = "skip",
    ) -> None:
        """Args:
            every_n_steps: Optimizer steps between two versions. The last one is always published.
            module: Submodule to publish ("policy"); names of weights are then relative to it. Default: all of it.
            include: Only weights whose names match one of these patterns ("*.lora_*"). Default: all.
            dtype: Floating-point weights are cast to it on the way. Default: as they are.
            partition: Where versions go, one sample each. Only for weights.
            keep: Versions that stay readable; older ones are cleared.
            when_busy: While one version is being put another waits. A third one takes its place and that is counted
                (skip), or the step waits (wait).
        Raises:
            InvalidRequestError: a number below 1, or an unknown choice; is a ValueError.
        """
        for name, value in {"every_n_steps": every_n_steps, "keep": keep}.items():
            check_int(name, value, 1)
        if when_busy not in ("skip", "wait"):
            raise InvalidRequestError(f"when_busy must be skip or wait, got {when_busy!r}.")
        if dtype not in (None, "float32", "bfloat16", "float16"):
            raise InvalidRequestError(f"dtype must be float32, bfloat16, float16 or None, got {dtype!r}.")
        self.every_n_steps = every_n_steps
        self.module = module
        self.include = include
        self.dtype = dtype
        self.partition = partition
        self.keep = keep
        self.when_busy = when_busy
        self.skipped = 0
        """Versions of this fit that were replaced by a newer one before they were put."""
        self._version: int | None = None
        self._work: Background[_Version] | None = None
        self._free: list[Snapshot] = []
        self._keys: deque[str] = deque()
        self._copied: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def version(self) -> int | None:
        """Of the weights that this fit handed out last, on every rank; None before the first."""
        return self._version

    def info(self, trainer: Trainer, pl_module: LightningModule, version: int) -> dict[str, Any]:
        """What travels with a version as ``Weights.info``: small plain data. Override; called on the first rank."""
        return {}

    # ---- when ----

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        datamodule = datamodule_of(trainer, "PublishWeights")
        if stage != "fit":
            return
        if getattr(trainer.strategy, "zero_stage_3", False):
            raise InvalidRequestError(
                "PublishWeights can't gather the weights of DeepSpeed stage 3. Use FSDP, ModelParallelStrategy, or "
                "stage 2."
            )
        self.skipped, self._version = 0, None
        if trainer.is_global_zero:
            self._work = Background("lightning-tq-weights", self._put)
            self._keys.clear()
            _forget_earlier(datamodule.client, self.partition)

    # A producer may need weights for the first sample, and Lightning fetch that before on_train_start. With a
    # checkpoint the right weights are there when on_load_checkpoint is called.

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            self._publish(trainer, pl_module, int(checkpoint["global_step"]))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._version is None and not restores_later(trainer):
            self._publish(trainer, pl_module, trainer.global_step)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._version != trainer.global_step:
            self._publish(trainer, pl_module, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._work is not None:
            self._work.check()
        if self._version is None or trainer.global_step - self._version >= self.every_n_steps:
            self._publish(trainer, pl_module, trainer.global_step)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._copied is not None:  # the step changes what is being copied
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._version != trainer.global_step:
            self._publish(trainer, pl_module, trainer.global_step)
        self._seal(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seal(trainer)  # where Lightning found nothing to train, it left on_train_end out

    def _seal(self, trainer: Trainer) -> None:
        if self._work is not None:
            self._work.flush()
            datamodule_of(trainer, "PublishWeights").client.seal_partition(self.partition)
            self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()  # not sealed: a trainer that goes on from a checkpoint publishes there again

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.stop(_STOP_TIMEOUT_S)
        self._free, self._copied = [], None

    # ---- how ----

    def _publish(self, trainer: Trainer, pl_module: LightningModule, version: int) -> None:
        """All ranks call it where the weights are spread over them."""
        self._version = version
        state = _full_state(trainer, pl_module)
        if self._work is None:
            return
        snapshot = self._free.pop() if self._free else Snapshot()
        copied = self._copy(self._selected(state), snapshot, pl_module)
        newest = _Version(snapshot, version, self.info(trainer, pl_module, version), copied)
        replaced = self._work.submit(newest, replace=self.when_busy == "skip")
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
                f"PublishWeights(module={self.module!r}, include={self.include!r}) selects nothing of the "
                f"{len(state)} weights: {', '.join(list(state)[:5])}, ..."
            )
        return check_state(own)

    def _copy(
        self, tensors: dict[str, Tensor], snapshot: Snapshot, pl_module: LightningModule
    ) -> torch.cuda.Event | None:
        """Returns what tells the thread that the copy is there (``_Version.copied``)."""
        on_cuda = any(tensor.is_cuda for tensor in tensors.values())
        places = snapshot.prepare(tensors, getattr(torch, self.dtype) if self.dtype else None, pinned=on_cuda)
        if not on_cuda:
            for name, place in places.items():
                place.copy_(tensors[name])
            return None
        # Only an optimizer step changes parameters; buffers change in a forward pass, so they are copied before it.
        learned = {parameter.data_ptr() for parameter in pl_module.parameters()}
        late = {name for name, tensor in tensors.items() if tensor.data_ptr() in learned}
        for name in places.keys() - late:
            places[name].copy_(tensors[name], non_blocking=True)
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name in late:
                places[name].copy_(tensors[name], non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)
        return self._copied

    def _put(self, version: _Version) -> None:
        """In the thread."""
        if version.copied is not None:
            version.copied.synchronize()
        self._keys.append(version.snapshot.put(self.partition, version.number, version.info))
        self._free.append(version.snapshot)
        while len(self._keys) > self.keep:
            tq.kv_clear([self._keys.popleft()], self.partition)


def restores_later(trainer: Trainer) -> bool:
    """Is a checkpoint to be loaded that isn't yet when ``on_fit_start`` is called? So it is with FSDP and the like."""
    return trainer.ckpt_path is not None and trainer.strategy.restore_checkpoint_after_setup


def policy_version(trainer: Trainer) -> int:
    """Version of the weights that producers have or will get next: the newest published, or the global step."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        if isinstance(callback, PublishWeights) and callback.version is not None:
            return callback.version
    return trainer.global_step


def _full_state(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """The whole state dict on the first rank; what is spread over ranks is gathered there, on the host."""
    if isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy)):
        # What lightning_module_state_dict does, but whole whatever the strategy is told to save.
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        assert trainer.strategy.model is not None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(trainer.strategy.model, options=options))
    return dict(pl_module.state_dict()) if trainer.is_global_zero else {}


def _forget_earlier(client: TransferQueueClient, partition: str) -> None:
    """Versions of an earlier trainer: its readers go on with ours, unless it told them that it had ended."""
    known = client.get_stats()["partitions"].get(partition)
    if known is None:
        return
    if known["sealed"]:
        client.clear_partition(partition)
        return
    keys = list(tq.kv_list(partition).get(partition, {}))
    if keys:
        tq.kv_clear(keys, partition)
