# SPDX-License-Identifier: Apache-2.0
"""FabricLoader: a stream of a queue for your own training loop with Lightning Fabric."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, get_args

from lightning.fabric import Fabric

from lightning_tq.batch import TQBatch
from lightning_tq.checks import check_choice
from lightning_tq.loader import StreamReader, drawn_batches, stream_loader
from lightning_tq.producers.group import Producer, ProducerGroup
from lightning_tq.progress import Ack, AckRule, Position
from lightning_tq.queue_config import QueueConfig, as_queue_config
from lightning_tq.queue_connection import QueueConnection
from lightning_tq.rank_watchdog import RankWatchdog, parent_check
from lightning_tq.run_members import RunMembers, SharedQueue
from lightning_tq.stream import StageStream, Stream, as_stream, check_records, check_tail, sampler_modules
from lightning_tq.topology import Rank, fabric_topology, run_on_every_rank, run_on_rank_zero
from transfer_queue import TransferQueueClient
from transfer_queue.errors import InvalidRequestError

logger = logging.getLogger(__name__)

_NEEDED = {"epoch", "position"}
_STATE = {*_NEEDED, "taken", "left"}
"""Missing in older states: ``taken``, the micro-batches of that pass so far, and ``left``, partitions of earlier passes
with batches that wait for an ack."""


class FabricLoader:
    """``for data, meta in loader``: micro-batches on Fabric's device. Each pass is an epoch, starting with 0.

    ``{epoch}`` in the stream's partition is the number of the pass. ``fabric.save(path, {"loader": loader, ...})``
    stores its position. Use it as a context manager: on exit, once all ranks are there, it ends the producers, and the
    queue if it started it. It needs no ``setup_dataloaders``.

    Examples:
        >>> fabric = L.Fabric(accelerator="cpu", devices=1)
        >>> fabric.launch()
        >>> stream = Stream(partition="train", task="sft", fields=["x"], batch_size=4)
        >>> with FabricLoader(fabric, stream) as loader:
        ...     print([meta.size for data, meta in loader])
        [4, 4, 4, 4]
    """

    def __init__(
        self,
        fabric: Fabric,
        stream: Stream | Mapping[str, Any],
        queue: QueueConfig | Mapping[str, Any] | str | None = None,
        producers: Sequence[Producer] = (),
        dp_rank: Rank | None = None,
        dp_size: int | None = None,
        ack: Ack = "auto",
    ) -> None:
        """Start or join the queue on the first rank, join it on the others. A collective, after ``fabric.launch()``.

        Args:
            stream: What to read: a Stream, or a mapping of its options.
            queue: What TQDataModule takes: how to start the queue, or where to join it.
            producers: Processes that run until the loader is closed, on the first rank.
            dp_rank: Data-parallel rank, or a function of the Fabric that returns it. Default: from the strategy.
            dp_size: Data-parallel groups, for strategies that count every process as a group.
            ack: When a batch is acknowledged, so that the queue may delete it. When the loop asks for the next one
                ("step"), once a ``state_dict`` holds it ("checkpoint"), or "never". "auto" means "step" until the
                first ``state_dict`` or ``load_state_dict``, then "checkpoint".
        Raises:
            InvalidRequestError: an invalid stream, or ``launch()`` was not called.
            TransferQueueError: the queue can't be joined or started; every rank gets the same error.
        """
        stream = as_stream(stream, "train")
        check_choice("ack", ack, get_args(Ack))
        if not {"epoch", "stage"} >= set(stream.variables):
            raise InvalidRequestError(
                f"partition template {stream.partition!r} uses a variable that FabricLoader doesn't know. Use "
                f"{{epoch}}, the number of the pass over the loader."
            )
        self.epoch = 0
        """Number of the current or last pass."""
        self.topology = fabric_topology(fabric, dp_rank, dp_size)
        self._fabric = fabric
        self._next_epoch = 0
        self._left: list[str] = []
        """Partitions of earlier passes that the state of a resume holds."""
        self.partitions_at_start: Mapping[str, int] = {}
        self._connection = QueueConnection()
        self._members = RunMembers()
        self._producers = ProducerGroup(producers)
        self._join_queue(stream, as_queue_config(queue))
        self.watchdog = RankWatchdog([self._producers.failure, parent_check(fabric.global_rank), self._members.check])
        self.ack_rule = AckRule(ack, keeps_checkpoints=ack == "checkpoint")
        self._reader = StreamReader(StageStream("train", "train", stream), self)
        self._loader = stream_loader(self._reader)
        self.watchdog.start()

    def _join_queue(self, stream: Stream, config: QueueConfig) -> None:
        def prepare() -> SharedQueue:
            check_tail(stream, self.topology.dp_size)
            replays = check_records([StageStream("train", "train", stream)], self.topology.dp_size, False)
            self._connection.open(config, sampler_modules([stream]))
            stream.register(self.client, self.topology.dp_size)
            self.partitions_at_start = drawn_batches(self.client, stream.task)
            if not replays:
                if self._producers.runs_in("fit"):
                    self.client.expect_producers()
                self._producers.start(self.address, key_file=self._connection.conf["key_file"])
            return SharedQueue.of(self._fabric, self._connection)

        with ExitStack() as on_failure:
            on_failure.callback(self._release, failed=True)
            shared = run_on_rank_zero(self._fabric, prepare)
            join = partial(self._members.join, self._fabric, self._connection, config, shared)
            run_on_every_rank(self._fabric, join)
            on_failure.pop_all()

    @property
    def client(self) -> TransferQueueClient:
        """This process's client of the queue."""
        return self._connection.client

    @property
    def address(self) -> str:
        """Where other processes join the queue."""
        return self._connection.address

    def __iter__(self) -> Iterator[TQBatch]:
        self.epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        batches = iter(self._loader)
        batch = next(batches, None)
        # A rank starts after the acknowledged batches, so no rank may acknowledge before all have started.
        self._fabric.barrier("lightning_tq_started")
        while batch is not None:
            self._reader.note_trained(batch, stepped=True)  # the loop trains every batch it gets
            yield batch.to(self._fabric.device)
            batch = next(batches, None)
            if self._fabric.world_size > self.topology.dp_size:
                self._fabric.barrier("lightning_tq_read")  # a slower peer must not lose what it still reads
            self._reader.ack_due()

    def __len__(self) -> int:
        """Micro-batches of a whole pass. Raises TypeError without ``Stream.num_batches``."""
        return len(self._loader)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """The position after the last delivered batch. Plain data, the same on every rank."""
        progress = self._reader.progress
        if self.ack_rule.ack != "step":
            progress.save()
        name = self.partition_of(self._reader)
        position = progress.position or Position(
            partition_id=name, batch_index=self._reader.acked_in(name), epoch=self.epoch
        )
        left = list(dict.fromkeys([*self._left, *progress.unacknowledged()]))
        return {"epoch": self.epoch, "position": position.as_dict(), "taken": progress.taken, "left": left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass continues that epoch. It is empty if that epoch was read to its end."""
        if not _NEEDED <= set(state) <= _STATE:
            raise InvalidRequestError(f"can't resume from {dict(state)!r}: this is not a FabricLoader's state.")
        self._reader.progress.wait_for_checkpoints()
        self._next_epoch = self.epoch = int(state["epoch"])
        if self._reader.progress.partition is not None:  # it is set back after batches that it has drawn itself
            self.partitions_at_start = drawn_batches(self.client, self._reader.stream.task)
            self._reader.progress.partition = None
        if state["position"]:
            position = Position.from_dict(state["position"], self._reader.label)
            self._reader.progress.restore(position, int(state.get("taken", 0)))
        self._left = list(state.get("left", []))

    # ---- loader.RunContext ----

    overfits = False

    def partition_of(self, reader: StreamReader, epochs_ahead: int = 0) -> str:
        return reader.stream.partition_at(epoch=self.epoch, global_step=0, stage=reader.stage)

    def may_return(self, reader: StreamReader) -> bool:
        return False

    def left_partitions(self) -> list[str]:
        return self._left

    def begin_next_epoch(self) -> None:
        raise AssertionError("a pass is one epoch, even if empty")

    def ends_before_next(self, reader: StreamReader) -> bool:
        return False

    def training_ends(self, epochs_ahead: int) -> bool:
        return epochs_ahead > 0  # so a pass never goes on with the next epoch

    def stream_ended(self, reader: StreamReader) -> None:
        text = reader.leftover_text() if self._fabric.is_global_zero else None
        if text is not None:
            logger.warning(text)

    # ---- ending ----

    def close(self) -> None:
        """End the stream and what was started here. Idempotent. Other ranks must be done, and close within 60 s."""
        self._close(failed=True)

    def _close(self, failed: bool) -> None:
        self.watchdog.stop()
        self._reader.close()
        self._release(failed)

    def _release(self, failed: bool) -> None:
        """Leave the run and the queue, and end what was started here."""
        self._members.leave(failed)
        self._producers.end()
        self._connection.close()

    def __enter__(self) -> FabricLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._reader.finish(self._fabric)
            self._fabric.barrier("lightning_tq_close")  # the queue may end now, so no rank may still read
        self._close(failed=kind is not None)
