# SPDX-License-Identifier: Apache-2.0
"""TQDataModule: a Trainer's data, streamed from a queue that it starts or joins."""

from __future__ import annotations

import warnings
from typing import Any, get_args

from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_tq.books import Ack
from lightning_tq.callbacks.bookkeeper import Bookkeeper
from lightning_tq.callbacks.checkpoint import restore_beside
from lightning_tq.callbacks.finders import refuse_finders
from lightning_tq.callbacks.partition_switch import PartitionSwitch
from lightning_tq.connection import Connection
from lightning_tq.feed import Feed
from lightning_tq.loader import StreamLoader, stream_loader
from lightning_tq.place import Place
from lightning_tq.producers import Producer, ProducerGroup
from lightning_tq.queue_config import QueueConfig, as_queue_config
from lightning_tq.ranks import on_first_rank, quiet_known_warnings, resumed_from
from lightning_tq.run import LabelledStreams, Run, check_ends, check_streams, stage_streams
from lightning_tq.stream import Stream, sampler_modules
from lightning_tq.topology import Rank, Topology, trainer_topology
from transfer_queue import TransferQueueClient
from transfer_queue.errors import InvalidRequestError

Streams = Stream | list[Stream] | None
Loaders = StreamLoader | list[StreamLoader]


class TQDataModule(LightningDataModule):
    """Starts or joins a queue and feeds the loops of a Trainer from it; a step gets ``data, meta = batch``.

    The queue lives from the first fit, validate, test or predict until ``close()``, an exception that ends a run, or
    the end of the process: ``fit`` and then ``test`` use the same one. Whoever called ``transfer_queue.init()`` before
    keeps that queue; it is used and not closed.

    A checkpoint holds the place behind the last trained batch, not behind what Lightning fetched ahead. Lightning saves
    what rank 0 says; the place is the same on all ranks, since a batch exists for all of them or for none.
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
            train: What training reads.
            val: What validation reads, one stream or several (a loader each).
            test: What testing reads, one stream or several.
            predict: What prediction reads, one stream or several.
            queue: How to start the queue, or where to join it: a QueueConfig, a mapping of its fields, the path of a
                YAML file, or an address. Default: the queue that TQ_ADDRESS names, else a new one on this host.
            producers: Processes to run beside it, on the first rank.
            dp_rank: Data-parallel rank, or a function of the Trainer that tells it. Default: the strategy knows.
            dp_size: Data-parallel groups, for strategies that count every process as one.
            keep_alive: Keep the queue between fit, validate, test and predict. False: it ends with each of them.
            ack: When a trained batch is settled, so that the queue may let go of it: once a checkpoint holds its
                optimizer step ("checkpoint"), at the end of that step ("step"), or "never". "auto": the first where
                the Trainer saves checkpoints or was resumed from one, else the second.
        Raises:
            InvalidRequestError: streams that can't be right; is a ValueError.
            ConfigError: a queue configuration that can't be right.
        """
        super().__init__()
        self._streams = {
            "train": _as_list(train), "val": _as_list(val), "test": _as_list(test), "predict": _as_list(predict)
        }  # fmt: skip
        if ack not in get_args(Ack):
            raise InvalidRequestError(f"ack must be one of {', '.join(map(repr, get_args(Ack)))}, got {ack!r}.")
        check_streams(self._streams)
        self._queue_config = as_queue_config(queue)
        self._producers = list(producers or [])
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._keep_alive = keep_alive
        self._ack = ack
        self._connection = Connection()
        self._address: str | None = None
        self._group: ProducerGroup | None = None
        self._run: Run | None = None
        self._places: dict[str, Place] = {}
        self._places_of: str | None = None
        self._held: list[str] = []  # on the first rank: partitions that were there before this run could make any
        if not self._streams["val"]:  # Lightning takes val_dataloader for a promise, before setup
            warnings.filterwarnings("ignore", "You passed in a `val_dataloader` but have no `validation_step`")

    # ---- the queue ----

    def open(self) -> None:
        """Start or join the queue now, in this process. ``setup`` does it by itself; call it to put data before a run,
        or when ranks are spawned (they join, and the queue outlives them). Idempotent."""
        streams = [stream for streams in self._streams.values() for stream in streams]
        self._connection.open(self._queue_config, sampler_modules(streams), self._address)
        self._address = self._connection.address
        if self._address != self._places_of:
            self._places.clear()  # positions in another queue mean nothing in this one
            self._places_of = self._address

    def close(self) -> None:
        """End the run, the producers and the queue, as far as they were started here. Idempotent."""
        self._end_run()
        if self._connection.is_open:
            self._address = None
            self._connection.close()

    @property
    def client(self) -> TransferQueueClient:
        """This process' client of the queue."""
        return self._connection.client

    @property
    def address(self) -> str:
        """Where other processes join the queue."""
        return self._connection.address

    def stats(self) -> dict[str, Any]:
        """What the queue says of itself, and per stream of this process: partition, seconds waited, batches."""
        streams = {
            label: {
                "partition": feed.partition, "waited_s": feed.waited_s, "taken": feed.taken, "trained": feed.trained,
                "position": feed.place,
            }
            for label, feed in (self._run.feeds if self._run else {}).items()
        }  # fmt: skip
        return {**self.client.get_stats(), "streams": streams}

    def partition(self, stage: str = "train", number: int = 0) -> str:
        """The partition that an iterator of this stage ("train", "val", ...) would read now.

        Raises:
            InvalidRequestError: no run is going on, or there is no such stream.
        """
        run = self._current_run()
        feeds = run.of_stage(stage)
        if not 0 <= number < len(feeds):
            raise InvalidRequestError(f"this run has {len(feeds)} streams of stage {stage!r}, not number {number}.")
        return run.partition_of(stage, feeds[number].stream)

    def __enter__(self) -> TQDataModule:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- a run ----

    def setup(self, stage: str) -> None:
        """Open the queue on the first rank, join it on the others, and prepare what this stage reads."""
        trainer, entry = self._own_trainer(), str(getattr(stage, "value", stage))
        quiet_known_warnings()
        refuse_finders(trainer)
        self._end_run()
        topology = trainer_topology(trainer, self._dp_rank, self._dp_size)
        streams = stage_streams(entry, self._streams)
        self._group = ProducerGroup(self._producers) if trainer.is_global_zero else None
        self._address = on_first_rank(trainer, lambda: self._prepare(entry, topology, streams))
        rank_zero_info(f"Queue: {self._address} (to look into it: lightning-tq status --watch {self._address})")
        self.open()
        self._run = Run(trainer, topology, self._switch(trainer), self._group, self.client, self._ack)
        self._run.start(streams, self._places, self._connection.conf, self._held)
        if entry != "fit" and not any(entry in producer.stages for producer in self._producers):
            self._run.tell_missing(self._held)
        self._keep_books(trainer)

    def _prepare(self, entry: str, topology: Topology, streams: LabelledStreams) -> str:
        """What the first rank does before any other may fetch. Returns the queue's address."""
        check_ends(streams, topology.dp_size)
        self.open()
        checkpoint = resumed_from(self._own_trainer())
        if entry == "fit" and checkpoint is not None:
            restore_beside(self.client, checkpoint)
        self._held = self.client.get_partition_list()
        for _, stream in streams.values():
            stream.register(self.client, topology.dp_size)
        assert self._group is not None
        self._group.start(self.address, entry)
        return self.address

    def _switch(self, trainer: Trainer) -> PartitionSwitch:
        given = [callback for callback in _callbacks(trainer) if isinstance(callback, PartitionSwitch)]
        if len(given) > 1:
            raise InvalidRequestError(f"one PartitionSwitch decides the partitions, this Trainer has {len(given)}.")
        return given[0] if given else PartitionSwitch(clear_finished=False)

    def _keep_books(self, trainer: Trainer) -> None:
        # Lightning moves checkpoint callbacks behind all others at its start only; ours must come before them.
        callbacks = _callbacks(trainer)
        callbacks[:] = [Bookkeeper(self._find_run), *(each for each in callbacks if not isinstance(each, Bookkeeper))]

    def teardown(self, stage: str) -> None:
        trainer = self._own_trainer()
        self._end_run()
        trainer.strategy.barrier("lightning_tq_teardown")  # the queue may end now: nobody must still be reading
        if not self._keep_alive:
            self.close()

    def on_exception(self, exception: BaseException) -> None:
        self.close()

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.end()
        group, self._group = self._group, None
        if group is not None:
            group.end()

    def _find_run(self) -> Run | None:
        return self._run

    def _own_trainer(self) -> Trainer:
        if self.trainer is None:
            raise InvalidRequestError("setup needs a Trainer: give this to it as trainer.fit(model, datamodule=...).")
        return self.trainer

    # ---- what callbacks ask ----

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks of the run."""
        return self._current_run().topology.dp_size

    @property
    def topology(self) -> Topology:
        """This process' place among the data-parallel ranks of the run."""
        return self._current_run().topology

    def train_feed(self) -> Feed:
        """The training stream at work in this process."""
        return self._current_run().of_stage("train")[0]

    def finished_partitions(self) -> list[str]:
        """Partitions that this run has moved away from; each is told once."""
        return self._current_run().finished_partitions()

    def _current_run(self) -> Run:
        if self._run is None:
            raise InvalidRequestError("no run is going on: loaders exist during fit, validate, test and predict only.")
        return self._run

    # ---- loaders: nothing here may fail or start anything ----

    def train_dataloader(self) -> Loaders:
        return self._loaders("train")

    def val_dataloader(self) -> Loaders:
        return self._loaders("val")

    def test_dataloader(self) -> Loaders:
        return self._loaders("test")

    def predict_dataloader(self) -> Loaders:
        return self._loaders("predict")

    def _loaders(self, stage: str) -> Loaders:
        loaders = [stream_loader(feed) for feed in self._current_run().of_stage(stage)]
        return loaders[0] if len(loaders) == 1 else loaders

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """{"positions": {"train": {...}}, "left": [...]}: where training goes on behind the last optimizer step, and
        partitions that are finished and not cleared yet. Plain data, the same on every rank."""
        positions = {label: dict(place) for label, place in self._places.items()}
        return {"positions": positions, "left": self._run.left_partitions() if self._run else []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Training goes on behind what the checkpoint's model was trained on, if it reads the same partition."""
        if self._run is None or not self._run.of_stage("train"):
            return  # validate, test and predict load checkpoints, too, beside a training that may still go on
        self._run.take_over(state_dict.get("left", []))
        for label, place in state_dict.get("positions", {}).items():
            if label in self._run.feeds:
                self._run.feeds[label].restore(place)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None, "_group": None}  # threads and processes stay where they are


def _as_list(streams: Streams) -> list[Stream]:
    if streams is None:
        return []
    return [streams] if isinstance(streams, Stream) else list(streams)


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks
