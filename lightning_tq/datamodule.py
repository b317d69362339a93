# SPDX-License-Identifier: Apache-2.0
"""TQDataModule: a Trainer's data, streamed from a queue that it starts or joins."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, get_args

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_tq.callbacks.ack_batches import AckBatches
from lightning_tq.callbacks.fit_report import FitReport
from lightning_tq.callbacks.partition_switch import PartitionSwitch
from lightning_tq.callbacks.publish_weights import PublishWeights
from lightning_tq.callbacks.queue_checkpoint import restore_queue, writes_in_background
from lightning_tq.checks import check_choice
from lightning_tq.loader import StreamLoader, StreamReader, drawn_batches, stream_loader
from lightning_tq.producers.group import Producer, ProducerGroup, check_producers
from lightning_tq.producers.process import refuse_to_train
from lightning_tq.progress import Ack, AckRule, Position, Progress
from lightning_tq.queue_config import QueueConfig, as_queue_config
from lightning_tq.queue_connection import QueueConnection
from lightning_tq.run import Run
from lightning_tq.run_members import RunMembers, SharedQueue
from lightning_tq.stream import (
    StageStream,
    Stream,
    as_stream,
    check_batches_fit,
    check_records,
    check_streams,
    check_tail,
    sampler_modules,
    stage_streams,
)
from lightning_tq.topology import Rank, Topology, run_on_every_rank, run_on_rank_zero, trainer_topology
from lightning_tq.trainer_compat import (
    callbacks_of,
    check_checkpoint_exists,
    check_checkpoints,
    check_shares,
    check_slots,
    check_written_checkpoints,
    ignore_harmless_warnings,
    keeps_checkpoints,
    only_note_sigterm,
    refuse_async_checkpoints,
    refuse_finders,
    resume_path,
)
from transfer_queue import TransferQueueClient, get_metrics_endpoint
from transfer_queue.errors import InvalidRequestError

# Mappings are accepted, too. With them in the type, the command line would not check the options of a stream.
Streams = Stream | list[Stream] | None
Loaders = StreamLoader | list[StreamLoader]


class TQDataModule(LightningDataModule):
    """Starts or joins a queue and feeds a Trainer from it; a step gets ``data, meta = batch``.

    The queue lives from the first fit, validate, test or predict until ``close()``, an exception that ends a run, or
    the end of the process. A queue from an earlier ``transfer_queue.init()`` is used and not closed.

    A checkpoint holds the position after the last trained batch, not after what Lightning fetched ahead. Lightning
    saves rank 0's state only. That is enough, since a batch exists for all ranks or for none.

    Examples:
        >>> dm = TQDataModule(train=Stream(partition="train", task="sft", fields=["x"], batch_size=4))
        >>> trainer = L.Trainer(max_epochs=1)
        >>> trainer.fit(Model(), dm)
        >>> trainer.global_step
        4
    """

    def __init__(
        self,
        train: Stream | None = None,
        val: Streams = None,
        test: Streams = None,
        predict: Streams = None,
        queue: QueueConfig | dict[str, Any] | str | None = None,
        producers: list[Producer] | None = None,
        dp_rank: Rank | None = None,
        dp_size: int | None = None,
        keep_alive: bool = True,
        ack: Ack = "auto",
    ) -> None:
        """Args:
            train: What training reads. A mapping of a Stream's options works as well, here and for other stages.
            val: What validation reads: one stream, or several with a loader each.
            test: What testing reads: one stream or several.
            predict: What prediction reads: one stream or several.
            queue: How to start the queue, or where to join it. A QueueConfig, a mapping of its fields, the path of a
                YAML file, or an address. Default: the queue at TQ_ADDRESS, else a new one on this host.
            producers: Processes that run during a fit (or their own stages), on the first rank.
            dp_rank: Data-parallel rank, or a function of the Trainer that returns it. Default: from the strategy.
            dp_size: Data-parallel groups, for strategies that count every process as a group.
            keep_alive: Keep the queue between fit, validate, test and predict. False: it ends with each of them.
            ack: When a trained batch is acknowledged, so that the queue may delete it. Once a checkpoint holds its
                optimizer step ("checkpoint"), after that step ("step"), or "never". "auto" means "checkpoint" where
                the Trainer saves checkpoints or resumed from one, else "step".
        Raises:
            InvalidRequestError: streams that contradict each other; it is a ValueError.
            ConfigError: an invalid queue configuration.
        """
        super().__init__()
        ignore_harmless_warnings()  # before the Trainer is made
        self._streams = {
            stage: _as_list(stage, streams)
            for stage, streams in {"train": train, "val": val, "test": test, "predict": predict}.items()
        }
        check_choice("ack", ack, get_args(Ack))
        check_streams(self._streams, train_acks=ack != "never")
        self._queue_config = as_queue_config(queue)
        self._producers = check_producers([] if producers is None else producers)
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._keep_alive = keep_alive
        self._ack = ack
        self._connection = QueueConnection()
        self._address: str | None = None
        self._group = ProducerGroup(())
        self._run: Run | None = None
        self._members = RunMembers()
        self._progress: Progress | None = None
        """Of training, in the queue at ``_progress_address``. It outlives its run."""
        self._progress_address: str | None = None
        self._is_untouched = False
        """Whether the run that is being set up has changed nothing in a queue that was open before."""
        self._partitions_at_start: dict[str, int] = {}  # on the first rank: before this run's producers
        if not self._streams["val"]:  # Lightning expects validation wherever val_dataloader is defined
            warnings.filterwarnings("ignore", "You passed in a `val_dataloader` but have no `validation_step`")

    # ---- the queue ----

    def open(self) -> None:
        """Start or join the queue now, in this process. Idempotent.

        ``setup`` calls it. Call it earlier to put data before a run, or when ranks are spawned: they join the queue,
        which then outlives them.
        """
        streams = [stream for streams in self._streams.values() for stream in streams]
        self._connection.open(self._queue_config, sampler_modules(streams), self._address)
        self._address = self._connection.address

    def close(self) -> None:
        """End the run, and the producers and the queue that were started here. Idempotent."""
        self._end_run(failed=True)
        if self._connection.is_open:
            self._address = None
            self._connection.close()

    @property
    def client(self) -> TransferQueueClient:
        """This process's client of the queue. Before a run, call ``open`` first; else a NotInitializedError."""
        return self._connection.client

    @property
    def address(self) -> str:
        """Where other processes join the queue."""
        return self._connection.address

    def stats(self) -> dict[str, Any]:
        """The queue's statistics, and per stream of this process: partition, seconds waited, batches, position."""
        streams = {
            label: {
                "partition": reader.progress.partition, "waited_s": reader.waited_s, "taken": reader.progress.taken,
                "trained": reader.progress.trained, "position": position and position.as_dict(),
            }
            for label, reader in (self._run.readers if self._run else {}).items()
            for position in (reader.progress.position,)
        }  # fmt: skip
        return {**self.client.get_stats(), "streams": streams}

    def partition(self, stage: str = "train", number: int = 0) -> str:
        """The partition that an iterator of this stage ("train", "val", ...) would read now.

        Raises:
            InvalidRequestError: no run is active, or there is no such stream.
        """
        run = self._current_run()
        readers = run.of_stage(stage)
        if not 0 <= number < len(readers):
            raise InvalidRequestError(f"this run has {len(readers)} streams of stage {stage!r}, not number {number}.")
        return run.partition_of(readers[number])

    def __enter__(self) -> TQDataModule:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- a run ----

    @property
    def trainer(self) -> Trainer | None:
        """The Trainer of the run. Lightning sets it, before the ranks find each other."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        if trainer is not None:
            refuse_to_train()
            if self._is_in_use() and self._current_run().trainer is not trainer:
                raise InvalidRequestError(
                    "this data module serves one run at a time, and that of another Trainer is not over. Give each "
                    "Trainer a TQDataModule of its own: they share the queue of this process."
                )
        self._trainer = trainer

    def _is_in_use(self) -> bool:
        return self._run is not None and self._run.trainer.state.status == TrainerStatus.RUNNING

    def setup(self, stage: str) -> None:
        """Open the queue on the first rank, join it on the others, and prepare the streams of this stage."""
        trainer, entry = self._own_trainer(), str(getattr(stage, "value", stage))
        ignore_harmless_warnings()
        self._end_run(failed=True)
        self._is_untouched = self._connection.is_open
        refuse_finders(trainer)
        topology = trainer_topology(trainer, self._dp_rank, self._dp_size)
        streams = stage_streams(entry, self._streams)
        check_shares(trainer, streams)
        if entry == "fit":
            every_n_steps = [each.every_n_steps for each in callbacks_of(trainer) if isinstance(each, PublishWeights)]
            check_slots(trainer, self._streams["train"][0], max(every_n_steps, default=1))
            waits = self._ack in ("auto", "checkpoint") or self._switch(trainer).clear_finished
            is_live = self._streams["train"][0].record is None
            refuse_async_checkpoints(trainer, (waits and is_live) or writes_in_background(trainer))
            check_written_checkpoints(trainer)
        self._group = ProducerGroup(self._producers if trainer.is_global_zero else ())
        shared = run_on_rank_zero(trainer, lambda: self._prepare(entry, topology, streams))
        self._is_untouched = False
        rank_zero_info(f"Queue: {shared.address} (watch it with: lightning-tq status --watch {shared.address})")
        self._members = RunMembers()
        run_on_every_rank(trainer, lambda: self._members.join(trainer, self._connection, self._queue_config, shared))
        if self._progress_address != self.address:  # a position in another queue is meaningless here
            self._progress, self._progress_address = None, self.address
        endpoint = get_metrics_endpoint()
        if endpoint is not None:
            rank_zero_info(f"Metrics: http://{endpoint}/metrics")
        keeps = self._ack == "checkpoint" or keeps_checkpoints(trainer)
        self._run = Run(
            trainer=trainer, topology=topology, streams=streams, connection=self._connection,
            switch=self._switch(trainer), ack_rule=AckRule(self._ack, keeps, writes_in_background(trainer)),
            position=None if self._progress is None else self._progress.position,
            partitions_at_start=self._partitions_at_start, producers=self._group, members=self._members,
        )  # fmt: skip
        self._run.start()
        for reader in self._run.of_stage("train"):
            self._progress = reader.progress
        if not any(entry in producer.stages for producer in self._producers):
            self._run.has_no_producers(entry, bool(self._producers))
        self._add_callbacks(trainer)
        only_note_sigterm(trainer)

    def _prepare(self, entry: str, topology: Topology, streams: list[StageStream]) -> SharedQueue:
        """The first rank's work before any rank may fetch."""
        trainer = self._own_trainer()
        if entry == "fit":
            check_tail(self._streams["train"][0], topology.dp_size)
        replays = check_records(streams, topology.dp_size, bool(self._producers))
        checkpoint = resume_path(trainer)
        if checkpoint is not None:
            check_checkpoint_exists(checkpoint)
        self.open()
        capacity = self.client.get_stats()["capacity"]
        check_batches_fit(streams, topology.dp_size, capacity)
        trains_queue = entry == "fit" and self._streams["train"][0].record is None
        if trains_queue and self._ack in ("auto", "checkpoint"):
            check_checkpoints(trainer, self._streams["train"][0], topology.dp_size, capacity)
        self._is_untouched = False
        if entry == "fit" and checkpoint is not None and not replays:
            train = self._streams["train"][0]
            restore_queue(self.client, checkpoint, self._switch(trainer).pattern(train, "train"), train.task)
        self._partitions_at_start = drawn_batches(self.client, streams[0].stream.task)
        publishes = trains_queue and any(isinstance(each, PublishWeights) for each in callbacks_of(trainer))
        if publishes and checkpoint is None:
            pattern = self._switch(trainer).pattern(self._streams["train"][0], "train")
            self.client.advance(pattern, trainer.global_step, resumed=True)
        for each in streams:
            # Groups can be leased once their task is there, and must not be before a resumed run knows its version.
            if not (publishes and checkpoint is not None and each.stage == "train" and each.stream.draws_groups):
                each.stream.register(self.client, topology.dp_size)
            if each.stage != "train":
                each.stream.deal_anew(self.client, topology.dp_size, each.stage)
        if self._group.runs_in(entry) and not replays:
            self.client.expect_producers()  # an earlier run's have died, and these take seconds to start
            self._group.start(self.address, entry, self._connection.conf["key_file"])
        return SharedQueue.of(trainer, self._connection)

    def _switch(self, trainer: Trainer) -> PartitionSwitch:
        given = [callback for callback in callbacks_of(trainer) if isinstance(callback, PartitionSwitch)]
        if len(given) > 1:
            raise InvalidRequestError(f"this Trainer has {len(given)} PartitionSwitch callbacks. Give it one at most.")
        return given[0] if given else PartitionSwitch(clear_finished=False)

    def _add_callbacks(self, trainer: Trainer) -> None:
        # Lightning moves checkpoint callbacks to the end only when it starts. Ours must run before them.
        callbacks = callbacks_of(trainer)
        others = [each for each in callbacks if not isinstance(each, AckBatches | FitReport)]
        callbacks[:] = [AckBatches(), FitReport(), *others]

    def teardown(self, stage: str) -> None:
        self._end_run(failed=False)
        if not self._keep_alive:
            self.close()

    def on_exception(self, exception: BaseException) -> None:
        if self._is_in_use():  # it is of another Trainer, which was refused
            return
        if not self._is_untouched:  # else the run was refused, and its user may have filled the queue
            self.close()

    def _end_run(self, failed: bool) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.end()
        self._group.end()
        if not failed:  # the queue may end now, so no rank may still read
            self._own_trainer().strategy.barrier("lightning_tq_teardown")
        self._members.leave(failed)

    def _own_trainer(self) -> Trainer:
        if self.trainer is None:
            raise InvalidRequestError("setup needs a Trainer: call trainer.fit(model, datamodule=...).")
        return self.trainer

    # ---- for callbacks ----

    @property
    def topology(self) -> Topology:
        """This process among the data-parallel ranks of the run."""
        return self._current_run().topology

    def train_reader(self) -> StreamReader:
        """The stream reader of training in this process."""
        return self._current_run().train_reader()

    def _current_run(self) -> Run:
        if self._run is None:
            raise InvalidRequestError("no run is active: loaders exist only during fit, validate, test and predict.")
        return self._run

    # ---- loaders: they must not fail or start anything ----

    def train_dataloader(self) -> Loaders:
        return self._loaders("train")

    def val_dataloader(self) -> Loaders:
        return self._loaders("val")

    def test_dataloader(self) -> Loaders:
        return self._loaders("test")

    def predict_dataloader(self) -> Loaders:
        return self._loaders("predict")

    def _loaders(self, stage: str) -> Loaders:
        loaders = [stream_loader(reader) for reader in self._current_run().of_stage(stage)]
        return loaders[0] if len(loaders) == 1 else loaders

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """{"positions": {"train": {...}}, "left": [...], "overfitted": {"train": "train@0", ...}}: positions after the
        last optimizer step, partitions that are finished and not cleared yet, and those that ``overfit_batches`` reads
        in every epoch. Plain data, the same on every rank."""
        position = None if self._progress is None else self._progress.position
        positions = {} if position is None else {"train": position.as_dict()}
        return {"positions": positions, **(self._run.state_dict() if self._run else {"left": [], "overfitted": {}})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Training continues after the batches in the checkpoint, if it reads the same partition."""
        if self._run is None or not self._run.of_stage("train"):
            return  # validate, test and predict also load checkpoints, and must not move a training stream
        self._run.load_state_dict(state_dict)
        for label, position in state_dict.get("positions", {}).items():
            if label in self._run.readers:
                self._run.readers[label].progress.restore(Position.from_dict(position, label))

    def __getstate__(self) -> dict[str, Any]:
        # Threads and processes stay in this process.
        return {**self.__dict__, "_run": None, "_group": ProducerGroup(()), "_members": RunMembers()}


def _as_list(stage: str, streams: Streams | Mapping[str, Any]) -> list[Stream]:
    if streams is None:
        return []
    return [as_stream(each, stage) for each in (streams if isinstance(streams, list | tuple) else [streams])]
